"""Products with a weight that has stopped changing, and what may be fused into them.

M rows (any leading dimensions), N outputs, K inputs.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.ops.integers import dequantize
from twofold.ops.norms import rms_norm, silu_mul

FEW_ROWS = 64
INT4_ROWS = 4  # from 5 on, a bfloat16 matrix is as fast (two cores with AMX)


class Norm(NamedTuple):
    """x -> x / rms(x) * weight, the weight with its offset."""

    weight_K: Tensor
    eps: float


class Linear(Protocol):
    """y = f(norm(x) W^T) + residual; f is silu(gate) * up of [gate; up] in a gated weight, else nothing."""

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor: ...


def around(product: Callable[[Tensor], Tensor], gated: bool) -> Linear:
    """A plain product with everything else done before and after it; the reference."""

    def apply(x: Tensor, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        y = product(x if norm is None else rms_norm(x, *norm))
        if gated:
            y = silu_mul(*y.chunk(2, dim=-1))
        return y if residual is None else residual + y

    return apply


def dense_linear(weight_NK: Tensor, gated: bool = False) -> Linear:
    return around(lambda x: F.linear(x, weight_NK), gated)


def top1(linear: Linear, x: Tensor, norm: Norm | None = None) -> Tensor:
    """The index of the largest output, the lowest among equals; [...] of x [..., K]."""
    return linear(x, norm).argmax(dim=-1)


def cpu_linear(weight_NK: Tensor, gated: bool = False) -> Linear:
    """At up to `FEW_ROWS` rows PyTorch's own product spends most of its time on a weight laid out in rows: a wide
    weight is laid out once in oneDNN's blocks, a narrow one multiplied from the left, W x^T.

    oneDNN's product has no gradient, so autograd takes PyTorch's.
    """
    able = weight_NK.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    if not able or len(weight_NK) < 512:
        return around(lambda x: _left_product(x, weight_NK), gated)
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight_NK.detach().contiguous(), 8)

    def product(x: Tensor) -> Tensor:
        if x.requires_grad or x.numel() // x.shape[-1] > FEW_ROWS:
            return F.linear(x, weight_NK)
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), blocked, None, "none", [], "")

    return around(product, gated)


def cpu_packed(
    q_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, bits: int, gated: bool, dtype: torch.dtype
) -> Linear | None:
    """Of up to `INT4_ROWS` rows in bfloat16, PyTorch's product with 4-bit weights; of more, one with the matrix.

    None for what it does not serve: other dtypes, 8 bits, zero points, N that 16 does not divide, odd group sizes, and
    processors for which it was not written (it is many times slower there).
    """
    outputs, inputs = q_NK.shape
    group_size = inputs // scale_NG.shape[1]
    written = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    served = written and dtype == torch.bfloat16 and bits == 4 and zero_NG is None
    if not served or outputs % 16 or group_size not in (32, 64, 128, 256):
        return None
    words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q_NK.int() + 8, 1)
    scales_GN2 = torch.stack((scale_NG.T, torch.zeros_like(scale_NG.T)), dim=-1).to(dtype).contiguous()
    weight_NK = dequantize(q_NK, scale_NG, None, group_size, dtype)

    def product(x: Tensor) -> Tensor:
        x_MK = x.reshape(-1, inputs)
        if x.requires_grad or len(x_MK) > INT4_ROWS:
            return F.linear(x, weight_NK)
        y_MN = torch.ops.aten._weight_int4pack_mm_for_cpu(x_MK, words, group_size, scales_GN2)
        return y_MN.view(*x.shape[:-1], outputs)

    return around(product, gated)


def _left_product(x: Tensor, weight_NK: Tensor) -> Tensor:
    if not 1 < x.numel() // x.shape[-1] <= FEW_ROWS:
        return F.linear(x, weight_NK)
    return (weight_NK @ x.flatten(0, -2).T).T.view(*x.shape[:-1], -1)
