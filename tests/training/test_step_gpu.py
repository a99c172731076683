"""Steps replayed as CUDA graphs are those that are called; skipped where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.tiny import HYBRID, PLAIN, VOCABULARY, build, perturb
from tests.training.test_distill import fake
from tests.training.test_draft import SHAPE
from twofold.data.conversations import Conversation, PackedRows, pack
from twofold.models.drafter import Drafter
from twofold.models.drafter_config import DrafterConfig
from twofold.ops.kernels import Kernels
from twofold.pipeline.checkpoint import Checkpoints
from twofold.training import step as step_module
from twofold.training.distill import DistillConfig, distill
from twofold.training.draft import DraftConfig, train_drafter
from twofold.training.losses import DraftLoss
from twofold.training.optimizer import OptimizerConfig
from twofold.training.step import WARM_UPS

pytestmark = pytest.mark.gpu

STEPS = WARM_UPS + 4
Moved = dict[str, Tensor]


def rows() -> PackedRows:
    """Documents of many lengths, so that steps have different numbers of them."""
    draw = torch.Generator().manual_seed(3)
    sizes = [*range(5, 125, 4), *[6] * 40]
    texts = [torch.randint(VOCABULARY - 1, (size,), generator=draw).tolist() for size in sizes]
    return pack([Conversation(ids[: len(ids) // 3], ids[len(ids) // 3 :]) for ids in texts], 128)


def moved(model: torch.nn.Module, before: Moved) -> Moved:
    return {name: p.detach() - before[name] for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def drafted(folder: Path, optimizer: OptimizerConfig, **options: Any) -> Moved:
    kernels = Kernels.auto("cuda")
    target = build(HYBRID, kernels).cuda().freeze()
    drafter = Drafter.initialized(DrafterConfig.for_target(HYBRID, SHAPE), 0, kernels)
    perturb(drafter, 2)
    drafter = drafter.cuda()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    how = {"batch_rows": 2, "row_length": 128, "anchors": 32, "precision": "bfloat16"} | options
    config = DraftConfig(optimizer=optimizer, **how)
    train_drafter(drafter, target, rows(), config, 0, Checkpoints(folder), lambda *_: None, dict)
    return moved(drafter, before)


def distilled(folder: Path, optimizer: OptimizerConfig, **options: Any) -> Moved:
    kernels = Kernels.auto("cuda")
    teacher = build(options.pop("model", PLAIN), kernels).cuda().requires_grad_(False)
    student = fake(build(teacher.config, kernels, seed=1), options.get("scales") == "learned").cuda()
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    how = {"batch_rows": 2, "row_length": 128, "precision": "bfloat16", "top_k": 9} | options
    config = DistillConfig(optimizer=optimizer, **how)

    def validate() -> dict[str, float]:  # passes of other shapes between the replays
        with torch.no_grad():
            hidden, _ = student(torch.zeros(1, 40, dtype=torch.long, device="cuda"))
        return {"norm": float(hidden.norm())}

    distill(student, teacher, rows(), config, 0, Checkpoints(folder), lambda *_: None, validate)
    return moved(student, before)


def near(found: Moved, wanted: Moved, tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    a, b = (torch.cat([x.flatten() for x in each.values()]) for each in (found, wanted))
    assert b.norm() > 0
    assert float((a - b).norm() / b.norm()) < tolerance


@pytest.mark.parametrize("method", ["muon", "adamw"])
@pytest.mark.parametrize(
    ("run", "options"),
    [
        (drafted, {}),
        (drafted, {"loss": DraftLoss(hard=0.1, soft=0.9), "positions": "dpace", "store_features": True}),
        (distilled, {}),
        (distilled, {"scales": "learned", "tokens": "answer"}),
        (distilled, {"model": HYBRID}),
        (distilled, {"teacher": "topk"}),
    ],
    ids=["draft", "draft D-PACE", "distill", "distill scales", "distill hybrid", "distill top k"],
)
def test_captured_steps_are_the_eager_ones(
    run: Callable[..., Moved], options: dict[str, Any], method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels called one by one make the same steps, but for the order of sums; the eager form, which takes
    the valid guesses alone, makes them up to what bfloat16 and a first step of Adam, the sign of gradients, let be."""
    learning_rate = 3e-3 if method == "muon" else 1e-3
    made, replays, replay = [], [], torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(graph)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    for name, captured, warm_ups in (("replayed", True, WARM_UPS), ("called", True, 10**9), ("eager", False, WARM_UPS)):
        monkeypatch.setattr(step_module, "WARM_UPS", warm_ups)
        how = OptimizerConfig(
            steps=STEPS, learning_rate=learning_rate, method=method, captured=captured, validate_every=STEPS - 1
        )
        made.append(run(tmp_path / name, how, **dict(options)))
        assert len(replays) == 2 * (STEPS - WARM_UPS)  # two parts a step, of the first training alone
    replayed, called, eager = made
    near(replayed, called, 0.15)
    near(replayed, eager, 0.4)


def test_a_hybrid_in_float32_is_refused(tmp_path: Path) -> None:
    how = OptimizerConfig(steps=STEPS, learning_rate=1e-3, captured=True)
    with pytest.raises(ValueError, match="a convolution in float32 is in no CUDA graph; compute in bfloat16"):
        distilled(tmp_path, how, model=HYBRID, precision="float32")
