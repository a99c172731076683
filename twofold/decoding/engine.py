"""Requests in, text out: the decode loop with its endings, one sequence at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from twofold.decoding.step import Cycle, decode
from twofold.decoding.text import TextStream
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.models.tokenizer import Tokenizer
from twofold.ops.sampling import Sampling


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
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_context = max_context or target.config.max_position_embeddings

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

    def _deltas(self, request: Request, limit: int, eos: frozenset[int], text: TextStream) -> Iterator[Delta]:
        tokens: list[int] = []
        logprobs: list[float] = []
        given = cycles = 0
        ended = False
        for cycle in decode(self.target, self.drafter, request.prompt_ids, limit, request.sampling, eos):
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
