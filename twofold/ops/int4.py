"""INT4 words and their numbers: pack, unpack, dequantize.

Layout (compressed-tensors `pack-quantized`): eight 4-bit values to an int32 along the input dimension, lowest
nibble first, nibble = q + 8 for q in [-8, 7]. A last word that is not full is filled with zero bits.

N output features, K input features, G = K / group_size groups.
"""

import torch
from torch import Tensor

QMIN = -8
QMAX = 7
VALUES_PER_WORD = 8


def packed_width(num_inputs: int) -> int:
    """Number of int32 words that hold `num_inputs` 4-bit values: ceil(num_inputs / 8)."""
    return -(-num_inputs // VALUES_PER_WORD)


def pack_int4(q_NK: Tensor) -> Tensor:
    """word[n, j] = sum_i (q[n, 8j + i] + 8) << 4i, int8 [N, K] -> int32 [N, ceil(K / 8)].

    Raises ValueError unless q is a two-dimensional int8 tensor with values in [-8, 7].
    """
    if q_NK.dtype != torch.int8 or q_NK.dim() != 2:
        raise ValueError(f"pack_int4 takes int8 [N, K], got {q_NK.dtype} {list(q_NK.shape)}")
    if q_NK.numel() and (int(q_NK.min()) < QMIN or int(q_NK.max()) > QMAX):
        raise ValueError(f"pack_int4 takes values in [{QMIN}, {QMAX}]; clamp before packing")
    rows, num_inputs = q_NK.shape
    words = torch.zeros(rows, packed_width(num_inputs), dtype=torch.int32, device=q_NK.device)
    for i in range(VALUES_PER_WORD):
        nibble = (q_NK[:, i::VALUES_PER_WORD].to(torch.int32) - QMIN) << (4 * i)
        words[:, : nibble.shape[1]] |= nibble
    return words


def unpack_int4(packed: Tensor, num_inputs: int) -> Tensor:
    """Inverse of `pack_int4`: int32 [N, ceil(K / 8)] -> int8 [N, K], with K = `num_inputs`.

    Raises ValueError when dtype or width do not belong to K.
    """
    if packed.dtype != torch.int32 or packed.dim() != 2:
        raise ValueError(f"unpack_int4 takes int32 [N, K / 8], got {packed.dtype} {list(packed.shape)}")
    rows, width = packed.shape
    if width != packed_width(num_inputs):
        raise ValueError(f"{num_inputs} inputs need {packed_width(num_inputs)} words a row, got {width}")
    q = torch.empty(rows, width, VALUES_PER_WORD, dtype=torch.int8, device=packed.device)
    for i in range(VALUES_PER_WORD):
        # The shift is arithmetic; the mask drops the copies of the sign bit.
        q[:, :, i] = ((packed >> (4 * i)) & 0xF) + QMIN
    return q.flatten(1)[:, :num_inputs].contiguous()


def dequantize(q_NK: Tensor, scale_NG: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """w[n, k] = q[n, k] * scale[n, k // group_size], rounded once to `dtype`; [N, K].

    The product of a 4-bit integer and a bfloat16 scale is exact in float32, so every dtype is a rounding of
    the same number, and float32 and float64 hold it exactly.
    """
    exact = torch.promote_types(torch.promote_types(dtype, scale_NG.dtype), torch.float32)
    q_NGg = q_NK.to(exact).unflatten(1, (scale_NG.shape[1], group_size))
    return q_NGg.mul_(scale_NG.to(exact).unsqueeze(-1)).flatten(1).to(dtype)
