"""Latency of whole answers: time to first token, time per token, total; every variant in one process."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from twofold.decoding.graphs import CapturedCycle
from twofold.decoding.step import Cycle, decode
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.ops.sampling import Sampling

Report = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Settings are (prompt tokens, new tokens); greedy, one sequence, EOS ignored, medians over prompts and runs."""

    short: tuple[int, int] = (64, 128)
    medium: tuple[int, int] = (2048, 256)
    long: tuple[int, int] = (8192, 256)
    prompts: int = 4
    runs: int = 3
    chat_prompts: int = 16  # held-out prompts as they are
    chat_tokens: int = 128

    def __post_init__(self) -> None:
        sizes = vars(self).items()
        if small := [name for name, size in sizes if min(size if isinstance(size, tuple) else (size,)) < 1]:
            raise ValueError(f"{small[0]} = {getattr(self, small[0])}: 1 or more")

    def settings(self) -> dict[str, tuple[int, int]]:
        return {"short": self.short, "medium": self.medium, "long": self.long}


@dataclass(frozen=True)
class Variant:
    """One line of the ledger."""

    target: CausalLM
    drafter: Drafter | None


@dataclass(frozen=True)
class Latency:
    """Medians in milliseconds; `accept_length` is tokens gained a cycle, the mean."""

    ttft_ms: float
    total_ms: float
    ms_per_token: float
    accept_length: float


def _answering(variant: Variant, length: int) -> Callable[[tuple[int, ...], int], Iterator[Cycle]]:
    """Greedy decoding as the engine does it: with replayed cycles on a GPU."""
    if variant.target.device.type == "cuda":
        captured = CapturedCycle(variant.target, variant.drafter, length, Sampling())
        return lambda prompt, new_tokens: captured.decode(prompt, new_tokens, 0)
    return lambda prompt, new_tokens: decode(variant.target, variant.drafter, prompt, new_tokens, Sampling())


def measure_latency(
    variants: Mapping[str, Variant],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    runs: int,
    report: Report,
) -> dict[str, Latency]:
    """Every variant on every prompt, `runs` times, greedily, after one unmeasured round on the first prompt.

    Variants take turns inside a run, so that what disturbs the machine disturbs all of them. Per token: (total -
    TTFT) / (tokens - 1).
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    cycles = dict.fromkeys(variants, 0)
    answers = {name: _answering(variant, max(map(len, prompts)) + new_tokens) for name, variant in variants.items()}
    total = len(prompts) * runs + 1
    for number in range(total):
        prompt = tuple(prompts[max(0, number - 1) % len(prompts)])
        for name, answering in answers.items():
            began = time.perf_counter()
            answer = answering(prompt, new_tokens)
            tokens = len(next(answer).token_ids)
            first = time.perf_counter() - began
            count = 0
            for cycle in answer:
                tokens += len(cycle.token_ids)
                count += 1
            whole = time.perf_counter() - began
            assert tokens == new_tokens
            if number > 0:  # the first round warms up
                times[name].append((first * 1e3, whole * 1e3))
                cycles[name] += count
        report(number + 1, total, "")
    measured = {}
    for name, pairs in times.items():
        ttft = statistics.median(first for first, _ in pairs)
        whole = statistics.median(total for _, total in pairs)
        rest = statistics.median(total - first for first, total in pairs)
        gained = (new_tokens - 1) * len(pairs)
        measured[name] = Latency(ttft, whole, rest / (new_tokens - 1), gained / max(1, cycles[name]))
    return measured
