"""The parts of a layer that target and drafter share."""

import torch
from torch import Tensor, nn

from twofold.ops.kernels import Kernels, Linear
from twofold.ops.norms import rms_norm
from twofold.quant.linear import FakeQuantLinear, PackedLinear


class RMSNorm(nn.Module):
    """y = x / rms(x) * (offset + w), see `ops.norms.rms_norm`."""

    def __init__(self, width: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps = eps
        self.offset = offset
        self.frozen: Tensor | None = None  # offset + w

    def forward(self, x: Tensor) -> Tensor:
        if self.frozen is not None:
            return rms_norm(x, self.frozen, self.eps)
        return rms_norm(x, self.weight, self.eps, self.offset)


class Projections:
    """Several linear layers of one input: y_i = x W_i^T (+ b_i), as one product once the weights are frozen.

    Holds names, not layers, so that a layer of `owner` can be replaced (by a fake-quantized one, say).
    """

    def __init__(self, owner: nn.Module, *names: str) -> None:
        self.owner = owner
        self.names = names
        self.frozen: tuple[Linear, list[int]] | None = None

    def layers(self) -> list[nn.Module]:
        return [self.owner.get_submodule(name) for name in self.names]

    def freeze(self, kernels: Kernels, dtype: torch.dtype) -> None:
        layers = self.layers()
        if any(getattr(layer, "bias", None) is not None for layer in layers):
            return
        weights = [dense_weight(layer, dtype) for layer in layers]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.frozen = (kernels.freeze_linear(weight), [len(w) for w in weights])

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.frozen is None:
            return tuple(layer(x) for layer in self.layers())
        linear, sizes = self.frozen
        y = linear(x)
        return y.split(sizes, dim=-1) if len(sizes) > 1 else (y,)


def dense_weight(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] that a linear layer, quantized or not, multiplies with."""
    if isinstance(layer, FakeQuantLinear | PackedLinear):
        return layer.dense_weight(dtype).detach()
    assert isinstance(layer, nn.Linear), f"{type(layer).__name__} is no linear layer"
    return layer.weight.detach().to(dtype)


def freeze(module: nn.Module, kernels: Kernels, dtype: torch.dtype) -> None:
    """Lays out all weights for decoding. Call it when they have stopped changing."""
    for part in module.modules():
        if isinstance(part, RMSNorm):
            part.frozen = part.weight.detach() + part.offset
        for value in vars(part).values():
            if isinstance(value, Projections):
                value.freeze(kernels, dtype)


class MLP(nn.Module):
    """y = (silu(x W_gate^T) * x W_up^T) W_down^T."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.inputs = Projections(self, "gate_proj", "up_proj")
        self.output = Projections(self, "down_proj")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.inputs(x)
        return self.output(nn.functional.silu(gate) * up)[0]
