"""An artifact is a folder that is whole or absent.

    DIR/STAGE/            finished: the stage's files and manifest.json
    DIR/.STAGE.partial/   in work: .digest names the work, checkpoint/ lets it resume

A partial folder becomes an artifact in this order: its manifest is written (atomically, naming size and
sha256 of every file), the checkpoint is removed, the older artifact steps aside, the folder is renamed.
A kill between any two of these leaves a state from which `open_partial` goes on.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from twofold import __version__
from twofold.pipeline.checkpoint import Checkpoints, sync
from twofold.pipeline.digest import Json, file_digest, write_atomically

MANIFEST = "manifest.json"
CHECKPOINT = "checkpoint"
_DIGEST = ".digest"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    kind: str
    digest: str
    config: Json
    seed: int
    parents: dict[str, str]  # stage -> digest
    stage_version: int
    versions: dict[str, str]
    metrics: dict[str, Json]
    seconds: float
    files: dict[str, dict[str, Json]]  # name -> {"bytes", "sha256"}


def versions() -> dict[str, str]:
    """Versions of what computes the numbers, without importing it."""
    found = {"twofold": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def partial_folder(out: Path, stage: str) -> Path:
    return out / f".{stage}.partial"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished artifact. Raises ValueError if it is missing or damaged: the folder may then be of
    another's making, and is none to delete."""
    path = folder / MANIFEST
    remedy = f"move {folder} away and run the recipe again, or choose another folder for the run"
    if not path.is_file():
        raise ValueError(f"{path} is missing; {remedy}")
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); {remedy}") from error
    hints = get_type_hints(Manifest)
    if not isinstance(content, dict) or content.keys() != hints.keys():
        raise ValueError(f"{path} is damaged (its keys are not a manifest's); {remedy}")
    if wrong := [name for name, hint in hints.items() if not _is(content[name], hint)]:
        raise ValueError(f"{path} is damaged ({wrong[0]} is of a wrong type); {remedy}")
    return Manifest(**content)


def _is(value: Json, hint: Any) -> bool:
    """Whether JSON data are of a type: a plain one, Json, or a dict of those."""
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_is(item, get_args(hint)[1]) for item in value.values())
    return hint is Json or type(value) is hint or (hint is float and type(value) is int)


def read_artifact(folder: Path, *, hashes: bool = False) -> Manifest:
    """The manifest, after checking that every listed file is there with its size (and sha256 if `hashes`)."""
    manifest = read_manifest(folder)
    for name, listed in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing; {_remedy(folder)}")
        size = path.stat().st_size
        if size != (written := listed.get("bytes")):
            raise ValueError(f"{path} is damaged ({size} bytes, written were {written}); {_remedy(folder)}")
        if hashes and file_digest(path) != listed.get("sha256"):
            raise ValueError(f"{path} is damaged (its sha256 differs); {_remedy(folder)}")
    return manifest


def lineage(out: Path, stage: str) -> dict[str, Manifest]:
    """The manifests of a stage's artifact and of all that it was made from, by stage, as far as they are there."""
    found: dict[str, Manifest] = {}
    waiting = [stage]
    while waiting:
        name = waiting.pop()
        if name not in found and (out / name).is_dir():
            found[name] = read_manifest(out / name)
            waiting += found[name].parents
    return found


def made_anew(manifests: Mapping[str, Manifest]) -> str | None:
    """The stage of a lineage that was made anew after what came from it, which makes that outdated; None: none was.

    A parent that is not there outdates nothing: made again as it was, it has the same digest.
    """
    for manifest in manifests.values():
        for name, digest in manifest.parents.items():
            if name in manifests and manifests[name].digest != digest:
                return name
    return None


def _remedy(folder: Path) -> str:
    return f"delete the folder {folder} and run the recipe again to make it anew"


def open_partial(out: Path, stage: str, digest: str) -> Literal["fresh", "resumed", "discarded", "whole"]:
    """Readies `.STAGE.partial` for the work that `digest` names, and says how.

    "fresh": empty. "resumed": holds checkpoints of the same work; half-written outputs beside them are
    removed, so that the result depends on the checkpoint alone. "discarded": held other work, now empty.
    "whole": the work was finished, only the renaming was left, and it is done now.
    """
    folder = partial_folder(out, stage)
    state: Literal["fresh", "resumed", "discarded"] = "fresh"
    mark = folder / _DIGEST
    if mark.is_file() and mark.read_text() == digest:
        if (folder / MANIFEST).is_file():
            _publish(out, stage)
            return "whole"
        for entry in folder.iterdir():
            if entry.name not in (_DIGEST, CHECKPOINT):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if Checkpoints(folder / CHECKPOINT).latest() is not None or any((folder / CHECKPOINT).glob("[!.]*")):
            state = "resumed"
    else:
        if folder.exists():
            state = "discarded" if mark.is_file() else "fresh"
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        write_atomically(mark, digest)
    (folder / CHECKPOINT).mkdir(exist_ok=True)
    return state


def finish(
    out: Path,
    stage: str,
    *,
    digest: str,
    config: Json,
    seed: int,
    parents: Mapping[str, str],
    stage_version: int,
    metrics: Mapping[str, Json],
    seconds: float,
) -> Manifest:
    """Makes `.STAGE.partial` the artifact `STAGE`; an older artifact of that name is replaced."""
    folder = partial_folder(out, stage)
    files: dict[str, dict[str, Json]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name == _DIGEST or name.startswith(f"{CHECKPOINT}/"):
            continue
        sync(path)
        files[name] = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
    manifest = Manifest(
        kind=stage,
        digest=digest,
        config=config,
        seed=seed,
        parents=dict(parents),
        stage_version=stage_version,
        versions=versions(),
        metrics=dict(metrics),
        seconds=round(seconds, 3),
        files=files,
    )
    write_atomically(folder / MANIFEST, json.dumps(asdict(manifest), indent=2, allow_nan=False) + "\n")
    _publish(out, stage)
    return manifest


def _publish(out: Path, stage: str) -> None:
    folder, final, older = partial_folder(out, stage), out / stage, out / f".{stage}.old"
    shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
    if older.exists():
        shutil.rmtree(older)
    if final.exists():  # a folder that is not empty cannot be replaced in one step
        os.replace(final, older)
    os.replace(folder, final)
    sync(out)
    (final / _DIGEST).unlink(missing_ok=True)
    shutil.rmtree(older, ignore_errors=True)
