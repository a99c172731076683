"""Acceptance by counting; the trainer's measure and the decode loop's are one; divergences are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat

import pytest
import torch

from tests import pocket
from tests.decoding import oracle
from tests.decoding.test_step import prompt, tiny
from tests.models.test_drafter import SHAPE
from tests.models.tiny import VOCABULARY
from tests.training.test_draft import run as train
from twofold.data.conversations import Conversation, pack
from twofold.decoding.step import Cycle, decode
from twofold.evaluation import acceptance as module
from twofold.evaluation.acceptance import check_lossless, measure_acceptance
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.ops.sampling import Sampling
from twofold.training.blocks import draft_logits, make_blocks, teacher_forced_acceptance

BLOCK = SHAPE.block_size


def quiet(*_: object) -> None:
    pass


@pytest.mark.parametrize("right", range(BLOCK))
def test_whole_cycles_are_counted(right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the end of the answer cut are not."""
    target, drafter = tiny()
    wanted = oracle.plain(target, prompt(6), 30)
    oracle.install(monkeypatch, prompt(6), wanted, repeat(right))
    assert not set(wanted) & set(target.config.eos_token_ids)
    found, answers = measure_acceptance(target, drafter, [list(prompt(6))], 30, Sampling(), quiet)
    assert answers == [wanted]
    # a cycle that begins with n tokens done has room for a whole block if 30 - n >= 4
    starts = [n for n in range(1, 30, right + 1) if 30 - n >= BLOCK]
    assert found.counts == Counter({right: len(starts)})
    assert found.accept_length == right + 1


def test_the_cycle_that_an_eos_cut_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = tiny()

    def decode(*_: object) -> Iterator[Cycle]:
        yield Cycle([9], torch.zeros(1, 9), 0)
        yield Cycle([9, 9, 9], torch.zeros(3, 9), 2)
        yield Cycle([9, 1], torch.zeros(4, 9), 3)  # 4 were accepted or chosen, the second is EOS

    monkeypatch.setattr(module, "decode", decode)
    found, answers = measure_acceptance(target, drafter, [[5]], 40, Sampling(), quiet)
    assert found.counts == Counter({2: 1})
    assert answers == [[9, 9, 9, 9, 9, 1]]


PROMPTS = [prompt(5 + seed, seed) for seed in range(4)]
LENGTH = 28


@pytest.fixture(scope="module", params=[None, 6], ids=["full", "window"])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[CausalLM, Drafter, list[list[int]]]:
    """A drafter that has half learnt the target's greedy answers to `PROMPTS`, and those answers."""
    target, drafter = tiny(window=request.param)
    answers = [oracle.plain(target, asked, LENGTH) for asked in PROMPTS]
    rows = pack([Conversation(list(a), b) for a, b in zip(PROMPTS, answers, strict=True)], 48)
    train(drafter, target, rows, tmp_path_factory.mktemp("trained"), 30)
    return target, drafter, answers


@torch.no_grad()
def right_guesses(drafter: Drafter, target: CausalLM, ids: list[int], anchors: list[int]) -> list[int]:
    """The runs of right guesses at the anchors, as training computes them."""
    rows = pack([Conversation([], ids)], len(ids) + 3)
    blocks = make_blocks(rows, torch.tensor([anchors]), BLOCK, drafter.config.mask_token_id)
    right = draft_logits(drafter, target, rows, blocks).argmax(dim=-1) == blocks.labels_BAK
    runs: list[int] = right[0].long().cumprod(dim=-1).sum(dim=-1).tolist()
    return runs


def test_training_and_decoding_measure_the_same_acceptance(trained: tuple[CausalLM, Drafter, list[list[int]]]) -> None:
    """At every anchor of the decode loop, num_accepted is the run of right guesses that training computes there."""
    target, drafter, answers = trained
    counts = Counter[int]()
    for asked, answer in zip(PROMPTS, answers, strict=True):
        found: dict[int, int] = {}
        anchor = len(asked)
        for cycle in list(decode(target, drafter, asked, LENGTH, Sampling()))[1:]:
            if anchor + BLOCK < len(asked) + LENGTH:  # not cut by the answer's end
                found[anchor] = cycle.num_accepted
            anchor += len(cycle.token_ids)
        assert right_guesses(drafter, target, [*asked, *answer], list(found)) == list(found.values())
        counts.update(found.values())
    assert set(counts) == set(range(BLOCK))  # no guess right, some, all


