"""A killed and resumed run equals an uninterrupted one; what did not change is not done again."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.toy import STAGES, ToyRecipe, kill_before_rename
from twofold.evaluation.gates import GateFailure
from twofold.pipeline.artifact import partial_folder, read_artifact
from twofold.pipeline.checkpoint import Checkpoints
from twofold.pipeline.recipe import read_recipe
from twofold.pipeline.run import run_pipeline, status
from twofold.pipeline.stage import Stage, StageContext

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    (tmp_path / "source.txt").write_text("twelve chars")
    file = tmp_path / "toy.toml"
    file.write_text('name = "toy"\n[seeds]\nsource = "source.txt"\n')
    return file


@pytest.fixture
def recipe(recipe_file: Path) -> ToyRecipe:
    return read_recipe(recipe_file, ToyRecipe)


def run(recipe: ToyRecipe, out: Path, **options: Any) -> dict[str, str]:
    results = run_pipeline(recipe, out, STAGES, io.StringIO(), **options)
    return {result.name: result.state for result in results}


def contents(out: Path) -> dict[str, str]:
    """Every file of the artifacts, and what a manifest says besides the time it took."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if path.is_file() and not name.startswith("."):
            found[name] = path.read_text()
            if path.name == "manifest.json":
                manifest = json.loads(found[name])
                del manifest["seconds"]
                found[name] = json.dumps(manifest)
    return found


def expected_numbers(steps: int, factor: int, start: int) -> int:
    x = start
    for step in range(1, steps + 1):
        x = (factor * x + step) % 1_000_003
    return x


