"""The parts of a layer that target and drafter share."""

from itertools import groupby

import torch
from torch import Tensor, nn

from twofold.ops.kernels import Kernels
from twofold.ops.linear import Linear, Norm
from twofold.quant.linear import FakeQuantLinear, PackedLinear
from twofold.quant.scheme import QuantScheme


class RMSNorm(nn.Module):
    """y = x / rms(x) * (offset + w), see `ops.norms.rms_norm`."""

    def __init__(self, width: int, eps: float, offset: float, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps = eps
        self.offset = offset
        self.frozen: Norm | None = None

    def freeze(self) -> None:
        self.frozen = Norm(self.weight.detach() + self.offset, self.eps)

    def scale(self) -> Norm:
        """The weight with its offset, and eps."""
        return self.frozen or Norm(self.weight + self.offset, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        if self.frozen is not None:
            return self.kernels.rms_norm(x, *self.frozen)
        return self.kernels.norm(x, self.weight, self.eps, self.offset)


class Projections:
    """Several linear layers of one input, y_i = norm(x) W_i^T (+ b_i), as one product once the weights are frozen.

    Of `gated` layers, gate and up, frozen as one, comes silu(gate) * up. A residual is added to what a single output
    is. Holds names, not layers, so that a layer of `owner` can be replaced (by a fake-quantized one, say).
    """

    def __init__(self, owner: nn.Module, *names: str, gated: bool = False) -> None:
        self.owner = owner
        self.names = names
        self.gated = gated
        self.frozen: list[tuple[Linear, list[int]]] = []  # with the widths that the outputs have

    def layers(self) -> list[nn.Module]:
        return [self.owner.get_submodule(name) for name in self.names]

    def freeze(self, kernels: Kernels, dtype: torch.dtype) -> None:
        layers = self.layers()
        if any(getattr(layer, "bias", None) is not None for layer in layers):
            return
        parts: list[tuple[Linear | None, list[nn.Module]]] = []  # of integers that the kernels serve, or dense
        for scheme, run in groupby(layers, key=lambda layer: _integers(layer, kernels)):
            part = list(run)
            gated = self.gated and len(part) == len(layers)
            linear = None if scheme is None else _frozen_integers(part, kernels, gated, dtype)
            if linear is None and parts and parts[-1][0] is None:
                parts[-1][1].extend(part)
            else:
                parts.append((linear, part))
        self.frozen = []
        for linear, part in parts:
            gated = self.gated and len(part) == len(layers)
            if linear is None:
                weights = [dense_weight(layer, dtype) for layer in part]
                linear = kernels.freeze_linear(torch.cat(weights) if len(weights) > 1 else weights[0], gated)
            sizes = [size(layer)[0] for layer in part]
            self.frozen.append((linear, [sum(sizes) // 2] if gated else sizes))
        if kernels.join is not None and len(self.frozen) == 2:
            (first, sizes), (second, more) = self.frozen
            if (joined := kernels.join(first, second)) is not None:
                self.frozen = [(joined, sizes + more)]

    def __call__(self, x: Tensor, norm: RMSNorm | None = None, residual: Tensor | None = None) -> tuple[Tensor, ...]:
        assert residual is None or len(self.names) == 1
        if self.frozen:
            assert norm is None or norm.frozen is not None
            scale = None if norm is None else norm.frozen
            products = [(linear(x, scale, residual), sizes) for linear, sizes in self.frozen]
            outputs = [part for y, sizes in products for part in y.split(sizes, dim=-1)]
        else:
            normed = x if norm is None else norm(x)
            outputs = [layer(normed) for layer in self.layers()]
            if residual is not None:
                outputs = [residual + outputs[0]]
        return tuple(outputs)

    def top1(self, x: Tensor, kernels: Kernels) -> Tensor:
        """Where the largest entry of the only output is, [...] of x [..., K]."""
        if not self.frozen:
            return self(x)[0].argmax(dim=-1)
        ((linear, _),) = self.frozen
        return kernels.top1(linear, x)


def size(layer: nn.Module) -> tuple[int, int]:
    """(N, K) of a linear layer, quantized or not."""
    assert isinstance(layer, nn.Linear | FakeQuantLinear | PackedLinear), f"{type(layer).__name__} is no linear layer"
    return layer.out_features, layer.in_features


def _integers(layer: nn.Module, kernels: Kernels) -> QuantScheme | None:
    """The scheme of a layer whose integers the kernels multiply with."""
    return layer.scheme if kernels.freeze_packed is not None and isinstance(layer, PackedLinear) else None


def _frozen_integers(layers: list[nn.Module], kernels: Kernels, gated: bool, dtype: torch.dtype) -> Linear | None:
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    assert kernels.freeze_packed is not None
    assert len(packed) == len(layers)
    q_NK = torch.cat([layer.integers() for layer in packed])
    scale_NG = torch.cat([layer.grid.scale_NG for layer in packed])
    zeros = [layer.grid.zero_NG for layer in packed]
    zero_NG = torch.cat([zero for zero in zeros if zero is not None]) if zeros[0] is not None else None
    return kernels.freeze_packed(q_NK, scale_NG, zero_NG, packed[0].scheme.bits, gated, dtype)


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
            part.freeze()
        if isinstance(part, nn.Conv1d):  # tap by tap, so that a kernel reads channels that lie side by side
            by_tap_WC = part.weight.detach().permute(2, 1, 0).contiguous()
            part.weight = nn.Parameter(by_tap_WC.permute(2, 1, 0), requires_grad=False)
        for value in vars(part).values():
            if isinstance(value, Projections):
                value.freeze(kernels, dtype)


class MLP(nn.Module):
    """x + (silu(n W_gate^T) * n W_up^T) W_down^T, with n = norm(x)."""

    def __init__(self, hidden_size: int, intermediate_size: int, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.inputs = Projections(self, "gate_proj", "up_proj", gated=True)
        self.output = Projections(self, "down_proj")

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        inputs = self.inputs(x, norm)
        gated = inputs[0] if len(inputs) == 1 else self.kernels.silu_mul(*inputs)
        return self.output(gated, residual=x)[0]
