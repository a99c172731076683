"""From tokens to text, as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

_HOLE = "\ufffd"  # what bytes that are no character (yet) decode to
_LONGEST_WINDOW, _SHORTEST_WINDOW = 64, 32  # tokens; a character is 4 bytes at most


class TextStream:
    """The text of a growing token sequence.

    Let full be the one-shot decode of all tokens. The text given out is full[:s], s the least start of any
    stop string in full, or all of full: it depends neither on how tokens were cut into pushes nor on which
    stop string was completed first. Of the tokens, it takes those whose own text begins before s.

    `decode` must be that of a byte-level tokenizer: bytes concatenated, then UTF-8 in which an incomplete
    character at the end is one U+FFFD. Each token costs two decodes of a short window.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: tuple[str, ...] = ()) -> None:
        if not all(stop):
            raise ValueError("a stop string must not be empty; leave it out")
        self._decode = decode
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._window: list[int] = []  # the tokens since the last clean border but one
        self._mark = 0  # where in the window the last clean border is
        self._read = 0  # characters of the window's text that were read
        self._hole = False  # whether the text ends in a character that may still be incomplete
        self._pending = ""  # characters that were read, but may belong to a stop string
        self._length = 0  # characters read, of all tokens
        self._given = 0  # characters given out
        self._begins: list[int] = []  # of every token: in which character its text begins
        self._ended = False
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes further tokens and returns the text that is certain now. After a stop string: nothing."""
        if self._ended:
            return ""
        return self._certain("".join(map(self._characters, token_ids)), final=False)

    def flush(self) -> str:
        """The text held back, at the end of the sequence. It too may hold a stop string: see `stopped`."""
        if self._ended:
            return ""
        self._ended = True
        self._length += self._hole
        return self._certain(_HOLE if self._hole else "", final=True)

    @property
    def num_tokens(self) -> int:
        """How many tokens the text given out so far took; never decreases."""
        if self._ended and not self.stopped:
            return len(self._begins)
        return bisect_left(self._begins, self._given)

    @property
    def length(self) -> int:
        """Whole characters that the tokens so far have, whether they are given out or not."""
        return self._length

    def _characters(self, token: int) -> str:
        """The whole characters that the token completes."""
        self._begins.append(self._length)
        self._window.append(token)
        text = self._decode(self._window)
        self._hole = text.endswith(_HOLE)
        new = text[self._read : len(text) - self._hole]
        self._read += len(new)
        self._length += len(new)
        if new and not self._hole:  # one clean piece stays as context, for decoders that look at it
            self._cut(self._mark)
            self._mark = len(self._window)
        elif len(self._window) > _LONGEST_WINDOW:  # no text ends here, but no character is that long
            self._cut(len(self._window) - _SHORTEST_WINDOW)
            self._mark = 0
        return new

    def _cut(self, start: int) -> None:
        if start:
            self._window = self._window[start:]
            self._read = len(self._decode(self._window)) - self._hole

    def _certain(self, new: str, *, final: bool) -> str:
        text = self._pending + new
        starts = [start for stop in self._stop if (start := text.find(stop)) >= 0]
        found = min(starts, default=len(text))
        held = len(text) if final else self._first_hope(text)
        self.stopped = bool(starts) and found <= held
        self._ended = self._ended or self.stopped
        end = min(found, held)
        self._pending = text[end:]
        self._given += end
        return text[:end]

    def _first_hope(self, text: str) -> int:
        """The least position from which the text is the beginning of a stop string; its length if none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stop):
                return start
        return len(text)
