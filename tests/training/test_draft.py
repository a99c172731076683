"""Draft blocks by brute force; the loss by its definition; a short training pays."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.models.test_drafter import SHAPE
from tests.models.tiny import HYBRID, VOCABULARY, build, perturb
from twofold.data.conversations import Conversation, PackedRows, pack
from twofold.data.features import features_of
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.models.drafter_config import DrafterConfig
from twofold.ops.kernels import Kernels
from twofold.pipeline.checkpoint import Checkpoints
from twofold.training.blocks import draft_logits, make_blocks, sample_anchors, teacher_forced_acceptance
from twofold.training.draft import DraftConfig, draft_loss, train_drafter
from twofold.training.loop import OptimizerConfig
from twofold.training.losses import HARD, DraftLoss
from twofold.training.precision import Precision, autocast, dtype_of

BLOCK, MASK = SHAPE.block_size, SHAPE.mask_token_id


def packed() -> PackedRows:
    """Two rows: documents of several lengths, one that fills its row to the end, one row with unused room."""
    sizes = [(3, 9), (1, 11), (2, 5), (0, 5)]  # (prompt, answer): 12 + 12, 7 + 5 + unused
    draw = torch.Generator().manual_seed(1)
    made = []
    for num_prompt, num_answer in sizes:
        ids = torch.randint(VOCABULARY - 1, (num_prompt + num_answer,), generator=draw).tolist()
        made.append(Conversation(ids[:num_prompt], ids[num_prompt:]))
    rows = pack(made, 24)
    assert len(rows) == 2
    assert rows.used_NT.all(dim=1).tolist() == [True, False]
    return rows


def pair(seed: int = 0) -> tuple[CausalLM, Drafter]:
    target = build(HYBRID).requires_grad_(False)
    drafter = Drafter.initialized(DrafterConfig.for_target(HYBRID, SHAPE), seed)
    perturb(drafter, 2)
    return target, drafter


def document(rows: PackedRows, row: int, at: int) -> int:
    """Where the document of a position starts."""
    return at - int(rows.positions_NT[row, at])


def test_blocks_by_brute_force() -> None:
    rows = packed()
    anchors = torch.arange(24).expand(2, -1)
    blocks = make_blocks(rows, anchors, BLOCK, MASK)
    valid_count = 0
    for row in range(2):
        for anchor in range(24):
            ids = blocks.block_ids_BN[row].view(24, BLOCK)[anchor].tolist()
            assert ids == [int(rows.token_ids_NT[row, anchor])] + [MASK] * (BLOCK - 1)
            position = int(rows.positions_NT[row, anchor])
            assert blocks.positions_BN[row].view(24, BLOCK)[anchor].tolist() == [position + k for k in range(BLOCK)]
            valid = True
            for k in range(1, BLOCK):
                at = anchor + k
                valid = (  # none behind a token that is not guessed
                    valid
                    and at < 24
                    and document(rows, row, at) == document(rows, row, anchor)
                    and bool(rows.answer_NT[row, at])
                )
                assert bool(blocks.valid_BAK[row, anchor, k - 1]) == valid
                if valid:
                    valid_count += 1
                    assert blocks.labels_BAK[row, anchor, k - 1] == rows.token_ids_NT[row, at]
    assert valid_count > 30


def test_anchors_stand_before_an_answer_token() -> None:
    rows = packed()
    for seed in range(20):
        anchors = sample_anchors(rows, 5, seed)
        assert anchors.shape == (2, 5)
        for row in range(2):
            assert len(set(anchors[row].tolist())) == 5
            for anchor in anchors[row].tolist():
                assert rows.answer_NT[row, anchor + 1]
                assert document(rows, row, anchor + 1) == document(rows, row, anchor)
    assert make_blocks(rows, anchors, BLOCK, MASK).valid_BAK[..., 0].all()


def test_anchors_are_drawn_by_the_seed_from_all_there_are() -> None:
    rows = packed()
    assert torch.equal(sample_anchors(rows, 4, 3), sample_anchors(rows, 4, 3))
    seen = [{int(a) for seed in range(200) for a in sample_anchors(rows, 4, seed)[row]} for row in range(2)]
    wanted = [
        {
            at
            for at in range(23)
            if rows.answer_NT[row, at + 1] and document(rows, row, at + 1) == document(rows, row, at)
        }
        for row in range(2)
    ]
    assert seen == wanted


def test_a_row_with_few_anchors_takes_them_all() -> None:
    rows = packed()
    anchors = sample_anchors(rows, 11, 0)  # the second row has 5 + 4
    valid = make_blocks(rows, anchors, BLOCK, MASK).valid_BAK[..., 0]
    assert valid.sum(dim=1).tolist() == [11, 9]
    assert sample_anchors(rows, 100, 0).shape == (2, 23)


MIXED = DraftLoss(hard=0.1, soft=0.3, total_variation=0.9)


@pytest.mark.parametrize("positions", ["decay", "dpace"])
@pytest.mark.parametrize(
    "shares", [HARD, DraftLoss(soft=1.0), DraftLoss(total_variation=1.0), MIXED], ids=["hard", "soft", "tv", "mixed"]
)
def test_the_loss_by_its_definition(shares: DraftLoss, positions: Literal["decay", "dpace"]) -> None:
    rows, (target, drafter) = packed(), pair()
    anchors = sample_anchors(rows, 7, 0)
    blocks = make_blocks(rows, anchors, BLOCK, MASK)
    optimizer = OptimizerConfig(steps=1, learning_rate=1.0)
    config = DraftConfig(optimizer=optimizer, loss=shares, positions=positions, gamma=2.5, alpha=0.25, vocab_chunk=13)
    features = features_of(target, rows, drafter.config.target_layer_ids)
    loss = draft_loss(drafter, target, rows, blocks, features, config, target.lm_head.weight)
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in drafter.parameters())
    with torch.no_grad():
        log_q = draft_logits(drafter, target, rows, blocks).log_softmax(dim=-1)
        log_p = target.logits(target(rows.token_ids_NT, rows.positions_NT)[0]).log_softmax(dim=-1)
    total = weight = 0.0
    for row, a in itertools.product(range(2), range(7)):
        last = int(blocks.valid_BAK[row, a].sum())
        assert blocks.valid_BAK[row, a, :last].all()
        found = [log_q[row, a, k, blocks.labels_BAK[row, a, k]].exp().item() for k in range(last)]
        for k in range(last):  # k = 0 is the first guess, whose weight by decay is 1
            w, before = math.exp(-k / 2.5), int(anchors[row, a]) + k
            if positions == "dpace":
                w = sum(math.prod(0.75 * q + 0.25 for q in found[: m + 1]) for m in range(k, last))
            p, q = log_p[row, before], log_q[row, a, k]
            term = -shares.hard * q[rows.token_ids_NT[row, before + 1]]
            term = term + shares.soft * (p.exp() * (p - q)).sum()
            term = term + shares.total_variation * (p.exp() - q.exp()).abs().sum() / 2
            total, weight = total + w * float(term), weight + w
    wanted = total / weight if positions == "decay" else total / int(blocks.valid_BAK[..., 0].sum())
    assert loss.item() == pytest.approx(wanted, rel=1e-4)


def test_in_bfloat16_the_loss_is_near() -> None:
    rows, (target, drafter) = packed(), pair()
    blocks = make_blocks(rows, sample_anchors(rows, 7, 0), BLOCK, MASK)
    features = features_of(target, rows, drafter.config.target_layer_ids)
    config = DraftConfig(optimizer=OptimizerConfig(steps=1, learning_rate=1.0), loss=MIXED)
    losses = []
    for made in (config, replace(config, precision="bfloat16")):
        head = target.lm_head.weight.detach().to(dtype_of(made.precision))
        losses.append(draft_loss(drafter, target, rows, blocks, features, made, head))
    assert losses[1].dtype == torch.float32
    assert losses[0] != losses[1]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=2e-2)


def test_logits_see_no_later_token() -> None:
    """Changing what comes after the anchor changes neither its scores nor those of other documents."""
    rows, (target, drafter) = packed(), pair()
    anchors = torch.tensor([[2, 7, 15], [1, 4, 8]])
    changed = replace(rows, token_ids_NT=rows.token_ids_NT.clone())
    changed.token_ids_NT[0, 8:12] = 5  # after the second anchor, to the end of the first document
    with torch.no_grad():
        a, b = (draft_logits(drafter, target, r, make_blocks(r, anchors, BLOCK, MASK)) for r in (rows, changed))
    assert torch.equal(a, b)
    changed.token_ids_NT[0, 6] = (changed.token_ids_NT[0, 6] + 1) % VOCABULARY
    with torch.no_grad():
        c = draft_logits(drafter, target, changed, make_blocks(changed, anchors, BLOCK, MASK))
    assert torch.equal(a[0, 0], c[0, 0])
    assert not torch.equal(a[0, 1], c[0, 1])
    assert torch.equal(a[0, 2], c[0, 2])
    assert torch.equal(a[1], c[1])


def test_a_frozen_target_passes_the_gradient_on() -> None:
    """Frozen weights lie in a layout whose product knows no gradient; a few rows take it."""
    rows, (_, drafter) = packed(), pair()
    wide = replace(HYBRID, vocab_size=1200)  # a head so narrow as the others' is never laid out anew
    plain = build(wide).requires_grad_(False)
    frozen = build(wide, Kernels.cpu()).requires_grad_(False).freeze()
    blocks = make_blocks(rows, sample_anchors(rows, 3, 0), BLOCK, MASK)
    gradients = []
    for target in (plain, frozen):
        drafter.zero_grad()
        draft_logits(drafter, target, rows, blocks).square().mean().backward()
        assert drafter.fc.weight.grad is not None
        gradients.append(drafter.fc.weight.grad.clone())
    assert gradients[0].abs().max() > 1e-4
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-6)


def periodic() -> PackedRows:
    """Text with a rule: a token is followed by the next one."""
    made = [Conversation([start], [(start + i) % 40 for i in range(1, 24)]) for start in range(0, 40, 5)]
    return pack(made, 48)


def run(
    drafter: Drafter,
    target: CausalLM,
    rows: PackedRows,
    folder: Path,
    steps: int,
    joined: int = 0,
    precision: Precision = "float32",
) -> tuple[list[int], list[dict[str, float]]]:
    """Steps done, and validations."""
    optimizer = OptimizerConfig(steps=steps, learning_rate=3e-3, validate_every=steps // 2)
    config = DraftConfig(
        optimizer=optimizer, batch_rows=4, row_length=48, anchors=12, joined=joined, precision=precision
    )
    done: list[int] = []

    def validate() -> dict[str, float]:
        with autocast(precision, target.device):
            return {"accept_length": teacher_forced_acceptance(drafter, target, rows).accept_length}

    history = train_drafter(
        drafter,
        target,
        rows,
        config,
        0,
        Checkpoints(folder),
        lambda step, *_: done.append(step),
        validate,
    )
    return done, history


def test_training_raises_acceptance(tmp_path: Path) -> None:
    target, drafter = pair()
    before = copy.deepcopy(target.state_dict())
    _, history = run(drafter, target, periodic(), tmp_path, 80)
    assert history[0]["accept_length"] < 1.3
    assert history[-1]["accept_length"] > 2.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert not any(p.requires_grad for p in drafter.parameters())


def test_a_target_in_bfloat16(tmp_path: Path) -> None:
    """Teaches and judges nearly as one in float32 does."""
    target, drafter = pair()
    run(drafter, target, periodic(), tmp_path / "wide", 80)
    wide = teacher_forced_acceptance(drafter, target, periodic()).accept_length
    narrow_target, taught = target.bfloat16(), pair()[1]
    with autocast("bfloat16", target.device):
        narrow = teacher_forced_acceptance(drafter, narrow_target, periodic()).accept_length
    assert narrow == pytest.approx(wide, rel=0.05)
    _, history = run(taught, narrow_target, periodic(), tmp_path / "narrow", 80, precision="bfloat16")
    assert history[-1]["accept_length"] > 2.0


def test_joined_rows_are_learned_from(tmp_path: Path) -> None:
    weights = []
    for joined, rows in ((0, periodic()), (2, periodic()), (0, periodic().joined(2))):
        target, drafter = pair()
        run(drafter, target, rows, tmp_path / str(len(weights)), 4, joined)
        weights.append(drafter.fc.weight)
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[1])


def test_a_warm_start_runs_its_full_schedule(tmp_path: Path) -> None:
    """Weights alone are taken over: all steps are done, at the rates of a new training, and weights move."""
    target, drafter = pair()
    run(drafter, target, periodic(), tmp_path / "first", 6)
    warm = Drafter(drafter.config)
    warm.load_state_dict(drafter.state_dict())
    rates: list[float] = []
    rate = OptimizerConfig.rate

    def recorded(self: OptimizerConfig, step: int) -> float:
        rates.append(rate(self, step))
        return rates[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OptimizerConfig, "rate", recorded)
        done, history = run(warm, target, periodic(), tmp_path / "second", 8)
    assert done == list(range(1, 9))
    assert rates[0] == rates[1] == 3e-3  # one step of warm-up, then the peak, not the end of the first schedule
    assert [entry["step"] for entry in history] == [0, 4, 8]
    assert not torch.equal(warm.fc.weight, drafter.fc.weight)


@pytest.mark.parametrize("wrong", [{"anchors": 0}, {"batch_rows": -1}, {"row_length": 1}, {"heldout_rows": 0}])
def test_what_would_train_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a step needs one or more"):
        DraftConfig(optimizer=OptimizerConfig(steps=1, learning_rate=1.0), **wrong)
