"""What the drafter gains in the decode loop itself, and whether the loop is lossless."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from twofold.decoding.acceptance import Acceptance, walk
from twofold.decoding.step import decode
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.ops.sampling import Sampling, lead

Report = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """How much is measured: answers of up to `max_tokens` to `prompts` held-out prompts; the lossless check runs
    `lossless_prompts` of them to exactly `max_tokens`, greedily and at `temperature`."""

    prompts: int = 24
    max_tokens: int = 128
    lossless_prompts: int = 24
    temperature: float = 0.8

    def __post_init__(self) -> None:
        if min(self.prompts, self.max_tokens, self.lossless_prompts) < 1:
            raise ValueError(
                f"prompts = {self.prompts}, max_tokens = {self.max_tokens}, "
                f"lossless_prompts = {self.lossless_prompts}: each is 1 or more"
            )
        Sampling(temperature=self.temperature)  # has checks of its own


def measure_acceptance(
    target: CausalLM,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    max_tokens: int,
    sampling: Sampling,
    report: Report,
    categories: Sequence[str] | None = None,
) -> tuple[Acceptance, list[list[int]]]:
    """Speculative answers to the prompts: their acceptance, by the prompts' `categories` too, and their tokens."""
    found = Acceptance(drafter.config.block_size)
    answers = []
    stop_ids = frozenset(target.config.eos_token_ids)
    for number, prompt in enumerate(prompts, 1):
        tokens: list[int] = []
        right: dict[int, int] = {}  # after the anchor's position in the answer; the prefill's entry, -1, counts nothing
        room = max_tokens + found.block_size - 1  # so that the last cycle too drafts a whole block, as in training
        for cycle in decode(target, drafter, tuple(prompt), room, sampling, stop_ids):
            right[len(tokens) - 1] = cycle.num_accepted
            tokens += cycle.token_ids
            if len(tokens) >= max_tokens:
                break
        del tokens[max_tokens:]
        accepted = walk(right, 0, len(tokens), found.block_size, ended=tokens[-1] in stop_ids)
        found.add(accepted, categories[number - 1] if categories else "")
        answers.append(tokens)
        report(number, len(prompts), f"accept length {found.accept_length:.2f}")
    return found, answers


@dataclass(frozen=True)
class Losslessness:
    """`divergences` counts answers whose speculative tokens differ from the plain ones; `near_ties` those of them where
    the two tokens that came first at the first difference are within `NEAR_TIE` of one another (see `lead`)."""

    prompts: int
    tokens: int
    divergences: int
    near_ties: int


# What rounding may change in the distance of two scores: products of one row and of many sum in another order. Scores
# are rounded themselves, in bfloat16 by up to 0.06 each between 16 and 32.
NEAR_TIE = {torch.float32: 1e-3, torch.bfloat16: 0.5}


def check_lossless(
    target: CausalLM,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    max_tokens: int,
    samplings: Sequence[Sampling],
    report: Report,
) -> Losslessness:
    """Exactly `max_tokens` tokens for every prompt and sampling, once with and once without the drafter."""
    divergences = near_ties = done = 0
    for sampling in samplings:
        for prompt in prompts:
            plain = list(decode(target, None, tuple(prompt), max_tokens, sampling))
            speculative = decode(target, drafter, tuple(prompt), max_tokens, sampling)
            got = [token for cycle in speculative for token in cycle.token_ids]
            wanted = [token for cycle in plain for token in cycle.token_ids]
            assert len(got) == len(wanted) == max_tokens
            if got != wanted:
                divergences += 1
                first = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
                scores = plain[first].logits
                assert scores is not None
                near_ties += lead(scores[0], len(prompt) + first, sampling) < NEAR_TIE[scores.dtype]
            done += 1
            report(done, len(prompts) * len(samplings), f"{divergences} divergences")
    return Losslessness(done, done * max_tokens, divergences, near_ties)
