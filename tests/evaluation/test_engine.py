"""The engine's benchmark: acceptance drawn around a mean, and figures that hang together."""

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from twofold.decoding.graphs import CapturedCycle
from twofold.evaluation import engine
from twofold.evaluation.engine import ForcedAcceptance, accepted_counts, measure_engine, time_answers
from twofold.evaluation.engine_result import LABEL, EngineBench, Result, pieces, setting_name
from twofold.evaluation.roofline import ROWS, row_names, variants
from twofold.models.shapes import find_shape
from twofold.ops.kernels import Kernels
from twofold.ops.sampling import Sampling

TINY, CPU = find_shape("tiny"), torch.device("cpu")
BLOCK = TINY.drafter.block_size


@pytest.mark.parametrize("length", [1.0, 1.5, 3.1, 5.03, 7.9, 8.0])
def test_counts_have_the_mean_and_the_law_of_a_run_of_successes(length: float) -> None:
    counts = accepted_counts(length, 8, 4096)
    assert 1 + float(counts.double().mean()) == pytest.approx(length, abs=0.01)
    assert 0 <= int(counts.min()) <= int(counts.max()) <= 7
    reached = [float((counts >= k).double().mean()) for k in range(8)]
    for k in range(1, 7):  # each guess is as likely to be right as the first
        if reached[k] > 0.05:
            assert reached[k + 1] / reached[k] == pytest.approx(reached[1], abs=0.03)
    answers = counts[:4000].double().view(-1, 25).mean(dim=1)  # the cycles of 128 tokens
    assert float((1 + answers - length).abs().max()) < 0.5


@pytest.mark.parametrize("length", [0.9, 8.1])
def test_a_block_cannot_gain_more_than_itself(length: float) -> None:
    with pytest.raises(ValueError, match="a block of 8 gains 1 to 8 tokens"):
        accepted_counts(length, 8, 10)


def test_cycles_gain_what_was_drawn() -> None:
    *_, (_, target, drafter), _ = variants(TINY, Kernels.reference(), CPU, torch.float32)
    assert drafter is not None
    counts = torch.tensor([3, 0, 7, 2])
    captured = CapturedCycle(target, drafter, 80, Sampling(), batch_size=2, accept=ForcedAcceptance(counts, CPU))
    captured.start(torch.ones(2, 5, dtype=torch.long), 0)
    gained = []
    for _ in range(6):
        captured.launch()
        gained.append([len(tokens) for tokens in captured.read()])
    assert gained == [[4, 4], [1, 1], [8, 8], [3, 3], [4, 4], [1, 1]]
    assert captured.rows.state.lengths_B.tolist() == [5 + 21] * 2


def test_a_timing_hangs_together() -> None:
    *_, (_, target, drafter), _ = variants(TINY, Kernels.cpu(), CPU, torch.float32)
    assert drafter is not None
    forced = ForcedAcceptance(torch.tensor([2]), CPU)
    timing = time_answers(CapturedCycle(target, drafter, 40, Sampling(), accept=forced), 10, 22, 0, 1)
    assert timing.accept_length == 3.0
    assert timing.total_ms - timing.ttft_ms == pytest.approx(7 * timing.cycle_ms)
    assert timing.ms_per_token == pytest.approx((timing.total_ms - timing.ttft_ms) / 21)


def test_the_whole_of_it_on_a_tiny_shape() -> None:
    config = EngineBench(
        accept_length=3.0, settings=((8, 10), (12, 6), (20, 6)), batches=(1, 2), contexts=(30,), warm_ups=0, runs=1
    )
    lines: list[str] = []
    found = measure_engine(TINY, config, Kernels.cpu(), CPU, torch.float32, lines.append)
    assert json.loads(json.dumps(found)) == found
    assert LABEL in lines[0]
    names = ["BF16", "INT4 target", "+ BF16 drafter", "+ INT4 drafter", "+ SWA", "+ INT4 head", "all INT4, plain"]
    assert [row["name"] for row in found["ledger"]] == names
    assert found["complete"] is True
    assert {figures["process"] for row in found["ledger"] for figures in row["settings"].values()} == {1}
    assert found["kind"] == LABEL
    assert found["setting"] == "12/6"
    assert found["bf16_ms_per_token"] == found["ledger"][0]["settings"]["12/6"]["ms_per_token"]
    assert found["cycle_ms"] == found["ledger"][5]["cycle_ms"]
    assert list(found["total_ms"]) == list(found["ttft_ms"]) == ["8/10", "12/6", "20/6"]
    read = [row["bytes"] for row in found["ledger"]]
    assert read[1] < read[0]
    assert read[6] < read[5] < read[4] <= read[3] < read[2]
    places = [(cycle["batch"], cycle["context"]) for cycle in found["cycles"]["speculative"]]
    assert places == [(1, 30), (1, 2048), (2, 2048)]


