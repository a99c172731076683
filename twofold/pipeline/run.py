"""Runs a recipe: stages in order; finished ones are skipped, interrupted ones resumed."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from twofold.evaluation.gates import check
from twofold.pipeline.artifact import (
    CHECKPOINT,
    Manifest,
    finish,
    lineage,
    made_anew,
    open_partial,
    partial_folder,
    read_artifact,
)
from twofold.pipeline.checkpoint import Checkpoints
from twofold.pipeline.digest import ContentDigests, Json, plain, stage_digest, write_atomically
from twofold.pipeline.progress import Progress, duration
from twofold.pipeline.stage import Stage, StageContext

_LOCK, _RECIPE = ".lock", "recipe.json"


@dataclass(frozen=True, kw_only=True)
class StageResult:
    name: str
    state: Literal["finished", "skipped"]
    seconds: float
    metrics: dict[str, Json]


def run_pipeline(
    recipe: Any,
    out: Path,
    stages: Sequence[Stage[Any]],
    stream: TextIO,
    until: str | None = None,
) -> list[StageResult]:
    """Makes the artifacts of `stages` under `out` (up to `until`, if given), for `recipe` with its `seed`.

    A stage whose artifact has the wanted digest is skipped; any other is done, and with it all that follow
    from it. Raises GateFailure when a gate is missed (the artifact stays; a later run checks it again),
    ValueError for bad input or a damaged artifact, KeyboardInterrupt after saying how to go on.
    """
    names = [stage.name for stage in stages]
    _assert_order(stages)
    if until is not None and until not in names:
        raise ValueError(f"no stage {until!r}; stages are: {', '.join(names)}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder with --out")
    for stage in stages:  # a stage refuses a recipe before any other begins
        stage.config(recipe)
    _check_folder(out, stages)
    out.mkdir(parents=True, exist_ok=True)
    with _lock(out):
        write_atomically(out / _RECIPE, json.dumps(plain(recipe, _absolute), indent=2) + "\n")
        contents = ContentDigests(out / ".contents.json")
        digests: dict[str, str] = {}
        results = []
        for stage in stages[: names.index(until) + 1] if until else stages:
            parents = {name: digests[name] for name in stage.parents}
            results.append(_run_stage(stage, recipe, out, parents, contents, digests, stream))
        return results


def _run_stage(
    stage: Stage[Any],
    recipe: Any,
    out: Path,
    parents: Mapping[str, str],
    contents: ContentDigests,
    digests: dict[str, str],
    stream: TextIO,
) -> StageResult:
    config = stage.config(recipe)
    wanted = stage_digest(
        kind=stage.name,
        config=plain(config, contents),
        seed=recipe.seed,
        parents=parents,
        stage_version=stage.version,
    )
    contents.save()
    digests[stage.name] = wanted
    final = out / stage.name
    state: Literal["finished", "skipped"] = "skipped"
    manifest = read_artifact(final) if final.exists() else None
    if manifest is None or manifest.digest != wanted:
        for name in stage.parents:  # long work does not begin with a damaged input
            read_artifact(out / name, hashes=True)
        how = open_partial(out, stage.name, wanted)
        if how == "whole":
            manifest = read_artifact(final)
        else:
            state = "finished"
            if how == "discarded":
                _say(stream, stage.name, "the interrupted work was for another configuration: discarded")
            manifest = _work(stage, config, recipe.seed, out, wanted, parents, how == "resumed", stream)
    for name in stage.publish:
        _copy(final / name, out / name)
    result = StageResult(name=stage.name, state=state, seconds=manifest.seconds, metrics=manifest.metrics)
    _say(stream, stage.name, f"{state:<9}{duration(manifest.seconds):>8}  {figures(manifest.metrics)}")
    if stage.gates is not None:
        gates = stage.gates(recipe, manifest.metrics)
        for gate in gates:
            if gate.passed:
                _say(stream, "", f"gate     {gate.describe()}")
        check(gates)
    return result


def _work(
    stage: Stage[Any],
    config: Any,
    seed: int,
    out: Path,
    digest: str,
    parents: Mapping[str, str],
    resumed: bool,
    stream: TextIO,
) -> Manifest:
    folder = partial_folder(out, stage.name)
    checkpoints = Checkpoints(folder / CHECKPOINT)
    if resumed:
        newest = checkpoints.latest()
        _say(stream, stage.name, "resumed" + ("" if newest is None else f" from step {newest[0]}"))
    progress = Progress(stage.name, 0, stage.unit, stream)
    context = StageContext(
        config=config,
        seed=seed,
        inputs={name: out / name for name in stage.parents},
        output=folder,
        checkpoints=checkpoints,
        report=progress,
    )
    try:
        metrics = stage.run(context)
    except KeyboardInterrupt:
        progress.close()
        newest = checkpoints.latest()
        kept = "" if newest is None else f", step {newest[0]} is kept"
        _say(stream, stage.name, f"interrupted{kept}; the same command goes on from here")
        raise
    finally:
        progress.close()
    try:
        json.dumps(metrics, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"stage {stage.name}: its metrics are not finite JSON data: {metrics}") from error
    return finish(
        out,
        stage.name,
        digest=digest,
        config=plain(config, _absolute),
        seed=seed,
        parents=parents,
        stage_version=stage.version,
        metrics=metrics,
        seconds=checkpoints.seconds,
    )


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    name: str
    state: Literal["finished", "outdated", "interrupted", "missing"]
    step: int | None = None
    seconds: float = 0.0
    metrics: dict[str, Json]


def status(out: Path, stages: Sequence[Stage[Any]]) -> list[StageStatus]:
    """What is there, read only. "outdated": one of its lineage has been made anew since."""
    if not out.is_dir():
        raise ValueError(
            f"{out} is not a folder of a run; start one with: twofold run RECIPE --out {shlex.quote(str(out))}"
        )
    return [_stage_status(out, stage) for stage in stages]


def _stage_status(out: Path, stage: Stage[Any]) -> StageStatus:
    checkpoint = partial_folder(out, stage.name) / CHECKPOINT
    newest = Checkpoints(checkpoint).latest() if checkpoint.is_dir() else None
    step = None if newest is None else newest[0]
    if not (out / stage.name).is_dir():
        state: Literal["interrupted", "missing"] = "interrupted" if checkpoint.is_dir() else "missing"
        return StageStatus(name=stage.name, state=state, step=step, metrics={})
    manifest = read_artifact(out / stage.name)
    return StageStatus(
        name=stage.name,
        state="finished" if made_anew(lineage(out, stage.name)) is None else "outdated",
        step=step,
        seconds=manifest.seconds,
        metrics=manifest.metrics,
    )


def _check_folder(out: Path, stages: Sequence[Stage[Any]]) -> None:
    """Before anything is written: the folder may not be a run's."""
    made = [out / stage.name for stage in stages if (out / stage.name).exists()]
    for folder in made:
        read_artifact(folder)
    if made or (out / _LOCK).exists():
        return
    for name in (_RECIPE, *(name for stage in stages for name in stage.publish)):
        if (out / name).exists():
            raise ValueError(f"{out / name} is of no run; move it away, or choose another folder with --out")


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """One run a folder. The system frees the lock when its process ends, however it ends."""
    with (out / _LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            process = file.read().strip() or "unknown"
            raise ValueError(
                f"{out} is in use by another run (process {process}); wait for it, or choose another --out"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _copy(source: Path, destination: Path) -> None:
    temporary = destination.with_name(f".{destination.name}.writing")
    shutil.copyfile(source, temporary)
    os.replace(temporary, destination)


def _absolute(path: Path) -> str:
    return str(path.resolve())


def _assert_order(stages: Sequence[Stage[Any]]) -> None:
    seen: set[str] = set()
    for stage in stages:
        assert stage.name not in seen, f"two stages are named {stage.name}"
        assert seen.issuperset(stage.parents), f"{stage.name} comes before one of its parents"
        seen.add(stage.name)


def _say(stream: TextIO, name: str, text: str) -> None:
    stream.write(f"{name:<15} {text.rstrip()}\n")
    stream.flush()


def figures(metrics: Mapping[str, Json]) -> str:
    """The plain numbers among the metrics, as "kl 0.012  top1 0.97"; the rest is left to the report."""
    numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
