"""Requests in, text out: the decode loop with its endings, one sequence at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from twofold.decoding.graphs import CapturedCycle
from twofold.decoding.step import Cycle, decode
from twofold.decoding.text import TextStream
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.models.tokenizer import Tokenizer
from twofold.ops.sampling import Sampling

LEAST_CAPACITY = 1024
MOST_CAPTURED = 4  # samplings whose graphs are kept


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt_ids: tuple[int, ...]
    sampling: Sampling = Sampling()
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What one cycle added. The last has a finish reason and the statistics of the whole answer.

    Text never ends inside a character or inside what may become a stop string, so a token's text can come with a
    later delta. `logprobs` are those of the target at temperature 1, one for each token.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    finish_reason: Literal["stop", "length"] | None = None
    prompt_tokens: int = 0
    cycles: int = 0  # draft-verify-commit cycles after the prefill
    accept_length: float = 0.0  # tokens gained a cycle, the mean


class Engine:
    """Target and drafter (None: plain decoding) with their tokenizer. Not for use from several threads."""

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        max_context: int | None = None,
        capture: bool | None = None,
    ) -> None:
        """`capture` says whether cycles are captured and replayed; None: on a GPU."""
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_context = max_context or target.config.max_position_embeddings
        self.capture = target.device.type == "cuda" if capture is None else capture
        self._captured: dict[Sampling, CapturedCycle] = {}  # of one capacity, sharing their buffers

    def generate(self, request: Request) -> Iterator[Delta]:
        """Yields what each cycle adds; closing the iterator ends the work.

        The answer ends with an EOS token (no part of the text), before a stop string ("stop"), or after exactly
        `max_tokens` tokens or at the end of the context ("length"). ValueError, at once, for an empty or
        too long prompt, an empty stop string, or no tokens.
        """
        num_prompt = len(request.prompt_ids)
        if num_prompt == 0:
            raise ValueError("the prompt is empty; send at least one token")
        if num_prompt >= self.max_context:
            raise ValueError(
                f"the prompt has {num_prompt} tokens and leaves no room for an answer in a context of "
                f"{self.max_context}; shorten it"
            )
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens is {request.max_tokens}; it must be at least 1")
        eos = frozenset() if request.ignore_eos else frozenset(self.target.config.eos_token_ids)
        limit = min(request.max_tokens, self.max_context - num_prompt)
        return self._deltas(request, limit, eos, TextStream(self.tokenizer.decode, request.stop))

    def _cycles(self, request: Request, limit: int, eos: frozenset[int]) -> Iterator[Cycle]:
        """Replayed where cycles are captured; called one by one where scores are asked for, which a graph keeps not."""
        prompt_ids, sampling = request.prompt_ids, request.sampling
        if not self.capture or request.logprobs:
            return decode(self.target, self.drafter, prompt_ids, limit, sampling, eos)
        captured = self._cycle(len(prompt_ids) + limit, replace(sampling, seed=0))
        return captured.decode(prompt_ids, limit, sampling.seed, eos)

    def _cycle(self, length: int, sampling: Sampling) -> CapturedCycle:
        """One of at least this capacity. A longer request than any before has buffers and graphs made anew."""
        held = next(iter(self._captured.values()), None)
        if held is not None and held.max_length < length:
            self._captured.clear()
            held = None
        found = self._captured.pop(sampling, None)
        if found is None:
            capacity = held.max_length if held else max(LEAST_CAPACITY, 1 << (length - 1).bit_length())
            rows = held.rows if held else None
            found = CapturedCycle(self.target, self.drafter, capacity, sampling, rows=rows)
            while len(self._captured) >= MOST_CAPTURED:
                del self._captured[next(iter(self._captured))]
        self._captured[sampling] = found  # the newest last
        return found

    def _deltas(self, request: Request, limit: int, eos: frozenset[int], text: TextStream) -> Iterator[Delta]:
        tokens: list[int] = []
        logprobs: list[float] = []
        given = cycles = 0
        ended = False
        for cycle in self._cycles(request, limit, eos):
            cycles += 1
            tokens += cycle.token_ids
            if request.logprobs:
                logprobs += _logprobs(cycle)
            ended = tokens[-1] in eos
            piece = text.push([token for token in cycle.token_ids if token not in eos])
            if text.stopped or ended or len(tokens) == limit:
                break
            upto = text.num_tokens  # tokens whose text is held back may not count in the end
            yield Delta(text=piece, token_ids=tuple(tokens[given:upto]), logprobs=tuple(logprobs[given:upto]))
            given = upto
        piece += text.flush()
        gained = (len(tokens) - 1) / max(1, cycles - 1)  # the first token is the prefill's
        if text.stopped:  # tokens whose text begins after the stop string do not count
            del tokens[text.num_tokens :], logprobs[text.num_tokens :]
        yield Delta(
            text=piece,
            token_ids=tuple(tokens[given:]),
            logprobs=tuple(logprobs[given:]),
            finish_reason="stop" if text.stopped or ended else "length",
            prompt_tokens=len(request.prompt_ids),
            cycles=cycles - 1,
            accept_length=gained if cycles > 1 else 0.0,
        )


def _logprobs(cycle: Cycle) -> list[float]:
    assert cycle.logits is not None
    chosen = cycle.logits[: len(cycle.token_ids)].float().log_softmax(dim=-1)
    return [float(row[token]) for row, token in zip(chosen, cycle.token_ids, strict=True)]
