"""Recipes: one TOML file -> frozen, typed configs. What is not known or not of its type is an error."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

C = TypeVar("C")


# Placeholders of the stages' configs, to be replaced by imports from beside the stages' code.


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    train: Path
    heldout: Path
    count: int = 1000


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    max_new_tokens: int = 256
    temperature: float = 0.7


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    group_size: int = 32
    method: Literal["round", "awq"] = "awq"


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    steps: int = 400
    learning_rate: float = 2e-5
    warmup: float = 0.03
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    sequence_length: int = 512
    batch_size: int = 8


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    pass


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    steps: int = 400
    learning_rate: float = 1e-3
    anchors: int = 64
    gamma: float = 7.0


@dataclass(frozen=True, kw_only=True)
class DraftQuantizeConfig:
    group_size: int = 32
    damping: float = 0.01
    conversations: int = 64


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    prompts: int = 64


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    repeats: int = 5


@dataclass(frozen=True, kw_only=True)
class GatesConfig:
    """Thresholds; they enter no stage's digest, so changing one measures nothing anew."""

    kl_recovery: float = 0.2
    speedup: float = 1.0
    divergences: int = 0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run. Sections bear the names of the stages; a `Path` is relative to the recipe's file."""

    name: str
    model: Path
    seed: int = 0
    prompts: PromptsConfig
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    regenerate: GenerateConfig = field(default_factory=GenerateConfig)
    draft_pretrain: DraftConfig = field(default_factory=DraftConfig)
    draft_finetune: DraftConfig = field(default_factory=DraftConfig)
    draft_quantize: DraftQuantizeConfig = field(default_factory=DraftQuantizeConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    gates: GatesConfig = field(default_factory=GatesConfig)


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
    raise ValueError(
        f"no recipe {name_or_path!r}: neither a file nor built in; built in are: {', '.join(builtin)}"
    )


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
