"""`fp8.quantize_rows` in one kernel, after a norm where one is given, and the product by cuBLAS; from sm_89 on."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twofold.ops.linear import Norm


@triton.jit
def _quantize_kernel(x_ptr, norm_ptr, q_ptr, scale_ptr, x_m, eps, K: tl.constexpr, BLOCK: tl.constexpr):
    """A program has a row. The norm's result is rounded to the dtype of x, as it would be in memory."""
    m, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here = k < K
    x = tl.load(x_ptr + m * x_m + k, mask=here, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / K + eps) * tl.load(norm_ptr + k, mask=here, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    most = tl.max(tl.abs(x), axis=0)
    scale = tl.where(most > 0.0, most / 448.0, 1.0)
    q = tl.clamp(x / scale, -448.0, 448.0)
    tl.store(q_ptr + m * K + k, q.to(q_ptr.dtype.element_ty), mask=here)
    tl.store(scale_ptr + m, scale)


def quantize_rows(x_MK: Tensor, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
    """(q [M, K] in float8_e4m3fn, s [M, 1] in float32)."""
    assert x_MK.stride(1) == 1
    rows, width = x_MK.shape
    q, scale = x_MK.new_empty(rows, width, dtype=torch.float8_e4m3fn), x_MK.new_empty(rows, 1, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    weight, eps = (None, 0.0) if norm is None else norm
    _quantize_kernel[(rows,)](
        x_MK, weight, q, scale, x_MK.stride(0), eps, width, block, num_warps=max(1, min(8, block // 512))
    )
    return q, scale


def scaled_product(q_MK: Tensor, scale_M1: Tensor, q_NK: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    """y [M, N]. Sums are those of the tensor cores, which keep fewer bits than float32."""
    return torch._scaled_mm(q_MK, q_NK.T, scale_M1, scale_N1.T, out_dtype=dtype, use_fast_accum=True)
