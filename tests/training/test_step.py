"""A captured step is the eager one: over fixed shapes, replayed, killed and resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.tiny import PLAIN, VOCABULARY, build, perturb
from tests.training.replay import ReplayedStep
from tests.training.test_distill import fake
from tests.training.test_draft import SHAPE
from twofold.data.conversations import Conversation, PackedRows, pack
from twofold.models.drafter import Drafter
from twofold.models.drafter_config import DrafterConfig
from twofold.pipeline.checkpoint import Checkpoints
from twofold.quant.scheme import QuantScheme
from twofold.training import loop
from twofold.training.distill import DistillConfig, distill
from twofold.training.draft import DraftConfig, train_drafter
from twofold.training.loop import train
from twofold.training.losses import DraftLoss
from twofold.training.optimizer import OptimizerConfig
from twofold.training.step import WARM_UPS, TrainingStep

STEPS = WARM_UPS + 4  # three of them replayed
Report = Callable[..., None]


def rows() -> PackedRows:
    """Seven rows of one to four documents, answers of many lengths, unused ends."""
    draw = torch.Generator().manual_seed(3)
    sizes = [20, 9, 11, 5, 6, 7, 3, 13, 18, 4, 4, 4, 4, 8, 12]
    texts = [torch.randint(VOCABULARY - 1, (size,), generator=draw).tolist() for size in sizes]
    made = pack([Conversation(ids[: len(ids) // 3], ids[len(ids) // 3 :]) for ids in texts], 20)
    assert len(made) == 7
    return made


def optimizer(**options: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"steps": STEPS, "learning_rate": 3e-3, "method": "muon", "weight_decay": 0.1} | options)


Moved = tuple[dict[str, Tensor], dict[str, Tensor]]  # before and after


def drafted(folder: Path, report: Report = lambda *_: None, *, markov: int = 0, **options: Any) -> Moved:
    how = {"batch_rows": 2, "row_length": 20, "anchors": 7, "vocab_chunk": 40} | options
    target = build(PLAIN).requires_grad_(False)
    shape = replace(SHAPE, target_layer_ids=(0, 1), markov_rank=markov)
    drafter = Drafter.initialized(DrafterConfig.for_target(target.config, shape), 0)
    perturb(drafter, 2)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    train_drafter(drafter, target, rows(), DraftConfig(**how), 0, Checkpoints(folder), report, dict)
    return before, {name: x.detach() for name, x in drafter.state_dict().items()}


def distilled(folder: Path, report: Report = lambda *_: None, **options: Any) -> Moved:
    how = {"batch_rows": 2, "row_length": 20, "top_k": 9, "vocab_chunk": 40} | options
    teacher = build(PLAIN).requires_grad_(False)
    student = fake(build(PLAIN, seed=1), how.get("scales") == "learned", how.get("head", False))
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    distill(student, teacher, rows(), DistillConfig(**how), 0, Checkpoints(folder), report, dict)
    return before, {name: p.detach() for name, p in student.named_parameters()}


LOSSES = {
    "hard": {},
    "soft, D-PACE": {"loss": DraftLoss(soft=1.0), "positions": "dpace"},
    "mixed, Markov head": {"loss": DraftLoss(hard=0.1, soft=0.3, total_variation=0.9), "markov": 3},
    "stored": {"store_features": True, "precision": "bfloat16"},
    "quantized": {"quantize": QuantScheme(group_size=16), "scales": "learned"},
}
HEALINGS = {
    "all": {},
    "answers": {"tokens": "answer", "divergence": "jensen_shannon", "precision": "bfloat16"},
    "stored": {"teacher": "stored", "head": True, "scales": "learned"},
    "top k": {"teacher": "topk", "tokens": "answer"},
}
CASES = [(drafted, options) for options in LOSSES.values()] + [(distilled, options) for options in HEALINGS.values()]
every_case = pytest.mark.parametrize(
    ("run", "options"), CASES, ids=[*(f"draft {name}" for name in LOSSES), *(f"distill {name}" for name in HEALINGS)]
)


@every_case
def test_fixed_shapes_take_the_steps_of_the_eager_form(
    run: Callable[..., Moved], options: dict[str, Any], tmp_path: Path
) -> None:
    """All guesses and positions with weight 0 for those that do not count, up to rounding."""
    (before, eager), (_, fixed) = (
        run(tmp_path / f"{captured}", optimizer=optimizer(captured=captured), **options) for captured in (False, True)
    )
    coarse = options.get("precision") == "bfloat16" or "quantize" in options
    for name, start in before.items():
        if name in eager and eager[name].is_floating_point() and not torch.equal(eager[name], start):
            moved = eager[name] - start
            assert (fixed[name] - eager[name]).norm() < (0.1 if coarse else 0.01) * moved.norm(), name


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_a_step_in_parts_is_the_step(options: dict[str, Any], captured: bool, tmp_path: Path) -> None:
    """Rows have answers of many lengths: means of parts would not be the mean."""
    (before, whole), (_, parts) = (
        drafted(
            tmp_path / f"{some}", optimizer=optimizer(captured=captured), batch_rows=5, rows_at_once=some, **options
        )
        for some in (0, 2)
    )
    coarse = options.get("precision") == "bfloat16" or "quantize" in options
    for name, start in before.items():
        if name in whole and whole[name].is_floating_point() and not torch.equal(whole[name], start):
            moved = whole[name] - start
            assert (parts[name] - whole[name]).norm() < (0.1 if coarse else 0.01) * moved.norm(), name


@pytest.mark.parametrize("method", ["muon", "adamw"])
@every_case
def test_replayed_steps_are_those_that_are_called(
    run: Callable[..., Moved], options: dict[str, Any], method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: rates, step counts and inputs are read where they stand, and no part waits for the device."""
    adamw = torch.optim.AdamW  # a GPU has its fused form, whose steps are counted on the device
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, fused, **how: adamw(groups, fused=True, **how))
    how = optimizer(captured=True, method=method, validate_every=STEPS - 1)
    before, called = run(tmp_path / "called", optimizer=how, **options)
    monkeypatch.setattr(loop, "TrainingStep", ReplayedStep)
    _, replayed = run(tmp_path / "replayed", optimizer=how, **options)
    assert any(not torch.equal(called[name], start) for name, start in before.items() if name in called)
    for name, tensor in called.items():
        assert torch.equal(replayed[name], tensor), name


