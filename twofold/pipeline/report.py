"""The report of a run: `report.json`, read by other tools, and `report.html`, read by people.

A number that was not measured is null, and the page says so; a name that is missing or unknown is an error.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

from twofold.pipeline.digest import write_atomically
from twofold.pipeline.figures import curve_svg, histogram_svg, ledger_svg, positions_svg

# The form of report.json. Lists hold any number of entries of their one form.
NUMBER, OPTIONAL, COUNT = "a number", "a number or null", "a whole number"
TEXT, TRUTH = "a text", "true or false"
_TARGET = {"kl": OPTIONAL, "top1": OPTIONAL, "ppl": OPTIONAL}
_DRAFTER = {"accept_length": OPTIONAL}
_LATENCY = {"total_ms": OPTIONAL, "ttft_ms": OPTIONAL, "speedup": OPTIONAL}
REQUIRED: dict[str, Any] = {
    "target": {"ptq": _TARGET, "qad": _TARGET, "teacher": {"ppl": OPTIONAL}, "kl_recovery": OPTIONAL},
    "drafter": {"pretrain": _DRAFTER, "finetune": _DRAFTER, "gptq": _DRAFTER, "swa": _DRAFTER},
    "ledger": [{"name": TEXT, "ms_per_token": NUMBER, "speedup": NUMBER, "accept_length": OPTIONAL}],
    "latency": {"short": _LATENCY, "medium": _LATENCY, "long": _LATENCY},
    "lossless": {"prompts": COUNT, "tokens": COUNT, "divergences": COUNT, "near_ties": COUNT},
    "gates": [{"name": TEXT, "measured": NUMBER, "threshold": NUMBER, "passed": TRUTH, "stderr": OPTIONAL}],
}
FURTHER: dict[str, Any] = {
    "name": TEXT,
    "date": TEXT,
    "command": TEXT,
    "environment": dict,  # name -> text: hardware, versions
    "recipe": dict,
    "curve": [{"step": COUNT, "kl": NUMBER}],  # validation KL while distilling, the first before it
    "acceptance": {"positions": [NUMBER], "lengths": [COUNT]},  # rates; counts of accept length 1, 2, ...
    "quality": [{"name": TEXT, "teacher": OPTIONAL, "ptq": OPTIONAL, "qad": OPTIONAL}],  # further tasks
}

_CHECKS: dict[str, Callable[[Any], bool]] = {
    NUMBER: lambda v: isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v),
    OPTIONAL: lambda v: v is None or _CHECKS[NUMBER](v),
    COUNT: lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0,
    TEXT: lambda v: isinstance(v, str),
    TRUTH: lambda v: isinstance(v, bool),
}


def validate(data: Any) -> None:
    """Raises ValueError that names the first entry of `data` which is missing, unknown or of a wrong kind."""
    if not isinstance(data, dict):
        raise ValueError("report: should be an object")
    further = {key: form for key, form in FURTHER.items() if key in data}
    _validate(data, REQUIRED | further, "report")
    if not data["ledger"]:
        raise ValueError("report.ledger: has no entry; its first is the baseline")


def _validate(value: Any, form: Any, where: str) -> None:
    if isinstance(form, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: should be an object")
        for key in form:
            if key not in value:
                raise ValueError(f"{where}.{key}: is missing")
            _validate(value[key], form[key], f"{where}.{key}")
        for key in value:
            if key not in form:
                raise ValueError(f"{where}.{key}: is not known; known are: {', '.join(form)}")
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise ValueError(f"{where}: should be a list")
        for index, item in enumerate(value):
            _validate(item, form[0], f"{where}[{index}]")
    elif form is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: should be an object")
    elif not _CHECKS[form](value):
        raise ValueError(f"{where}: is {value!r}, should be {form}")


def read_report(file: Path) -> dict[str, Any]:
    """The figures of a finished run. Raises ValueError if there are none, or they are damaged."""
    if not file.is_file():
        raise ValueError(f"there is no {file}; finish the run first: twofold status {shlex.quote(str(file.parent))}")
    try:
        data = json.loads(file.read_text())
        validate(data)
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); run the recipe again") from error
    return dict(data)


def build_report(data: dict[str, Any], folder: Path) -> None:
    """Checks `data` and writes `report.json` and `report.html` (which needs no other file) into `folder`."""
    validate(data)
    write_atomically(folder / "report.json", json.dumps(data, indent=2, allow_nan=False) + "\n")
    write_atomically(folder / "report.html", page(data))


def headline(data: dict[str, Any]) -> str:
    """One sentence: "2.84x as fast: 7.1 ms a token instead of 20.2"."""
    first, last = data["ledger"][0], data["ledger"][-1]
    ms = f"{last['ms_per_token']:.3g} ms a token instead of {first['ms_per_token']:.3g}"
    return f"{last['speedup']:.2f}x as fast: {ms}"


def lossless_line(data: dict[str, Any]) -> str:
    """What was compared with plain decoding, and what came out."""
    found = data["lossless"]
    compared = f"{found['tokens']:,} tokens of {found['prompts']:,} prompts"
    ties = f", {found['near_ties']:,} near-ties" if found["near_ties"] else ""
    if not found["tokens"]:
        return "Not compared with plain decoding."
    if not found["divergences"]:
        return f"{compared}: all equal to plain decoding{ties}."
    return f"{compared}: {found['divergences']:,} divergences from plain decoding{ties}."


def page(data: dict[str, Any]) -> str:
    """The report as one HTML text, with its style and figures inside."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = _figure
    acceptance = data.get("acceptance") or {"positions": [], "lengths": []}
    figures = {
        "ledger": ledger_svg(data["ledger"]),
        "curve": curve_svg(data["curve"]) if data.get("curve") else None,
        "positions": positions_svg(acceptance["positions"]) if acceptance["positions"] else None,
        "lengths": histogram_svg(acceptance["lengths"]) if sum(acceptance["lengths"]) else None,
    }
    further = dict.fromkeys(FURTHER) | data
    return environment.get_template("report.html.jinja").render(
        further, figures=figures, headline=headline(data), lossless_line=lossless_line(data)
    )


def _figure(value: float | None, form: str = ".4g") -> str:
    return "not measured" if value is None else format(value, form)
