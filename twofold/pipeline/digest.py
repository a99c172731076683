"""Digests that name a stage's work before it is done.

    digest = sha256(canonical JSON of {kind, config, seed, parents, stage_version})

A `Path` inside a config is an input of the stage: its content enters the digest, not its place, so a model
folder may be moved without work being done again, and may not be changed without.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Json = Any  # None, bool, int, float, str, list and dict of those


def plain(value: object, path: Callable[[Path], Json] = str) -> Json:
    """`value` as JSON data: dataclasses become objects, tuples lists, and a Path what `path` makes of it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), path) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item, path) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, path) for item in value]
    if isinstance(value, Path):
        return path(value)
    assert value is None or isinstance(value, bool | int | float | str), f"{value!r} cannot be in a config"
    return value


def stage_digest(*, kind: str, config: Json, seed: int, parents: Mapping[str, str], stage_version: int) -> str:
    """Hex sha256 that two runs share exactly when the stage would compute the same thing."""
    content = {
        "kind": kind,
        "config": config,
        "seed": seed,
        "parents": dict(parents),
        "stage_version": stage_version,
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ContentDigests:
    """sha256 of input files and folders, remembered in a file by (path, size, modification time).

    Hashing the weights of a large model takes most of a minute; like an index of a version control system,
    the memory skips files that were not touched. A folder's digest covers the relative names and contents of
    its files (hidden ones left out).
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known = _remembered(memory)

    def __call__(self, path: Path) -> str:
        if path.is_file():
            return self._file(path)
        if not path.is_dir():
            raise ValueError(f"{path}: no such file or folder; correct the path in the recipe")
        names = sorted(
            p.relative_to(path).as_posix()
            for p in path.rglob("*")
            if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts)
        )
        content = [[name, self._file(path / name)] for name in names]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def _file(self, path: Path) -> str:
        key, stat = str(path.resolve()), path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns]
        known = self._known.get(key)
        if known is not None and known[:2] == stamp:
            return str(known[2])
        digest = file_digest(path)
        self._known[key] = [*stamp, digest]
        return digest

    def save(self) -> None:
        write_atomically(self._memory, json.dumps(self._known))


def _remembered(memory: Path) -> dict[str, list[Json]]:
    """Nothing where the file is missing or damaged: it is only a memory, hashing again replaces it."""
    try:
        entries = json.loads(memory.read_text()).items()
        return {path: [size, modified, digest] for path, (size, modified, digest) in entries}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}


def write_atomically(path: Path, text: str) -> None:
    """Replaces the content of `path`; a kill at any moment leaves the old content or the new, never half."""
    temporary = path.with_name(f".{path.name}.writing")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
