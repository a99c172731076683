"""The whole line on a model of no size: to its report, skipped when done, and the same after every kill."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.pipeline.line import write_recipe
from twofold.cli import main
from twofold.data.conversations import Conversation, load_conversations
from twofold.data.generate import GenerateConfig
from twofold.decoding.engine import Request
from twofold.evaluation.gates import GateFailure
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target
from twofold.models.draft_quantization import packable_linears
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import load_drafter
from twofold.pipeline import draft_stages
from twofold.pipeline.artifact import read_artifact
from twofold.pipeline.commands import evaluate, export_run, load_engine
from twofold.pipeline.digest import plain
from twofold.pipeline.measure_stages import long_prompts
from twofold.pipeline.models import decode_precision
from twofold.pipeline.recipe import Recipe, load_recipe
from twofold.pipeline.run import run_pipeline
from twofold.pipeline.stages import STAGES
from twofold.quant.linear import PackedLinear
from twofold.quant.scheme import QuantScheme
from twofold.training.draft import train_drafter
from twofold.training.precision import Precision

ROOT = Path(__file__).parents[2]
NAMES = [stage.name for stage in STAGES]
TIMED = ("bench", "report")


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The recipe's file and a finished run of it."""
    file = write_recipe(tmp_path_factory.mktemp("line"))
    out = file.parent / "out"
    results = run_pipeline(load_recipe(str(file)), out, STAGES, io.StringIO())
    assert [(r.name, r.state) for r in results] == [(name, "finished") for name in NAMES]
    return file, out


