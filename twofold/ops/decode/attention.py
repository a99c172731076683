"""Attention of a decode pass over a cache whose lengths stay on the device; the references of attention_triton.py.

B rows, T queries, S cached positions, H query heads, G key heads, D head width, R <= D its rotated part, P positions.
"""

import torch
from torch import Tensor

from twofold.ops.attention import attention
from twofold.ops.norms import rms_norm, rotate


def decode_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    lengths_B: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    gate_BTHD: Tensor | None = None,
) -> Tensor:
    """o = softmax(q k^T / sqrt(D), over visible keys) v, times sigmoid(gate) where one is given. [B, T, H, D]

    Query t of row b is at position p = lengths[b] + t; its block's own keys are in the cache, at lengths[b] and after.
    It sees key s if s <= p (not `causal`: s < lengths[b] + T, the whole block: a drafter's pass), and s > p - window
    where there is a window, which must be no smaller than T.
    """
    assert window is None or window >= q_BTHD.shape[1]
    num_tokens = q_BTHD.shape[1]
    key_S = torch.arange(k_BSGD.shape[1], device=q_BTHD.device)
    position_BT = lengths_B[:, None] + torch.arange(num_tokens, device=q_BTHD.device)
    last_BT = position_BT if causal else (lengths_B + num_tokens - 1)[:, None].expand_as(position_BT)
    mask_BTS = key_S <= last_BT[..., None]
    if window is not None:
        mask_BTS = mask_BTS & (key_S > position_BT[..., None] - window)
    o = attention(q_BTHD, k_BSGD, v_BSGD, mask_BTS)
    return o if gate_BTHD is None else (o * gate_BTHD.sigmoid()).to(o.dtype)


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
) -> Tensor | None:
    """QK-norm (where a weight is given, offset included), rotary embedding by the table's row lengths[b] + t, and
    the write of k and v to the cache at lengths[b] + t. Returns the new q [B, T, H, D]; without q, None."""
    positions_BT = lengths_B[:, None] + torch.arange(k_BTGD.shape[1], device=k_BTGD.device)
    cos, sin = cos_PR[positions_BT], sin_PR[positions_BT]
    rows = torch.arange(len(positions_BT), device=k_BTGD.device)[:, None]
    k = k_BTGD if k_norm_D is None else rms_norm(k_BTGD, k_norm_D, eps)
    k_BSGD[rows, positions_BT] = rotate(k, cos, sin).to(k_BSGD.dtype)
    v_BSGD[rows, positions_BT] = v_BTGD.to(v_BSGD.dtype)
    if q_BTHD is None:
        return None
    return rotate(q_BTHD if q_norm_D is None else rms_norm(q_BTHD, q_norm_D, eps), cos, sin)
