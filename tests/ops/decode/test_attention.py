"""Attention over a cache: the reference by its formula, Triton's kernels by the reference."""

import pytest
import torch
from torch import Tensor

from tests.ops.decode.on_device import DEVICE, DTYPES, tolerance
from twofold.ops.decode import attention
from twofold.ops.norms import rms_norm, rotary_table, rotate


def test_reference_is_brute_force() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 12, 2, 8), torch.randn(2, 12, 2, 8)
    lengths = torch.tensor([0, 7])
    for causal, window in ((True, None), (True, 4), (False, None), (False, 4)):
        o = attention.decode_attention(q, k, v, lengths, causal=causal, window=window)
        for b, t, h in ((0, 0, 0), (0, 2, 3), (1, 0, 1), (1, 1, 2), (1, 2, 0)):
            p = int(lengths[b]) + t
            keys = [s for s in range(p + 1 if causal else int(lengths[b]) + 3) if window is None or s > p - window]
            weight = torch.stack([q[b, t, h] @ k[b, s, h // 2] / 8**0.5 for s in keys]).softmax(0)
            expected = torch.stack([w * v[b, s, h // 2] for w, s in zip(weight, keys, strict=True)]).sum(0)
            torch.testing.assert_close(o[b, t, h], expected)


def test_reference_stores_rotated_keys() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 8)
    w = torch.rand(8)
    keys, values = torch.zeros(2, 9, 2, 8), torch.zeros(2, 9, 2, 8)
    lengths = torch.tensor([0, 5])
    new = attention.store_keys(q, k, v, w, w, 1e-6, *rotary_table(torch.arange(9), 4, 100.0), lengths, keys, values)
    cos, sin = rotary_table(lengths[:, None] + torch.arange(3), 4, 100.0)
    torch.testing.assert_close(new, rotate(rms_norm(q, w, 1e-6), cos, sin))
    torch.testing.assert_close(keys[1, 5:8], rotate(rms_norm(k, w, 1e-6), cos, sin)[1])
    assert torch.equal(values[0, :3], v[0])
    assert not keys[0, 3:].any()
    assert not keys[1, :5].any()


def cached(capacity: int, width: int, batch: int, tokens: int, heads: int, key_heads: int) -> tuple[Tensor, ...]:
    """q and gate as halves of one tensor, a cache that is NaN nowhere but large past every length."""
    torch.manual_seed(0)
    q, gate = torch.randn(batch, tokens, heads, 2 * width).chunk(2, dim=-1)
    return q, gate, torch.randn(batch, capacity, key_heads, width), torch.randn(batch, capacity, key_heads, width)


CASES = [
    # tokens, heads, key heads, width, capacity, lengths, window, causal
    (1, 4, 2, 16, 300, [0, 1, 299], None, True),
    (5, 4, 1, 32, 400, [0, 1, 127, 128, 395], None, True),  # the border of a part
    (16, 8, 2, 16, 700, [127, 112, 684], None, True),
    (16, 8, 2, 16, 700, [0, 15, 16, 17, 684], 16, True),  # the border of the window
    (5, 6, 2, 16, 400, [3, 4, 5, 150, 395], 100, False),
    (16, 8, 1, 16, 300, [0, 200], None, False),  # more queries than a tile
]


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "key_heads", "width", "capacity", "lengths", "window", "causal"), CASES)
def test_attention_of_a_block(
    tokens: int, heads: int, key_heads: int, width: int, capacity: int, lengths: list[int], window: int | None,
    causal: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    from twofold.ops.decode import attention_triton

    q, gate, k, v = (x.to(DEVICE, dtype) for x in cached(capacity, width, len(lengths), tokens, heads, key_heads))
    lengths_B = torch.tensor(lengths, device=DEVICE)
    for b, length in enumerate(lengths):  # what lies behind is no part of it
        k[b, length + tokens :] = v[b, length + tokens :] = 1e4
    for g, splits in ((None, None), (gate, 1), (gate, 3)):
        rule = {"causal": causal, "window": window, "gate_BTHD": g}
        expected = attention.decode_attention(q, k, v, lengths_B, **rule)
        o = attention_triton.decode_attention(q, k, v, lengths_B, splits=splits, **rule)
        torch.testing.assert_close(o, expected, **tolerance(dtype))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [16, 32])
@pytest.mark.parametrize("normed", [True, False])
def test_storing_of_keys(rotary: int, normed: bool, dtype: torch.dtype) -> None:
    from twofold.ops.decode import attention_triton

    torch.manual_seed(0)
    fused = torch.randn(2, 3, (2 * 4 + 2 + 2) * 32, device=DEVICE, dtype=dtype)
    q, k, v = fused.split([2 * 4 * 32, 64, 64], dim=-1)
    q = q.unflatten(-1, (4, -1)).chunk(2, dim=-1)[0]  # beside its gate
    k, v = k.unflatten(-1, (2, -1)), v.unflatten(-1, (2, -1))
    norms = [torch.rand(32, device=DEVICE, dtype=dtype) if normed else None for _ in range(2)]
    table = rotary_table(torch.arange(20, device=DEVICE), rotary, 1e4)
    lengths = torch.tensor([0, 17], device=DEVICE)
    for new in (q, None):
        caches = [torch.zeros(2, 20, 2, 32, device=DEVICE, dtype=dtype) for _ in range(4)]
        arguments = (new, k, v, *norms, 1e-6, *table, lengths)
        expected = attention.store_keys(*arguments, *caches[:2])
        found = attention_triton.store_keys(*arguments, *caches[2:])
        torch.testing.assert_close(caches[2:], caches[:2], **tolerance(dtype))
        torch.testing.assert_close(found, expected, **tolerance(dtype))
