"""An engine without a model: tokens are bytes, the answer is a function of the last message."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twofold.decoding.engine import Delta, Request
from twofold.decoding.text import TextStream

END = 255  # separates messages; occurs in no UTF-8 text
CONTEXT = 4096


class ByteTokenizer:
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        ids: list[int] = []
        for message in messages:
            if not isinstance(message["content"], str):
                raise ValueError("the content of a message must be a text or a list of text parts")
            ids += [END, *message["content"].encode()]
        return ids


class FakeEngine:
    """Answers "re: " and the last message, in random blocks of 1 to 5 tokens.

    A last message that begins with "forever" is answered without end, one with "fail" by a defect after
    four tokens, one with "refuse" by a ValueError, one with "plan" by the number of messages.
    """

    model_name = "fake"
    max_context = CONTEXT

    def __init__(self, *, cycle_s: float = 0.0) -> None:
        self.tokenizer = ByteTokenizer()
        self.cycle_s = cycle_s
        self.requests: list[Request] = []
        self.running = 0
        self.most_running = 0
        self.closed_early = 0
        self.threads: set[str] = set()

    def generate(self, request: Request) -> Iterator[Delta]:
        self.requests.append(request)
        self.threads.add(threading.current_thread().name)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            yield from self._deltas(request)
        except GeneratorExit:
            self.closed_early += 1
            raise
        finally:
            self.running -= 1

    def _deltas(self, request: Request) -> Iterator[Delta]:
        last = bytes(request.prompt_ids).rpartition(bytes([END]))[2]
        if last.startswith(b"refuse"):
            raise ValueError("this engine refuses")
        text = b"re: " + (str(request.prompt_ids.count(END)).encode() if last.startswith(b"plan") else last)
        whole = text * CONTEXT if last.startswith(b"forever") else text
        answer, draw = whole[: request.max_tokens], random.Random(len(whole))
        stream, start, taken, cycles = TextStream(self.tokenizer.decode, request.stop), 0, 0, 0
        while True:
            block = answer[start : start + draw.randint(1, 5)]
            start += len(block)
            cycles += 1
            time.sleep(self.cycle_s)
            given = stream.push(block)
            ended = start >= len(answer)
            if ended:
                given += stream.flush()
            ids = tuple(answer[taken : stream.num_tokens])
            taken = stream.num_tokens
            over = ended or stream.stopped
            cut = ended and len(whole) > len(answer) and not stream.stopped
            yield Delta(
                text=given,
                token_ids=ids,
                logprobs=tuple(-token / 256 for token in ids) if request.logprobs else (),
                finish_reason=("length" if cut else "stop") if over else None,
                cycles=cycles,
                accept_length=taken / cycles,
                prompt_tokens=len(request.prompt_ids),
            )
            if over:
                return
            if last.startswith(b"fail") and start >= 4:
                raise RuntimeError("a defect")
