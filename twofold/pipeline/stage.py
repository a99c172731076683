"""What a stage is. The stages themselves are listed in `pipeline.stages`.

A stage is a function of (config, seed, input artifacts) that fills a folder and returns its metrics. It
reads nothing else of the recipe: what it depends on is what `config` selects, and that is in its digest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from twofold.evaluation.gates import Gate
from twofold.pipeline.checkpoint import Checkpoints
from twofold.pipeline.digest import Json

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class StageContext(Generic[C]):
    """What a stage's function is given. `report` and `checkpoints.save` suit a training loop as they are."""

    config: C
    seed: int
    inputs: dict[str, Path]  # parent stage -> its finished artifact
    output: Path  # fill this; all in it belongs to the artifact, except checkpoints.folder
    checkpoints: Checkpoints  # go on from checkpoints.latest() if there is one
    report: Callable[[int, int, str], None]  # (done, total, note) of the progress


@dataclass(frozen=True, kw_only=True)
class Stage(Generic[C]):
    """`config` selects from the recipe what the stage depends on; `version` is raised when its code changes
    what it computes. `gates` are checked when it finishes and at every later run, from the stored metrics.
    Files named in `publish` are copied to the run's own folder, for other tools to find."""

    name: str
    version: int
    config: Callable[[Any], C]
    run: Callable[[StageContext[C]], dict[str, Json]]
    parents: tuple[str, ...] = ()
    gates: Callable[[Any, dict[str, Json]], Sequence[Gate]] | None = None  # (recipe, metrics)
    publish: tuple[str, ...] = ()
    unit: str = "steps"
