"""Integers of 4 or 8 bits and their numbers: pack, unpack, dequantize.

Layout (compressed-tensors `pack-quantized`): 32 / b values of b bits to an int32 along the last dimension, lowest
bits first, field = q + 2^(b-1) for q in [-2^(b-1), 2^(b-1) - 1]. A last word that is not full is filled with zero
bits.

N output features, K input features, G = K / group_size groups.
"""

import torch
from torch import Tensor


def limits(bits: int) -> tuple[int, int]:
    """The smallest and the largest integer of `bits` bits, (-2^(bits-1), 2^(bits-1) - 1)."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def packed_width(count: int, bits: int) -> int:
    """Number of int32 words that hold `count` values: ceil(count * bits / 32)."""
    return -(-count * bits // 32)


def pack_integers(q_NK: Tensor, bits: int) -> Tensor:
    """word[n, j] = sum_i (q[n, mj + i] + 2^(bits-1)) << bits * i, m = 32 / bits; int8 [N, K] -> int32 [N, ceil(K / m)].

    Raises ValueError unless q is a two-dimensional int8 tensor with values of `bits` bits.
    """
    if q_NK.dtype != torch.int8 or q_NK.dim() != 2:
        raise ValueError(f"pack_integers takes int8 [N, K], got {q_NK.dtype} {list(q_NK.shape)}")
    qmin, qmax = limits(bits)
    if q_NK.numel() and (int(q_NK.min()) < qmin or int(q_NK.max()) > qmax):
        raise ValueError(f"{bits} bits hold values in [{qmin}, {qmax}]; clamp before packing")
    rows, count = q_NK.shape
    words = torch.zeros(rows, packed_width(count, bits), dtype=torch.int32, device=q_NK.device)
    per_word = 32 // bits
    for i in range(per_word):
        field = (q_NK[:, i::per_word].to(torch.int32) - qmin) << (bits * i)
        words[:, : field.shape[1]] |= field
    return words


def unpack_integers(packed: Tensor, count: int, bits: int) -> Tensor:
    """Inverse of `pack_integers`: int32 [N, ceil(K * bits / 32)] -> int8 [N, K], with K = `count`.

    Raises ValueError when dtype or width do not belong to K.
    """
    if packed.dtype != torch.int32 or packed.dim() != 2:
        raise ValueError(f"unpack_integers takes int32 [N, words], got {packed.dtype} {list(packed.shape)}")
    rows, width = packed.shape
    if width != packed_width(count, bits):
        raise ValueError(f"{count} values of {bits} bits need {packed_width(count, bits)} words a row, got {width}")
    qmin, per_word = limits(bits)[0], 32 // bits
    q = torch.empty(rows, width, per_word, dtype=torch.int8, device=packed.device)
    for i in range(per_word):
        # The shift is arithmetic; the mask drops the copies of the sign bit.
        q[:, :, i] = ((packed >> (bits * i)) & ((1 << bits) - 1)) + qmin
    return q.flatten(1)[:, :count].contiguous()


def dequantize(q_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, group_size: int, dtype: torch.dtype) -> Tensor:
    """w[n, k] = (q[n, k] - zero[n, j]) * scale[n, j], j = k // group_size, rounded once to `dtype`; [N, K].

    Without zero points they are 0. A difference has at most 9 bits and a bfloat16 scale 8, so their product is
    exact in float32: every dtype is a rounding of the same number, and float32 and float64 hold it exactly.
    """
    exact = torch.promote_types(torch.promote_types(dtype, scale_NG.dtype), torch.float32)
    q_NGg = q_NK.to(exact).unflatten(1, (scale_NG.shape[1], group_size))
    if zero_NG is not None:
        q_NGg.sub_(zero_NG.to(exact).unsqueeze(-1))
    return q_NGg.mul_(scale_NG.to(exact).unsqueeze(-1)).flatten(1).to(dtype)
