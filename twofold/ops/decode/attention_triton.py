"""`decode_attention` by split-KV flash decoding, and `store_keys` in one kernel (equations in attention.py).

The queries of all T positions and of the H / G heads of a key head stand in one tile, so a key is read once. A fixed
grid has `splits` programs for a key head; each takes an equal part of the keys that its row has, a length read on the
device, and those without one end at once. Their results (o, log2 of the sum) are put together by a second kernel: by
its many programs, since one that does so for a head's 16 queries would read a megabyte.

Where launches overlap, lengths, norms and the rotary table are read before the wait: a pass does not write them.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from twofold.ops.decode.overlap_triton import able, await_before, let_next_start, options

LEAST = 128  # keys that are worth a program


@triton.jit
def _part(length, WINDOW: tl.constexpr, T: tl.constexpr, splits, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """First key, number of keys and keys of a program."""
    first = tl.maximum(length - WINDOW + 1, 0) if WINDOW > 0 else length * 0
    count = length + T - first
    each = tl.cdiv(tl.cdiv(count, splits), BLOCK_N) * BLOCK_N
    return first, count, tl.maximum(each, CHUNK)


@triton.jit
def _split_kernel(q_ptr, k_ptr, v_ptr, lengths_ptr, o_ptr, log_ptr, q_b, q_t, q_h, k_b, k_s, k_g, v_b, v_s, v_g, scale,
                  splits, T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
                  CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
                  PRECISION: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    let_next_start(OVERLAP)
    split, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    M_BLOCKS: tl.constexpr = (T * (H // G) + BLOCK_M - 1) // BLOCK_M
    g = tl.program_id(1) // M_BLOCKS
    length = tl.load(lengths_ptr + b).to(tl.int32)
    first, count, each = _part(length, WINDOW, T, splits, BLOCK_N, CHUNK)
    start = first + split * each
    end = tl.minimum(start + each, first + count)
    await_before(OVERLAP)
    if start < end:
        m = (tl.program_id(1) % M_BLOCKS) * BLOCK_M + tl.arange(0, BLOCK_M)
        t, h = m // (H // G), g * (H // G) + m % (H // G)
        real = m < T * (H // G)
        d, n = tl.arange(0, D), tl.arange(0, BLOCK_N)
        q = tl.load(q_ptr + b * q_b + (t * q_t + h * q_h)[:, None] + d[None, :], mask=real[:, None], other=0.0)
        position = length + t
        last = position if CAUSAL else position * 0 + length + T - 1
        k_at = k_ptr + b * k_b + g.to(tl.int64) * k_g + d[:, None]
        v_at = v_ptr + b * v_b + g.to(tl.int64) * v_g + d[None, :]
        most = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        o = tl.zeros([BLOCK_M, D], tl.float32)
        for s in range(start, end, BLOCK_N):
            key = s + n
            k = tl.load(k_at + key.to(tl.int64)[None, :] * k_s, mask=(key < end)[None, :], other=0.0)
            score = tl.dot(q, k, input_precision=PRECISION) * scale
            seen = (key[None, :] <= last[:, None]) & (key < end)[None, :]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
            new = tl.maximum(most, tl.max(score, axis=1))
            base = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing yet
            p = tl.exp2(score - base[:, None])
            shrink = tl.exp2(most - base)
            total = total * shrink + tl.sum(p, axis=1)
            v = tl.load(v_at + key.to(tl.int64)[:, None] * v_s, mask=(key < end)[:, None], other=0.0)
            o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision=PRECISION)
            most = new
        row = ((b * T + t) * H + h) * splits + split
        o = o / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(o_ptr + row[:, None] * D + d[None, :], o, mask=real[:, None])
        tl.store(log_ptr + row, most + tl.log2(total), mask=real)


@triton.jit
def _combine_kernel(o_ptr, log_ptr, lengths_ptr, gate_ptr, out_ptr, gate_b, gate_t, gate_h, splits, T: tl.constexpr,
                    H: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
                    CHUNK: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
                    OVERLAP: tl.constexpr):  # fmt: skip
    let_next_start(OVERLAP)
    b, t, h = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    _, count, each = _part(length, WINDOW, T, splits, BLOCK_N, CHUNK)
    used = tl.cdiv(count, each)
    await_before(OVERLAP)
    row = (b * T + t) * H + h
    split, d = tl.arange(0, SPLITS), tl.arange(0, D)
    gate = 1.0
    if gate_ptr is not None:  # on its way while the rest is waited for
        gate = tl.sigmoid(tl.load(gate_ptr + b * gate_b + t * gate_t + h * gate_h + d).to(tl.float32))
    logs = tl.load(log_ptr + row * splits + split, mask=split < used, other=float("-inf"))
    most = tl.max(logs, axis=0)
    total = tl.sum(tl.exp2(logs - most), axis=0)
    o = tl.zeros([D], tl.float32)
    for s in range(0, used, STEP):
        some = s + tl.arange(0, STEP)
        weight = tl.exp2(tl.load(log_ptr + row * splits + some, mask=some < used, other=float("-inf")) - most) / total
        at = (row * splits + some)[:, None] * D + d[None, :]
        o += tl.sum(tl.load(o_ptr + at, mask=(some < used)[:, None], other=0.0) * weight[:, None], axis=0)
    tl.store(out_ptr + row * D + d, (o * gate).to(out_ptr.dtype.element_ty))


def decode_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    lengths_B: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    gate_BTHD: Tensor | None = None,
    splits: int | None = None,
    combine: int | None = None,
    overlap: bool = False,
) -> Tensor:
    """`splits` and how many of them the second kernel reads at once are chosen where they are not given."""
    overlap = able(overlap, q_BTHD.device)
    batch, num_tokens, heads, width = q_BTHD.shape
    capacity, key_heads = k_BSGD.shape[1:3]
    assert window is None or window >= num_tokens
    for x in (q_BTHD, k_BSGD, v_BSGD, gate_BTHD):
        assert x is None or x.stride(-1) == 1, "head vectors must be contiguous"
    if width not in (16, 32, 64, 128, 256):
        raise ValueError(f"decode_attention serves head widths of 16 to 256, powers of 2, not {width}")
    queries = num_tokens * (heads // key_heads)
    block_m = min(64, max(16, triton.next_power_of_2(queries)))
    block_n, stages = _blocks(width, q_BTHD.element_size(), _capability(q_BTHD.device))
    m_blocks = triton.cdiv(queries, block_m)
    if splits is None:
        splits = max(1, _multiprocessors(q_BTHD.device) // (batch * key_heads * m_blocks))
    splits = min(splits, triton.cdiv(min(capacity, window + num_tokens if window else capacity), LEAST))
    o = q_BTHD.new_empty(batch, num_tokens, heads, splits, width, dtype=torch.float32)
    logs = q_BTHD.new_empty(batch, num_tokens, heads, splits, dtype=torch.float32)
    out = q_BTHD.new_empty(batch, num_tokens, heads, width)
    _split_kernel[(splits, key_heads * m_blocks, batch)](
        q_BTHD, k_BSGD, v_BSGD, lengths_B, o, logs, *q_BTHD.stride()[:3], *k_BSGD.stride()[:3], *v_BSGD.stride()[:3],
        width**-0.5 * 1.4426950408889634, splits, num_tokens, heads, key_heads, width, window or 0, causal, block_m,
        block_n, LEAST, "ieee" if q_BTHD.dtype == torch.float32 else "tf32", overlap,
        num_warps=4 if block_m <= 32 else 8, num_stages=stages, **options(overlap),
    )  # fmt: skip
    gate_strides = (0, 0, 0) if gate_BTHD is None else gate_BTHD.stride()[:3]
    _combine_kernel[(heads, num_tokens, batch)](
        o, logs, lengths_B, gate_BTHD, out, *gate_strides, splits, num_tokens, heads, width, window or 0, block_n,
        LEAST, triton.next_power_of_2(splits), combine or min(32, triton.next_power_of_2(splits)), overlap, num_warps=4,
        **options(overlap),
    )  # fmt: skip
    return out


def _blocks(width: int, item: int, capability: tuple[int, int]) -> tuple[int, int]:
    """Keys of a step, and steps in flight, that fit into shared memory (99 KiB on sm_86 and sm_89)."""
    keys = 64 if width * item <= 256 or (width * item <= 512 and capability[1] == 0) else 32
    return keys if width * item <= 512 else 16, 2


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 12


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@triton.jit
def _scale(norm_ptr, cos_ptr, sin_ptr, position, d, R: tl.constexpr):
    """What the numbers at d of a head are turned with: the norm's weight, cos and sin."""
    weight = 1.0
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + d).to(tl.float32)
    cos = tl.load(cos_ptr + position * R + d, mask=d < R, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * R + d, mask=d < R, other=0.0).to(tl.float32)
    return weight, cos, sin


