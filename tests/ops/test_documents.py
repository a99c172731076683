"""Documents of packed rows, and the mixing over them, against loops and against each document alone."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.ops.test_convolution import slow_convolution
from twofold.ops.attention import attention
from twofold.ops.documents import Documents, causal_document_mask, document_ids, most_documents
from twofold.ops.gated_delta import gated_delta_recurrent
from twofold.ops.packed import packed_attention, packed_convolution, packed_delta


def test_documents_start_where_positions_do() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
    documents = document_ids(positions)
    assert [len(set(row.tolist())) for row in documents] == [3, 1]
    mask = causal_document_mask(documents)
    members = [[0, 0, 0, 1, 2, 2], [0] * 6]
    for b in range(2):
        for t in range(6):
            for s in range(6):
                assert bool(mask[b, t, s]) == (s <= t and members[b][s] == members[b][t])


def test_borders_of_rows_that_stand_one_behind_the_other() -> None:
    documents = Documents(document_ids(torch.tensor([[0, 1, 2, 0, 0, 1], [3, 4, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])))
    assert documents.borders.tolist() == [0, 3, 4, 6, 8, 12, 18]
    assert documents.longest == 6


@pytest.mark.parametrize("more", [0, 1, 5])
def test_borders_of_a_fixed_number(more: int) -> None:
    """Documents that are not there are empty, at the end."""
    ids = document_ids(torch.tensor([[0, 1, 2, 0, 0, 1], [3, 4, 0, 1, 0, 1]]))
    documents = Documents(ids, most=6 + more)
    assert documents.borders.tolist() == [0, 3, 4, 6, 8, 10, 12] + [12] * more
    assert documents.borders.dtype == torch.int32
    assert documents.longest == 6


def test_attention_between_borders_of_a_fixed_number() -> None:
    """What variable-length attention computes: each stretch of all rows by itself, of no tokens or of some."""
    torch.manual_seed(0)
    documents = Documents(document_ids(torch.tensor([[0, 1, 2, 0, 0, 1], [3, 4, 0, 1, 2, 3]])), most=8)
    q, k, v = (torch.randn(2, 6, heads, 8, dtype=torch.float64) for heads in (6, 2, 2))
    found = [
        attention(*(x.flatten(0, 1)[None, begin:end] for x in (q, k, v)), causal=True)
        for begin, end in itertools.pairwise(documents.borders.tolist())
        if end > begin
    ]
    torch.testing.assert_close(torch.cat(found, dim=1).view(2, 6, 6, 8), packed_attention(q, k, v, documents))


def test_the_most_documents_of_a_batch() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [3, 4, 0, 1, 2, 3], [0, 0, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    for size in range(1, 6):
        batches = itertools.combinations(range(4), min(size, 4))
        wanted = max(len(Documents(document_ids(positions[list(batch)])).borders) - 1 for batch in batches)
        assert most_documents(positions, size) == wanted


def alone(mix: object, tensors: list[Tensor], lengths: list[int]) -> Tensor:
    """The documents of one row, each by itself."""
    parts = zip(*(x.split(lengths, dim=1) for x in tensors), strict=True)
    return torch.cat([mix(*part) for part in parts], dim=1)  # type: ignore[operator]


LENGTHS = [10, 1, 70, 19]
DOCUMENTS = Documents(torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])[None])


def test_attention_inside_documents() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, sum(LENGTHS), heads, 8, dtype=torch.float64) for heads in (6, 2, 2))
    expected = alone(lambda *qkv: attention(*qkv, causal=True), [q, k, v], LENGTHS)
    torch.testing.assert_close(packed_attention(q, k, v, DOCUMENTS), expected)


def test_delta_rule_inside_documents() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, sum(LENGTHS), heads, 8, dtype=torch.float64) for heads in (2, 2, 4))
    g = -torch.rand(1, sum(LENGTHS), 4, dtype=torch.float64)
    beta = torch.rand(1, sum(LENGTHS), 4, dtype=torch.float64)
    expected = alone(lambda *tokens: gated_delta_recurrent(*tokens)[0], [q, k, v, g, beta], LENGTHS)
    torch.testing.assert_close(packed_delta(q, k, v, g, beta, DOCUMENTS), expected)


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("width", [2, 4])
def test_convolution_over_whole_rows(num_tokens: int, width: int) -> None:
    torch.manual_seed(num_tokens)
    x = torch.randn(2, num_tokens, 6, dtype=torch.float64)
    w = torch.randn(6, width, dtype=torch.float64)
    expected = slow_convolution(x, w, torch.zeros(2, num_tokens))
    torch.testing.assert_close(packed_convolution(x, w, None), expected)


def test_convolution_inside_documents() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, sum(LENGTHS), 6, dtype=torch.float64)
    w = torch.randn(6, 4, dtype=torch.float64)
    y = packed_convolution(x, w, DOCUMENTS)
    torch.testing.assert_close(y, slow_convolution(x, w, DOCUMENTS.ids_BT))
    changed = x.clone()
    changed[:, :11] += 1
    assert torch.equal(packed_convolution(changed, w, DOCUMENTS)[:, 11:], y[:, 11:])


def test_convolution_under_autocast_is_near() -> None:
    """A convolution is then in bfloat16, the sum at a border of documents in float32."""
    torch.manual_seed(0)
    x, w = torch.randn(1, sum(LENGTHS), 6), torch.randn(6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        got = packed_convolution(x, w, DOCUMENTS)
    torch.testing.assert_close(got.float(), slow_convolution(x, w, DOCUMENTS.ids_BT), rtol=2e-2, atol=5e-2)
