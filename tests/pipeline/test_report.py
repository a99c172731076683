"""The report's names are fixed, and its page stands alone."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from twofold.pipeline.report import build_report, headline, lossless_line, page, read_report, validate


def plausible() -> dict[str, Any]:
    return {
        "target": {
            "ptq": {"kl": 0.0412, "top1": 0.921, "ppl": 6.41},
            "qad": {"kl": 0.0187, "top1": 0.9485, "ppl": 6.22},
            "teacher": {"ppl": 6.15},
            "kl_recovery": 0.546,
        },
        "drafter": {
            "pretrain": {"accept_length": 3.21},
            "finetune": {"accept_length": 3.58},
            "gptq": {"accept_length": 3.55},
            "swa": {"accept_length": None},
        },
        "ledger": [
            {"name": "baseline", "ms_per_token": 20.2, "speedup": 1.0, "accept_length": 1.0},
            {"name": "+ INT4 target", "ms_per_token": 15.1, "speedup": 1.34, "accept_length": 1.0},
            {"name": "+ drafter", "ms_per_token": 8.3, "speedup": 2.43, "accept_length": 3.58},
            {"name": "+ INT4 drafter", "ms_per_token": 7.11, "speedup": 2.84, "accept_length": 3.55},
        ],
        "latency": {
            "short": {"total_ms": 980.0, "ttft_ms": 24.1, "speedup": 2.9},
            "medium": {"total_ms": 2310.5, "ttft_ms": 310.0, "speedup": 2.6},
            "long": {"total_ms": None, "ttft_ms": None, "speedup": None},
        },
        "lossless": {"prompts": 64, "tokens": 12800, "divergences": 0, "near_ties": 0},
        "gates": [
            {"name": "kl_recovery", "measured": 0.546, "threshold": 0.4, "passed": True, "stderr": 0.02},
            {"name": "divergences", "measured": 0, "threshold": 0, "passed": True, "stderr": None},
            {"name": "speedup", "measured": 2.84, "threshold": 3.0, "passed": False, "stderr": 0.05},
        ],
        "name": "pocket",
        "date": "2026-07-14",
        "command": "twofold run pocket --out runs/pocket",
        "environment": {"cpu": "4 cores, AVX2", "memory": "16 GiB", "torch": "2.13.0", "twofold": "0.1.0"},
        "recipe": {"name": "pocket", "distill": {"steps": 400}, "note": "<script>alert(1)</script>"},
        "curve": [{"step": s, "kl": 0.0187 + 0.0225 * 0.985**s} for s in range(0, 401, 25)],
        "acceptance": {
            "positions": [0.78, 0.58, 0.42, 0.3, 0.21, 0.14, 0.08],
            "lengths": [220, 200, 160, 120, 90, 70, 60, 80],
        },
        "quality": [{"name": "closed questions", "teacher": 0.412, "ptq": 0.389, "qad": 0.405}],
    }


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_is_well_formed(tmp_path: Path) -> None:
    build_report(plausible(), tmp_path)
    text = (tmp_path / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    names = [tag for tag, _ in tags.seen]
    assert names.count("svg") == 4
    assert not {"script", "link", "img", "iframe"}.intersection(names)
    for _, attributes in tags.seen:
        for key in ("src", "href", "xlink:href"):
            assert (attributes.get(key) or "#").startswith("#")
    assert "url(http" not in text
    assert "@import" not in text
    assert "#01010" not in text  # every stand-in colour was replaced
    assert "2.84x as fast: 7.11 ms a token instead of 20.2" in text
    assert "12,800 tokens of 64 prompts: all equal to plain decoding." in text
    assert re.search(r"speedup</td><td>2.84</td><td>3</td><td>0.05</td><td class=.missed.>missed", text)
    assert text.count("not measured") == 4
    assert "94.85%" in text


def test_the_json_keeps_its_names(tmp_path: Path) -> None:
    build_report(plausible(), tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == plausible()
    assert read_report(tmp_path / "report.json") == plausible()


def test_the_least_report(tmp_path: Path) -> None:
    """Only what report.json must have; the page leaves out the rest."""
    least = {k: plausible()[k] for k in ("target", "drafter", "ledger", "latency", "lossless", "gates")}
    build_report(least | {"gates": []}, tmp_path)
    assert (tmp_path / "report.html").read_text().count("<svg") == 1


def test_the_same_figures_give_the_same_page() -> None:
    assert page(plausible()) == page(plausible())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("target", "ptq", "kl"), ..., "report.target.ptq.kl: is missing"),
        (("target", "ptq", "kl"), "0.1", "report.target.ptq.kl: is '0.1', should be a number or null"),
        (("target", "kl_recovery"), float("nan"), "report.target.kl_recovery: is nan, should be a number"),
        (("drafter", "swa"), ..., "report.drafter.swa: is missing"),
        (("ledger", 1, "speedup"), None, r"report.ledger\[1\].speedup: is None, should be a number"),
        (("ledger",), [], "report.ledger: has no entry"),
        (("latency", "huge"), {}, "report.latency.huge: is not known; known are: short, medium, long"),
        (("lossless", "divergences"), 0.5, "report.lossless.divergences: is 0.5, should be a whole number"),
        (("gates", 0, "passed"), 1, r"report.gates\[0\].passed: is 1, should be true or false"),
        (("extra",), 1, "report.extra: is not known"),
    ],
)
def test_what_is_wrong_is_named(path: tuple[str | int, ...], value: Any, message: str) -> None:
    data = copy.deepcopy(plausible())
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        validate(data)


def test_divergences_are_said() -> None:
    data = plausible() | {"lossless": {"prompts": 2, "tokens": 1000, "divergences": 3, "near_ties": 2}}
    assert lossless_line(data) == "1,000 tokens of 2 prompts: 3 divergences from plain decoding, 2 near-ties."
    assert "3 divergences" in page(data)


def test_headline() -> None:
    assert headline(plausible()) == "2.84x as fast: 7.11 ms a token instead of 20.2"


@pytest.mark.parametrize(
    ("content", "message"), [(b"{}", r"report\.target: is missing"), (b"", "Expecting value"), (b"\xff", "utf-8")]
)
def test_a_damaged_report_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{file} is damaged \(.*{message}.*\); run the recipe again$"):
        read_report(file)


def test_no_report_yet(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no .*; finish the run first"):
        read_report(tmp_path / "report.json")
