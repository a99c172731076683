"""What goes to which kernel of a pass with a decode state."""

from __future__ import annotations

import torch

from twofold.ops.cache import CachePlace, cache_attention
from twofold.ops.decode import served


def test_a_prefill_over_empty_rows_attends_to_its_own_tokens_alone() -> None:
    torch.manual_seed(0)
    q, gate = (torch.randn(2, 100, 8, 32).bfloat16()[:, :, :4] for _ in range(2))
    k, v = (torch.randn(2, 150, 2, 32).bfloat16() for _ in range(2))
    place = CachePlace(torch.zeros(2, dtype=torch.long), 100, 100, True, (k, k))
    found = served.cache_attention(q, k, v, place, gate)
    k[:, 100:] = v[:, 100:] = 1e4
    assert torch.equal(served.cache_attention(q, k, v, place, gate), found)
    wanted = cache_attention(q.double(), k.double(), v.double(), place, gate.double())
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)