SMALL = EngineBench(accept_length=3.0, settings=((8, 10), (12, 6)), batches=(1, 2), warm_ups=0, runs=1)
PIECES = 7 * 2 + 3 * 2  # rows and settings; three rows and batches


def measure(config: EngineBench = SMALL, **more: Any) -> Result:
    say = more.pop("say", lambda _: None)
    return measure_engine(TINY, config, Kernels.cpu(), CPU, torch.float32, say, **more)


def steady(result: Result) -> Any:
    """What does not depend on the machine's speed."""
    ledger = [
        (row["name"], [(name, x["accept_length"], x["bytes"]) for name, x in row["settings"].items()])
        for row in result["ledger"]
    ]
    cycles = {name: [(c["batch"], c["context"], c["bytes"]) for c in found] for name, found in result["cycles"].items()}
    return ledger, cycles, result["complete"], list(result["total_ms"])


@pytest.fixture(scope="module")
def uninterrupted() -> Result:
    return measure()


@pytest.mark.parametrize("kept", [1, 2, 7, PIECES - 1])
def test_what_a_killed_process_kept_is_gone_on_with(
    kept: int, uninterrupted: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    left = itertools.count(kept, -1)

    def mortal(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if next(left) == 0:
                raise RuntimeError("out of memory")
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(engine, "time_answers", mortal(time_answers))
        patch.setattr(engine, "time_cycles", mortal(engine.time_cycles))
        with pytest.raises(RuntimeError, match="out of memory"):
            measure(keep=lambda result: states.append(json.dumps(result)))
    assert len(states) == kept
    earlier = json.loads(states[-1])
    assert earlier["complete"] is False
    found = measure(keep=lambda result: states.append(json.dumps(result)), earlier=earlier)
    assert len(states) == PIECES
    assert [json.loads(state)["complete"] for state in states] == [False] * (PIECES - 1) + [True]
    assert steady(found) == steady(uninterrupted)
    figures = [x for row in found["ledger"] for x in row["settings"].values()]
    figures += [x for cycles in found["cycles"].values() for x in cycles]
    assert sorted(x["process"] for x in figures) == [1] * kept + [2] * (PIECES - kept)
    assert len(found["processes"]) == 2
    assert found["ledger"][0]["settings"]["8/10"] == earlier["ledger"][0]["settings"]["8/10"]  # not measured again


def test_no_piece_begins_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    lasting = iter([3.0, 10.0, 4.0, 4.0, 4.0])

    def timed(*_: Any) -> dict[str, Any]:
        nonlocal now
        now += next(lasting)
        return dict.fromkeys(("ttft_ms", "cycle_ms", "ms_per_token", "total_ms", "bytes", "share_of_copy"), 1.0) | {
            "kernels": None
        }

    monkeypatch.setattr(engine, "measure_answers", timed)
    config = EngineBench(accept_length=3.0, settings=((8, 10), (12, 6), (20, 6)))
    lines: list[str] = []
    # ends at 103, 113, 117, 121; then 10 more, as long as the second took, would be 131
    found = measure(config, deadline=130.5, clock=lambda: now, say=lines.append)
    assert [list(row["settings"]) for row in found["ledger"]] == [["8/10", "12/6", "20/6"], ["8/10"]]
    assert found["complete"] is False
    assert "17 of 21 pieces are missing, the longest took 10 s; the same command goes on" in lines[-1]
    # a later process knows how long they took, and begins none either
    again = measure(config, earlier=found, deadline=now + 9.9, clock=lambda: now, say=lines.append)
    assert again["ledger"] == found["ledger"]
    again = measure(config, earlier=found, deadline=now + 10.1, clock=lambda: now, say=lines.append)
    assert [list(row["settings"]) for row in again["ledger"]] == [["8/10", "12/6", "20/6"], ["8/10", "12/6"]]
    assert [x["process"] for x in again["ledger"][1]["settings"].values()] == [1, 2]


def test_some_rows_alone() -> None:
    config = EngineBench(accept_length=3.0, settings=((8, 6),), warm_ups=0, runs=1, rows=("+ INT4 head", "BF16"))
    found = measure(config)
    assert [row["name"] for row in found["ledger"]] == ["BF16", "+ INT4 head"]
    assert found["complete"] is True
    assert "int4_ms_per_token" not in found
    assert found["cycle_ms"] == found["ledger"][1]["cycle_ms"]
    with pytest.raises(ValueError, match="no row 'INT4' on this machine; its rows are: BF16, INT4 target, "):
        measure(EngineBench(accept_length=3.0, rows=("INT4",)))


def test_rows_have_the_names_of_the_variants() -> None:
    kernels = Kernels.cpu()
    assert tuple(name for name, *_ in variants(TINY, kernels, CPU, torch.float32)) == row_names(kernels, CPU)
    assert row_names(kernels, CPU) == ROWS[:-1]  # the last needs a GPU


def test_a_piece_is_measured_once() -> None:
    config = EngineBench(accept_length=3.0, settings=((8, 6), (8, 6)), contexts=(2048,))
    found = pieces(config, ("BF16", "+ SWA"))
    assert [(piece.row, piece.part, piece.at) for piece in found] == [
        ("BF16", "settings", (8, 6)),
        ("BF16", "cycles", (1, 2048)),
        ("+ SWA", "settings", (8, 6)),
    ]


def test_settings_have_names() -> None:
    assert [setting_name(s) for s in ((64, 128), (2048, 256), (8192, 256), (16, 8))] == [
        "short",
        "medium",
        "long",
        "16/8",
    ]
    with pytest.raises(ValueError, match="PROMPT/NEW"):
        EngineBench(accept_length=2.0, settings=((1, 8),))
    with pytest.raises(ValueError, match="at least 1"):
        EngineBench(accept_length=2.0, runs=0)


def table(result: Result) -> list[str]:
    """As scripts/tables.py draws it, of a result as `bench --shape` writes it."""
    path = Path(__file__).parents[2] / "scripts" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", path)
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    written = {
        "command": "twofold bench",
        "date": "",
        "environment": {"hardware": "", "torch": ""},
        "runs": 1,
        **result,
    }
    drawn: list[str] = tables.tables("engine_4b", written).splitlines()
    return drawn


def test_the_result_has_what_its_table_shows(uninterrupted: Result) -> None:
    drawn = table(uninterrupted)
    assert sum(line.startswith("| 8/10 | ") for line in drawn) == 7
    assert sum("| 2 | 2,048 |" in line for line in drawn) == 3
    assert not any("complete" in line or "process" in line for line in drawn)
    assert {line.count("|") for line in drawn if line.startswith("| 8/10 | ")} == {10}


def test_a_table_says_what_is_missing_and_what_makes_no_ratio() -> None:
    states: list[Result] = []
    config = EngineBench(accept_length=3.0, settings=((8, 6), (10, 6)), warm_ups=0, runs=1, rows=("BF16", "+ SWA"))
    measure(config, keep=lambda result: states.append(json.loads(json.dumps(result))))
    drawn = table(states[2])  # the last row lacks a setting
    assert sum(line.startswith("| 8/6 | ") for line in drawn) == 2
    assert sum(line.startswith("| 10/6 | ") for line in drawn) == 1
    assert "Not complete: what is not here was not measured." in drawn
    drawn = table(measure(config, earlier=states[0]))
    assert not any("Not complete" in line for line in drawn)
    assert any("only rows of the same one make a ratio" in line for line in drawn)
    processes = [line.split("|")[-2].strip() for line in drawn if line.startswith(("| 8/6", "| 10/6"))]
    assert processes == ["1", "2", "2", "2"]
    assert len({line.count("|") for line in drawn if line.startswith("|")}) == 1
