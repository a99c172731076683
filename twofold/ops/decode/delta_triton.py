"""`delta_window`, `commit_delta_` and `commit_convolution_` (equations in delta.py and ops/gated_delta.py).

A program has one value head, or some of its columns: convolution, activation, unit length, decay, the triangular system
and the products, with the state read once. (I + A)^-1 is made of two diagonal blocks of 8 rows, each of them
(I + N)(I + N^2)(I + N^4) with N^8 = 0: five products one after the other, and numbers that stay small. A product is
three in tf32 where the inputs are float32, else one: over 60 windows of random bfloat16 inputs the state is then off by
0.05 to 0.09 % of it, and by 0.26 to 0.32 % for the rounding of those inputs.

Where launches overlap, state, weights and the inputs before the window are read before the wait: only commits write
them, and between a commit and the next pass stand kernels that overlap with nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twofold.ops.decode.delta import WindowFactors
from twofold.ops.decode.overlap_triton import able, await_before, in_turn, let_next_start, options

TOKENS = 16


@triton.jit
def _convolved_before(conv_ptr, weight_ptr, channel, t, conv_w, weight_c, weight_w, T: tl.constexpr, W: tl.constexpr):
    """What the inputs before the window add to the convolution at every token, for some channels."""
    z = tl.zeros([t.shape[0], channel.shape[0]], tl.float32)
    for j in tl.static_range(W - 1):
        old = (t + j < W - 1) & (t < T)
        x = tl.load(conv_ptr + (t + j)[:, None] * conv_w + channel[None, :], mask=old[:, None], other=0.0)
        z += x.to(tl.float32) * _tap(weight_ptr, channel, t, j, weight_c, weight_w)
    return z


@triton.jit
def _tap(weight_ptr, channel, t, j: tl.constexpr, weight_c, weight_w):
    """The same for all tokens, but loaded for each, as inputs are: both lie where they are multiplied."""
    return tl.load(weight_ptr + channel[None, :] * weight_c + j * weight_w + 0 * t[:, None]).to(tl.float32)


@triton.jit
def _convolved(z, x_ptr, weight_ptr, channel, t, x_t, weight_c, weight_w, copy_ptr, copies, C: tl.constexpr,
               T: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """silu of the convolution, z of what lies before the window; zero past T. With `copies`, x is left at copy_ptr."""
    for j in tl.static_range(W):
        source = t + j - (W - 1)
        new = (source >= 0) & (t < T)
        x = tl.load(x_ptr + source[:, None] * x_t + channel[None, :], mask=new[:, None], other=0.0)
        z += x.to(tl.float32) * _tap(weight_ptr, channel, t, j, weight_c, weight_w)
        if copy_ptr is not None and j == W - 1:
            tl.store(copy_ptr + t[:, None] * C + channel[None, :], x, mask=new[:, None] & copies)
    return z * tl.sigmoid(z)


@triton.jit
def _log_decay(a, dt, a_log):
    a += dt
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    return -tl.exp(a_log) * soft


@triton.jit
def _convolved_before_token(conv_ptr, weight_ptr, channel, conv_w, weight_c, weight_w, W: tl.constexpr):
    z = tl.zeros([channel.shape[0]], tl.float32)
    for j in tl.static_range(W - 1):
        old = tl.load(conv_ptr + j * conv_w + channel).to(tl.float32)
        z += old * tl.load(weight_ptr + channel * weight_c + j * weight_w).to(tl.float32)
    return z


@triton.jit
def _token_kernel(x_ptr, conv_ptr, weight_ptr, a_ptr, b_ptr, a_log_ptr, dt_ptr, state_ptr, z_ptr, norm_ptr, o_ptr,
                  k_ptr, u_ptr, decay_ptr, copy_ptr, x_b, x_t, conv_b, conv_w, weight_c, weight_w, a_b, a_t, b_b, b_t,
                  state_b, z_b, z_t, z_h, eps, T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
                  V: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
                  READ: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """`_window_kernel` of one token: vectors, and no system to solve."""
    let_next_start(OVERLAP)
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i = h // (H // G)
    of_k, of_v = tl.arange(0, K), part * COLUMNS + tl.arange(0, COLUMNS)
    q_at, k_at, v_at = i * K + of_k, (G + i) * K + of_k, 2 * G * K + h * V + of_v
    state = tl.load(state_ptr + b * state_b + h * K * V + of_k[:, None] * V + of_v[None, :])
    dt, a_log = tl.load(dt_ptr + h).to(tl.float32), tl.load(a_log_ptr + h).to(tl.float32)
    conv_ptr += b * conv_b
    q = _convolved_before_token(conv_ptr, weight_ptr, q_at, conv_w, weight_c, weight_w, W)
    k = _convolved_before_token(conv_ptr, weight_ptr, k_at, conv_w, weight_c, weight_w, W)
    v = _convolved_before_token(conv_ptr, weight_ptr, v_at, conv_w, weight_c, weight_w, W)
    q_weight = tl.load(weight_ptr + q_at * weight_c + (W - 1) * weight_w).to(tl.float32)
    k_weight = tl.load(weight_ptr + k_at * weight_c + (W - 1) * weight_w).to(tl.float32)
    v_weight = tl.load(weight_ptr + v_at * weight_c + (W - 1) * weight_w).to(tl.float32)
    await_before(OVERLAP)

    x_ptr += b * x_b
    new_q, new_k, new_v = tl.load(x_ptr + q_at), tl.load(x_ptr + k_at), tl.load(x_ptr + v_at)
    q += new_q.to(tl.float32) * q_weight
    k += new_k.to(tl.float32) * k_weight
    v += new_v.to(tl.float32) * v_weight
    a, beta = tl.load(a_ptr + b * a_b + h).to(tl.float32), tl.load(b_ptr + b * b_b + h).to(tl.float32)
    g, beta = _log_decay(a, dt, a_log), tl.sigmoid(beta)
    q *= tl.sigmoid(q)
    k *= tl.sigmoid(k)
    v *= tl.sigmoid(v)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * K**-0.5
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    state *= tl.exp(g)
    u = beta * (v - tl.sum(k[:, None] * state, axis=0))
    o = tl.sum(q * k, axis=0) * u + tl.sum(q[:, None] * state, axis=0)

    if z_ptr is not None:  # COLUMNS is V
        z = tl.load(z_ptr + b * z_b + h * z_h + of_v).to(tl.float32)
        o *= tl.rsqrt(tl.sum(o * o, axis=0) / V + eps) * tl.load(norm_ptr + of_v).to(tl.float32)
        o *= z * tl.sigmoid(z)
    tl.store(o_ptr + (b * H + h) * V + of_v, o.to(o_ptr.dtype.element_ty))
    tl.store(u_ptr + (b * H + h) * V + of_v, u)
    if copy_ptr is not None:
        copy_ptr += b * (2 * G * K + H * V)
        first = (part == 0) & (h % (H // G) == 0)  # of those that read the same keys
        tl.store(copy_ptr + q_at, new_q, mask=(of_k < K) & first)
        tl.store(copy_ptr + k_at, new_k, mask=(of_k < K) & first)
        tl.store(copy_ptr + v_at, new_v)
    if part == 0:
        tl.store(decay_ptr + b * H + h, g)
        if h % (H // G) == 0:
            tl.store(k_ptr + (b * G + i) * K + of_k, k)


@triton.jit
def _window_kernel(x_ptr, conv_ptr, weight_ptr, a_ptr, b_ptr, a_log_ptr, dt_ptr, state_ptr, z_ptr, norm_ptr, o_ptr,
                   k_ptr, u_ptr, decay_ptr, copy_ptr, x_b, x_t, conv_b, conv_w, weight_c, weight_w, a_b, a_t, b_b, b_t,
                   state_b, z_b, z_t, z_h, eps, T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
                   V: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
                   READ: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    let_next_start(OVERLAP)
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i = h // (H // G)
    t, j = tl.arange(0, TOKENS), tl.arange(0, TOKENS)
    of_k, of_v = tl.arange(0, K), part * COLUMNS + tl.arange(0, COLUMNS)
    q_at, k_at, v_at = i * K + of_k, (G + i) * K + of_k, 2 * G * K + h * V + of_v
    state = tl.load(state_ptr + b * state_b + h * K * V + of_k[:, None] * V + of_v[None, :])
    dt, a_log = tl.load(dt_ptr + h).to(tl.float32), tl.load(a_log_ptr + h).to(tl.float32)
    conv_ptr += b * conv_b
    q = _convolved_before(conv_ptr, weight_ptr, q_at, t, conv_w, weight_c, weight_w, T, W)
    k = _convolved_before(conv_ptr, weight_ptr, k_at, t, conv_w, weight_c, weight_w, T, W)
    v = _convolved_before(conv_ptr, weight_ptr, v_at, t, conv_w, weight_c, weight_w, T, W)
    await_before(OVERLAP)

    x_ptr += b * x_b
    a = tl.load(a_ptr + b * a_b + t * a_t + h, mask=t < T, other=0.0).to(tl.float32)
    beta = tl.load(b_ptr + b * b_b + t * b_t + h, mask=t < T, other=0.0).to(tl.float32)
    C: tl.constexpr = 2 * G * K + H * V
    if copy_ptr is not None:
        copy_ptr += b * T * C
    first = (part == 0) & (h % (H // G) == 0)  # of those that read the same keys
    k = _convolved(k, x_ptr, weight_ptr, k_at, t, x_t, weight_c, weight_w, copy_ptr, first, C, T, W)
    q = _convolved(q, x_ptr, weight_ptr, q_at, t, x_t, weight_c, weight_w, copy_ptr, first, C, T, W)
    v = _convolved(v, x_ptr, weight_ptr, v_at, t, x_t, weight_c, weight_w, copy_ptr, True, C, T, W)
    g = _log_decay(a, dt, a_log)
    q *= (tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6) * K**-0.5)[:, None]
    k *= tl.rsqrt(tl.sum(k * k, axis=1) + 1e-6)[:, None]

    g = tl.where(t < T, g, 0.0)
    beta = tl.where(t < T, tl.sigmoid(beta), 0.0)
    decay = tl.cumsum(g, axis=0)
    pair = tl.exp(tl.where(j[None, :] <= t[:, None], decay[:, None] - decay[None, :], float("-inf")))

    dots = tl.dot(k, tl.trans(k), input_precision=READ)
    mix = tl.where(j[None, :] < t[:, None], beta[:, None] * pair * dots, 0.0)
    near = (t[:, None] // 8) == (j[None, :] // 8)
    one = tl.where(t[:, None] == j[None, :], 1.0, 0.0)
    n1 = tl.where(near, -mix, 0.0)  # TOKENS is 16: two blocks on the diagonal and one below
    n2 = tl.dot(n1, n1, input_precision=READ)
    n4 = tl.dot(n2, n2, input_precision=READ)
    inverse = tl.dot(n1, n2, one + n1 + n2, input_precision=READ)
    inverse = tl.dot(inverse, n4, inverse, input_precision=READ)
    below = tl.dot(inverse, tl.where(near, 0.0, -mix), input_precision=READ)

    from_start = tl.exp(decay)[:, None]
    u = beta[:, None] * (v - from_start * tl.dot(k, state, input_precision=READ))
    u = tl.dot(inverse, u, input_precision=READ)
    u = tl.dot(below, u, u, input_precision=READ)
    seen = pair * tl.dot(q, tl.trans(k), input_precision=READ)
    o = tl.dot(seen, u, from_start * tl.dot(q, state, input_precision=READ), input_precision=READ)

    real = (t < T)[:, None]
    if z_ptr is not None:  # COLUMNS is V
        z = tl.load(z_ptr + b * z_b + t[:, None] * z_t + h * z_h + of_v[None, :], mask=real, other=0.0).to(tl.float32)
        o *= tl.rsqrt(tl.sum(o * o, axis=1) / V + eps)[:, None] * tl.load(norm_ptr + of_v).to(tl.float32)[None, :]
        o *= z * tl.sigmoid(z)
    tl.store(o_ptr + ((b * T + t)[:, None] * H + h) * V + of_v[None, :], o.to(o_ptr.dtype.element_ty), mask=real)
    tl.store(u_ptr + ((b * H + h) * T + t)[:, None] * V + of_v[None, :], u, mask=real)
    if part == 0:
        tl.store(decay_ptr + (b * H + h) * T + t, decay, mask=t < T)
        if h % (H // G) == 0:
            tl.store(k_ptr + ((b * G + i) * T + t)[:, None] * K + of_k[None, :], k, mask=real)


def delta_window(
    x_BTC: Tensor,
    conv_BWC: Tensor,
    weight_CW: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    state_BHKV: Tensor,
    *,
    z_BTHV: Tensor | None = None,
    norm_V: Tensor | None = None,
    eps: float = 0.0,
    factors: WindowFactors | None = None,
    copy_BTC: Tensor | None = None,
    overlap: bool = False,
    division: tuple[int, int] | None = None,
) -> tuple[Tensor, WindowFactors]:
    """T <= 16; `factors` (of one layer, contiguous) are written where they are given, and x to `copy`. `division`:
    columns of a program (all of them with z) and its warps."""
    overlap = able(overlap, x_BTC.device)
    batch, num_tokens, channels = x_BTC.shape
    heads, width, value_width = state_BHKV.shape[1:]
    key_heads = (channels - heads * value_width) // (2 * width)
    if num_tokens > TOKENS:
        raise ValueError(f"a window has at most {TOKENS} tokens, got {num_tokens}; use gated_delta")
    assert state_BHKV.dtype == torch.float32
    assert state_BHKV[0].is_contiguous()
    for x in (x_BTC, conv_BWC, a_BTH, b_BTH, z_BTHV):
        assert x is None or x.stride(-1) == 1, "channels and heads must be contiguous"
    o = x_BTC.new_empty(batch, num_tokens, heads, value_width)
    if factors is None:
        new = state_BHKV.new_empty
        factors = WindowFactors(
            new(batch, key_heads, num_tokens, width),
            new(batch, heads, num_tokens, value_width),
            new(batch, heads, num_tokens),
        )
    assert all(x.is_contiguous() for x in factors)
    assert copy_BTC is None or (copy_BTC.is_contiguous() and copy_BTC.dtype == x_BTC.dtype)
    # the norm needs all columns of a head; without it more programs read the state
    columns, warps = division or ((value_width, 8) if z_BTHV is not None else (32, 4 if num_tokens == 1 else 8))
    columns = min(columns, value_width)
    assert z_BTHV is None or columns == value_width
    kernel = _token_kernel if num_tokens == 1 else _window_kernel
    strides = (
        *x_BTC.stride()[:2],
        *conv_BWC.stride()[:2],
        *weight_CW.stride(),
        *a_BTH.stride()[:2],
        *b_BTH.stride()[:2],
    )
    z_strides = (0, 0, 0) if z_BTHV is None else z_BTHV.stride()[:3]
    kernel[(value_width // columns, heads, batch)](
        x_BTC, conv_BWC, weight_CW, a_BTH, b_BTH, A_log_H, dt_bias_H, state_BHKV, z_BTHV, norm_V, o, *factors, copy_BTC,
        *strides, state_BHKV.stride(0), *z_strides, eps, num_tokens, heads, key_heads, width, value_width,
        weight_CW.shape[1], columns, TOKENS, "tf32x3" if x_BTC.dtype == torch.float32 else "tf32", overlap,
        num_warps=warps, **options(overlap),
    )  # fmt: skip
    return o, factors


@triton.jit
def _commit_kernel(state_ptr, k_ptr, u_ptr, decay_ptr, n_ptr, batch, state_l, state_b, T: tl.constexpr, H: tl.constexpr,
                   G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, COLUMNS: tl.constexpr,
                   TOKENS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    in_turn(OVERLAP)
    part, h, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n = tl.load(n_ptr + row % batch).to(tl.int32)
    if n > 0:
        t = tl.arange(0, TOKENS)
        of_k, of_v = tl.arange(0, K), part * COLUMNS + tl.arange(0, COLUMNS)
        at = state_ptr + row // batch * state_l + row % batch * state_b + h * K * V + of_k[:, None] * V + of_v[None, :]
        state = tl.load(at)
        total = tl.load(decay_ptr + (row * H + h) * T + n - 1)
        decay = tl.load(decay_ptr + (row * H + h) * T + t, mask=t < n, other=float("inf"))
        i = h // (H // G)
        mine = (t < n)[None, :]
        k = tl.load(k_ptr + ((row * G + i) * T + t)[None, :] * K + of_k[:, None], mask=mine, other=0.0)
        u = tl.load(u_ptr + ((row * H + h) * T + t)[:, None] * V + of_v[None, :], mask=(t < n)[:, None], other=0.0)
        k *= tl.exp(total - decay)[None, :]
        tl.store(at, tl.exp(total) * state + tl.dot(k, u, input_precision="tf32x3"))


def commit_delta_(state_BHKV: Tensor, factors: WindowFactors, n_B: Tensor, *, overlap: bool = False) -> Tensor:
    overlap = able(overlap, state_BHKV.device)
    heads, width, value_width = state_BHKV.shape[-3:]
    layers = state_BHKV.shape[0] if state_BHKV.dim() == 5 else 1
    batch = state_BHKV.shape[-4]
    num_tokens, key_heads = factors.k_BGTK.shape[-2], factors.k_BGTK.shape[-3]
    assert num_tokens <= TOKENS
    assert state_BHKV[(0,) * (state_BHKV.dim() - 3)].is_contiguous()
    assert all(x.is_contiguous() for x in factors)
    columns = min(64, value_width)
    state_l = state_BHKV.stride(0) if state_BHKV.dim() == 5 else 0
    _commit_kernel[(value_width // columns, heads, layers * batch)](
        state_BHKV, *factors, n_B, batch, state_l, state_BHKV.stride(-4), num_tokens, heads, key_heads, width,
        value_width, columns, TOKENS, overlap, num_warps=4, **options(overlap),
    )  # fmt: skip
    return state_BHKV


@triton.jit
def _commit_convolution_kernel(conv_ptr, x_ptr, n_ptr, batch, channels, conv_l, conv_b, conv_w, x_l, x_b, x_t,
                               KEPT: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    in_turn(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    layer, b = row // batch, row % batch
    n = tl.load(n_ptr + b).to(tl.int32)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    conv_ptr += layer * conv_l + b * conv_b
    x_ptr += layer * x_l + b * x_b
    here = c < channels
    for w in tl.static_range(KEPT):  # from the oldest on: what is read was not yet written
        old = tl.load(conv_ptr + (w + n) * conv_w + c, mask=here & (w + n < KEPT), other=0.0)
        new = tl.load(x_ptr + (w + n - KEPT) * x_t + c, mask=here & (w + n >= KEPT), other=0.0)
        tl.debug_barrier()  # a channel's load and store may be of different threads
        tl.store(conv_ptr + w * conv_w + c, tl.where(w + n < KEPT, old, new), mask=here)


def commit_convolution_(conv_BWC: Tensor, x_BTC: Tensor, n_B: Tensor, *, overlap: bool = False) -> Tensor:
    overlap = able(overlap, conv_BWC.device)
    batch, kept, channels = conv_BWC.shape[-3:]
    layers = conv_BWC.shape[0] if conv_BWC.dim() == 4 else 1
    assert conv_BWC.stride(-1) == 1
    assert x_BTC.stride(-1) == 1
    assert conv_BWC.dtype == x_BTC.dtype
    conv_l, x_l = (x.stride(0) if x.dim() == 4 else 0 for x in (conv_BWC, x_BTC))
    block = 1024
    _commit_convolution_kernel[(triton.cdiv(channels, block), layers * batch)](
        conv_BWC, x_BTC, n_B, batch, channels, conv_l, *conv_BWC.stride()[-3:-1], x_l, *x_BTC.stride()[-3:-1], kept,
        block, overlap, num_warps=4, **options(overlap),
    )  # fmt: skip
    return conv_BWC