def weights(out: Path) -> dict[str, bytes]:
    """Every tensor file of the artifacts."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for stage in NAMES
        for path in sorted((out / stage).rglob("*.safetensors"))
    }


def test_the_report_has_its_names(line: tuple[Path, Path]) -> None:
    report = json.loads((line[1] / "report.json").read_text())
    target, drafter = report["target"], report["drafter"]
    for name in ("ptq", "qad"):
        assert target[name].keys() == {"kl", "top1", "ppl"}
        assert target[name]["kl"] > 0
    assert target["kl_recovery"] == pytest.approx(1 - target["qad"]["kl"] / target["ptq"]["kl"])
    assert target["teacher"]["ppl"] > 1
    assert drafter.keys() == {"pretrain", "finetune", "gptq", "swa"}
    assert all(1 <= entry["accept_length"] <= 4 for entry in drafter.values())
    ledger = report["ledger"]
    assert [e["name"] for e in ledger] == ["baseline", "+ INT4 target", "+ drafter", "+ INT4 drafter", "+ SWA"]
    assert ledger[0]["speedup"] == 1.0
    assert report["latency"].keys() == {"short", "medium", "long"}
    assert report["lossless"] == {"prompts": 4, "tokens": 40, "divergences": 0, "near_ties": 0}
    assert all(gate["passed"] for gate in report["gates"])
    assert (line[1] / "report.html").read_text().startswith("<!doctype html>")


def test_done_is_skipped(line: tuple[Path, Path]) -> None:
    before = weights(line[1])
    results = run_pipeline(load_recipe(str(line[0])), line[1], STAGES, io.StringIO())
    assert [r.state for r in results] == ["skipped"] * len(NAMES)
    assert weights(line[1]) == before


def test_a_gate_is_judged_anew_and_nothing_measured(line: tuple[Path, Path]) -> None:
    recipe = load_recipe(str(line[0]))
    strict = replace(recipe, gates=replace(recipe.gates, accept_length=4.5, kl_recovery=1.5))
    stream = io.StringIO()
    with pytest.raises(GateFailure) as caught:
        run_pipeline(strict, line[1], STAGES, stream)
    assert [gate.name for gate in caught.value.missed] == ["kl_recovery", "accept_length"]
    assert "finished" not in stream.getvalue()


def test_the_artifacts_are_models(line: tuple[Path, Path]) -> None:
    out = line[1]
    target, drafter = load_target(out / "pack"), load_drafter(out / "draft_quantize")
    assert (
        sum(isinstance(layer, PackedLinear) for layer in target.modules())
        == read_artifact(out / "pack").metrics["layers"]
    )
    assert drafter.config.sliding_window == 8
    assert drafter.draft_head is not None
    assert drafter.draft_head.linear.out_features == 4000
    assert load_drafter(out / "draft_finetune").config.sliding_window is None
    assert all(isinstance(drafter.get_submodule(name), PackedLinear) for name in ("fc", "layers.1.mlp.up_proj"))


def test_a_drafter_trained_quantized(line: tuple[Path, Path], tmp_path: Path) -> None:
    """Stage 2 leaves packed layers; the last stage gives them a window, and does not touch them."""
    out = tmp_path / "out"
    shutil.copytree(line[1], out)
    recipe = load_recipe(str(line[0]))
    scheme = QuantScheme(group_size=16)
    aware = replace(
        recipe,
        draft_finetune=replace(recipe.draft_finetune, quantize=scheme, scales="learned"),
        draft_quantize=replace(recipe.draft_quantize, method="trained", head=None),
    )
    run_pipeline(aware, out, STAGES, io.StringIO())
    finetuned, made = load_drafter(out / "draft_finetune"), load_drafter(out / "draft_quantize")
    assert all(isinstance(made.get_submodule(name), PackedLinear) for name in packable_linears(made.config))
    assert made.config.sliding_window == 8
    before, after = finetuned.state_dict(), made.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_drafter_learns_from_a_target_in_its_precision(
    line: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "out", []

    def watched(drafter: Drafter, target: CausalLM, *rest: Any) -> Any:
        seen.append((drafter.norm.weight.dtype, target.norm.weight.dtype))
        return train_drafter(drafter, target, *rest)

    monkeypatch.setattr(draft_stages, "train_drafter", watched)
    shutil.copytree(line[1], out)
    recipe = load_recipe(str(line[0]))
    narrow = replace(recipe.draft_finetune, precision="bfloat16")
    run_pipeline(replace(recipe, draft_finetune=narrow), out, STAGES, io.StringIO(), until="draft_finetune")
    assert seen == [(torch.float32, torch.bfloat16)]
    assert load_drafter(out / "draft_finetune").norm.weight.dtype == torch.float32
    (first, *_), (other, *_) = (read_artifact(o / "draft_finetune").metrics["curve"] for o in (line[1], out))
    assert other["accept_length"] == pytest.approx(first["accept_length"], rel=0.1)


def test_healing_keeps_the_grid(line: tuple[Path, Path]) -> None:
    """Scales byte for byte those of the quantization; embedding and norms' neighbours the model's own."""
    out = line[1]
    ptq, qad = (load_file(out / stage / "model.safetensors") for stage in ("quantize", "pack"))
    assert ptq.keys() == qad.keys()
    for name in ptq:
        if name.endswith(("weight_scale", "weight_shape")) or "embed" in name:
            assert torch.equal(ptq[name], qad[name]), name
    moved = [name for name in ptq if name.endswith("weight_packed") and not torch.equal(ptq[name], qad[name])]
    assert moved


def test_the_second_answers_are_those_of_the_healed_target(line: tuple[Path, Path]) -> None:
    out = line[1]
    first, second = (load_conversations(out / stage / "train.safetensors") for stage in ("generate", "regenerate"))
    assert [c.prompt_ids for c in first] == [c.prompt_ids for c in second]
    assert len(first) == 6
    assert first != second


def test_a_new_drafter_starts_at_the_target(line: tuple[Path, Path]) -> None:
    """One attention layer: 4 matrices and 2 norms of attention, 3 matrices of the MLP, 2 norms; final norm, fusion."""
    assert read_artifact(line[1] / "draft_pretrain").metrics["weights_from_target"] == 4 + 2 + 3 + 2 + 2


@pytest.mark.parametrize("precision", [None, "float32", "bfloat16"])
def test_the_engine_of_a_run(line: tuple[Path, Path], precision: Precision | None) -> None:
    engine = load_engine(line[1], precision)
    assert engine.drafter is not None
    expected = torch.bfloat16 if precision == "bfloat16" else torch.float32
    assert engine.target.norm.weight.dtype == engine.drafter.norm.weight.dtype == expected
    prompt = tuple(engine.tokenizer.chat_ids([{"role": "user", "content": "Hello."}]))
    deltas = list(engine.generate(Request(prompt_ids=prompt, max_tokens=9, ignore_eos=True)))
    assert sum(len(d.token_ids) for d in deltas) == 9
    assert deltas[-1].finish_reason == "length"


def test_a_gpu_answers_in_what_its_kernels_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode_precision() == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert decode_precision() == "bfloat16"


def killed(file: Path, out: Path, stage: str, step: int) -> str:
    """What a run says that is killed in the middle of a stage."""
    command = [sys.executable, "-m", "tests.pipeline.line", str(file), str(out), stage, str(step)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout


def test_killed_and_resumed_is_the_same(line: tuple[Path, Path]) -> None:
    """Killed in distill, killed in draft_finetune, then run to its end: all as in the run that nothing disturbed."""
    file, whole = line
    out = file.parent / "killed"
    killed(file, out, "distill", 3)
    assert not (out / "distill").exists()
    said = killed(file, out, "draft_finetune", 2)
    assert "distill         resumed from step 3" in said
    stream = io.StringIO()
    run_pipeline(load_recipe(str(file)), out, STAGES, stream)
    assert "draft_finetune  resumed from step 2" in stream.getvalue()
    assert weights(out) == weights(whole)
    assert {"distill/student.safetensors", "draft_finetune/model.safetensors"} <= weights(out).keys()
    for name in NAMES:
        if name not in TIMED:
            ours, theirs = read_artifact(out / name), read_artifact(whole / name)
            assert (ours.metrics, ours.digest) == (theirs.metrics, theirs.digest), name


def test_a_drafter_of_another_target_is_refused(line: tuple[Path, Path], tmp_path: Path) -> None:
    file, out = line
    config = json.loads((out / "draft_finetune" / "config.json").read_text())
    other = file.parent / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | {"num_target_layers": 9}))
    (other / "model.safetensors").write_bytes((out / "draft_finetune" / "model.safetensors").read_bytes())
    recipe = replace(load_recipe(str(file)), drafter=other, draft=None)
    with pytest.raises(ValueError, match="its num_target_layers is 9, the target's 4; use a drafter of this"):
        run_pipeline(recipe, tmp_path / "out", STAGES, io.StringIO(), until="prompts")
    assert not (tmp_path / "out").exists()


def test_a_drafter_that_reads_no_layer_of_the_target_is_refused_before_any_work(
    line: tuple[Path, Path], tmp_path: Path
) -> None:
    recipe = load_recipe(str(line[0]))
    assert recipe.draft is not None
    recipe = replace(recipe, draft=replace(recipe.draft, target_layer_ids=(0, 4)))
    with pytest.raises(
        ValueError, match=r"\[draft\] target_layer_ids \[4\] are not layers of a target with 4; correct"
    ):
        run_pipeline(recipe, tmp_path / "out", STAGES, io.StringIO(), until="prompts")
    assert not (tmp_path / "out").exists()


def test_a_group_size_that_does_not_divide_names_the_layer(line: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = load_recipe(str(line[0]))
    recipe = replace(recipe, quantize=replace(recipe.quantize, group_size=32))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj: group_size 32 does not divide its 48 inputs"):
        run_pipeline(recipe, tmp_path / "out", STAGES, io.StringIO(), until="quantize")


@pytest.mark.parametrize("length", [1, 5, 9, 30, 200])
def test_long_prompts_are_exact_and_end_in_a_question(length: int) -> None:
    texts = [Conversation([10 * i + k for k in range(5)], [10 * i + 5 + k for k in range(4)]) for i in range(3)]
    for number, prompt in enumerate(long_prompts(texts, length, 3)):
        assert len(prompt) == length
        assert prompt[-5:] == texts[number].prompt_ids[-length:]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers", "speculators"])
def test_a_finished_run_is_exported(line: tuple[Path, Path], tmp_path: Path, engine: str) -> None:
    out = line[1]
    exported = export_run(out, engine, tmp_path / engine)
    card = (exported.target / "README.md").read_text()
    assert "base_model: model" in card
    assert "| healed |" in card
    assert str(line[0].parent) not in card  # no place of this machine
    if exported.drafter is not None:
        assert load_drafter(exported.drafter).config.sliding_window == 8
    without = export_run(out, engine, tmp_path / "without", "none")
    assert without.drafter is None
    assert "speculative" not in without.command


@pytest.fixture
def copied(line: tuple[Path, Path], tmp_path: Path) -> tuple[Recipe, Path]:
    """The recipe and a finished run of it that may be spoilt."""
    shutil.copytree(line[1], tmp_path / "run")
    return load_recipe(str(line[0])), tmp_path / "run"


@pytest.mark.parametrize(
    ("command", "stage"),
    [
        ("export --to vllm exported", "pack"),
        ("chat", "pack"),
        ("bench", "bench"),
        ("eval", "evaluate"),
    ],
)
def test_what_is_outdated_is_refused(
    copied: tuple[Recipe, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    stage: str,
) -> None:
    recipe, out = copied
    run_pipeline(replace(recipe, generate=GenerateConfig(max_new_tokens=3)), out, STAGES, io.StringIO(), "generate")
    monkeypatch.chdir(out.parent)
    name, *rest = command.split()
    assert main([name, "run", *rest]) == 2
    assert capsys.readouterr().err == (
        f"twofold: error: run/{stage} is outdated (generate was made anew since); "
        "bring it up to date with: twofold run RECIPE --out run\n"
    )
    assert not Path("exported").exists()


def test_a_drafter_that_is_outdated_may_stay_behind(copied: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, out = copied
    run_pipeline(replace(recipe, regenerate=GenerateConfig(max_new_tokens=3)), out, STAGES, io.StringIO(), "regenerate")
    with pytest.raises(ValueError, match=r"draft_quantize is outdated \(regenerate was made anew since\)"):
        export_run(out, "vllm", tmp_path / "exported")
    assert export_run(out, "vllm", tmp_path / "exported", "none").drafter is None


def test_the_folders_of_two_stages_are_enough_to_answer(line: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("pack", "draft_quantize"):
        shutil.copytree(line[1] / name, tmp_path / name)
    assert load_engine(tmp_path).drafter is not None


def test_a_card_tells_of_these_artifacts_alone(copied: tuple[Recipe, Path], tmp_path: Path) -> None:
    """Of a recipe that came later it says nothing, nor has it figures of what was there before."""
    recipe, out = copied
    changed = replace(recipe, name="changed", evaluate=replace(recipe.evaluate, prompts=1))
    run_pipeline(changed, out, STAGES, io.StringIO(), until="evaluate")
    (out / "recipe.json").write_text("")
    card = (export_run(out, "vllm", tmp_path / "exported").target / "README.md").read_text()
    assert "has not come to a report on these artifacts" in card
    assert "| healed |" not in card
    made = json.loads(card.split("```json")[1].split("```")[0])
    assert (made["model"], made["seed"]) == ("model", 3)
    assert made["distill"] == plain(recipe.distill)
    assert "evaluate" not in made


@pytest.mark.parametrize("name", ["pack/model.safetensors", "draft_quantize/model.safetensors", "report/report.json"])
def test_a_changed_byte_is_not_exported(copied: tuple[Recipe, Path], tmp_path: Path, name: str) -> None:
    file = copied[1] / name
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"{file} is damaged \(its sha256 differs\); delete the folder {file.parent} and"
    ):
        export_run(copied[1], "vllm", tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("config", [None, "model", {"own": {}}, {"model": "model", "own": {"prompt": 1}}])
def test_a_damaged_config_is_named(copied: tuple[Recipe, Path], config: Any) -> None:
    file = copied[1] / "evaluate" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"config": config}))
    with pytest.raises(ValueError, match=rf"^{file} is damaged \(.*\); delete the folder {file.parent} and run"):
        evaluate(copied[1])


def test_measured_again_the_quality_is_that_of_the_run(
    line: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    measured, kept = evaluate(line[1]), read_artifact(line[1] / "evaluate").metrics
    assert measured["qad"] == pytest.approx(kept["qad"])
    assert f"kl {kept['qad']['kl']:.4g}" in capsys.readouterr().out


def test_weights_may_be_read_by_whom_the_umask_allows(line: tuple[Path, Path]) -> None:
    pack = line[1] / "pack"
    assert (pack / "model.safetensors").stat().st_mode == (pack / "config.json").stat().st_mode
