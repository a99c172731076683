"""Models of a given shape with random weights, made on the device that they are for: to measure speed, not answers."""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn

from twofold.models import checkpoint, draft_quantization
from twofold.models.causal_lm import CausalLM
from twofold.models.config import ModelConfig
from twofold.models.drafter import Drafter
from twofold.models.drafter_config import DrafterConfig
from twofold.ops.kernels import Kernels
from twofold.quant.linear import PackedLinear, replace_linears
from twofold.quant.scheme import QuantScheme

M = TypeVar("M", bound=nn.Module)


def random_target(
    config: ModelConfig,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    scheme: QuantScheme | None = None,
    head_scheme: QuantScheme | None = None,
) -> CausalLM:
    """Matrices N(0, 1 / fan_in), or random integers of that spread where a scheme says so; norms do nothing. On the
    meta device it has sizes alone."""
    with torch.device("meta"):
        model = CausalLM(config, kernels).to(dtype)
        if head_scheme is not None:
            _pack(model, ["lm_head"], head_scheme)
        if scheme is not None:
            _pack(model, checkpoint.packable_linears(config), scheme)
    tied = model.lm_head.weight is model.embed_tokens.weight if isinstance(model.lm_head, nn.Linear) else False
    _fill(model.to_empty(device=device))
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    return model.requires_grad_(False)


def random_drafter(
    config: DrafterConfig,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    scheme: QuantScheme | None = None,
) -> Drafter:
    """The same for a drafter."""
    with torch.device("meta"):
        drafter = Drafter(config, kernels).to(dtype)
        if scheme is not None:
            _pack(drafter, draft_quantization.packable_linears(config), scheme)
    return _fill(drafter.to_empty(device=device)).requires_grad_(False)


def _pack(model: nn.Module, names: Iterable[str], scheme: QuantScheme) -> None:
    replace_linears(model, names, lambda _, linear: PackedLinear(linear.in_features, linear.out_features, scheme))


@torch.no_grad()
def _fill(model: M) -> M:
    if next(model.parameters()).is_meta:
        return model
    for layer in model.modules():
        if isinstance(layer, PackedLinear):
            words = layer.weight_packed
            torch.randint(-(2**31), 2**31, words.shape, dtype=words.dtype, device=words.device, out=words)
            spread = ((4**layer.scheme.bits - 1) / 12) ** 0.5  # of uniform integers
            layer.weight_scale.fill_(layer.in_features**-0.5 / spread)
            layer.weight_shape.copy_(torch.tensor([layer.out_features, layer.in_features]))
            if layer.weight_zero_point is not None:
                layer.weight_zero_point.zero_()
    for name, p in model.named_parameters():
        if p.dim() >= 2:
            p.normal_(std=p.shape[-1] ** -0.5)
        elif "norm" in name:
            owner = model.get_submodule(name.rpartition(".")[0])
            p.fill_(1.0 - float(getattr(owner, "offset", 0.0)))
        else:
            p.fill_(1.0)
    return model