@pytest.mark.parametrize(("run", "options"), [CASES[0], CASES[-1]], ids=["draft", "distill"])
def test_the_eager_form_could_not_be_captured(
    run: Callable[..., Moved], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for how many guesses or positions count: the check above can fail."""

    class Eager(ReplayedStep):
        def __init__(self, *arguments: Any, captured: bool) -> None:
            super().__init__(*arguments, captured=True)

    monkeypatch.setattr(loop, "TrainingStep", Eager)
    with pytest.raises(RuntimeError, match="in a captured part"):
        run(tmp_path, optimizer=optimizer(), **options)


@pytest.mark.parametrize("run", [drafted, distilled])
def test_killed_and_resumed_is_bit_equal(
    run: Callable[..., Moved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed before and after; the checkpoint stands among replayed steps."""
    monkeypatch.setattr(loop, "TrainingStep", ReplayedStep)
    how = optimizer(captured=True, steps=2 * STEPS, checkpoint_every=WARM_UPS + 2)

    class Killed(Exception):  # noqa: N818
        pass

    def kill(done: int, *_: object) -> None:
        if done == WARM_UPS + 3:
            raise Killed

    _, whole = run(tmp_path / "whole", optimizer=how)
    with pytest.raises(Killed):
        run(tmp_path / "parts", kill, optimizer=how)
    _, resumed = run(tmp_path / "parts", optimizer=how)
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


def test_inputs_are_made_one_step_ahead(tmp_path: Path) -> None:
    """Those of the next step after this one's loss was asked for, none past the end."""
    weight, events = nn.Parameter(torch.ones(2)), []

    def inputs_at(step: int) -> tuple[Tensor]:
        events.append(f"inputs {step}")
        return (torch.tensor(float(step + 1)),)

    def loss_of(factor: Tensor) -> Tensor:
        events.append(f"loss {int(factor) - 1}")
        return weight.sum() * factor

    def report(done: int, *_: object) -> None:
        events.append(f"step {done - 1}")

    how = OptimizerConfig(steps=3, learning_rate=0.1)
    train({"weight": weight}, inputs_at, loss_of, how, Checkpoints(tmp_path), report, dict)
    one = ["inputs 0", "loss 0", "inputs 1", "step 0", "loss 1", "inputs 2", "step 1", "loss 2", "step 2"]
    assert events == one


def test_inputs_of_another_shape_are_no_inputs() -> None:
    weight = nn.Parameter(torch.ones(2))
    step = TrainingStep([weight], lambda x: (weight * x).sum(), torch.optim.SGD([weight], 0.1), 1.0, captured=True)
    step.begin((torch.ones(2),))
    with pytest.raises(AssertionError, match="the same shapes"):
        step.begin((torch.ones(1),))  # `copy_` would spread it


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optimizer(captured=True, method="adamw", states="8bit"), '"8bit" is in no CUDA graph; set it to'),
        (
            lambda: DistillConfig(optimizer=optimizer(captured=True), activation_checkpointing=True),
            "activation_checkpointing = true is in no CUDA graph; set one of it and captured to false",
        ),
    ],
)
def test_what_cannot_be_captured_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
