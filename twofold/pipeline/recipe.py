"""Recipes: one TOML file -> frozen, typed configs. What is not known or not of its type is an error."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from twofold.data.generate import GenerateConfig
from twofold.data.prompts import PromptsConfig
from twofold.evaluation.acceptance import EvaluateConfig
from twofold.evaluation.latency import BenchConfig
from twofold.models.calibration import QuantizeConfig
from twofold.models.draft_quantization import DraftQuantizeConfig
from twofold.models.drafter_config import DraftShape
from twofold.training.distill import DistillConfig
from twofold.training.draft import DraftConfig

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class GatesConfig:
    """Thresholds; they enter no stage's digest, so changing one measures nothing anew."""

    kl_recovery: float = 0.4
    top1: float = 0.9
    accept_length: float = 2.0
    speedup: float = 1.5
    divergences: int = 0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run. Sections bear the names of the stages; a `Path` is relative to the recipe's file.

    `drafter` is a folder to start stage 1 from; without it the drafter starts from noise, in the shape of [draft].
    """

    name: str
    model: Path
    drafter: Path | None = None
    seed: int = 0
    prompts: PromptsConfig
    generate: GenerateConfig = GenerateConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    distill: DistillConfig
    regenerate: GenerateConfig = GenerateConfig()
    draft: DraftShape | None = None
    draft_pretrain: DraftConfig
    draft_finetune: DraftConfig
    draft_quantize: DraftQuantizeConfig = DraftQuantizeConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    bench: BenchConfig = BenchConfig()
    gates: GatesConfig = GatesConfig()

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or any(sign in self.name for sign in "/\\\0"):
            raise ValueError(f"name = {json.dumps(self.name)} names a folder of a run; use a plain file name")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed = {self.seed} is not from 0 to {2**32 - 1}")
        if (self.drafter is None) == (self.draft is None):
            raise ValueError("give either `drafter`, a folder to start from, or [draft], the shape of a new one")
        if self.draft_pretrain.quantize is not None:
            raise ValueError("[draft_pretrain] trains a dense drafter; set quantize in [draft_finetune]")
        if (self.draft_finetune.quantize is not None) != (self.draft_quantize.method == "trained"):
            raise ValueError(
                '[draft_finetune] quantize and [draft_quantize] method = "trained" belong together; set both or none'
            )


def builtin_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with Twofold."""
    folder = Path(str(resources.files("twofold"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_recipe(name_or_path: str) -> Path:
    """The file of a built-in recipe, or of a path. Raises ValueError that lists the built-in ones."""
    builtin = builtin_recipes()
    if name_or_path in builtin:
        return builtin[name_or_path]
    path = Path(name_or_path)
    if path.is_file():
        return path
    raise ValueError(f"no recipe {name_or_path!r}: neither a file nor built in; built in are: {', '.join(builtin)}")


def load_recipe(name_or_path: str) -> Recipe:
    return read_recipe(find_recipe(name_or_path), Recipe)


def read_recipe(path: Path, cls: type[C]) -> C:
    """The file's content as a `cls`; every error is a ValueError that names file, section and key."""
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error
    return load_config(cls, table, str(path), base=path.parent)


def load_config(cls: type[C], table: Mapping[str, Any], where: str, base: Path = Path()) -> C:
    """A dataclass from a table, strictly.

    Fields may be int, float, str, bool, Path, Literal, tuples of those, Optional, and further dataclasses
    (sub-tables; a tuple of dataclasses is an array of tables). An int is taken for a float, nothing else is
    converted. Paths are taken relative to `base` and must exist. `where` begins every message.
    """
    assert dataclasses.is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls) if f.init]
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known) or 'none'}"
            raise ValueError(f"{where}: unknown key {key!r}; {hint}")
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if f.init and required and f.name not in table:
            raise ValueError(f"{where}: {f.name!r} is missing; it has no default ({_name(hints[f.name])})")
    values = {key: _convert(hints[key], value, where, key, base) for key, value in table.items()}
    try:
        return cls(**values)
    except ValueError as error:  # from the config's own __post_init__
        raise ValueError(f"{where}: {error}") from error


def _convert(hint: Any, value: Any, where: str, key: str, base: Path) -> Any:
    wrong = ValueError(f"{where}: {key} = {_toml(value)} should be {_name(hint)}")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise wrong
        assert isinstance(hint, type)
        return load_config(hint, value, f"{where} [{key}]", base)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool) != any(value is a for a in (True, False)):
            raise wrong
        return value
    if origin in (Union, types.UnionType):  # TOML has no null: a key of an Optional is simply left out
        (inner,) = (a for a in arguments if a is not type(None))
        return _convert(inner, value, where, key, base)
    if origin is tuple:
        if not isinstance(value, list):
            raise wrong
        inner_hints = [arguments[0]] * len(value) if arguments[-1] is ... else list(arguments)
        if len(inner_hints) != len(value):
            raise wrong
        pairs = enumerate(zip(inner_hints, value, strict=True))
        return tuple(_convert(h, v, where, f"{key}[{i}]", base) for i, (h, v) in pairs)
    if hint is Path:
        if not isinstance(value, str):
            raise wrong
        path = base / Path(value).expanduser()
        if not path.exists():
            raise ValueError(f"{where}: {key} = {_toml(value)}: there is no {path}; correct the path")
        return path
    if hint is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise wrong
        return float(value)
    assert hint in (int, float, str, bool), f"{key}: a config cannot have a field of type {hint}"
    if type(value) is not hint:
        raise wrong
    return value


def _name(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(_toml(a) for a in arguments)
    if origin in (Union, types.UnionType):
        return _name(next(a for a in arguments if a is not type(None)))
    if origin is tuple:
        if arguments[-1] is ...:
            return f"a list of {_name(arguments[0])}"
        return f"a list of {len(arguments)}: " + ", ".join(_name(a) for a in arguments)
    if dataclasses.is_dataclass(hint):
        return "a table"
    names = {int: "int", float: "float", str: "string", bool: "true or false", Path: "a path (string)"}
    return names[hint]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
