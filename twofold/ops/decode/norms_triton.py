"""`rms_norm`, `gated_rms_norm` (equations in ops/norms.py), `add_rms_norm` and `silu_mul` (norms.py), a program a row.
Of a prefill's many narrow rows, heads, a program has several: there would be more programs than can be started in time.

Rows may be parts of wider ones; the last dimension is contiguous.
"""

import triton
import triton.language as tl
from torch import Tensor

from twofold.ops.decode.overlap_triton import able, await_before, in_turn, let_next_start, options

MANY_ROWS = 1024  # a prefill's
MANY_HEADS = 4096  # in all rows, above which a program has several


@triton.jit
def _norm_kernel(x_ptr, other_ptr, weight_ptr, h_ptr, y_ptr, x_m, x_h, other_m, other_h, heads, eps, offset,
                 D: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Row m, head h of x; `other` is added before (and the sum stored), or gates the result."""
    let_next_start(OVERLAP)
    m, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    here = d < D
    w = tl.load(weight_ptr + d, mask=here, other=0.0).to(tl.float32) + offset
    await_before(OVERLAP)
    x = tl.load(x_ptr + m * x_m + h * x_h + d, mask=here, other=0.0).to(tl.float32)
    if other_ptr is not None:
        other = tl.load(other_ptr + m * other_m + h * other_h + d, mask=here, other=0.0).to(tl.float32)
        if not GATED:
            rounded = (x + other).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + (m * heads + h) * D + d, rounded, mask=here)
            x = rounded.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps) * w
    if GATED:
        y *= other * tl.sigmoid(other)
    tl.store(y_ptr + (m * heads + h) * D + d, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def _heads_kernel(x_ptr, gate_ptr, weight_ptr, y_ptr, x_m, x_h, gate_m, gate_h, heads, eps, D: tl.constexpr,
                  BLOCK: tl.constexpr, HEADS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """`_norm_kernel`, gated, of HEADS heads of row m."""
    in_turn(OVERLAP)
    m = tl.program_id(0).to(tl.int64)
    h, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    here = (h < heads)[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + m * x_m + h[:, None] * x_h + d[None, :], mask=here, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + m * gate_m + h[:, None] * gate_h + d[None, :], mask=here, other=0.0).to(tl.float32)
    w = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None] * w[None, :] * gate * tl.sigmoid(gate)
    tl.store(y_ptr + (m * heads + h)[:, None] * D + d[None, :], y.to(y_ptr.dtype.element_ty), mask=here)


def _strides(x: Tensor) -> tuple[int, int, int, int]:
    """Rows, heads and their strides of [M, D] or [..., H, D], where leading dimensions are dense."""
    assert x.stride(-1) == 1, "rows must be contiguous"
    if x.dim() <= 2:
        return x.shape[0] if x.dim() == 2 else 1, 1, x.stride(0), 0
    rows = x.flatten(0, -3) if x.dim() > 3 else x
    assert rows.data_ptr() == x.data_ptr(), "leading dimensions must be one"
    return rows.shape[0], rows.shape[1], rows.stride(0), rows.stride(1)


def _launch(x: Tensor, other: Tensor | None, weight_D: Tensor, h: Tensor | None, eps: float, offset: float,
            gated: bool, overlap: bool) -> Tensor:  # fmt: skip
    overlap = able(overlap, x.device)
    y = x.new_empty(x.shape)
    rows, heads, x_m, x_h = _strides(x)
    _, _, other_m, other_h = (0, 0, 0, 0) if other is None else _strides(other)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    if gated and other is not None and rows * heads > MANY_HEADS and block <= 512:
        some = min(4096 // block, triton.next_power_of_2(heads))
        _heads_kernel[(rows, triton.cdiv(heads, some))](
            x, other, weight_D, y, x_m, x_h, other_m, other_h, heads, eps, width, block, some, overlap,
            num_warps=max(1, some * block // 1024), **options(overlap),
        )  # fmt: skip
        return y
    most = 8 if rows < MANY_ROWS else 4  # so that 2,048 rows are on the multiprocessors at once
    _norm_kernel[(rows, heads)](
        x, other, weight_D, h, y, x_m, x_h, other_m, other_h, heads, eps, offset, width, gated, block,
        overlap, num_warps=max(1, min(most, block // 256)), **options(overlap),
    )  # fmt: skip
    return y


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0, *, overlap: bool = False) -> Tensor:
    return _launch(x, None, weight_D, None, eps, offset, False, overlap)


def gated_rms_norm(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float, *, overlap: bool = False) -> Tensor:
    return _launch(x, gate, weight_D, None, eps, 0.0, True, overlap)


def add_rms_norm(
    x_MD: Tensor, residual_MD: Tensor, weight_D: Tensor, eps: float, *, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    h = x_MD.new_empty(x_MD.shape)
    return h, _launch(x_MD, residual_MD, weight_D, h, eps, 0.0, False, overlap)


@triton.jit
def _silu_mul_kernel(x_ptr, y_ptr, x_m, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    in_turn(OVERLAP)
    m = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + m * x_m + d, mask=d < width, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + m * x_m + width + d, mask=d < width, other=0.0).to(tl.float32)
    tl.store(y_ptr + m * width + d, (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty), mask=d < width)


def silu_mul(gate_up_MD: Tensor, *, overlap: bool = False) -> Tensor:
    overlap = able(overlap, gate_up_MD.device)
    rows, width = gate_up_MD.shape[0], gate_up_MD.shape[1] // 2
    assert gate_up_MD.stride(-1) == 1
    y = gate_up_MD.new_empty(rows, width)
    _silu_mul_kernel[(rows, triton.cdiv(width, 1024))](  # a grid's first size alone may exceed 65,535
        gate_up_MD, y, gate_up_MD.stride(0), width, 1024, overlap, num_warps=4, **options(overlap)
    )
    return y
