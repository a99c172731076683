"""Attention of draft blocks in training: what a block may see, as a law that gives a mask or a sparse kernel.

B rows, A blocks a row of K tokens each, N = A * K queries, T tokens of context, S = T + N keys, H query heads,
G key heads, D head width.
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.ops.attention import attention

TILE = 128  # queries and keys that flex attention takes or skips together
Law = Callable[[Any, Any, Any, Any], Tensor]  # (row, head, query, key) -> whether it is seen; numbers or tensors


def sees_context(key: Tensor, position: Tensor, anchor: Tensor, window: int | None) -> Tensor:
    """Context strictly before the anchor, and inside the window where there is one: key > position - W."""
    before = key < anchor
    return before if window is None else before & (key > position - window)


@dataclass(frozen=True)
class DraftMask:
    """Block a stands at row index anchors[b, a]. Its tokens see the context of its own document before its anchor,
    and one another; never another block. Keys are the row's T tokens, then the blocks'. Documents are numbered in
    ascending order."""

    documents_BT: Tensor
    anchors_BA: Tensor
    block_size: int
    window: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, N, T + N)"""
        rows, num_tokens = self.documents_BT.shape
        num_queries = self.anchors_BA.shape[1] * self.block_size
        return rows, num_queries, num_tokens + num_queries

    def law(self) -> Law:
        """Of plain numbers and two tensors: flex attention compiles it."""
        documents_BT, anchors_BA, size, window = self.documents_BT, self.anchors_BA, self.block_size, self.window
        num_tokens = documents_BT.shape[1]

        def visible(b: Any, h: Any, query: Any, key: Any) -> Tensor:
            block = query // size
            anchor = anchors_BA[b, block]
            at = key.clamp(max=num_tokens - 1)  # a block's key is no index of the row
            same = documents_BT[b, at] == documents_BT[b, anchor]
            context = same & sees_context(key, anchor + query % size, anchor, window) & (key < num_tokens)
            return context | ((key >= num_tokens) & ((key - num_tokens) // size == block))

        return visible

    @cached_property
    def dense(self) -> Tensor:
        """[B, N, S], true where a query sees a key."""
        device = self.documents_BT.device
        rows, queries, keys = (torch.arange(n, device=device) for n in self.shape)
        return self.law()(rows[:, None, None], 0, queries[None, :, None], keys[None, None])

    @cached_property
    def sparse(self) -> Any:
        """Flex attention's BlockMask, from where each query begins and ends to see, without a mask in memory."""
        from torch.nn.attention.flex_attention import BlockMask

        some, whole = self._tiles()
        listed = [(t.sum(-1).int(), t.int().argsort(dim=-1, descending=True, stable=True).int()) for t in (some, whole)]
        return BlockMask.from_kv_blocks(*listed[0], *listed[1], TILE, self.law(), self.shape[1:])

    def _tiles(self) -> tuple[Tensor, Tensor]:
        """[B, 1, N / 128, S / 128]: tiles in which something is seen, but not all; and those seen whole."""
        size, num_tokens, (_, queries, keys) = self.block_size, self.documents_BT.shape[1], self.shape
        query_N = torch.arange(queries, device=self.anchors_BA.device)
        anchor_BN = self.anchors_BA.repeat_interleave(size, dim=1)
        first_BN = torch.searchsorted(self.documents_BT, self.documents_BT.gather(1, self.anchors_BA))
        first_BN = first_BN.repeat_interleave(size, dim=1)
        if self.window is not None:
            first_BN = first_BN.maximum(anchor_BN + query_N % size + 1 - self.window)
        own_N1 = (num_tokens + query_N - query_N % size)[:, None]
        tile_K = torch.arange(0, keys, TILE, device=self.anchors_BA.device)

        def meets(begin: Tensor, end: Tensor) -> Tensor:
            return (begin < end) & (begin < tile_K + TILE) & (end > tile_K)

        first_BN1, last_BN1 = first_BN[..., None], anchor_BN[..., None]
        seen = meets(first_BN1, last_BN1) | meets(own_N1, own_N1 + size)
        whole = (first_BN1 <= tile_K) & (last_BN1 >= tile_K + TILE)
        rest = (0, 0, 0, -queries % TILE)  # queries that are not there see what the others see
        some = F.pad(seen, rest, value=False).unflatten(1, (-1, TILE)).any(dim=2)
        every = F.pad(whole, rest, value=True).unflatten(1, (-1, TILE)).all(dim=2)
        return (some & ~every)[:, None], every[:, None]


def draft_attention(q_BNHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask: DraftMask) -> Tensor:
    """`attention` under the mask; the reference."""
    return attention(q_BNHD, k_BSGD, v_BSGD, mask.dense)


@functools.cache
def _flex(device: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    plain: Callable[..., Any] = flex_attention
    return torch.compile(plain, dynamic=False) if device == "cuda" else plain


def flex_draft_attention(q_BNHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask: DraftMask) -> Tensor:
    """The same by flex attention, which skips the tiles that nothing is seen in: time and memory grow with what a block
    sees, not with the square of all blocks. Compiled on a GPU; on a CPU the plain form, slow, for tests."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q_BNHD, k_BSGD, v_BSGD))
    o = _flex(q.device.type)(q, k, v, block_mask=mask.sparse, enable_gqa=q.shape[1] != k.shape[1])
    return o.transpose(1, 2)


def why_no_flex() -> str | None:
    """What flex attention lacks on a GPU machine; None where nothing."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        return "there is no C compiler (triton needs one)"
    return None
