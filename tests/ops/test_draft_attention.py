"""The law of training blocks: by brute force, and flex attention by the mask. See also tests/models/test_drafter.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from twofold.ops.draft_attention import DraftMask, draft_attention, flex_draft_attention
from twofold.ops.kernels import Kernels

LENGTHS = [[70, 60, 20], [3, 140, 7]]


def mask(window: int | None, block: int) -> DraftMask:
    documents = torch.stack(
        [torch.tensor([n for n, length in enumerate(row) for _ in range(length)]) for row in LENGTHS]
    )
    return DraftMask(documents, torch.tensor([[0, 5, 69, 70, 100, 149], [2, 3, 4, 64, 142, 149]]), block, window)


@pytest.mark.parametrize("window", [None, 16, 50])
def test_by_brute_force(window: int | None) -> None:
    made, block = mask(window, 7), 7
    rows, queries, keys = made.shape
    assert (rows, queries, keys) == (2, 42, 150 + 42)
    assert made.dense.shape == made.shape
    wanted = torch.zeros(made.shape, dtype=torch.bool)
    for b in range(rows):
        document = made.documents_BT[b].tolist()
        for a, anchor in enumerate(made.anchors_BA[b].tolist()):
            for k in range(block):
                for key in range(anchor):
                    near = window is None or anchor + k - key < window
                    wanted[b, a * block + k, key] = near and document[key] == document[anchor]
                wanted[b, a * block + k, 150 + a * block : 150 + (a + 1) * block] = True
    assert torch.equal(made.dense, wanted)


def long(window: int | None, block: int) -> DraftMask:
    """Rows of 600 tokens, whose tiles are also seen whole."""
    documents = torch.stack([torch.tensor([0] * 40 + [1] * 500 + [2] * 60), torch.tensor([5] * 600)])
    anchors = torch.arange(0, 2 * 40).view(2, 40) * 3 + torch.tensor([[420], [350]])
    return DraftMask(documents, anchors, block, window)


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("block", [16, 10, 7])
@pytest.mark.parametrize("make", [mask, long])
def test_the_sparse_mask_is_the_same(make: Callable[..., DraftMask], block: int, window: int | None) -> None:
    """A tile is visited if anything in it is seen, and without the law if all of it is."""
    made = make(window, block)
    _, queries, keys = made.shape
    more_keys, more_queries = (0, -keys % 128), (0, 0, 0, -queries % 128)

    def tiles(missing: bool) -> torch.Tensor:
        """[B, N / 128, 128, S / 128, 128]; keys that are not there are not seen, queries are `missing`."""
        dense = F.pad(F.pad(made.dense, more_keys), more_queries, value=missing)
        return dense.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))

    assert torch.equal(made.sparse.to_dense()[:, 0].bool(), tiles(False).any(dim=4).any(dim=2))
    whole = tiles(True).all(dim=4).all(dim=2)
    count, listed = made.sparse.full_kv_num_blocks[:, 0], made.sparse.full_kv_indices[:, 0].long()
    found = torch.zeros_like(whole).scatter(2, listed, torch.arange(listed.shape[2]) < count[..., None])
    assert torch.equal(found, whole)
    assert make is mask or window == 40 or whole.any()
    places = (torch.arange(n) for n in made.shape)
    b, query, key = torch.meshgrid(*places, indexing="ij")
    assert torch.equal(made.sparse.mask_mod(b, torch.tensor(0), query, key), made.dense)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("make", [mask, long])
def test_flex_attention_is_attention_under_the_mask(
    make: Callable[..., DraftMask], window: int | None, heads: tuple[int, int]
) -> None:
    made = make(window, 16)
    rows, queries, keys = made.shape
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(rows, queries, heads[0], 16, generator=draw)
    k, v = (torch.randn(rows, keys, heads[1], 16, generator=draw) for _ in range(2))
    torch.testing.assert_close(flex_draft_attention(q, k, v, made), draft_attention(q, k, v, made))
    fresh = replace(made)
    torch.testing.assert_close(Kernels.reference().draft_attention(q, k, v, fresh), draft_attention(q, k, v, made))


@pytest.mark.gpu  # compiled nowhere else
@pytest.mark.parametrize("window", [None, 40])
def test_compiled_it_is_the_same_with_its_gradients(window: int | None) -> None:
    made = mask(window, 16)
    made = DraftMask(made.documents_BT.cuda(), made.anchors_BA.cuda(), 16, window)
    rows, queries, keys = made.shape
    draw = torch.Generator().manual_seed(0)
    given = [
        torch.randn(rows, n, h, 64, generator=draw).cuda().bfloat16().requires_grad_()
        for n, h in ((queries, 6), (keys, 2), (keys, 2))
    ]
    outputs = [kernel(*given, made) for kernel in (flex_draft_attention, draft_attention)]
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
    gradients = [torch.autograd.grad(o.float().square().sum(), given) for o in outputs]
    torch.testing.assert_close(*gradients, rtol=5e-2, atol=1e-1)
