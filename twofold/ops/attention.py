"""Softmax attention with grouped keys, over given keys or over a cache.

B batch, T queries, S keys, H query heads, G key heads, D head width.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
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


def cache_mask(positions_BT: Tensor, num_keys: int) -> Tensor:
    """[B, T, S]: query at position p sees the cached positions 0..p."""
    return torch.arange(num_keys, device=positions_BT.device) <= positions_BT[..., None]


@dataclass(frozen=True)
class CacheMask:
    """Query t of row b stands at lengths[b] + t, and sees the cached positions up to its own.

    `num_keys` is what the host knows: no row's last query stands at num_keys or later. With `exact`, every row's last
    query stands right before it.
    """

    lengths_B: Tensor
    num_queries: int
    num_keys: int
    exact: bool

    @property
    def causal(self) -> bool:
        """Whether the cache holds nothing but the queries' own positions."""
        return self.exact and self.num_keys == self.num_queries

    @cached_property
    def dense(self) -> Tensor | None:
        """[B, T, S], true where a query sees a key; None where all are seen."""
        if self.exact and self.num_queries == 1:
            return None
        steps_T = torch.arange(self.num_queries, device=self.lengths_B.device)
        return cache_mask(self.lengths_B[:, None] + steps_T, self.num_keys)


def cache_attention(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask: CacheMask) -> Tensor:
    """`attention` over a cache of S >= mask.num_keys positions that has the queries' own keys already."""
    k_BSGD, v_BSGD = k_BSGD[:, : mask.num_keys], v_BSGD[:, : mask.num_keys]
    if mask.causal and mask.num_queries > 1:
        return attention(q_BTHD, k_BSGD, v_BSGD, causal=True)
    return attention(q_BTHD, k_BSGD, v_BSGD, mask.dense)
