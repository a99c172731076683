"""Step checkpoints of a stage that takes long: whole or absent, whenever the process is killed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path


class Checkpoints:
    """The checkpoints of one stage: `FOLDER/step-00000120/`, the newest only.

    `save(step, write)` lets `write(folder)` fill a temporary folder and then renames it; `latest()` gives
    (step, folder) of the newest whole one. Both are plain callables, so a training loop takes them without
    knowing the pipeline. A stage may keep further files of its own in `folder`, if it writes them atomically.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started = time.monotonic()
        newest = self.latest()
        self._seconds_before = 0.0 if newest is None else _seconds_at(newest[1])

    @property
    def seconds(self) -> float:
        """Seconds of work so far: up to the checkpoint resumed from, and since."""
        return self._seconds_before + time.monotonic() - self._started

    def latest(self) -> tuple[int, Path] | None:
        steps = sorted(self.folder.glob("step-*"))
        return (int(steps[-1].name.removeprefix("step-")), steps[-1]) if steps else None

    def save(self, step: int, write: Callable[[Path], object]) -> None:
        final = self.folder / f"step-{step:08d}"
        if final.exists():  # a step's state depends on the step alone: the one there is the same
            return
        temporary = self.folder / ".writing"
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        write(temporary)
        (temporary / "checkpoint.json").write_text(json.dumps({"step": step, "seconds": self.seconds}))
        for file in temporary.rglob("*"):
            sync(file)
        os.replace(temporary, final)
        sync(self.folder)
        for other in self.folder.glob("step-*"):
            if other != final:
                shutil.rmtree(other)


def sync(path: Path) -> None:
    """fsync: the file's content, or the folder's names, are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seconds_at(folder: Path) -> float:
    path = folder / "checkpoint.json"
    try:
        return float(json.loads(path.read_text())["seconds"])
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is missing or damaged; delete the folder {folder} to begin its stage anew") from error
