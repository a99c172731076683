"""Attention and its masks against loops."""

import pytest
import torch
from torch import Tensor

from twofold.ops.attention import attention
from twofold.ops.cache import CachePlace


def slow_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """One query at a time; visible [B, T, S]."""
    batch, queries, heads, width = q.shape
    o = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            group = h // (heads // k.shape[2])
            for t in range(queries):
                keys = visible[b, t].nonzero().flatten()
                weight = torch.softmax(k[b, keys, group] @ q[b, t, h] / width**0.5, dim=0)
                o[b, t, h] = weight @ v[b, keys, group]
    return o


def random_qkv(queries: int, keys: int, heads: int, groups: int) -> list[Tensor]:
    torch.manual_seed(heads + keys)
    shapes = ((2, queries, heads, 8), (2, keys, groups, 8), (2, keys, groups, 8))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
def test_attention_under_a_mask(heads: int, groups: int) -> None:
    q, k, v = random_qkv(3, 7, heads, groups)
    mask = torch.rand(2, 3, 7) > 0.5
    mask[..., 0] = True  # every query sees something
    torch.testing.assert_close(attention(q, k, v, mask), slow_attention(q, k, v, mask))


@pytest.mark.parametrize("length", [1, 5])
def test_causal_attention_sees_no_later_key(length: int) -> None:
    q, k, v = random_qkv(length, length, 6, 2)
    visible = torch.ones(2, length, length, dtype=torch.bool).tril()
    torch.testing.assert_close(attention(q, k, v, causal=True), slow_attention(q, k, v, visible))


def test_attention_without_a_mask_sees_all_keys() -> None:
    q, k, v = random_qkv(2, 9, 4, 2)
    visible = torch.ones(2, 2, 9, dtype=torch.bool)
    torch.testing.assert_close(attention(q, k, v), slow_attention(q, k, v, visible))


def test_cached_query_sees_positions_up_to_its_own() -> None:
    table = torch.zeros(5, 2)
    mask = CachePlace(torch.tensor([2, 0]), 2, 5, False, (table, table)).dense
    assert mask is not None
    assert mask.int().tolist() == [[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]]
