"""Progress of long work: how far, how fast, how long still."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

_WINDOW_SECONDS = 30.0  # the rate is that of the last half minute: it follows a change of pace
_TERMINAL_SECONDS = 0.1
_LOG_SECONDS = 5.0


class Progress:
    """Called as `progress(done, total, note)`; writes

        distill  120/400 steps  30 %  8.1 steps/s  KL 0.012  left 0:35

    over one line of a terminal, and every few seconds as a new line elsewhere (logs, pipes). The first call
    sets the start: work that was done before it (a resumed run) does not count into the rate.
    """

    def __init__(
        self,
        stage: str,
        total: int,
        unit: str,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage, self.total, self.unit = stage, total, unit
        self._stream, self._clock = stream, clock
        self._terminal = stream.isatty()
        self._history: deque[tuple[float, int]] = deque()
        self._written: float | None = None
        self._open_line = False

    def __call__(self, done: int, total: int, note: str = "") -> None:
        if self._history and done < self._history[-1][1]:  # a new phase of the stage counts from its start
            self._history.clear()
        self.total = total
        self.update(done, note)

    def update(self, done: int, note: str = "") -> None:
        now = self._clock()
        self._history.append((now, done))
        while len(self._history) > 2 and now - self._history[1][0] >= _WINDOW_SECONDS:
            self._history.popleft()
        pause = _TERMINAL_SECONDS if self._terminal else _LOG_SECONDS
        if self._written is not None and now - self._written < pause and done < self.total:
            return
        self._written = now
        line = self._line(done, note)
        if self._terminal:
            self._stream.write(f"\r{line}\x1b[K")
            self._open_line = True
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Clears the terminal's progress line; what was written to a log stays."""
        if self._open_line:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._open_line = False

    def _line(self, done: int, note: str) -> str:
        percent = 100 * done // self.total if self.total else 100
        parts = [self.stage, f"{done}/{self.total} {self.unit}", f"{percent} %"]
        (then, done_then), (now, _) = self._history[0], self._history[-1]
        rate = (done - done_then) / (now - then) if now > then else 0.0
        if rate > 0:
            parts.append(f"{rate:.3g} {self.unit}/s" if rate < 1000 else f"{rate:.0f} {self.unit}/s")
        if note:
            parts.append(note)
        if rate > 0 and done < self.total:
            parts.append(f"left {duration((self.total - done) / rate)}")
        return "  ".join(parts)


def duration(seconds: float) -> str:
    """0:35, 12:05, 3:20:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
