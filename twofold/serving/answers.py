"""Answers in the format of the OpenAI API, whole or as a stream of chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from twofold.decoding.engine import Delta
from twofold.decoding.text import TextStream

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


def event(content: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What stays the same over an answer: who answers, in which of the two formats, with what."""

    model: str
    chat: bool
    prompt_tokens: int
    logprobs: bool
    decode: Callable[[Sequence[int]], str]  # for the text of single tokens in logprobs
    created: int = field(default_factory=lambda: int(time.time()))
    key: str = field(default_factory=lambda: secrets.token_hex(12))

    async def whole(self, deltas: AsyncIterable[Delta]) -> Json:
        """One object with the text, finish_reason, and usage."""
        parts = [delta async for delta in deltas]
        text = "".join(part.text for part in parts)
        last = parts[-1] if parts else None  # none: cancelled, nobody will read this
        choice: Json = {"index": 0, "finish_reason": last.finish_reason if last else None}
        choice |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice["logprobs"] = self._logprobs(parts, TextStream(self.decode))
        body = self._head("chat.completion") | {"choices": [choice], "usage": self._usage(parts)}
        return body | (_statistics(last) if last else {})

    async def chunks(self, deltas: AsyncIterable[Delta], *, include_usage: bool) -> AsyncIterator[Json]:
        """A chunk for every delta with something to say; the last of them has the finish_reason."""
        empty = {"usage": None} if include_usage else {}
        head = self._head("chat.completion.chunk")
        if self.chat:
            role = {"role": "assistant", "content": ""}
            yield head | {"choices": [self._piece(role, None, None)]} | empty
        completion_tokens, before = 0, TextStream(self.decode)
        async for delta in deltas:
            completion_tokens += len(delta.token_ids)
            if not (delta.text or delta.finish_reason or (self.logprobs and delta.logprobs)):
                continue
            piece = {"content": delta.text} if self.chat else delta.text
            choice = self._piece(piece, delta.finish_reason, self._logprobs([delta], before))
            yield head | {"choices": [choice]} | empty | _statistics(delta)
        if include_usage:
            yield head | {"choices": [], "usage": self._counts(completion_tokens)}

    def _head(self, kind: str) -> Json:
        prefix, kind = ("chatcmpl", kind) if self.chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self.key}", "object": kind, "created": self.created, "model": self.model}

    def _piece(self, piece: Any, finish_reason: str | None, logprobs: Json | None) -> Json:
        name = "delta" if self.chat else "text"
        return {"index": 0, name: piece, "logprobs": logprobs, "finish_reason": finish_reason}

    def _usage(self, parts: Sequence[Delta]) -> Json:
        return self._counts(sum(len(part.token_ids) for part in parts))

    def _counts(self, completion_tokens: int) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }

    def _logprobs(self, parts: Sequence[Delta], before: TextStream) -> Json | None:
        """One entry a token, of the chosen token only. `before` has the answer's tokens before these, and takes these:
        a token's offset is the character of the answer in which its text begins."""
        if not self.logprobs:
            return None
        values = [value for part in parts for value in part.logprobs]
        texts = [self.decode([token]) for part in parts for token in part.token_ids]
        if not self.chat:
            offsets = []
            for part in parts:
                for token in part.token_ids:
                    offsets.append(before.length)
                    before.push([token])
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
        content = []
        for text, value in zip(texts, values, strict=True):
            # A token that is a part of a character has no text whose bytes would be its own.
            own = None if "\ufffd" in text else list(text.encode())
            content.append({"token": text, "logprob": value, "bytes": own, "top_logprobs": []})
        return {"content": content, "refusal": None}


def _statistics(delta: Delta) -> Json:
    """How the speculation went, beside what the API knows; only the last delta says."""
    if delta.finish_reason is None:
        return {}
    return {"twofold": {"cycles": delta.cycles, "accept_length": delta.accept_length}}
