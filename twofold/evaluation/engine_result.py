"""What the engine's benchmark measures, piece by piece, and the result that the pieces are put into: plain data, which
can be written after each of them and gone on with.

    {"kind": , "complete": , "setting": , "processes": [{"date": , "copy_gb_per_s": }, ...],
     "ledger": [{"name": , "settings": {"short": figures, ...}, and the figures at "setting"}, ...],
     "cycles": {"bf16": [figures, ...], "int4": ..., "speculative": ...},
     "bf16_ms_per_token": , "int4_ms_per_token": , "cycle_ms": , "ttft_ms": {"short": , ...}, "total_ms": {...}}

All figures have "process", the place in "processes" (from 1) of the process that measured them, and "seconds", what it
took to measure them. Only figures of one process make a ratio.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

LABEL = "random weights, forced acceptance"
LOSSLESS = "+ INT4 head"  # the last row whose answers are the INT4 target's; its figures are the result's
CYCLES_OF = {"BF16": "bf16", "INT4 target": "int4", LOSSLESS: "speculative"}  # rows with single cycles
CONTEXT = 2048  # of the cycles at several batch sizes

Result = dict[str, Any]
Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EngineBench:
    """Settings are (prompt tokens, new tokens), one sequence; `contexts` and `batches` are for single cycles; `rows` of
    the ledger, all that a device has by default."""

    accept_length: float
    settings: tuple[tuple[int, int], ...] = ((64, 128), (2048, 256), (8192, 256))
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = ()
    warm_ups: int = 5
    runs: int = 50
    rows: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.settings or min(min(pair) for pair in self.settings) < 2:
            raise ValueError("a setting is PROMPT/NEW, both at least 2 tokens")
        if min((*self.batches, *self.contexts, self.runs)) < 1 or self.warm_ups < 0:
            raise ValueError("batches, contexts and runs are at least 1")

    @property
    def setting(self) -> str:
        """The middle one by length, at which a row's own figures are."""
        return setting_name(sorted(self.settings)[len(self.settings) // 2])


@dataclass(frozen=True)
class Piece:
    """The least that is measured and kept: of a row of the ledger, whole answers at a setting (prompt, new tokens) or a
    single cycle at a place (batch, context)."""

    row: str
    part: Literal["settings", "cycles"]
    at: tuple[int, int]


def pieces(config: EngineBench, names: Sequence[str]) -> list[Piece]:
    """Of the whole benchmark, in the order in which they are measured; `names` are the rows that a device has.

    ValueError for a row that is not among them.
    """
    for name in config.rows or ():
        if name not in names:
            raise ValueError(f"the ledger has no row {name!r} on this machine; its rows are: {', '.join(names)}")
    places: list[tuple[int, int]] = []
    if config.contexts or config.batches != (1,):
        places = [(1, context) for context in config.contexts] + [(batch, CONTEXT) for batch in config.batches]
    found = []
    for name in names if config.rows is None else [name for name in names if name in config.rows]:
        found += [Piece(name, "settings", setting) for setting in config.settings]
        found += [Piece(name, "cycles", place) for place in places if name in CYCLES_OF]
    return list(dict.fromkeys(found))


def find(result: Result, piece: Piece) -> Figures | None:
    """The figures of a piece; None where it was not measured."""
    if piece.part == "settings":
        settings = {row["name"]: row["settings"] for row in result["ledger"]}
        return settings.get(piece.row, {}).get(setting_name(piece.at))
    cycles = result["cycles"].get(CYCLES_OF[piece.row], [])
    return next((cycle for cycle in cycles if (cycle["batch"], cycle["context"]) == piece.at), None)


def add(result: Result, piece: Piece, figures: Figures) -> None:
    """Puts the figures of a piece where `find` finds them; at the result's setting they are the row's own too."""
    if piece.part == "cycles":
        result["cycles"].setdefault(CYCLES_OF[piece.row], []).append(figures)
        return
    row = next((row for row in result["ledger"] if row["name"] == piece.row), None)
    if row is None:
        row = {"name": piece.row, "settings": {}}
        result["ledger"].append(row)
    name = setting_name(piece.at)
    row["settings"][name] = figures
    if name == result["setting"]:
        row.update(figures)


def headline(result: Result) -> Figures:
    """What a result is quoted by, as far as its rows are there."""
    rows = {row["name"]: row for row in result["ledger"]}
    wanted = (
        ("bf16_ms_per_token", "BF16", "ms_per_token"),
        ("int4_ms_per_token", "INT4 target", "ms_per_token"),
        ("cycle_ms", LOSSLESS, "cycle_ms"),
    )
    found: Figures = {key: rows[name][figure] for key, name, figure in wanted if figure in rows.get(name, {})}
    last = rows.get(LOSSLESS, {"settings": {}})["settings"]
    for key in ("ttft_ms", "total_ms"):
        found[key] = {setting: figures[key] for setting, figures in last.items()}
    return found


def setting_name(setting: tuple[int, int]) -> str:
    prompt, new_tokens = setting
    return {(64, 128): "short", (2048, 256): "medium", (8192, 256): "long"}.get(setting, f"{prompt}/{new_tokens}")