def test_the_trainer_walks_through_the_cycles_of_the_decode_loop(
    trained: tuple[CausalLM, Drafter, list[list[int]]],
) -> None:
    """On packed greedy answers, answer by answer, the same counts."""
    target, drafter, _ = trained
    found, answers = measure_acceptance(target, drafter, [list(asked) for asked in PROMPTS], LENGTH, Sampling(), quiet)
    for length in (48, 100):  # an answer a row, several a row
        rows = pack([Conversation(list(a), b) for a, b in zip(PROMPTS, answers, strict=True)], length)
        got = teacher_forced_acceptance(drafter, target, rows, batch_rows=3, anchors_at_once=5)
        assert sorted(map(sorted, map(Counter.items, got.answers))) == sorted(
            map(sorted, map(Counter.items, found.answers))
        )
        assert got.accept_length == found.accept_length > 1.2


def test_they_agree_where_an_eos_falls_into_the_last_block(
    trained: tuple[CausalLM, Drafter, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the EOS is in the answer, and whether `max_tokens` is there, is within a block of it, or cuts it off."""
    target, drafter, answers = trained
    asked, answer = list(PROMPTS[0]), answers[0]
    ends = sorted(answer.index(token) for token in set(answer))[1:]
    last_cycle_counts = 0
    for end in ends:
        monkeypatch.setattr(target, "config", replace(target.config, eos_token_ids=(answer[end],)))
        cycles = []
        for max_tokens in range(end, end + 2 + BLOCK):
            found, [got] = measure_acceptance(target, drafter, [asked], max_tokens, Sampling(), quiet)
            assert got == answer[: min(max_tokens, end + 1)]
            rows = pack([Conversation(asked, got)], 48)
            assert found.counts == teacher_forced_acceptance(drafter, target, rows).counts
            cycles.append(found.cycles)
        assert len(set(cycles[1:])) == 1  # what cut nothing changes nothing
        last_cycle_counts += cycles[1] > cycles[0]
    assert last_cycle_counts


def test_trainer_and_engine_agree_on_the_pocket_pair() -> None:
    """Answers of several lengths, some ended by EOS: accept length within 2 %, greedy, on held-out prompts."""
    target, drafter, prompts = pocket.target(), pocket.trained_drafter(), [list(p) for p in pocket.prompts(6)]
    found, answers = measure_acceptance(target, drafter, prompts, 64, Sampling(), quiet)
    rows = pack([Conversation(p, a) for p, a in zip(prompts, answers, strict=True)], 256)
    got = teacher_forced_acceptance(drafter, target, rows)
    assert found.accept_length > 2
    assert got.accept_length == pytest.approx(found.accept_length, rel=0.02)
    assert got.cycles == pytest.approx(found.cycles, rel=0.05)


def test_categories_are_kept_apart() -> None:
    target, drafter = tiny()
    prompts = [list(prompt(5 + seed, seed)) for seed in range(3)]
    found, _ = measure_acceptance(target, drafter, prompts, 20, Sampling(), quiet, ["qa", "", "qa"])
    assert found.categories == ["qa", "", "qa"]
    assert found.by_category().keys() == {"qa"}
    assert found.by_category()["qa"].answers == [found.answers[0], found.answers[2]]


def test_lossless() -> None:
    target, drafter = tiny()
    prompts = [list(prompt(5)), list(prompt(9, 1))]
    found = check_lossless(target, drafter, prompts, 12, (Sampling(), Sampling(temperature=0.8)), quiet)
    assert (found.prompts, found.tokens, found.divergences, found.near_ties) == (4, 48, 0, 0)


@pytest.mark.parametrize(
    ("gap", "dtype", "near"),
    [(0.5, torch.float32, 0), (1e-4, torch.float32, 1), (0.75, torch.bfloat16, 0), (0.25, torch.bfloat16, 1)],
)
def test_a_divergence_is_found(gap: float, dtype: torch.dtype, near: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode loop that slips at the third token with a drafter; near: by the plain scores at that token."""
    target, drafter = tiny()

    def slipping(_: object, drafter_: object, *rest: object) -> Iterator[Cycle]:
        logits = torch.zeros(1, VOCABULARY, dtype=dtype)
        logits[0, 8] = 5.0
        logits[0, 7] = 5.0 - gap
        tokens = [8, 8, 8, 8] if drafter_ is None else [8, 8, 7, 7]
        for token in tokens:
            yield Cycle([token], logits, 0)

    monkeypatch.setattr(module, "decode", slipping)
    found = check_lossless(target, drafter, [[1], [2]], 4, (Sampling(),), quiet)
    assert (found.divergences, found.near_ties) == (2, 2 * near)
