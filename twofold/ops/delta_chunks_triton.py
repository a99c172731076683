"""A prefill's pass of Gated DeltaNet in six launches, whatever its length (equations in ops/gated_delta.py).

    convolution   silu(conv), q and k of unit length, q also over sqrt(K); the inputs that the next pass follows
    systems       of each chunk of L = 64 tokens: G, beta, and what A has between tokens of one half of it
    inverse       of I + A of each half, a warp each
    factors       of each chunk: X = (I + A)^-1 beta V, what is written into an empty state, and
                  E = (I + A)^-1 beta e^G K, what the state erases of it
    states        chunk after chunk: u = X - E S, S <- e^{G_L} S + sum_j e^{G_L - G_j} k_j u_j^T; keeps S before each
    outputs       o_t = e^{G_t} S^T q_t + sum_{j <= t} e^{G_t - G_j} (q_t k_j) u_j

How many tokens of each row will be committed is known before: past them nothing is written (beta = 0) and nothing
decays (g = 0), so the last S is the state after them. Only `states` is sequential, and columns of S are independent:
its programs have some of them in registers from the first chunk to the last. Factors and the S that is
read are rounded to the dtype of x, sums and the S that is carried are float32.

B rows, T tokens, N chunks, C channels, W convolution width, G key heads, H value heads, K key width, V value width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
_HALF = tl.constexpr(32)
_LENGTHS = ["tokens", "chunks", "x_b", "a_b", "b_b"]  # prompts of all lengths run the same code


@triton.jit(do_not_specialize=_LENGTHS)
def _convolution_kernel(x_ptr, conv_ptr, weight_ptr, keep_ptr, y_ptr, after_ptr, tokens, channels, x_b, x_t, conv_b,
                        conv_w, weight_c, weight_w, G, K: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """A program has half as many tokens as a chunk and K channels: one head of queries or keys, or values."""
    block, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    c = part * K + tl.arange(0, K)
    mine = (c < channels)[None, :]
    x_ptr += b * x_b
    conv_ptr += b * conv_b
    t = block * _HALF + tl.arange(0, _HALF)
    z = tl.zeros([_HALF, K], tl.float32)
    for j in tl.static_range(W):
        tap = tl.load(weight_ptr + c * weight_c + j * weight_w, mask=c < channels, other=0.0).to(tl.float32)[None, :]
        source = t + j - (W - 1)
        new = ((source >= 0) & (source < tokens))[:, None] & mine
        z += tl.load(x_ptr + source.to(tl.int64)[:, None] * x_t + c[None, :], mask=new, other=0.0).to(tl.float32) * tap
        if block == 0:
            old = (source < 0)[:, None] & mine
            at = (source + W - 1)[:, None] * conv_w + c[None, :]
            z += tl.load(conv_ptr + at, mask=old, other=0.0).to(tl.float32) * tap
    y = z * tl.sigmoid(z)
    if part < 2 * G:
        unit = tl.rsqrt(tl.sum(y * y, axis=1) + 1e-6) * tl.where(part < G, K**-0.5, 1.0)
        y *= unit[:, None]
    at = (b * tokens + t)[:, None] * channels + c[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=(t < tokens)[:, None] & mine)
    if block == 0:
        keep = tokens if keep_ptr is None else tl.load(keep_ptr + b).to(tl.int32)
        for w in tl.static_range(W - 1):
            last = keep + w - (W - 1)
            of_pass = tl.load(x_ptr + last.to(tl.int64) * x_t + c, mask=(last >= 0) & (c < channels), other=0.0)
            of_state = tl.load(conv_ptr + (keep + w) * conv_w + c, mask=(last < 0) & (c < channels), other=0.0)
            kept = tl.where(last >= 0, of_pass, of_state)
            tl.store(after_ptr + (b * (W - 1) + w) * channels + c, kept, mask=c < channels)


@triton.jit
def _rates(a_ptr, b_ptr, a_log, dt, t, a_t, b_t, keep):
    """g and beta of some tokens."""
    a = tl.load(a_ptr + t * a_t, mask=t < keep, other=0.0).to(tl.float32) + dt
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    g = tl.where(t < keep, -tl.exp(a_log) * soft, 0.0)
    beta = tl.sigmoid(tl.load(b_ptr + t * b_t, mask=t < keep, other=0.0).to(tl.float32))
    return g, tl.where(t < keep, beta, 0.0)


@triton.jit(do_not_specialize=_LENGTHS)
def _systems_kernel(y_ptr, a_ptr, b_ptr, a_log_ptr, dt_ptr, keep_ptr, systems_ptr, decay_ptr, beta_ptr, tokens,
                    channels, chunks, a_b, a_t, b_b, b_t, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """G, beta and, for each half of a chunk, A on its diagonal; a program has one chunk of one head."""
    n, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    keep = tokens if keep_ptr is None else tl.load(keep_ptr + b).to(tl.int32)
    half, of_k = tl.arange(0, _HALF), tl.arange(0, K)
    a_log, dt = tl.load(a_log_ptr + h).to(tl.float32), tl.load(dt_ptr + h).to(tl.float32)
    place = (b * H + h) * chunks + n
    before = 0.0
    for part in tl.static_range(2):
        t = (n * 2 + part) * _HALF + half
        at = (b * tokens + t)[:, None] * channels + (G + h // (H // G)) * K + of_k[None, :]
        k = tl.load(y_ptr + at, mask=(t < tokens)[:, None], other=0.0)
        g, beta = _rates(a_ptr + b * a_b + h, b_ptr + b * b_b + h, a_log, dt, t, a_t, b_t, keep)
        decay = tl.cumsum(g, axis=0) + before
        before += tl.sum(g, axis=0)
        to = (place * 2 + part) * _HALF
        tl.store(decay_ptr + to + half, decay)
        tl.store(beta_ptr + to + half, beta)
        below = tl.dot(k, tl.trans(k), input_precision=PRECISION) * beta[:, None]
        later = half[:, None] > half[None, :]
        below *= tl.exp(tl.where(later, decay[:, None] - decay[None, :], float("-inf")))
        tl.store(systems_ptr + (to + half)[:, None] * _HALF + half[None, :], below)


@triton.jit
def _inverse_kernel(systems_ptr, inverses_ptr, SIZE: tl.constexpr):
    """(I + A)^-1 of strictly lower triangular A, row after row: T_i = e_i - sum_{j < i} A_ij T_j. A program of one warp
    has one A. A thread holds a column of T, and rows of A come from memory, so no step waits for another warp;
    unrolled, a step changes one register."""
    at = tl.program_id(0).to(tl.int64) * SIZE * SIZE
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    for i in tl.static_range(1, SIZE):
        a = tl.load(systems_ptr + at + i * SIZE + tl.arange(0, SIZE))
        less = tl.sum(a[:, None] * inverse, axis=0)
        inverse -= tl.where(row == i, less[None, :], 0.0)
    tl.store(inverses_ptr + at + row * SIZE + column, inverse)


@triton.jit(do_not_specialize=_LENGTHS)
def _factors_kernel(y_ptr, inverses_ptr, decay_ptr, beta_ptr, erased_ptr, written_ptr, tokens, channels, chunks,
                    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    """A program has one chunk of one head. The chunk is two halves: (I + A)^-1 = [[P, 0], [-Q A_10 P, Q]]."""
    n, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    half = tl.arange(0, _HALF)
    of_k, of_v = tl.arange(0, K), tl.arange(0, V)
    t_0 = n * 2 * _HALF + half
    t_1 = t_0 + _HALF
    y_ptr += b * tokens * channels
    key = y_ptr + (G + h // (H // G)) * K + of_k[None, :]
    value = y_ptr + 2 * G * K + h * V + of_v[None, :]
    k_0 = tl.load(key + t_0.to(tl.int64)[:, None] * channels, mask=(t_0 < tokens)[:, None], other=0.0)
    k_1 = tl.load(key + t_1.to(tl.int64)[:, None] * channels, mask=(t_1 < tokens)[:, None], other=0.0)
    place = (b * H + h) * chunks + n
    at_0, at_1 = place * 2 * _HALF + half, place * 2 * _HALF + _HALF + half
    decay_0, decay_1 = tl.load(decay_ptr + at_0), tl.load(decay_ptr + at_1)
    beta_0, beta_1 = tl.load(beta_ptr + at_0), tl.load(beta_ptr + at_1)
    p = tl.load(inverses_ptr + at_0[:, None] * _HALF + half[None, :])
    q = tl.load(inverses_ptr + at_1[:, None] * _HALF + half[None, :])
    below = tl.dot(k_1, tl.trans(k_0), input_precision=PRECISION) * beta_1[:, None]
    below *= tl.exp(decay_1[:, None] - decay_0[None, :])
    r = -tl.dot(tl.dot(q, below, input_precision="tf32x3"), p, input_precision="tf32x3")

    p, q, r = p * beta_0[None, :], q * beta_1[None, :], r * beta_0[None, :]
    start_0, start_1 = tl.exp(decay_0)[None, :], tl.exp(decay_1)[None, :]
    x_0 = tl.dot((p * start_0).to(k_0.dtype), k_0, input_precision=PRECISION)
    x_1 = tl.dot((r * start_0).to(k_0.dtype), k_0, input_precision=PRECISION)
    x_1 = tl.dot((q * start_1).to(k_0.dtype), k_1, x_1, input_precision=PRECISION)
    to = erased_ptr + of_k[None, :]
    tl.store(to + at_0[:, None] * K, x_0.to(k_0.dtype))
    tl.store(to + at_1[:, None] * K, x_1.to(k_0.dtype))
    v_0 = tl.load(value + t_0.to(tl.int64)[:, None] * channels, mask=(t_0 < tokens)[:, None], other=0.0)
    v_1 = tl.load(value + t_1.to(tl.int64)[:, None] * channels, mask=(t_1 < tokens)[:, None], other=0.0)
    x_0 = tl.dot(p.to(v_0.dtype), v_0, input_precision=PRECISION)
    x_1 = tl.dot(r.to(v_0.dtype), v_0, input_precision=PRECISION)
    x_1 = tl.dot(q.to(v_0.dtype), v_1, x_1, input_precision=PRECISION)
    to = written_ptr + of_v[None, :]
    tl.store(to + at_0[:, None] * V, x_0.to(v_0.dtype))
    tl.store(to + at_1[:, None] * V, x_1.to(v_0.dtype))


@triton.jit(do_not_specialize=_LENGTHS)
def _states_kernel(y_ptr, erased_ptr, written_ptr, decay_ptr, state_ptr, starts_ptr, after_ptr, tokens, channels,
                   chunks, state_b, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                   L: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """A program has some columns of one head's state. What is written takes the place of X."""
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    of_k, of_l = tl.arange(0, K), tl.arange(0, L)
    of_v = part * COLUMNS + tl.arange(0, COLUMNS)
    of_state = of_k[:, None] * V + of_v[None, :]
    s = tl.load(state_ptr + b * state_b + h * K * V + of_state)
    row = (b * H + h) * chunks
    keys = y_ptr + b * tokens * channels + (G + h // (H // G)) * K + of_k[None, :]
    for n in range(chunks):
        place = row + n
        read = s.to(starts_ptr.dtype.element_ty)
        tl.store(starts_ptr + place * K * V + of_state, read)
        erased = tl.load(erased_ptr + (place * L + of_l)[:, None] * K + of_k[None, :])
        at = (place * L + of_l)[:, None] * V + of_v[None, :]
        u = tl.load(written_ptr + at).to(tl.float32) - tl.dot(erased, read, input_precision=PRECISION)
        tl.store(written_ptr + at, u.to(written_ptr.dtype.element_ty))
        t = n * L + of_l
        k = tl.load(keys + t.to(tl.int64)[:, None] * channels, mask=(t < tokens)[:, None], other=0.0)
        decay = tl.load(decay_ptr + place * L + of_l)
        total = tl.load(decay_ptr + place * L + L - 1)
        u *= tl.exp(total - decay)[:, None]
        s = tl.dot(tl.trans(k), u.to(k.dtype), tl.exp(total) * s, input_precision=PRECISION)
    tl.store(after_ptr + (b * H + h) * K * V + of_state, s)


@triton.jit(do_not_specialize=_LENGTHS)
def _outputs_kernel(y_ptr, written_ptr, decay_ptr, starts_ptr, o_ptr, tokens, channels, chunks, H: tl.constexpr,
                    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr,
                    PRECISION: tl.constexpr):  # fmt: skip
    n, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    PARTS: tl.constexpr = V // COLUMNS
    part, h = tl.program_id(1) % PARTS, tl.program_id(1) // PARTS
    of_k, of_l = tl.arange(0, K), tl.arange(0, L)
    of_v = part * COLUMNS + tl.arange(0, COLUMNS)
    t = n * L + of_l
    here = (t < tokens)[:, None]
    place = (b * H + h) * chunks + n
    at = y_ptr + (b * tokens + t)[:, None] * channels + h // (H // G) * K + of_k[None, :]
    q = tl.load(at, mask=here, other=0.0)
    k = tl.load(at + G * K, mask=here, other=0.0)
    u = tl.load(written_ptr + (place * L + of_l)[:, None] * V + of_v[None, :])
    s = tl.load(starts_ptr + place * K * V + of_k[:, None] * V + of_v[None, :])
    decay = tl.load(decay_ptr + place * L + of_l)
    seen = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    seen *= tl.exp(tl.where(of_l[None, :] <= of_l[:, None], decay[:, None] - decay[None, :], float("-inf")))
    o = tl.exp(decay)[:, None] * tl.dot(q, s, input_precision=PRECISION)
    o = tl.dot(seen.to(u.dtype), u, o, input_precision=PRECISION)
    tl.store(o_ptr + ((b * tokens + t)[:, None] * H + h) * V + of_v[None, :], o.to(o_ptr.dtype.element_ty), mask=here)


def delta_chunks(
    qkv_BTC: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    weight_CW: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    conv_BWC: Tensor,
    state_BHKV: Tensor,
    keep_B: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o [B, T, H, V], and of the first `keep` tokens of each row, None: of all, the convolution's last W - 1 inputs
    [B, W - 1, C] and the state [B, H, K, V] in float32). Outputs past `keep` mean nothing.

    Widths K and V are powers of 2 from 16 to 256.
    """
    batch, tokens, channels = qkv_BTC.shape
    heads, width, value_width = state_BHKV.shape[1:]
    key_heads = (channels - heads * value_width) // (2 * width)
    assert state_BHKV.dtype == torch.float32
    assert state_BHKV[0].is_contiguous()
    for x in (qkv_BTC, conv_BWC, a_BTH, b_BTH):
        assert x.stride(-1) == 1, "channels and heads must be contiguous"
    chunks = triton.cdiv(tokens, CHUNK)
    new, wide = qkv_BTC.new_empty, state_BHKV.new_empty
    y = new(batch, tokens, channels)
    conv_after, state_after = conv_BWC.new_empty(conv_BWC.shape), wide(state_BHKV.shape)
    erased, written = (new(batch, heads, chunks, CHUNK, n) for n in (width, value_width))
    starts = new(batch, heads, chunks, width, value_width)
    decay, beta = (wide(batch, heads, chunks, CHUNK) for _ in range(2))
    systems, inverses = (wide(batch, heads, chunks, CHUNK, CHUNK // 2) for _ in range(2))
    o = new(batch, tokens, heads, value_width)
    precision = "tf32x3" if qkv_BTC.dtype == torch.float32 else "tf32"
    sizes = heads, key_heads, width, value_width

    _convolution_kernel[(triton.cdiv(tokens, _HALF.value), triton.cdiv(channels, width), batch)](
        qkv_BTC, conv_BWC, weight_CW, keep_B, y, conv_after, tokens, channels, *qkv_BTC.stride()[:2],
        *conv_BWC.stride()[:2], *weight_CW.stride(), key_heads, width, weight_CW.shape[1], num_warps=4,
    )  # fmt: skip
    _systems_kernel[(chunks, heads, batch)](
        y, a_BTH, b_BTH, A_log_H, dt_bias_H, keep_B, systems, decay, beta, tokens, channels, chunks,
        *a_BTH.stride()[:2], *b_BTH.stride()[:2], heads, key_heads, width, precision, num_warps=4,
    )  # fmt: skip
    _inverse_kernel[(batch * heads * chunks * 2,)](systems, inverses, CHUNK // 2, num_warps=1)
    _factors_kernel[(chunks, heads, batch)](
        y, inverses, decay, beta, erased, written, tokens, channels, chunks, *sizes, precision, num_warps=2,
    )  # fmt: skip
    columns = min(32, value_width)
    _states_kernel[(value_width // columns, heads, batch)](
        y, erased, written, decay, state_BHKV, starts, state_after, tokens, channels, chunks, state_BHKV.stride(0),
        *sizes, CHUNK, columns, precision, num_warps=4, num_stages=3 if qkv_BTC.itemsize == 2 else 1,
    )  # fmt: skip
    columns = min(64, value_width)
    _outputs_kernel[(chunks, heads * (value_width // columns), batch)](
        y, written, decay, starts, o, tokens, channels, chunks, *sizes, CHUNK, columns, precision, num_warps=4,
    )  # fmt: skip
    return o, conv_after, state_after
