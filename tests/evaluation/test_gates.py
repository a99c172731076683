"""Gates: what passes, and what a missed one says."""

from __future__ import annotations

import pytest

from twofold.evaluation.gates import Gate, GateFailure, check


@pytest.mark.parametrize(
    ("gate", "passed", "text"),
    [
        (
            Gate(name="kl_gain", measured=0.31, threshold=0.4),
            False,
            "kl_gain 0.31 < 0.4: missed by 0.09",
        ),
        (Gate(name="kl_gain", measured=0.4, threshold=0.4), True, "kl_gain 0.4 >= 0.4"),
        (
            Gate(name="kl", measured=0.2, threshold=0.1, direction="<="),
            False,
            "kl 0.2 > 0.1: missed by 0.1",
        ),
        (Gate(name="kl", measured=0.01, threshold=0.01, direction="<="), True, "kl 0.01 <= 0.01"),
        (Gate(name="x", measured=1.0, threshold=2.0, stderr=0.1), False, "x 1 +- 0.1 < 2: missed by 1"),
        (Gate(name="x", measured=float("nan"), threshold=1.0), False, "x nan is no number; >= 1 asked"),
        (Gate(name="x", measured=float("inf"), threshold=1.0), False, "x inf is no number; >= 1 asked"),
        (Gate(name="x", measured=0.499999, threshold=0.5), False, "x 0.499999 < 0.5: missed by 1e-06"),
    ],
)
def test_gate(gate: Gate, passed: bool, text: str) -> None:
    assert gate.passed is passed
    assert gate.describe() == text


def test_check_names_every_missed_gate() -> None:
    low, fine = Gate(name="low", measured=0, threshold=1), Gate(name="fine", measured=1, threshold=1)
    high = Gate(name="high", measured=3, threshold=1, direction="<=")
    check([fine])
    with pytest.raises(GateFailure) as caught:
        check([low, fine, high])
    assert caught.value.missed == (low, high)
    assert str(caught.value) == "low 0 < 1: missed by 1\nhigh 3 > 1: missed by 2"
