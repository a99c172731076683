"""The loop over chunks of the gated delta rule as one kernel, forward and backward.

With P, X [L, V], A, B [L, K] and a factor a for each chunk, S [K, V] before the first chunk given or zero:

    X_c = P_c -+ A_c S_c,    S_{c+1} = a_c S_c +- B_c^T X_c + E_c

Forward (-, +): P what would be written into an empty state, A what the state erases of it, B the keys decayed to the
chunk's end, no E. The gradient D of S after a chunk obeys the same law from the last chunk to the first, (+, -), with
P the gradient of X, A and B exchanged, and E the gradient of the S that was read:

    dP_c = Y_c = dX_c + B_c D_c,    D_{c-1} = a_c D_c - A_c^T Y_c + E_c
    dA_c = -Y_c S_c^T,    dB_c = X_c D_c^T,    da_c = sum S_c * D_c

Columns of S are independent: each program has some of them in registers from the first chunk to the last.
M heads of all rows, C chunks of L tokens, K key width, V value width.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scan_kernel(p_ptr, a_ptr, b_ptr, factor_ptr, e_ptr, first_ptr, x_ptr, s_ptr, chunks, K: tl.constexpr,
                 V: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr, REVERSE: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    o_k, o_l = tl.arange(0, K), tl.arange(0, L)
    o_v = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    of_state = o_k[:, None] * V + o_v[None, :]
    of_token = o_l[:, None] * V + o_v[None, :]
    s = tl.zeros([K, COLUMNS], tl.float32) if first_ptr is None else tl.load(first_ptr + head * K * V + of_state)
    for i in range(chunks):
        c = head * chunks + (chunks - 1 - i if REVERSE else i)
        tl.store(s_ptr + c * K * V + of_state, s)
        a = tl.load(a_ptr + c * L * K + o_l[:, None] * K + o_k[None, :])
        b = tl.load(b_ptr + c * L * K + o_l[None, :] * K + o_k[:, None])
        x = tl.load(p_ptr + c * L * V + of_token)
        read = tl.dot(a, s, input_precision=PRECISION)
        x = x + read if REVERSE else x - read
        tl.store(x_ptr + c * L * V + of_token, x)
        written = tl.dot(b, x, input_precision=PRECISION)
        s = tl.load(factor_ptr + c) * s
        s = s - written if REVERSE else s + written
        if e_ptr is not None:
            s += tl.load(e_ptr + c * K * V + of_state)


def fits(written_MCLV: Tensor, erased_MCLK: Tensor, state_MKV: Tensor | None) -> bool:
    """Whether the kernel can: sizes that are powers of 2, for one program neither too few nor too many; no gradient
    for the first state."""
    if state_MKV is not None and state_MKV.requires_grad:
        return False
    sizes = (*written_MCLV.shape[2:], erased_MCLK.shape[3])
    return written_MCLV.dtype == torch.float32 and all(16 <= n <= 128 and n & (n - 1) == 0 for n in sizes)


def _scan(
    p_MCLV: Tensor,
    a_MCLK: Tensor,
    b_MCLK: Tensor,
    factor_MC: Tensor,
    e_MCKV: Tensor | None,
    first_MKV: Tensor | None,
    reverse: bool,
    precision: str,
) -> tuple[Tensor, Tensor]:
    heads, chunks, length, values = p_MCLV.shape
    keys = a_MCLK.shape[3]
    p, a, b, factor = (x.contiguous() for x in (p_MCLV, a_MCLK, b_MCLK, factor_MC))
    e, first = (None if x is None else x.contiguous() for x in (e_MCKV, first_MKV))
    x_MCLV, s_MCKV = torch.empty_like(p), p.new_empty(heads, chunks, keys, values)
    columns = min(32, values)
    _scan_kernel[(heads, values // columns)](
        p,
        a,
        b,
        factor,
        e,
        first,
        x_MCLV,
        s_MCKV,
        chunks,
        keys,
        values,
        length,
        columns,
        reverse,
        precision,
        num_stages=2,
    )
    return x_MCLV, s_MCKV


class ChunkScan(torch.autograd.Function):
    """(written [M, C, L, V], erased [M, C, L, K], k_end [M, C, L, K], factor [M, C], state [M, K, V] or None, precision
    of the products) -> (X [M, C, L, V], S before each chunk [M, C, K, V]). No gradient reaches the state."""

    @staticmethod
    def forward(
        ctx: Any,
        written: Tensor,
        erased: Tensor,
        k_end: Tensor,
        factor: Tensor,
        state: Tensor | None,
        precision: str,
    ) -> tuple[Tensor, Tensor]:
        x, s = _scan(written, erased, k_end, factor, None, state, False, precision)
        ctx.save_for_backward(erased, k_end, factor, x, s)
        ctx.precision = precision
        return x, s

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None]:
        erased, k_end, factor, x, s = ctx.saved_tensors
        y, d = _scan(grads[0], k_end, erased, factor, grads[1], None, True, ctx.precision)
        return y, -y @ s.transpose(-1, -2), x @ d.transpose(-1, -2), (s * d).sum((-1, -2)), None, None
