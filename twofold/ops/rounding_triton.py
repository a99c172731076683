"""`rounding` in one pass over the weight; the same equations, float32 weights on a GPU.

A quotient by `/` is an approximation in Triton: `div_rn` is the rounded one that the reference has.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

_BLOCK = 2048


@triton.jit
def _levels(w, s, z, QMIN: tl.constexpr, QMAX: tl.constexpr):
    steps = tl.div_rn(w, s)
    rounded = libdevice.rint(steps + z)
    # a weight that is NaN must not become one of the grid's numbers
    q = tl.maximum(rounded, QMIN, propagate_nan=tl.PropagateNan.ALL)
    return steps, rounded, tl.minimum(q, QMAX, propagate_nan=tl.PropagateNan.ALL) - z


@triton.jit
def _round_kernel(w_ptr, s_ptr, z_ptr, out_ptr, size, group, QMIN: tl.constexpr, QMAX: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    j = at // group
    w = tl.load(w_ptr + at, mask=mask, other=0.0)
    s = tl.load(s_ptr + j, mask=mask, other=1.0).to(tl.float32)
    z = 0.0 if z_ptr is None else tl.load(z_ptr + j, mask=mask, other=0).to(tl.float32)
    _, _, q = _levels(w, s, z, QMIN, QMAX)
    tl.store(out_ptr + at, (q * s).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _slope_kernel(w_ptr, s_ptr, z_ptr, grad_ptr, out_ptr, num_groups, group, QMIN: tl.constexpr, QMAX: tl.constexpr,
                  ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    j = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    s = tl.load(s_ptr + j, mask=j < num_groups, other=1.0).to(tl.float32)[:, None]
    z = 0.0 if z_ptr is None else tl.load(z_ptr + j, mask=j < num_groups, other=0).to(tl.float32)[:, None]
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, group, BLOCK):
        k = start + tl.arange(0, BLOCK)
        mask = (j < num_groups)[:, None] & (k < group)[None, :]
        at = j[:, None] * group + k[None, :]
        w = tl.load(w_ptr + at, mask=mask, other=0.0)
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        steps, rounded, q = _levels(w, s, z, QMIN, QMAX)
        inside = (rounded >= QMIN) & (rounded <= QMAX)
        total += tl.sum(grad * (q - tl.where(inside, steps, 0.0)), axis=1)
    tl.store(out_ptr + j, total, mask=j < num_groups)


def round_to_grid(
    weight_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, qmin: int, qmax: int, dtype: torch.dtype
) -> Tensor:
    out = torch.empty_like(weight_NK, dtype=dtype, memory_format=torch.contiguous_format)
    size = weight_NK.numel()
    _round_kernel[(triton.cdiv(size, _BLOCK),)](
        *_contiguous(weight_NK, scale_NG, zero_NG), out, size, size // scale_NG.numel(), qmin, qmax, _BLOCK
    )
    return out


def scale_gradient(
    weight_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, qmin: int, qmax: int, grad_NK: Tensor
) -> Tensor:
    out = torch.empty_like(scale_NG, dtype=torch.float32, memory_format=torch.contiguous_format)
    count = scale_NG.numel()
    group = weight_NK.numel() // count
    block = min(1024, triton.next_power_of_2(group))
    rows = _BLOCK // block
    _slope_kernel[(triton.cdiv(count, rows),)](
        *_contiguous(weight_NK, scale_NG, zero_NG), grad_NK.contiguous(), out, count, group, qmin, qmax, rows, block
    )
    return out


def _contiguous(weight_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    return weight_NK.contiguous(), scale_NG.contiguous(), None if zero_NG is None else zero_NG.contiguous()
