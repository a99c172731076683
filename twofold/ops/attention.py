"""Softmax attention with grouped keys. B batch, T queries, S keys, H query heads, G key heads, D head width."""

import torch.nn.functional as F
from torch import Tensor


def attention(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask_BTS: Tensor | None = None, causal: bool = False
) -> Tensor:
    """o = softmax(q k^T / sqrt(D), over visible keys) v, each key head serving H / G query heads.

    `mask_BTS` is true where a query sees a key; without it every key is visible, or, with `causal`
    (T = S), those not after the query. Returns [B, T, H, D].
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BSGD, v_BSGD))
    mask = None if mask_BTS is None else mask_BTS.unsqueeze(1)
    grouped = q.shape[1] != k.shape[1]
    if grouped and mask is not None and q.is_cuda:  # PyTorch's fused kernels take a mask or groups, not both
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return o.transpose(1, 2)
