"""A toy line of three stages; `python -m tests.pipeline.toy RECIPE OUT` runs it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from twofold.evaluation.gates import Gate
from twofold.pipeline.recipe import read_recipe
from twofold.pipeline.run import run_pipeline
from twofold.pipeline.stage import Stage, StageContext


@dataclass(frozen=True, kw_only=True)
class SeedsConfig:
    source: Path
    count: int = 3


@dataclass(frozen=True, kw_only=True)
class WalkConfig:
    steps: int = 8
    factor: int = 3


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    digits: int = 3


@dataclass(frozen=True, kw_only=True)
class ToyRecipe:
    name: str
    seed: int = 0
    seeds: SeedsConfig
    walk: WalkConfig = field(default_factory=WalkConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    least: float = 0.0


def seeds(context: StageContext[SeedsConfig]) -> dict[str, Any]:
    numbers = [len(context.config.source.read_text()) + context.seed + i for i in range(context.config.count)]
    (context.output / "part").mkdir()
    (context.output / "part" / "numbers.json").write_text(json.dumps(numbers))
    return {"count": len(numbers)}


def walk(context: StageContext[WalkConfig]) -> dict[str, Any]:
    """x <- factor x + step (mod a prime), a checkpoint every second step, output appended as it goes."""
    step, numbers = 0, json.loads((context.inputs["seeds"] / "part" / "numbers.json").read_text())
    newest = context.checkpoints.latest()
    if newest is not None:
        step, numbers = newest[0], json.loads((newest[1] / "state.json").read_text())
    while step < context.config.steps:
        step += 1
        numbers = [(context.config.factor * x + step) % 1_000_003 for x in numbers]
        with (context.output / "log.txt").open("a") as log:
            log.write(f"{step}\n")
        context.report(step, context.config.steps, f"x {numbers[0]}")
        if step % 2 == 0:
            state = json.dumps(numbers)
            context.checkpoints.save(step, lambda folder, s=state: (folder / "state.json").write_text(s))
    (context.output / "log.txt").unlink(missing_ok=True)
    (context.output / "numbers.json").write_text(json.dumps(numbers))
    return {"sum": sum(numbers)}


def judge(context: StageContext[JudgeConfig]) -> dict[str, Any]:
    numbers = json.loads((context.inputs["walk"] / "numbers.json").read_text())
    score = round(sum(numbers) / len(numbers) / 1_000_003, context.config.digits)
    (context.output / "score.json").write_text(json.dumps(score))
    return {"score": score}


STAGES: tuple[Stage[Any], ...] = (
    Stage(name="seeds", version=1, config=lambda r: r.seeds, run=seeds),
    Stage(name="walk", version=1, config=lambda r: r.walk, run=walk, parents=("seeds",)),
    Stage(
        name="judge",
        version=1,
        config=lambda r: r.judge,
        run=judge,
        parents=("walk",),
        gates=lambda r, metrics: [Gate(name="score", measured=metrics["score"], threshold=r.least)],
        publish=("score.json",),
    ),
)


def kill_before_rename(nth: int) -> Callable[[Any, Any], None]:
    calls, replace = count(1), os.replace

    def replace_or_die(source: Any, destination: Any) -> None:
        if next(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, destination)

    return replace_or_die


if __name__ == "__main__":
    run_pipeline(read_recipe(Path(sys.argv[1]), ToyRecipe), Path(sys.argv[2]), STAGES, sys.stdout)
