"""The engine's benchmark: acceptance drawn around a mean, and figures that hang together."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from twofold.decoding.graphs import CapturedCycle
from twofold.evaluation.engine import (
    LABEL,
    EngineBench,
    ForcedAcceptance,
    accepted_counts,
    measure_engine,
    setting_name,
    time_answers,
)
from twofold.evaluation.roofline import variants
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


@pytest.mark.parametrize("length", [0.9, 8.1])
def test_a_block_cannot_gain_more_than_itself(length: float) -> None:
    with pytest.raises(ValueError, match="a block of 8 gains 1 to 8 tokens"):
        accepted_counts(length, 8, 10)


def test_cycles_gain_what_was_drawn() -> None:
    *_, (_, target, drafter) = variants(TINY, Kernels.reference(), CPU, torch.float32)
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
    *_, (_, target, drafter) = variants(TINY, Kernels.cpu(), CPU, torch.float32)
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
    names = ["BF16", "INT4 target", "+ BF16 drafter", "+ INT4 drafter", "+ SWA", "+ INT4 head"]
    assert [row["name"] for row in found["ledger"]] == names
    assert found["kind"] == LABEL
    assert found["setting"] == "12/6"
    assert found["bf16_ms_per_token"] == found["ledger"][0]["settings"]["12/6"]["ms_per_token"]
    assert found["cycle_ms"] == found["ledger"][-1]["cycle_ms"]
    assert list(found["total_ms"]) == list(found["ttft_ms"]) == ["8/10", "12/6", "20/6"]
    read = [row["bytes"] for row in found["ledger"]]
    assert read[1] < read[0]
    assert read[5] < read[4] <= read[3] < read[2]
    places = [(cycle["batch"], cycle["context"]) for cycle in found["cycles"]["speculative"]]
    assert places == [(1, 30), (1, 2048), (2, 2048)]


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


def test_the_result_has_what_its_table_shows() -> None:
    """scripts/tables.py draws a result as `bench --shape` writes it."""
    path = Path(__file__).parents[2] / "scripts" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", path)
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    config = EngineBench(accept_length=3.0, settings=((8, 6),), batches=(2,), warm_ups=0, runs=1)
    found = measure_engine(TINY, config, Kernels.cpu(), CPU, torch.float32, lambda _: None)
    made = {"command": "twofold bench", "date": "", "environment": {"hardware": "", "torch": ""}, **found}
    drawn = tables.tables("engine_4b", made).splitlines()
    assert sum(line.startswith("| 8/6 | ") for line in drawn) == 6
    assert sum("| 2 | 2,048 |" in line for line in drawn) == 3
