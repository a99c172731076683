"""What the drafter gains in the decode loop itself, and whether the loop is lossless."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twofold.decoding.step import decode
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.ops.sampling import Sampling

Report = Callable[[int, int, str], None]


@dataclass
class Acceptance:
    """Counts of num_accepted over whole cycles. A cycle that the answer's end cut short is left out: it says how
    long the answer was, not how good the draft."""

    block_size: int
    counts: Counter[int] = field(default_factory=Counter)

    @property
    def cycles(self) -> int:
        return sum(self.counts.values())

    @property
    def accept_length(self) -> float:
        """Mean tokens gained a cycle: num_accepted + 1."""
        return 1.0 + sum(n * c for n, c in self.counts.items()) / max(1, self.cycles)

    def histogram(self) -> list[int]:
        """Cycles that gained 1, 2, ... block_size tokens."""
        return [self.counts[n] for n in range(self.block_size)]

    def by_position(self) -> list[float]:
        """Of the cycles whose first k - 1 guesses were accepted, the share that accepted the k-th, k = 1, 2, ..."""
        reached = [sum(c for n, c in self.counts.items() if n >= k) for k in range(self.block_size)]
        return [b / a if a else 0.0 for a, b in zip(reached, reached[1:], strict=False)]


def measure_acceptance(
    target: CausalLM,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    max_tokens: int,
    sampling: Sampling,
    report: Report,
) -> tuple[Acceptance, list[list[int]]]:
    """Speculative answers to the prompts: their acceptance and their tokens."""
    found = Acceptance(drafter.config.block_size)
    answers = []
    stop_ids = frozenset(target.config.eos_token_ids)
    for number, prompt in enumerate(prompts, 1):
        tokens: list[int] = []
        for cycle in decode(target, drafter, tuple(prompt), max_tokens, sampling, stop_ids):
            whole = len(cycle.token_ids) == cycle.num_accepted + 1
            if tokens and whole and max_tokens - len(tokens) >= found.block_size:
                found.counts[cycle.num_accepted] += 1
            tokens += cycle.token_ids
        answers.append(tokens)
        report(number, len(prompts), f"accept length {found.accept_length:.2f}")
    return found, answers