def test_an_uninterrupted_run(recipe: ToyRecipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(recipe, out) == {"seeds": "finished", "walk": "finished", "judge": "finished"}
    numbers = json.loads((out / "walk" / "numbers.json").read_text())
    assert numbers == [expected_numbers(8, 3, 12 + i) for i in range(3)]
    assert (out / "score.json").read_text() == (out / "judge" / "score.json").read_text()
    assert not [p.name for p in out.iterdir() if p.name.endswith((".partial", ".old", ".writing"))]
    assert sorted(p.name for p in (out / "walk").iterdir()) == ["manifest.json", "numbers.json"]
    assert read_artifact(out / "walk", hashes=True).metrics == {"sum": sum(numbers)}
    assert run(recipe, out) == {"seeds": "skipped", "walk": "skipped", "judge": "skipped"}


def run_and_die(recipe: ToyRecipe, out: Path, nth: int) -> int:
    """A run in a process of its own, which SIGKILLs itself before its `nth` rename; the exit code."""
    child = os.fork()
    if child == 0:
        os.replace = kill_before_rename(nth)  # type: ignore[assignment]
        try:
            run(recipe, out)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_before_any_rename_and_resumed(recipe: ToyRecipe, tmp_path: Path) -> None:
    """SIGKILL at every place where the disk changes state; then once more, run through."""
    run(recipe, tmp_path / "whole")
    nth, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        nth += 1
        code = run_and_die(recipe, tmp_path / f"killed{nth}", nth)
        assert code in (0, -signal.SIGKILL)
        run(recipe, tmp_path / f"killed{nth}")
        assert contents(tmp_path / f"killed{nth}") == contents(tmp_path / "whole"), f"killed before rename {nth}"
    assert nth > 12


def test_killed_again_and_again_while_replacing_older_artifacts(recipe: ToyRecipe, tmp_path: Path) -> None:
    run(recipe, tmp_path / "whole")
    for first in (2, 5, 8):
        out = tmp_path / f"out{first}"
        run(replace(recipe, seed=1), out)
        codes = [run_and_die(recipe, out, first + more) for more in range(3)]
        assert codes[0] == -signal.SIGKILL
        run(recipe, out)
        assert contents(out) == contents(tmp_path / "whole")


def test_killed_from_outside_goes_on_from_its_checkpoint(recipe: ToyRecipe, tmp_path: Path) -> None:
    """Killed by a signal in the midst of stage walk, which has come to step 6 of 8."""
    out, source = tmp_path / "out", recipe.seeds.source.with_name("slow.toml")
    source.write_text('name = "toy"\n[seeds]\nsource = "source.txt"\n[walk]\nsteps = 1000000\n')
    command = [sys.executable, "-m", "tests.pipeline.toy", str(source), str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    checkpoint = partial_folder(out, "walk") / "checkpoint"
    deadline = time.monotonic() + 20
    while (newest := _latest(checkpoint)) is None or newest < 6:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert status(out, STAGES)[1].state == "interrupted"
    kept = _latest(checkpoint)
    assert kept is not None
    stages = [_until(stage, kept + 4) if stage.name == "walk" else stage for stage in STAGES[:2]]
    stream = io.StringIO()
    run_pipeline(read_recipe(source, ToyRecipe), out, stages, stream)
    assert f"resumed from step {kept}" in stream.getvalue()
    numbers = json.loads((out / "walk" / "numbers.json").read_text())
    assert numbers[0] == expected_numbers(kept + 4, 3, 12)


def _latest(folder: Path) -> int | None:
    steps = sorted(folder.glob("step-*"))
    return int(steps[-1].name.removeprefix("step-")) if steps else None


def _until(stage: Stage[Any], steps: int) -> Stage[Any]:
    """The same stage (so the same digest), with fewer steps to go."""

    def shorter(context: StageContext[Any]) -> dict[str, Any]:
        return stage.run(replace(context, config=replace(context.config, steps=steps)))

    return replace(stage, run=shorter)


def test_a_changed_config_is_done_anew_from_its_stage_on(recipe: ToyRecipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(recipe, out)
    changed = replace(recipe, walk=replace(recipe.walk, factor=5))
    assert run(changed, out, until="walk") == {"seeds": "skipped", "walk": "finished"}
    assert [s.state for s in status(out, STAGES)] == ["finished", "finished", "outdated"]
    assert run(changed, out) == {"seeds": "skipped", "walk": "skipped", "judge": "finished"}
    changed = replace(changed, judge=replace(recipe.judge, digits=2))
    assert run(changed, out) == {"seeds": "skipped", "walk": "skipped", "judge": "finished"}


def test_a_parent_that_is_gone_outdates_nothing(recipe: ToyRecipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(recipe, out)
    shutil.rmtree(out / "seeds")
    assert [s.state for s in status(out, STAGES)] == ["missing", "finished", "finished"]
    assert run(recipe, out) == {"seeds": "finished", "walk": "skipped", "judge": "skipped"}


def test_the_content_of_an_input_counts_and_not_its_place(recipe: ToyRecipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(recipe, out)
    moved = tmp_path / "moved.txt"
    recipe.seeds.source.rename(moved)
    recipe = replace(recipe, seeds=replace(recipe.seeds, source=moved))
    assert set(run(recipe, out).values()) == {"skipped"}
    moved.write_text("other content")
    assert set(run(recipe, out).values()) == {"finished"}


@pytest.mark.parametrize("content", [b"[]", b"3", b"\xff", b"{", '{"FILE": 3}', '{"FILE": [12]}'])
def test_a_damaged_memory_of_contents_is_made_anew(recipe: ToyRecipe, tmp_path: Path, content: str | bytes) -> None:
    out, memory = tmp_path / "out", tmp_path / "out" / ".contents.json"
    run(recipe, out)
    whole = memory.read_text()
    if isinstance(content, str):
        content = content.replace("FILE", str(recipe.seeds.source)).encode()
    memory.write_bytes(content)
    assert set(run(recipe, out).values()) == {"skipped"}
    assert memory.read_text() == whole


def test_seed_and_stage_version_count(recipe: ToyRecipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(recipe, out)
    stages = [replace(stage, version=2) if stage.name == "walk" else stage for stage in STAGES]
    results = run_pipeline(recipe, out, stages, io.StringIO())
    assert [r.state for r in results] == ["skipped", "finished", "finished"]
    assert set(run(replace(recipe, seed=7), out).values()) == {"finished"}


def test_partial_work_for_another_config_is_discarded(recipe: ToyRecipe, tmp_path: Path) -> None:
    out, stream = tmp_path / "out", io.StringIO()

    def stop(context: StageContext[Any]) -> dict[str, Any]:
        context.checkpoints.save(4, lambda folder: (folder / "state.json").write_text("[0, 0, 0]"))
        raise KeyboardInterrupt

    stages = [STAGES[0], replace(STAGES[1], run=stop)]
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(recipe, out, stages, stream)
    assert "walk            interrupted, step 4 is kept; the same command goes on from here" in stream.getvalue()
    assert [(s.state, s.step) for s in status(out, STAGES)][1] == ("interrupted", 4)
    changed = replace(recipe, walk=replace(recipe.walk, factor=5))
    run_pipeline(changed, out, STAGES, stream)
    assert "walk            the interrupted work was for another configuration: discarded" in stream.getvalue()
    assert json.loads((out / "walk" / "numbers.json").read_text())[0] == expected_numbers(8, 5, 12)


def test_a_missed_gate_stops_the_line_again_and_again(recipe: ToyRecipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    strict = replace(recipe, least=2.0)
    with pytest.raises(GateFailure, match=r"^score 0\.\d+ < 2: missed by [\d.]+$"):
        run(strict, out)
    assert (out / "judge" / "manifest.json").exists()
    with pytest.raises(GateFailure):
        run(strict, out)
    assert set(run(recipe, out).values()) == {"skipped"}  # a threshold is no part of the measurement


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"seconds": null}', None])
def test_a_damaged_checkpoint_is_named_and_its_stage_begun_anew(
    recipe: ToyRecipe, tmp_path: Path, content: bytes | None
) -> None:
    out = tmp_path / "out"
    assert run_and_die(recipe, out, 12) == -signal.SIGKILL
    (step,) = (partial_folder(out, "walk") / "checkpoint").iterdir()
    file = step / "checkpoint.json"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    for command in (lambda: run(recipe, out), lambda: status(out, STAGES)):
        with pytest.raises(ValueError, match=f"^{file} is missing or damaged; delete the folder {step} to begin"):
            command()
    shutil.rmtree(step)
    run(recipe, out)
    assert json.loads((out / "walk" / "numbers.json").read_text())[0] == expected_numbers(8, 3, 12)


@pytest.mark.parametrize(
    ("damage", "message", "remedy"),
    [
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is damaged", "move {} away"),
        (lambda f: (f / "manifest.json").write_text("{}"), "manifest.json is damaged", "move {} away"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing", "move {} away"),
        (lambda f: (f / "numbers.json").unlink(), "numbers.json is missing", "delete the folder {}"),
        (lambda f: (f / "numbers.json").write_text("[1"), r"damaged \(2 bytes, written were", "delete the folder {}"),
    ],
)
def test_a_damaged_artifact_is_named(recipe: ToyRecipe, tmp_path: Path, damage: Any, message: str, remedy: str) -> None:
    run(recipe, tmp_path / "out")
    damage(tmp_path / "out" / "walk")
    with pytest.raises(ValueError, match=message) as caught:
        run(recipe, tmp_path / "out")
    assert f"{remedy.format(tmp_path / 'out' / 'walk')} and run the recipe again" in str(caught.value)


@pytest.mark.parametrize("until", ["seeds", None])
def test_a_folder_of_anothers_making_is_seen_before_anything_is_written(
    recipe: ToyRecipe, tmp_path: Path, until: str | None
) -> None:
    out = tmp_path / "out"
    (out / "judge").mkdir(parents=True)
    (out / "judge" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"judge away and run the recipe again, or choose another folder") as caught:
        run(recipe, out, until=until)
    assert "delete" not in str(caught.value)
    assert [path.relative_to(out).as_posix() for path in sorted(out.rglob("*"))] == ["judge", "judge/thesis.txt"]


@pytest.mark.parametrize("name", ["recipe.json", "score.json"])
def test_a_file_of_anothers_making_is_not_written_over(recipe: ToyRecipe, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("years of work")
    with pytest.raises(ValueError, match=f"^{out / name} is of no run; move it away, or choose another folder"):
        run(recipe, out)
    assert [path.name for path in out.iterdir()] == [name]
    (out / name).rename(tmp_path / name)
    run(recipe, out)
    assert set(run(recipe, out).values()) == {"skipped"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("digest", 3),
        ("seed", True),
        ("parents", []),
        ("parents", {"seeds": None}),
        ("metrics", None),
        ("seconds", "long"),
        ("files", {"numbers.json": 3}),
    ],
)
def test_a_wrong_type_in_a_manifest_is_named(recipe: ToyRecipe, tmp_path: Path, key: str, value: Any) -> None:
    run(recipe, tmp_path / "out")
    file = tmp_path / "out" / "walk" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=rf"^{file} is damaged \({key} is of a wrong type\); move {file.parent} away"):
        status(tmp_path / "out", STAGES)


def test_a_file_without_its_size_in_a_manifest_is_named(recipe: ToyRecipe, tmp_path: Path) -> None:
    run(recipe, tmp_path / "out")
    file = tmp_path / "out" / "walk" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"files": {"numbers.json": {}}}))
    with pytest.raises(ValueError, match=r"numbers\.json is damaged \(\d+ bytes, written were None\)"):
        status(tmp_path / "out", STAGES)


def test_same_size_damage_is_found_by_hash(recipe: ToyRecipe, tmp_path: Path) -> None:
    run(recipe, tmp_path / "out")
    file = tmp_path / "out" / "walk" / "numbers.json"
    file.write_text(file.read_text().replace("[", "{"))
    read_artifact(tmp_path / "out" / "walk")
    with pytest.raises(ValueError, match="sha256 differs"):
        read_artifact(tmp_path / "out" / "walk", hashes=True)


def test_no_work_begins_with_a_damaged_input(recipe: ToyRecipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(recipe, out)
    file = out / "seeds" / "part" / "numbers.json"
    file.write_text(file.read_text().replace("[", "{"))
    other = partial_folder(out, "walk")  # work for another configuration, which is discarded when work begins
    other.mkdir()
    (other / ".digest").write_text("other")
    with pytest.raises(ValueError, match=f"^{file} is damaged .its sha256 differs.; delete the folder"):
        run(replace(recipe, walk=replace(recipe.walk, factor=5)), out)
    assert (other / ".digest").read_text() == "other"
    shutil.rmtree(out / "seeds")
    assert run(recipe, out) == {"seeds": "finished", "walk": "skipped", "judge": "skipped"}


def test_one_run_at_a_time(recipe: ToyRecipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as file:
        file.write("4321")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="in use by another run \\(process 4321\\)"):
            run(recipe, out)
    run(recipe, out)  # the file of a dead process is there still, its lock is not
    assert (out / ".lock").read_text() == str(os.getpid())


def test_unknown_stage(recipe: ToyRecipe, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no stage 'wall'; stages are: seeds, walk, judge"):
        run(recipe, tmp_path / "out", until="wall")


def test_metrics_that_are_no_numbers_are_no_artifact(recipe: ToyRecipe, tmp_path: Path) -> None:
    stages = [replace(STAGES[0], run=lambda context: {"kl": float("nan")})]
    with pytest.raises(RuntimeError, match="stage seeds: its metrics are not finite"):
        run_pipeline(recipe, tmp_path / "out", stages, io.StringIO())
    assert not (tmp_path / "out" / "seeds").exists()


def test_a_checkpoint_survives_a_failed_write(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoint")
    checkpoints.save(1, lambda folder: (folder / "x").write_text("1"))

    def fail(folder: Path) -> None:
        (folder / "x").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(2, fail)
    step, folder = Checkpoints(tmp_path / "checkpoint").latest() or (0, tmp_path)
    assert (step, (folder / "x").read_text()) == (1, "1")
    checkpoints.save(2, lambda folder: (folder / "x").write_text("2"))
    assert [p.name for p in sorted((tmp_path / "checkpoint").iterdir())] == ["step-00000002"]
