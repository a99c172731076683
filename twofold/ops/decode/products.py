"""Products of frozen weights on a GPU, in the signatures of `Kernels`: packed ones, and what they are for many rows.

M rows, N outputs, K inputs. Passes of up to `FEW_ROWS` rows multiply with packed weights; more rows, as in a prefill,
with the matrix they stand for, of integers made anew for each product. `overlap` is programmatic dependent launch, see
`linear_cuda`.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.ops import linear
from twofold.ops.decode import linear_cuda
from twofold.ops.decode.packed_weight import PackedWeight, pack_bf16, pack_w4, pack_w8
from twofold.ops.decode.served import rms_norm
from twofold.ops.linear import Linear, Norm

FEW_ROWS = 64  # on an H200 a pass of 64 takes 3.5 ms packed and 4.7 unpacked, of 128 rows 6.5 and 4.9


@functools.cache
def say_once(text: str) -> None:
    print(text, file=sys.stderr)


@dataclass(frozen=True)
class PackedProduct:
    """A `Linear` over a packed weight; `dense` is the matrix, where that is kept anyway. With a `tail`, of 16 bits
    behind a weight of 4, its outputs come behind the others'."""

    weight: PackedWeight
    dense: Tensor | None = None
    overlap: bool = False
    tail: PackedProduct | None = None
    fp8_scale_N1: Tensor | None = None  # of the matrix' rows, where many rows are multiplied in 8-bit floats, see `fp8`

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        residual_MN = None if residual is None else residual.reshape(-1, residual.shape[-1])
        product = self._few if len(x_MK) <= FEW_ROWS else self._many
        return product(x_MK, norm, residual_MN).view(*x.shape[:-1], -1)

    def _few(self, x_MK: Tensor, norm: Norm | None, residual_MN: Tensor | None) -> Tensor:
        return linear_cuda.packed_linear(
            x_MK,
            self.weight,
            norm_K=None if norm is None else norm.weight_K,
            eps=0.0 if norm is None else norm.eps,
            residual_MN=residual_MN,
            overlap=self.overlap,
            tail=None if self.tail is None else self.tail.weight,
        )

    def _many(self, x_MK: Tensor, norm: Norm | None, residual_MN: Tensor | None) -> Tensor:
        if self.fp8_scale_N1 is not None:
            return self._many_in_fp8(self.fp8_scale_N1, x_MK, norm, residual_MN)
        x_MK = x_MK if norm is None else rms_norm(x_MK, *norm)
        weight_NK = self.matrix()
        if residual_MN is not None:
            return torch.addmm(residual_MN, x_MK, weight_NK.T)
        y_MN = F.linear(x_MK, weight_NK)
        if not self.weight.gated:
            return y_MN
        from twofold.ops.decode import norms_triton

        return norms_triton.silu_mul(y_MN)

    def _many_in_fp8(self, scale_N1: Tensor, x_MK: Tensor, norm: Norm | None, residual_MN: Tensor | None) -> Tensor:
        from twofold.ops import fp8_triton
        from twofold.ops.decode import norms_triton

        outputs = self.weight.num_outputs
        q_NK = x_MK.new_empty(len(scale_N1), self.weight.num_inputs, dtype=torch.float8_e4m3fn)
        linear_cuda.unpack_e4m3(self.weight, scale_N1[:outputs], q_NK[:outputs])
        if self.tail is not None:
            linear_cuda.unpack_e4m3(self.tail.weight, scale_N1[outputs:], q_NK[outputs:])
        q_MK, scale_M1 = fp8_triton.quantize_rows(x_MK, norm)
        y_MN = fp8_triton.scaled_product(q_MK, scale_M1, q_NK, scale_N1, x_MK.dtype)
        y_MN = norms_triton.silu_mul(y_MN) if self.weight.gated else y_MN
        return y_MN if residual_MN is None else y_MN.add_(residual_MN)

    def matrix(self) -> Tensor:
        if self.dense is not None:
            return self.dense
        if self.tail is None:
            return linear_cuda.unpack(self.weight)
        tail_NK, outputs = self.tail.matrix(), self.weight.num_outputs
        both = tail_NK.new_empty(outputs + len(tail_NK), tail_NK.shape[1])
        linear_cuda.unpack(self.weight, both[:outputs])
        both[outputs:] = tail_NK
        return both

    def in_fp8(self) -> PackedProduct:
        """Looks at the matrix once."""
        from twofold.ops import fp8_triton

        return replace(self, fp8_scale_N1=fp8_triton.quantize_rows(self.matrix())[1])


def join(first: Linear, second: Linear) -> Linear | None:
    """Of a weight of 4 bits and one of 16; None for others."""
    if not isinstance(first, PackedProduct) or not isinstance(second, PackedProduct):
        return None
    served = (first.weight.bits, second.weight.bits) == (4, 16) and not (first.weight.gated or second.weight.gated)
    if not served:
        return None
    both = replace(first, tail=second)
    return both if first.fp8_scale_N1 is None else both.in_fp8()


def freeze_linear(weight_NK: Tensor, gated: bool, *, overlap: bool = False) -> Linear:
    outputs, inputs = weight_NK.shape
    if weight_NK.dtype != torch.bfloat16 or not weight_NK.is_cuda or inputs % 64 or outputs % (16 if gated else 8):
        return linear.dense_linear(weight_NK, gated)
    return PackedProduct(pack_bf16(weight_NK, gated), weight_NK, overlap)


def freeze_packed(
    q_NK: Tensor,
    scale_NG: Tensor,
    zero_NG: Tensor | None,
    bits: int,
    gated: bool,
    dtype: torch.dtype,
    *,
    overlap: bool = False,
    fp8: bool = False,
) -> Linear | None:
    """None, said once, for weights that the kernel does not serve, and for models of another dtype than bfloat16."""
    if dtype != torch.bfloat16:
        return None
    group_size = q_NK.shape[1] // scale_NG.shape[1]
    try:
        if bits == 4:
            weight = pack_w4(q_NK, scale_NG, zero_NG, group_size, gated)
        elif zero_NG is None:
            weight = pack_w8(q_NK, scale_NG, group_size, gated)
        else:
            raise ValueError("8 bits with zero points")
    except ValueError as error:
        say_once(f"a packed layer is multiplied as a dense one: {error}")
        return None
    product = PackedProduct(weight, None, overlap)
    return product.in_fp8() if fp8 else product


def top1(head: Linear, x: Tensor) -> Tensor:
    if not isinstance(head, PackedProduct) or head.weight.gated:
        return linear.top1(head, x)
    ids_M, _ = linear_cuda.top1(x.reshape(-1, x.shape[-1]), head.weight, overlap=head.overlap)
    return ids_M.view(x.shape[:-1])


def why_no_products(device: torch.device | str) -> str | None:
    """What products with packed weights lack on a machine with a GPU; None where nothing."""
    try:
        found = importlib.util.find_spec("cuda.bindings")
    except ModuleNotFoundError:
        found = None
    if found is None:
        return "cuda-bindings is not installed (pip install 'twofold[gpu]')"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None