@triton.jit
def _turned(x_ptr, weight, other_weight, cos, sin, d, partner, eps, NORMED: tl.constexpr, D: tl.constexpr,
            R: tl.constexpr):  # fmt: skip
    """The head at x_ptr, normalized and rotated. The partner of each number is read once more."""
    x = tl.load(x_ptr + d).to(tl.float32)
    other = tl.load(x_ptr + partner).to(tl.float32)
    if NORMED:
        factor = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        x *= factor * weight
        other *= factor * other_weight
    return x * cos + tl.where(d < R // 2, -other, other) * sin


@triton.jit
def _store_kernel(q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, lengths_ptr, new_q_ptr, keys_ptr,
                  values_ptr, q_b, q_t, q_h, k_b, k_t, k_g, v_b, v_t, v_g, keys_b, keys_s, keys_g, values_b, values_s,
                  values_g, eps, T, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
                  OVERLAP: tl.constexpr):  # fmt: skip
    let_next_start(OVERLAP)
    b, t, head = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    position = tl.load(lengths_ptr + b).to(tl.int64) + t
    d = tl.arange(0, D)
    partner = tl.where(d < R // 2, d + R // 2, tl.where(d < R, d - R // 2, d))
    if q_ptr is not None:  # noqa: SIM102 - decided when it is compiled: without q there is nothing to compile
        if head < H:
            weight, cos, sin = _scale(q_norm_ptr, cos_ptr, sin_ptr, position, d, R)
            other = 1.0 if q_norm_ptr is None else tl.load(q_norm_ptr + partner).to(tl.float32)
            await_before(OVERLAP)
            at = q_ptr + b * q_b + t * q_t + head * q_h
            q = _turned(at, weight, other, cos, sin, d, partner, eps, q_norm_ptr is not None, D, R)
            tl.store(new_q_ptr + ((b * T + t) * H + head) * D + d, q.to(new_q_ptr.dtype.element_ty))
    if head >= H:
        g = head - H
        weight, cos, sin = _scale(k_norm_ptr, cos_ptr, sin_ptr, position, d, R)
        other = 1.0 if k_norm_ptr is None else tl.load(k_norm_ptr + partner).to(tl.float32)
        await_before(OVERLAP)
        at = k_ptr + b * k_b + t * k_t + g * k_g
        v = tl.load(v_ptr + b * v_b + t * v_t + g * v_g + d)
        k = _turned(at, weight, other, cos, sin, d, partner, eps, k_norm_ptr is not None, D, R)
        tl.store(keys_ptr + b * keys_b + position * keys_s + g * keys_g + d, k.to(keys_ptr.dtype.element_ty))
        tl.store(values_ptr + b * values_b + position * values_s + g * values_g + d, v.to(values_ptr.dtype.element_ty))


def store_keys(
    q_BTHD: Tensor | None,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    cos_PR: Tensor,
    sin_PR: Tensor,
    lengths_B: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    *,
    overlap: bool = False,
) -> Tensor | None:
    overlap = able(overlap, k_BTGD.device)
    batch, num_tokens, key_heads, width = k_BTGD.shape
    heads = 0 if q_BTHD is None else q_BTHD.shape[2]
    for x in (q_BTHD, k_BTGD, v_BTGD, k_BSGD, v_BSGD):
        assert x is None or x.stride(-1) == 1, "head vectors must be contiguous"
    assert cos_PR.is_contiguous() and sin_PR.is_contiguous(), "the table must be contiguous"  # noqa: PT018
    assert width & (width - 1) == 0, f"head width {width} is no power of 2"
    q = None if q_BTHD is None else q_BTHD.new_empty(q_BTHD.shape)
    q_strides = (0, 0, 0) if q_BTHD is None else q_BTHD.stride()[:3]
    _store_kernel[(heads + key_heads, num_tokens, batch)](
        q_BTHD, k_BTGD, v_BTGD, q_norm_D, k_norm_D, cos_PR, sin_PR, lengths_B, q, k_BSGD, v_BSGD, *q_strides,
        *k_BTGD.stride()[:3], *v_BTGD.stride()[:3], *k_BSGD.stride()[:3], *v_BSGD.stride()[:3], eps, num_tokens, heads,
        width, cos_PR.shape[-1], overlap, num_warps=1 if width <= 128 else 2, **options(overlap),
    )  # fmt: skip
    return q
