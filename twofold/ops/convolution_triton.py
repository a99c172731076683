"""`packed_convolution` in two kernels: one forward, one backward for what the activation passes, and the input's.

    z_t = sum_j w[:, W - 1 - j] x_{t - j},  j < W and t - j in the document of t;   y = silu(z)
    dz = dy sigmoid(z) (1 + z (1 - sigmoid(z)))
    dx_t = sum_j w[:, W - 1 - j] dz_{t + j};   dw[:, W - 1 - j] = sum_t dz_t x_{t - j}

B rows, T tokens, C channels, W kernel width. Sums are float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS, _CHANNELS = 64, 64


@triton.jit
def _own(ids_ptr, row, t, other, tokens):
    """Whether `other` is a token of the row and in the document of t."""
    own = (other >= 0) & (other < tokens) & (t < tokens)
    if ids_ptr is not None:
        mine = tl.load(ids_ptr + row * tokens + t, mask=own, other=-1)
        own = own & (mine == tl.load(ids_ptr + row * tokens + other, mask=own, other=-2))
    return own


@triton.jit
def _forward_kernel(x_ptr, w_ptr, ids_ptr, dy_ptr, out_ptr, dw_ptr, tokens, channels, W: tl.constexpr,
                    TOKENS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """y; or, where `dy` is given, dz and the part of dw that this block of tokens has."""
    row = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    here = (t < tokens)[:, None] & (c < channels)[None, :]
    z = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for j in tl.static_range(W):
        own = _own(ids_ptr, row, t, t - j, tokens)[:, None] & (c < channels)[None, :]
        x = tl.load(x_ptr + (row * tokens + t - j)[:, None] * channels + c[None, :], mask=own, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + c * W + W - 1 - j, mask=c < channels, other=0.0).to(tl.float32)
        z += x * w[None, :]
    at = (row * tokens + t)[:, None] * channels + c[None, :]
    s = tl.sigmoid(z)
    if dy_ptr is None:
        tl.store(out_ptr + at, (z * s).to(out_ptr.dtype.element_ty), mask=here)
    else:
        dz = tl.load(dy_ptr + at, mask=here, other=0.0).to(tl.float32) * s * (1 + z * (1 - s))
        tl.store(out_ptr + at, dz.to(out_ptr.dtype.element_ty), mask=here)
        block = row * tl.num_programs(0) + tl.program_id(0)
        for j in tl.static_range(W):
            own = _own(ids_ptr, row, t, t - j, tokens)[:, None] & (c < channels)[None, :]
            x = tl.load(x_ptr + (row * tokens + t - j)[:, None] * channels + c[None, :], mask=own, other=0.0)
            part = tl.sum(dz * x.to(tl.float32), axis=0)
            tl.store(dw_ptr + (block * channels + c) * W + W - 1 - j, part, mask=c < channels)


@triton.jit
def _input_kernel(dz_ptr, w_ptr, ids_ptr, dx_ptr, tokens, channels, W: tl.constexpr, TOKENS: tl.constexpr,
                  CHANNELS: tl.constexpr):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    dx = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for j in tl.static_range(W):
        own = _own(ids_ptr, row, t, t + j, tokens)[:, None] & (c < channels)[None, :]
        dz = tl.load(dz_ptr + (row * tokens + t + j)[:, None] * channels + c[None, :], mask=own, other=0.0)
        w = tl.load(w_ptr + c * W + W - 1 - j, mask=c < channels, other=0.0).to(tl.float32)
        dx += dz.to(tl.float32) * w[None, :]
    here = (t < tokens)[:, None] & (c < channels)[None, :]
    at = (row * tokens + t)[:, None] * channels + c[None, :]
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=here)


def convolution(x_BTC: Tensor, weight_CW: Tensor, ids_BT: Tensor | None) -> Tensor:
    """[B, T, C] in the dtype of x; differentiable in x and in the weight."""
    y = _Convolution.apply(x_BTC, weight_CW, ids_BT)
    assert isinstance(y, Tensor)
    return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, weight_CW: Tensor, ids_BT: Tensor | None) -> Tensor:
        x_BTC, weight_CW = x_BTC.contiguous(), weight_CW.contiguous()
        ids_BT = None if ids_BT is None else ids_BT.contiguous()
        ctx.save_for_backward(x_BTC, weight_CW, ids_BT)
        y_BTC = torch.empty_like(x_BTC)
        _, num_tokens, channels = x_BTC.shape
        width = weight_CW.shape[1]
        _forward_kernel[_grid(x_BTC)](
            x_BTC, weight_CW, ids_BT, None, y_BTC, None, num_tokens, channels, width, _TOKENS, _CHANNELS
        )
        return y_BTC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_BTC, weight_CW, ids_BT = ctx.saved_tensors
        batch, num_tokens, channels = x_BTC.shape
        width, grid = weight_CW.shape[1], _grid(x_BTC)
        dz_BTC, dx_BTC = torch.empty_like(x_BTC, dtype=torch.float32), torch.empty_like(x_BTC)
        parts_PCW = dz_BTC.new_empty(batch * grid[0], channels, width)
        sizes = num_tokens, channels, width, _TOKENS, _CHANNELS
        _forward_kernel[grid](x_BTC, weight_CW, ids_BT, grads[0].contiguous(), dz_BTC, parts_PCW, *sizes)
        _input_kernel[grid](dz_BTC, weight_CW, ids_BT, dx_BTC, *sizes)
        return dx_BTC, parts_PCW.sum(0).to(weight_CW.dtype), None


def _grid(x_BTC: Tensor) -> tuple[int, int, int]:
    batch, num_tokens, channels = x_BTC.shape
    return triton.cdiv(num_tokens, _TOKENS), triton.cdiv(channels, _CHANNELS), batch
