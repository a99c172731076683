"""Distillation through the pipeline: the student's own text, learned scales, a teacher of few probabilities."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.pipeline.line import write_recipe
from tests.pipeline.test_stages import killed
from twofold.data.conversations import load_conversations, pack
from twofold.evaluation.fidelity import fidelity
from twofold.models.checkpoint import load_target
from twofold.pipeline import target_stages
from twofold.pipeline.artifact import read_artifact
from twofold.pipeline.recipe import load_recipe
from twofold.pipeline.run import run_pipeline
from twofold.pipeline.stages import STAGES

OTHER = '[distill]\ntext = "student"\nscales = "learned"\nscale_learning_rate = 1e-3\nteacher = "topk"\n'


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    file = write_recipe(tmp_path_factory.mktemp("heal"))
    text = file.read_text()
    assert "[distill]\n" in text
    file.write_text(text.replace("[distill]\n", OTHER))
    run_pipeline(load_recipe(str(file)), file.parent / "out", STAGES, io.StringIO(), until="pack")
    return file, file.parent / "out"


def test_the_packed_model_is_the_one_that_was_validated(line: tuple[Path, Path]) -> None:
    """Learned scales reach the packed model as training saw them: its KL is the validation's."""
    file, out = line
    curve = read_artifact(out / "distill").metrics["curve"]
    assert [entry["step"] for entry in curve] == [0, 2, 4]
    model, teacher = load_target(out / "pack"), load_target(file.parent / "model")
    heldout = pack(load_conversations(out / "generate" / "heldout.safetensors"), 64)
    kl = fidelity(model, teacher, heldout)["kl"]
    assert kl == pytest.approx(curve[-1]["kl"], rel=1e-2)  # norms are stored in bfloat16
    healed, ptq = load_file(out / "distill" / "student.safetensors"), load_file(out / "quantize" / "model.safetensors")
    scales = {name: tensor for name, tensor in healed.items() if name.endswith(".scale")}
    assert scales
    packed = load_file(out / "pack" / "model.safetensors")
    moved = 0
    for name, scale in scales.items():
        (stored,) = (n for n in packed if n.endswith(name.replace(".scale", ".weight_scale")))
        assert scale.dtype == torch.bfloat16
        assert torch.equal(packed[stored], scale)
        moved += int((ptq[stored] != scale).sum())
    assert moved > 0


def test_killed_and_resumed_learns_from_the_same_text(line: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The student's answers are asked once, and are the artifact's business no more when it is done."""
    file, whole = line
    out = file.parent / "killed"
    killed(file, out, "distill", 3)
    answers = out / ".distill.partial" / "checkpoint" / "answers.safetensors"
    own = load_conversations(answers)
    teachers = load_conversations(out / "generate" / "train.safetensors")
    assert [c.prompt_ids for c in own] == [c.prompt_ids for c in teachers]
    assert own != teachers
    monkeypatch.setattr(target_stages, "generate", None)  # not asked again
    run_pipeline(load_recipe(str(file)), out, STAGES, io.StringIO(), until="distill")
    monkeypatch.undo()
    name = "distill/student.safetensors"
    assert (out / name).read_bytes() == (whole / name).read_bytes()
