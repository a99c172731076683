"""What is kept of a teacher is what its logits say."""

from __future__ import annotations

import math

import pytest
import torch

from tests.data.test_features import rows
from tests.models.tiny import HYBRID, VOCABULARY, build
from twofold.data import teacher as teacher_module
from twofold.data.teacher import top_k, top_k_of


def test_by_hand() -> None:
    p = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01]])
    kept = top_k(p.log() + 3.0, 2, torch.float32)
    assert kept.ids[0].tolist() == [1, 3]
    assert kept.ids.dtype == torch.int32
    assert int(kept.ids[1, 0]) == 0
    torch.testing.assert_close(kept.logprobs.exp(), torch.tensor([[0.5, 0.25], [0.97, 0.01]]))
    torch.testing.assert_close(kept.tail.exp(), torch.tensor([0.25, 0.02]))


def test_all_of_the_vocabulary_leaves_nothing() -> None:
    assert top_k(torch.randn(3, 5), 5).tail.tolist() == [-math.inf] * 3


@pytest.mark.parametrize("block", [1, 2**24])
def test_rows_are_kept_in_their_place(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_module, "_BLOCK", block)
    target, packed = build(HYBRID), rows()
    kept = top_k_of(target, packed, 7, batch_rows=2, dtype=torch.float32)
    with torch.no_grad():
        log_p = target.logits(target(packed.token_ids_NT, packed.positions_NT)[0]).log_softmax(dim=-1)
    assert kept.ids.shape == (*packed.token_ids_NT.shape, 7)
    torch.testing.assert_close(kept.logprobs, log_p.topk(7).values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kept.logprobs, log_p.gather(2, kept.ids.long()), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kept.tail.exp(), 1 - kept.logprobs.exp().sum(dim=-1), rtol=1e-3, atol=1e-5)
    numbers = torch.tensor([3, 1])
    assert torch.equal(kept.select(numbers).ids, kept.ids[numbers])
    counted = packed.answer_NT[numbers]
    assert kept.select(numbers).select(counted).logprobs.shape == (int(counted.sum()), 7)


@pytest.mark.parametrize("k", [0, VOCABULARY + 1])
def test_more_than_there_is(k: int) -> None:
    with pytest.raises(ValueError, match=rf"top_k = {k} does not fit a vocabulary of 97; set it between 1 and that"):
        top_k_of(build(HYBRID), rows(), k, batch_rows=2)
