"""Acceptance by counting, its interval by the theory, the walk by hand."""

from __future__ import annotations

import random

import pytest

from twofold.decoding.acceptance import Acceptance, walk


def of(*answers: list[int]) -> Acceptance:
    found = Acceptance(4)
    for answer in answers:
        found.add(answer)
    return found


def test_figures_of_known_counts() -> None:
    found = of([0] * 5, [1, 3, 1], [1, 3])  # 10 cycles
    assert found.cycles == 10
    assert found.accept_length == pytest.approx(1 + (0 * 5 + 1 * 3 + 3 * 2) / 10)
    assert found.histogram() == [5, 3, 0, 2]
    assert found.by_position() == pytest.approx([5 / 10, 2 / 5, 2 / 2])
    assert found.by_category() == {}


def test_no_cycle_is_no_division_by_zero() -> None:
    for found in (Acceptance(4), of([]), of([], [])):
        assert (found.accept_length, found.histogram(), found.by_position()) == (1.0, [0] * 4, [0.0] * 3)
    assert Acceptance(4).interval() == (1.0, 1.0)


def test_the_interval_is_that_of_a_mean() -> None:
    """400 answers of as many cycles each, all of an answer alike: the mean's deviation is that of 400 draws."""
    draw = random.Random(0)
    values = [draw.choice([0, 3]) for _ in range(400)]
    found = of(*([value] * 10 for value in values))
    mean = sum(values) / 400
    deviation = (sum((v - mean) ** 2 for v in values) / 400 / 400) ** 0.5
    low, high = found.interval()
    assert low == pytest.approx(1 + mean - 1.96 * deviation, abs=0.2 * deviation)
    assert high == pytest.approx(1 + mean + 1.96 * deviation, abs=0.2 * deviation)
    assert found.interval() == (low, high)


def test_a_ratio_is_taken_in_pairs() -> None:
    """Prompts that differ widely, a drafter that gains the same everywhere: its ratio is sure."""
    draw = random.Random(1)
    easy = [draw.choice([0, 3]) for _ in range(50)]
    half = of(*([v] * 8 for v in easy))
    ratio, low, high = half.over(half)
    assert (ratio, low, high) == (1.0, 1.0, 1.0)
    worse = of(*([0] * 8 for _ in easy))
    ratio, low, high = worse.over(half)
    assert ratio == pytest.approx(1 / half.accept_length)
    assert low < ratio < high


def test_categories_have_figures() -> None:
    found = Acceptance(4)
    found.add([1, 1], "qa")
    found.add([3], "code")
    found.add([0])
    assert found.by_category().keys() == {"qa", "code"}
    assert found.figures()["categories"]["code"] == {"accept_length": 4.0, "interval": [4.0, 4.0], "cycles": 1}  # type: ignore[index]


def test_the_walk_goes_from_anchor_to_anchor() -> None:
    """Answer at 2 .. 13: anchors 2, 4, 8, 9, 12; blocks of 4."""
    right = [9, 9, 1, 9, 3, 9, 9, 9, 0, 2, 9, 9, 1, 0]
    assert walk(right, 2, 14, 4, ended=True) == [1, 3, 0, 2]  # at 12 the guess takes in the last token: cut
    right[12] = 0
    assert walk(right, 2, 14, 4, ended=True) == [1, 3, 0, 2, 0]  # the last token is the target's own
    assert walk(right, 2, 14, 4, ended=False) == [1, 3, 0, 2]  # at 12 less than a block was left
    assert walk(right, 2, 13, 4, ended=False) == [1, 3, 0]
    assert walk(right, 2, 3, 4, ended=True) == []
