"""Features are the target's, stored or computed."""

from __future__ import annotations

import pytest
import torch

from tests.models.tiny import HYBRID, build
from twofold.data.conversations import Conversation, PackedRows, pack
from twofold.data.features import feature_source, features_of

TAPS = (2, 0)


def rows() -> PackedRows:
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(97, (9 + i,), generator=draw).tolist() for i in range(10)]
    return pack([Conversation(ids[:4], ids[4:]) for ids in texts], 24)


def test_features_are_those_of_each_document_alone() -> None:
    """The tap of a layer is the residual stream after it: the final hidden state is the norm of the last one."""
    target, packed = build(HYBRID), rows()
    found = features_of(target, packed, (0, 3))
    assert not found.hidden.requires_grad
    torch.testing.assert_close(target.norm(found.taps[1]), found.hidden)
    for row in range(len(packed)):
        starts = (packed.positions_NT[row] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], 24], strict=True):
            with torch.no_grad():
                hidden, taps = target(packed.token_ids_NT[row : row + 1, start:end], taps=(0, 3))
            torch.testing.assert_close(found.hidden[row, start:end], hidden[0], rtol=1e-4, atol=1e-4)
            for got, tap in zip(found.taps, taps, strict=True):
                torch.testing.assert_close(got[row, start:end], tap[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", [False, True])
def test_rows_are_found_by_number(stored: bool) -> None:
    target, packed = build(HYBRID), rows()
    source = feature_source(target, packed, TAPS, stored, batch_rows=2)
    whole = features_of(target, packed, TAPS)
    assert len(packed) > 4
    numbers = torch.tensor([4, 1, 2])
    got = source(numbers, packed.select(numbers))
    torch.testing.assert_close(got.hidden, whole.hidden[numbers], rtol=1e-4, atol=1e-4)
    assert len(got.taps) == 2
    for ours, theirs in zip(got.taps, whole.taps, strict=True):
        torch.testing.assert_close(ours, theirs[numbers], rtol=1e-4, atol=1e-4)


def test_stored_rows_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target, packed = build(HYBRID), rows()
    source = feature_source(target, packed, TAPS, True, batch_rows=3)
    monkeypatch.setattr(target, "forward", None)
    source(torch.tensor([0, 1]), packed)
