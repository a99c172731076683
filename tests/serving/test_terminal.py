"""Chat from a pipe, over an engine that echoes."""

from __future__ import annotations

import io
import re

import pytest

from tests.serving.fake import CONTEXT, FakeEngine
from twofold.serving.terminal import chat


def talk(engine: FakeEngine, *lines: str) -> tuple[list[str], list[str]]:
    """The lines of answers and the notes."""
    sink, notes = io.StringIO(), io.StringIO()
    chat(engine, io.StringIO("".join(f"{line}\n" for line in lines)), sink, notes)  # type: ignore[arg-type]
    return sink.getvalue().splitlines(), notes.getvalue().splitlines()


def test_lines_are_answered_with_their_speed() -> None:
    answers, notes = talk(FakeEngine(), "hello", "", "  你好 ")
    assert answers == ["re: hello", "re: 你好"]
    assert re.fullmatch(r"\[9 tokens, [\d.]+ tokens/s, accept length [1-5]\.\d\d\]", notes[0])
    assert len(notes) == 2


def test_turns_add_up_until_reset() -> None:
    answers, notes = talk(FakeEngine(), "plan", "plan", "/reset", "plan")
    assert answers == ["re: 1", "re: 3", "re: 1"]
    assert "(forgotten)" in notes


def test_quit_and_unknown_commands() -> None:
    answers, notes = talk(FakeEngine(), "/help", "/quit", "hello")
    assert answers == []
    assert notes == ["unknown command /help; /reset forgets the conversation, /quit ends; Ctrl-C stops an answer"]


def test_a_conversation_that_no_longer_fits_is_said() -> None:
    answers, notes = talk(FakeEngine(), "x" * CONTEXT, "hello")
    assert answers == ["re: hello"]
    assert "has 4097 tokens, the context holds 4096; /reset" in notes[0]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # a locale's choice
def test_bytes_that_are_no_text_are_refused_after_what_came_before(errors: str) -> None:
    source = io.TextIOWrapper(io.BytesIO(b"hello\n\nh\xe9llo\nagain\n"), encoding="utf-8", errors=errors)
    sink = io.StringIO()
    with pytest.raises(ValueError, match="line 3 of the input is not UTF-8; convert it first") as caught:
        chat(FakeEngine(), source, sink, io.StringIO())  # type: ignore[arg-type]
    assert not isinstance(caught.value, UnicodeError)
    assert sink.getvalue() == "re: hello\n"


def test_at_a_terminal_the_conversation_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    typed, sink, notes = iter(["plan", "h\udce9llo", "plan", "/quit"]), io.StringIO(), io.StringIO()
    source = io.StringIO()
    monkeypatch.setattr(source, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    chat(FakeEngine(), source, sink, notes)  # type: ignore[arg-type]
    assert sink.getvalue().splitlines() == ["re: 1", "re: 3"]
    assert "this line is not UTF-8; type it anew" in notes.getvalue().splitlines()


def test_an_interrupt_ends_the_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sink, notes = FakeEngine(), io.StringIO(), io.StringIO()
    write = sink.write

    def interrupted(text: str) -> int:
        if len(sink.getvalue()) > 20:
            monkeypatch.setattr(sink, "write", write)
            raise KeyboardInterrupt
        return write(text)

    monkeypatch.setattr(sink, "write", interrupted)
    chat(engine, io.StringIO("forever\nhello\n"), sink, notes)  # type: ignore[arg-type]
    assert engine.closed_early == 1
    assert engine.running == 0
    assert sink.getvalue().splitlines()[-1] == "re: hello"
    assert "(stopped)" in notes.getvalue()
