"""Drafts that are as right as a test wants them: the answer is known beforehand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from twofold.decoding import step
from twofold.decoding.step import Rows, decode
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.ops.sampling import Sampling


def plain(target: CausalLM, prompt: tuple[int, ...], count: int, sampling: Sampling = Sampling()) -> list[int]:
    return [token for cycle in decode(target, None, prompt, count, sampling) for token in cycle.token_ids]


def install(monkeypatch: pytest.MonkeyPatch, prompt: tuple[int, ...], answer: list[int], right: Iterator[int]) -> None:
    """The next draft's first `next(right)` guesses are those of `answer`, the guess after them is not."""

    def draft(target: CausalLM, drafter: Drafter | None, rows: Rows, sampling: Sampling, num_tokens: int) -> Tensor:
        if drafter is None or num_tokens == 1:
            return rows.anchors_B[:, None]
        at = int(rows.state.lengths_B[0]) - len(prompt)
        assert rows.anchors_B.tolist() == [answer[at]]
        block = (answer[at : at + num_tokens] + [0] * num_tokens)[:num_tokens]
        wrong = 1 + next(right)
        if wrong < num_tokens:
            block[wrong] = (block[wrong] + 1) % target.config.vocab_size
        return torch.tensor([block])

    monkeypatch.setattr(step, "draft", draft)
