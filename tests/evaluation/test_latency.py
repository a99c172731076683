"""Latency, with a clock that counts what was done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.decoding.test_step import tiny
from twofold.decoding.step import Cycle
from twofold.evaluation import latency as module
from twofold.evaluation.latency import BenchConfig, Variant, measure_latency


class Clock:
    """Seconds that pass only when work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_figures_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    order: list[tuple[str, int]] = []
    target, drafter = tiny()
    seen = 0

    def decode(_: Any, drafter_: Any, prompt: tuple[int, ...], new_tokens: int, sampling: Any) -> Iterator[Cycle]:
        nonlocal seen
        seen += 1
        name = "plain" if drafter_ is None else "fast"
        order.append((name, prompt[0]))
        slow = 10.0 if len(order) <= 2 else 1.0  # the warm-up round is slow, and must not count
        clock.now += slow * prompt[0]  # prefill: as many seconds as the prompt says
        yield Cycle([1], torch.zeros(1, 2), 0)
        left, width = new_tokens - 1, 1 if drafter_ is None else 4
        while left:
            clock.now += slow * 0.5
            count = min(left, width)
            left -= count
            yield Cycle([1] * count, torch.zeros(count, 2), count - 1)

    monkeypatch.setattr(module, "decode", decode)
    monkeypatch.setattr(module.time, "perf_counter", clock.perf_counter)
    variants = {"plain": Variant(target, None), "fast": Variant(target, drafter)}
    reports: list[int] = []
    measured = measure_latency(variants, [[2], [4]], 9, 3, lambda done, *_: reports.append(done))

    assert reports == list(range(1, 8))  # a warm-up round, then 2 prompts, 3 runs each
    first = [("plain", 2), ("fast", 2)]
    assert order == first + [*first, ("plain", 4), ("fast", 4)] * 3  # taking turns
    plain, fast = measured["plain"], measured["fast"]
    assert plain.ttft_ms == fast.ttft_ms == pytest.approx(3000)  # the median of 2 s and 4 s
    assert plain.total_ms == pytest.approx(3000 + 8 * 500)
    assert fast.total_ms == pytest.approx(3000 + 2 * 500)
    assert plain.ms_per_token == pytest.approx(500)
    assert fast.ms_per_token == pytest.approx(2 * 500 / 8)
    assert (plain.accept_length, fast.accept_length) == (1.0, 4.0)


def test_on_a_model() -> None:
    target, drafter = tiny()
    variants = {"plain": Variant(target, None), "fast": Variant(target, drafter)}
    measured = measure_latency(variants, [[5, 6, 7]], 6, 1, lambda *_: None)
    for latency in measured.values():
        assert 0 < latency.ttft_ms < latency.total_ms
        assert latency.ms_per_token == pytest.approx((latency.total_ms - latency.ttft_ms) / 5)
    assert measured["plain"].accept_length == 1.0
    assert measured["fast"].accept_length >= 1.0


def test_settings_by_name() -> None:
    assert BenchConfig(short=(8, 4)).settings() == {"short": (8, 4), "medium": (2048, 256), "long": (8192, 256)}
