"""A guess with the bias of the one before it: by its definition, in decoding as in training, and lossless."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.decoding import oracle
from tests.decoding.test_step import SAMPLINGS, ids, prompt
from tests.models.test_drafter import CONFIG, SHAPE, drafter
from tests.models.test_drafter_checkpoint import packed
from tests.models.tiny import HYBRID, VOCABULARY, perturb
from tests.training.test_draft import BLOCK, MASK, MIXED, pair, periodic, run
from tests.training.test_draft import packed as packed_rows
from twofold.data.conversations import Conversation, pack
from twofold.data.features import features_of
from twofold.decoding.step import decode
from twofold.evaluation.acceptance import measure_acceptance
from twofold.models import markov_head as module
from twofold.models.causal_lm import CausalLM
from twofold.models.draft_head import DraftHeadConfig, make_draft_head
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import load_drafter, save_drafter
from twofold.models.drafter_config import DrafterConfig
from twofold.models.drafter_start import with_markov_head
from twofold.models.markov_head import MarkovHead
from twofold.ops.sampling import Sampling
from twofold.training.blocks import draft_logits, make_blocks, sample_anchors, teacher_forced_acceptance
from twofold.training.draft import DraftConfig, draft_loss
from twofold.training.losses import dpace_weights
from twofold.training.optimizer import OptimizerConfig

RANK = 5
MARKOV = replace(SHAPE, markov_rank=RANK)


def quiet(*_: object) -> None:
    pass


def markov_pair(size: float = 1.0) -> tuple[CausalLM, Drafter]:
    target, _ = pair()
    made = Drafter.initialized(DrafterConfig.for_target(HYBRID, MARKOV), 0)
    perturb(made, 2)
    assert made.markov_head is not None
    with torch.no_grad():
        made.markov_head.after.weight.mul_(size)
    return target, made.requires_grad_(False)


def test_the_bias_by_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CANDIDATES", 10)
    torch.manual_seed(0)
    head, scores = MarkovHead(VOCABULARY, RANK), torch.randn(2, 3, VOCABULARY)
    previous = torch.randint(VOCABULARY, (2, 3))
    with torch.no_grad():
        got = head(scores, previous)
        full = scores + head.before.weight[previous] @ head.after.weight.T
    for b in range(2):
        for t in range(3):
            kept = scores[b, t].topk(10).indices
            wanted = torch.full((VOCABULARY,), -torch.inf)
            wanted[kept] = full[b, t, kept]
            torch.testing.assert_close(got[b, t], wanted)


def test_it_begins_without_a_bias_and_as_the_same_drafter() -> None:
    plain = Drafter.initialized(CONFIG, 3)
    made = Drafter.initialized(replace(CONFIG, markov_rank=RANK), 3)
    assert made.markov_head is not None
    assert not made.markov_head.after.weight.any()
    assert made.markov_head.before.weight.any()
    state = made.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())


def test_a_trained_drafter_guesses_as_before_when_it_is_given_one() -> None:
    target, plain = pair()
    made = with_markov_head(plain, RANK, 0)
    assert made.config == replace(plain.config, markov_rank=RANK)
    wanted = list(decode(target, plain, prompt(7), 24, Sampling()))
    found = list(decode(target, made, prompt(7), 24, Sampling()))
    assert [cycle.token_ids for cycle in found] == [cycle.token_ids for cycle in wanted]
    assert made.markov_head is not None
    assert made.markov_head.before.weight.any()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
@pytest.mark.parametrize("rows", [None, 30])
def test_the_answer_does_not_change(sampling: Sampling, rows: int | None) -> None:
    target, made = markov_pair(5.0)
    if rows is not None:
        made.draft_head = make_draft_head(DraftHeadConfig(rows=rows), target.lm_head, torch.arange(VOCABULARY))
    wanted = oracle.plain(target, prompt(7), 24, sampling)
    assert ids(list(decode(target, made, prompt(7), 24, sampling))) == wanted


@pytest.mark.parametrize("positions", ["decay", "dpace"])
def test_the_loss_is_that_of_the_biased_scores(positions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product with more columns against scores and bias apart; gradients reach both matrices."""
    monkeypatch.setattr(module, "CANDIDATES", VOCABULARY)
    rows, (target, made) = packed_rows(), markov_pair()
    made.requires_grad_(True)
    blocks = make_blocks(rows, sample_anchors(rows, 7, 0), BLOCK, MASK)
    config = DraftConfig(
        optimizer=OptimizerConfig(steps=1, learning_rate=1.0),
        loss=MIXED,
        positions=positions,  # type: ignore[arg-type]
    )
    features = features_of(target, rows, made.config.target_layer_ids)
    loss = draft_loss(made, target, rows, blocks, features, config, target.lm_head.weight.detach())
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in made.parameters())
    with torch.no_grad():
        scores = draft_logits(made, target, rows, blocks)
        log_q = scores.log_softmax(dim=-1)[blocks.valid_BAK]
        labels = blocks.labels_BAK[blocks.valid_BAK]
        before = torch.arange(BLOCK - 1) + blocks.anchors_BA[..., None]
        log_p = target.logits(features.hidden).log_softmax(dim=-1)
        log_p = log_p[torch.arange(2)[:, None, None], before.clamp(max=23)][blocks.valid_BAK]
        hard = -log_q.gather(1, labels[:, None])[:, 0]
        soft = (log_p.exp() * (log_p - log_q)).sum(dim=1)
        tv = (log_p.exp() - log_q.exp()).abs().sum(dim=1) / 2
        if positions == "decay":
            weights = torch.exp(-torch.arange(BLOCK - 1) / config.gamma).expand(blocks.valid_BAK.shape)
            weights = weights[blocks.valid_BAK]
            divisor = weights.sum()
        else:
            spread = torch.zeros(blocks.valid_BAK.shape)
            spread[blocks.valid_BAK] = -hard
            weights = dpace_weights(spread, blocks.valid_BAK, config.alpha)[blocks.valid_BAK]
            divisor = blocks.valid_BAK[..., 0].sum()
        terms = MIXED.hard * hard + MIXED.soft * soft + MIXED.total_variation * tv
    assert loss.item() == pytest.approx(float((weights * terms).sum() / divisor), rel=1e-4)


