"""Gates: thresholds that a measured number must meet before the line goes on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Gate:
    """`measured direction threshold` must hold. `stderr`, the standard error of `measured`, only informs.

    A number that is not finite passes no gate.
    """

    name: str
    measured: float
    threshold: float
    direction: Literal[">=", "<="] = ">="
    stderr: float | None = None

    @property
    def passed(self) -> bool:
        if not math.isfinite(self.measured):
            return False
        if self.direction == ">=":
            return self.measured >= self.threshold
        return self.measured <= self.threshold

    def describe(self) -> str:
        """One line: "kl_recovery 0.31 < 0.4: missed by 0.09", or "kl_recovery 0.5 >= 0.4"."""
        error = "" if self.stderr is None else f" +- {_short(self.stderr)}"
        if self.passed:
            return f"{self.name} {_short(self.measured)}{error} {self.direction} {_short(self.threshold)}"
        if not math.isfinite(self.measured):
            return f"{self.name} {self.measured} is no number; {self.direction} {_short(self.threshold)} asked"
        sign = "<" if self.direction == ">=" else ">"
        missed_by = abs(self.threshold - self.measured)
        measured, threshold = _short(self.measured), _short(self.threshold)
        if measured == threshold:  # a near miss must not read "0.4 < 0.4"
            measured, threshold = repr(self.measured), repr(self.threshold)
        return f"{self.name} {measured}{error} {sign} {threshold}: missed by {_short(missed_by)}"


class GateFailure(Exception):  # noqa: N818 - it is a finding, not an error of the program
    """Some gates were missed; the message has one line for each."""

    def __init__(self, missed: Iterable[Gate]) -> None:
        self.missed = tuple(missed)
        super().__init__("\n".join(gate.describe() for gate in self.missed))


def check(gates: Iterable[Gate]) -> None:
    """Raises GateFailure with every missed gate; returns if all are passed."""
    missed = [gate for gate in gates if not gate.passed]
    if missed:
        raise GateFailure(missed)


def _short(value: float) -> str:
    return f"{value:.4g}"
