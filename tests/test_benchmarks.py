"""What benchmarks measure is what they say."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_a_drafters_step_is_the_same_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rows, whose blocks have not as many guesses each, one at a time or both at once: the losses of two steps."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("draft_4b_step")

    def losses(rows: int) -> list[float]:
        asked = f"--tiny --attention mask --batch-rows 2 --rows {rows} --length 32 --anchors 2 --steps 2 --out"
        monkeypatch.setattr(sys, "argv", ["", *asked.split(), str(tmp_path / "step.json")])
        torch.manual_seed(0)
        module.main()
        return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]

    together = losses(2)
    assert len(together) == 2
    assert losses(1) == pytest.approx(together, abs=0.01)  # products are bfloat16