def test_trainer_and_decode_loop_agree(tmp_path: Path) -> None:
    """A drafter that has half learnt the target's answers: the same counts, answer by answer."""
    target, made = markov_pair()
    prompts = [list(prompt(5 + seed, seed)) for seed in range(4)]
    answers = [oracle.plain(target, tuple(asked), 28) for asked in prompts]
    run(made, target, pack([Conversation(a, b) for a, b in zip(prompts, answers, strict=True)], 48), tmp_path, 30)
    found, answers = measure_acceptance(target, made, prompts, 28, Sampling(), quiet)
    rows = pack([Conversation(a, b) for a, b in zip(prompts, answers, strict=True)], 48)
    got = teacher_forced_acceptance(made, target, rows)
    order = sorted(map(sorted, map(Counter.items, got.answers)))
    assert order == sorted(map(sorted, map(Counter.items, found.answers)))
    assert found.accept_length > 1.2


def test_all_of_it_learns(tmp_path: Path) -> None:
    target, made = markov_pair()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    _, history = run(made, target, periodic(), tmp_path, 40)
    assert history[-1]["accept_length"] > history[0]["accept_length"]
    assert all(not torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())


@pytest.mark.parametrize("quantized", [False, True])
def test_what_is_saved_is_loaded(quantized: bool, tmp_path: Path) -> None:
    _, made = markov_pair()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.bfloat16())
    if quantized:
        packed(made)
    save_drafter(made, tmp_path)
    loaded = load_drafter(tmp_path)
    assert loaded.config == made.config
    assert loaded.config.markov_rank == RANK
    state, stored = made.state_dict(), loaded.state_dict()
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name]) for name in state)
    hf = json.loads((tmp_path / "config.json").read_text())
    assert hf["dflash_config"]["markov_rank"] == RANK
    if quantized:
        assert hf["quantization_config"]["ignore"] == ["markov_head.after"]


def test_without_one_the_config_is_as_ever() -> None:
    assert "markov_rank" not in drafter().config.to_hf()["dflash_config"]
    with pytest.raises(ValueError, match="markov_rank -1 is negative"):
        replace(CONFIG, markov_rank=-1)
