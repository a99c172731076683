"""Quantization of the drafter: rounding to nearest, AWQ, GPTQ, or a grid to train on.

Calibration passes whole drafts through it, contexts and blocks, so the layers that project the context see both.
D hidden size; a linear layer has K inputs; what makes them has P channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from twofold.models.calibration import LayerReport, check_fallbacks, rounding_errors
from twofold.models.draft_head import DraftHeadConfig
from twofold.models.drafter import Drafter
from twofold.models.drafter_config import DrafterConfig
from twofold.models.layers import RMSNorm
from twofold.quant.awq import InputStatistics, choose_scale, fold_into_norm, smoothing_scales
from twofold.quant.calibrate import gptq_in_order, observe
from twofold.quant.linear import FakeQuantLinear, PackedLinear, replace_linears
from twofold.quant.rounding import quantize, search_grid
from twofold.quant.scheme import QuantScheme


@dataclass(frozen=True, kw_only=True)
class DraftQuantizeConfig:
    """How the drafter is quantized after its training, calibrated on blocks at random anchors of the target's answers.

    "trained" takes it as quantization-aware finetuning left it (see `DraftConfig.quantize`); the others are as in
    `QuantizeConfig`. `sliding_window`, where given, is written into the quantized drafter's config (see
    `DrafterConfig`), and `head` gives it a head of its own. `max_fallbacks` is the share of layers that gptq may merely
    round.
    """

    method: Literal["gptq", "awq", "rtn", "trained"] = "gptq"
    bits: int = 4
    group_size: int = 32
    symmetric: bool = True
    damping: float = 0.01
    rows: int = 16
    anchors: int = 16
    sliding_window: int | None = None
    max_fallbacks: float = 0.0
    head: DraftHeadConfig | None = None

    def __post_init__(self) -> None:
        _ = self.scheme  # has checks of its own

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(bits=self.bits, group_size=self.group_size, symmetric=self.symmetric)


def packable_groups(config: DrafterConfig) -> list[list[str]]:
    """Names of the layers that are quantized, in the order in which they compute; a group has one input.

    They are `fc`, and attention and MLP of every layer.
    """
    attention, mlp = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    groups = [["fc"]]
    for i in range(config.num_layers):
        groups += [[f"layers.{i}.self_attn.{name}" for name in attention], [f"layers.{i}.self_attn.o_proj"]]
        groups += [[f"layers.{i}.mlp.{name}" for name in mlp], [f"layers.{i}.mlp.down_proj"]]
    return groups


def packable_linears(config: DrafterConfig) -> list[str]:
    return [name for group in packable_groups(config) for name in group]


@torch.no_grad()
def fake_quantize_drafter(drafter: Drafter, scheme: QuantScheme, learn_scale: bool = False) -> None:
    """Puts a `FakeQuantLinear` on the searched grid of its weights in the place of each packable layer.

    ValueError, before anything is replaced, for a layer that is packed already or whose width the groups do not fit.
    """
    names = packable_linears(drafter.config)
    for name in names:
        scheme.validate(name, _dense(drafter, name).weight.shape)

    def fake(_: str, linear: nn.Linear) -> nn.Module:
        grid = search_grid(linear.weight.detach(), scheme)
        return FakeQuantLinear.from_linear(linear, grid, scheme, learn_scale=learn_scale)

    replace_linears(drafter, names, fake)


@torch.no_grad()
def quantize_drafter(
    drafter: Drafter, run: Callable[[], object], config: DraftQuantizeConfig, report: Callable[[int, int, str], None]
) -> list[LayerReport]:
    """Replaces the packable layers by packed ones, in place; `run` passes the calibration drafts through the drafter.

    ValueError, before any work, for a layer that is packed already or whose width the groups do not fit; and when
    more than `max_fallbacks` of the layers were merely rounded.
    """
    assert config.method != "trained", "there is nothing to do for what was trained quantized"
    assert drafter.norm.frozen is None, "a frozen drafter would not notice that its weights change"
    names, scheme = packable_linears(drafter.config), config.scheme
    for name in names:
        scheme.validate(name, _dense(drafter, name).weight.shape)
    quantized = _gptq if config.method == "gptq" else _round
    reports = quantized(drafter, run, config, report)
    check_fallbacks(reports, len(names), config.max_fallbacks)
    return reports


def _gptq(
    drafter: Drafter, run: Callable[[], object], config: DraftQuantizeConfig, report: Callable[[int, int, str], None]
) -> list[LayerReport]:
    before = {name: _dense(drafter, name).weight.detach() for name in packable_linears(drafter.config)}
    groups = packable_groups(drafter.config)
    made = gptq_in_order(drafter, groups, run, config.scheme, config.damping, report)
    return [
        LayerReport(
            name=name,
            method="gptq",
            weight_error=_relative(_packed(drafter, name).dense_weight(torch.float32) - before[name], before[name]),
            output_error=rounding.relative_error,
            damping=rounding.damping,
            fallback=rounding.rounded_to_nearest,
        )
        for name, rounding in made.items()
    ]


def _round(
    drafter: Drafter, run: Callable[[], object], config: DraftQuantizeConfig, report: Callable[[int, int, str], None]
) -> list[LayerReport]:
    """Nothing makes up for errors, so one dense pass serves all layers."""
    names, scheme = packable_linears(drafter.config), config.scheme
    inputs = observe(drafter, names, run, lambda linear: InputStatistics(linear.weight))
    hessians = {name: found.hessian() for name, found in inputs.items()}
    alphas = _smooth(drafter, inputs, hessians, scheme) if config.method == "awq" else {}
    reports = []
    for number, name in enumerate(names, 1):
        linear, hessian_KK = _dense(drafter, name), hessians[name]
        weight_NK = linear.weight.detach()
        grid = search_grid(weight_NK, scheme, hessian_KK.diagonal() if config.method == "awq" else None)
        packed = PackedLinear.from_integers(
            quantize(weight_NK, grid, scheme), grid, scheme, cache_dtype=weight_NK.dtype
        )
        drafter.set_submodule(name, packed)
        weight_error, output_error = rounding_errors(weight_NK, packed, hessian_KK)
        made = LayerReport(
            name=name,
            method=config.method,
            weight_error=weight_error,
            output_error=output_error,
            alpha=alphas.get(name),
        )
        reports.append(made)
        report(number, len(names), f"{name}, output error {made.output_error:.2g}")
    return reports


@dataclass(frozen=True)
class _InputGroup:
    """Consumers of inputs that the producers make; input k is a multiple of channel owner[k] of each producer."""

    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    owner_K: Tensor


def _input_groups(config: DrafterConfig) -> list[_InputGroup]:
    """Keys and values read the context by hidden_norm and the block by their layer's norm, and all layers read the same
    context: so one scale serves attention's inputs in all layers. What `fc` reads is the target's, and stays."""
    layers = [f"layers.{i}" for i in range(config.num_layers)]
    hidden_D, inner = torch.arange(config.hidden_size), torch.arange(config.intermediate_size)
    values_GD = torch.arange(config.num_kv_heads * config.head_dim).view(config.num_kv_heads, -1)
    heads = values_GD.repeat_interleave(config.num_heads // config.num_kv_heads, dim=0).flatten()
    norms = ("hidden_norm", *(f"{layer}.input_layernorm" for layer in layers))
    attention = tuple(f"{layer}.self_attn.{name}_proj" for layer in layers for name in "qkv")
    groups = [_InputGroup(norms, attention, hidden_D)]
    for layer in layers:
        mlp = (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
        groups += [
            _InputGroup((f"{layer}.self_attn.v_proj",), (f"{layer}.self_attn.o_proj",), heads),
            _InputGroup((f"{layer}.post_attention_layernorm",), mlp, hidden_D),
            _InputGroup((f"{layer}.mlp.up_proj",), (f"{layer}.mlp.down_proj",), inner),
        ]
    return groups


def _smooth(
    drafter: Drafter, inputs: dict[str, InputStatistics], hessians: dict[str, Tensor], scheme: QuantScheme
) -> dict[str, float]:
    """AWQ: folds the best scale of each group, and brings `hessians` to the scaled inputs; consumer -> alpha."""
    alphas: dict[str, float] = {}
    for group in _input_groups(drafter.config):
        magnitude_P = torch.stack([inputs[name].magnitude(group.owner_K) for name in group.consumers]).mean(dim=0)
        scales_AP = smoothing_scales(magnitude_P)
        norms = [layer for name in group.producers if isinstance(layer := drafter.get_submodule(name), RMSNorm)]
        if len(norms) > 1:
            scales_AP = torch.exp2(scales_AP.log2().round())  # each norm in bfloat16 takes a power of two as it is
        elif norms:
            weight_P = norms[0].weight.cpu()
            scales_AP = torch.stack([fold_into_norm(weight_P, s, norms[0].offset)[1] for s in scales_AP])
        weights = [_dense(drafter, name).weight for name in group.consumers]
        scales_AK = scales_AP[:, group.owner_K]
        best = choose_scale(weights, [hessians[name] for name in group.consumers], scales_AK.to(weights[0]), scheme)
        _fold(drafter, group, scales_AP[best])
        for name in group.consumers:
            scale_K = scales_AK[best].to(hessians[name])
            hessians[name] /= scale_K[:, None] * scale_K
            alphas[name] = torch.linspace(0, 1, len(scales_AP))[best].item()
    return alphas


def _fold(drafter: Drafter, group: _InputGroup, scale_P: Tensor) -> None:
    for name in group.producers:
        producer = drafter.get_submodule(name)
        assert isinstance(producer, RMSNorm | nn.Linear)
        shape = (-1,) if isinstance(producer, RMSNorm) else (-1, 1)
        producer.weight.div_(scale_P.to(producer.weight).view(shape))
    for name in group.consumers:
        weight_NK = _dense(drafter, name).weight
        weight_NK.mul_(scale_P[group.owner_K].to(weight_NK))


def _dense(drafter: Drafter, name: str) -> nn.Linear:
    layer = drafter.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        raise ValueError(
            f'the drafter\'s {name} is quantized already; set the method to "trained", or start from dense'
        )
    return layer


def _packed(drafter: Drafter, name: str) -> PackedLinear:
    layer = drafter.get_submodule(name)
    assert isinstance(layer, PackedLinear)
    return layer


def _relative(added: Tensor, weight: Tensor) -> float:
    norm = float(weight.norm())
    return float(added.norm()) / norm if norm > 0 else 0.0
