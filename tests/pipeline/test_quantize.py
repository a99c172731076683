"""Stage quantize and what distillation starts from: AWQ with a quantized head, and an imported grid."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from tests.pipeline.line import write_recipe
from twofold.models import calibration
from twofold.models.calibration import QuantizeConfig
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target
from twofold.pipeline.artifact import read_artifact
from twofold.pipeline.recipe import load_recipe
from twofold.pipeline.run import run_pipeline
from twofold.pipeline.stages import STAGES
from twofold.pipeline.target_stages import student_of
from twofold.quant.linear import FakeQuantLinear, PackedLinear
from twofold.quant.scheme import QuantScheme

AWQ = '[quantize]\nmethod = "awq"\nhead = { bits = 8, group_size = -1 }\n'


def run(folder: Path, quantize: str, until: str) -> Path:
    file = write_recipe(folder)
    section = "[quantize]\ngroup_size = 16\n" if "checkpoint" in quantize else "[quantize]\n"
    text = file.read_text().replace(section, quantize).replace("[distill]\n", "[distill]\nhead = true\n")
    file.write_text(text)
    run_pipeline(load_recipe(str(file)), folder / "out", STAGES, io.StringIO(), until=until)
    return folder / "out"


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("awq"), AWQ, "pack")


def packed_weights(folder: Path) -> dict[str, torch.Tensor]:
    layers = load_target(folder).named_modules()
    return {name: layer.dense_weight(torch.float32) for name, layer in layers if isinstance(layer, PackedLinear)}


def check_start(out: Path) -> CausalLM:
    """The student is the model of stage quantize: the same numbers in every layer."""
    student = student_of(out.parent / "model", out / "quantize")
    for name, weight in packed_weights(out / "quantize").items():
        layer = student.get_submodule(name)
        assert isinstance(layer, FakeQuantLinear)
        assert torch.equal(layer.dense_weight(torch.float32), weight), name
    return student


def test_distillation_starts_from_the_smoothed_original(awq: Path) -> None:
    """On AWQ's grid it is AWQ's own model; of the head, which GPTQ moved, the masters are the rounded weights."""
    student = check_start(awq)
    head = student.get_submodule("lm_head")
    assert isinstance(head, FakeQuantLinear)
    assert torch.equal(head.weight, head.dense_weight(torch.float32))
    up = student.get_submodule("layers.0.mlp.up_proj")
    assert isinstance(up, FakeQuantLinear)
    assert not torch.equal(up.weight, up.dense_weight(torch.float32))  # masters between the grid's points
    original = load_target(awq.parent / "model")
    assert torch.equal(student.embed_tokens.weight, original.embed_tokens.weight)


@pytest.mark.parametrize("method", ['"rtn"', '"gptq"', '"gptq"\neven = true'])
def test_distillation_starts_from_what_was_packed(method: str, tmp_path: Path) -> None:
    check_start(run(tmp_path, f"[quantize]\nmethod = {method}\n", "quantize"))


def test_the_head_learns_and_is_packed_on_its_grid(awq: Path) -> None:
    before, after = packed_weights(awq / "quantize"), packed_weights(awq / "pack")
    assert before.keys() == after.keys()
    assert not torch.equal(before["lm_head"], after["lm_head"])
    head = load_target(awq / "pack").lm_head
    assert isinstance(head, PackedLinear)
    assert (head.scheme.bits, head.scheme.group_size) == (8, -1)


def test_every_layer_is_reported(awq: Path) -> None:
    layers = json.loads((awq / "quantize" / "layers.json").read_text())
    assert len(layers) == read_artifact(awq / "quantize").metrics["layers"] == len(packed_weights(awq / "pack"))
    assert all(0 < layer["output_error"] < 0.2 for layer in layers)
    assert [layer["name"] for layer in layers if layer["alpha"] is None] == ["lm_head"]


def test_an_imported_grid_is_taken_as_it_is(awq: Path, tmp_path: Path) -> None:
    """Scales frozen, and distillation starts from the checkpoint's own numbers, norms included."""
    out = run(tmp_path, f'[quantize]\ncheckpoint = "{awq / "quantize"}"\n', "quantize")
    student, theirs = student_of(tmp_path / "model", out / "quantize"), load_target(awq / "quantize")
    for name, layer in theirs.named_modules():
        if isinstance(layer, PackedLinear):
            mine = student.get_submodule(name)
            assert isinstance(mine, FakeQuantLinear)
            assert torch.equal(mine.dense_weight(torch.float32), layer.dense_weight(torch.float32))
            assert torch.equal(mine.grid.scale_NG, layer.grid.scale_NG)
        elif name.endswith("norm"):
            assert torch.equal(student.get_parameter(f"{name}.weight"), theirs.get_parameter(f"{name}.weight"))


def test_an_import_without_packed_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no packed layer; name a compressed-tensors checkpoint"):
        run(tmp_path, '[quantize]\ncheckpoint = "model"\n', "quantize")


def test_an_import_takes_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpoint takes its grids as they are; leave out bits, head"):
        QuantizeConfig(checkpoint=tmp_path, bits=8, head=QuantScheme(bits=8))


def test_a_head_that_does_not_fit_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_Rows", None)
    with pytest.raises(ValueError, match="lm_head: group_size 7 does not divide"):
        run(tmp_path, "[quantize]\nhead = { group_size = 7 }\n", "quantize")
