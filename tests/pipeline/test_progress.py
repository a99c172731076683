"""Progress lines: rate and time left are those of the work done since the start."""

from __future__ import annotations

import io

import pytest

from twofold.pipeline.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_log_lines_every_few_seconds_and_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress("distill", 400, "steps", stream, clock)
    for done in range(0, 401, 40):
        progress(done, 400, f"KL {done}")
        clock.now += 2.0  # 20 steps a second
    lines = stream.getvalue().splitlines()
    assert lines[0] == "distill  0/400 steps  0 %  KL 0"
    assert lines[1] == "distill  120/400 steps  30 %  20 steps/s  KL 120  left 0:14"
    assert lines[-1] == "distill  400/400 steps  100 %  20 steps/s  KL 400"
    assert len(lines) == 5


def test_resumed_work_does_not_count_into_the_rate() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress("distill", 400, "steps", stream, clock)
    progress(300, 400)
    clock.now += 10.0
    progress(310, 400)
    assert stream.getvalue().splitlines()[-1] == "distill  310/400 steps  77 %  1 steps/s  left 1:30"


def test_the_rate_follows_a_change_of_pace() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress("bench", 10_000, "runs", stream, clock)
    done = 0
    for rate in (10, 100):
        for _ in range(60):
            clock.now += 1.0
            done += rate
            progress.update(done)
    assert "100 runs/s" in stream.getvalue().splitlines()[-1]


def test_a_second_phase_begins_anew() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress("quantize", 10, "layers", stream, clock)
    progress(10, 10)
    clock.now += 100.0
    progress(0, 4)
    clock.now += 10.0
    progress(2, 4)
    assert stream.getvalue().splitlines()[-1] == "quantize  2/4 layers  50 %  0.2 layers/s  left 0:10"


def test_a_terminal_line_is_rewritten_and_cleared() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress("distill", 10, "steps", stream, clock)
    progress(1, 10)
    progress(2, 10)  # at once: not written
    clock.now += 1.0
    progress(3, 10)
    progress.close()
    assert stream.getvalue() == (
        "\rdistill  1/10 steps  10 %\x1b[K"
        "\rdistill  3/10 steps  30 %  2 steps/s  left 0:04\x1b[K"  # (3 - 1) steps in 1 s; 7 / 2 rounded
        "\r\x1b[K"
    )


@pytest.mark.parametrize(("seconds", "text"), [(725, "12:05"), (35, "0:35"), (12000, "3:20:00")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
