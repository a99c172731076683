"""Chat in a terminal, or line by line from a pipe."""

from __future__ import annotations

import io
import time
from collections.abc import Generator, Iterator
from typing import TextIO, cast

from twofold.decoding.engine import Delta, Engine, Request

_HELP = "/reset forgets the conversation, /quit ends; Ctrl-C stops an answer"


def chat(engine: Engine, source: TextIO, sink: TextIO, notes: TextIO) -> None:
    """A conversation of several turns, answered greedily. Lines come from `source`, answers go to `sink`,
    the speed of each answer and all else to `notes`. Ends at /quit or at the end of `source`. ValueError at a line of
    a pipe that is not UTF-8, when those before it are answered; at a terminal it is noted.
    """
    messages: list[dict[str, str]] = []
    interactive = source.isatty()
    if interactive:
        print(f"{engine.model_name}. {_HELP}", file=notes, flush=True)
    if isinstance(source, io.TextIOWrapper):
        source.reconfigure(errors="surrogateescape")  # bytes that are no text come with their line, not before it
    for number, line in enumerate(_lines(source, interactive), 1):
        text = line.strip()
        if not text:
            continue
        if any("\udc80" <= character <= "\udcff" for character in text):
            if not interactive:
                raise ValueError(f"line {number} of the input is not UTF-8; convert it first, with iconv say")
            print("this line is not UTF-8; type it anew", file=notes, flush=True)
            continue
        if text == "/quit":
            return
        if text == "/reset":
            messages.clear()
            print("(forgotten)", file=notes, flush=True)
        elif text.startswith("/"):
            print(f"unknown command {text}; {_HELP}", file=notes, flush=True)
        else:
            messages.append({"role": "user", "content": text})
            answer = _answer(engine, messages, sink, notes)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _lines(source: TextIO, interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from source
        return
    import readline  # noqa: F401 - importing it gives input() its editing and its history

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # drops the line begun, as shells do
            print()


def _answer(engine: Engine, messages: list[dict[str, str]], sink: TextIO, notes: TextIO) -> str | None:
    """Streams the answer; None if the conversation no longer fits."""
    prompt_ids = engine.tokenizer.chat_ids(messages)
    room = engine.max_context - len(prompt_ids)
    if room < 1:
        print(
            f"the conversation has {len(prompt_ids)} tokens, the context holds {engine.max_context}; "
            "/reset to begin anew",
            file=notes,
            flush=True,
        )
        return None
    request = Request(prompt_ids=tuple(prompt_ids), max_tokens=room)
    deltas = cast("Generator[Delta, None, None]", engine.generate(request))
    parts: list[str] = []
    num_tokens, accept_length, started = 0, 0.0, time.perf_counter()
    try:
        for delta in deltas:
            parts.append(delta.text)
            num_tokens += len(delta.token_ids)
            accept_length = delta.accept_length if delta.finish_reason else accept_length
            sink.write(delta.text)
            sink.flush()
    except KeyboardInterrupt:
        print("\n(stopped)", end="", file=notes)
    finally:
        deltas.close()
    seconds = time.perf_counter() - started
    sink.write("\n")
    sink.flush()
    said = f", accept length {accept_length:.2f}" if accept_length else ""
    print(f"[{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s{said}]", file=notes, flush=True)
    return "".join(parts)
