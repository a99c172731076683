"""How far drafts are accepted: counted in one way, by the decode loop and by a trainer.

A answers, R resamples, K block size.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

_RESAMPLES = 4000


@dataclass
class Acceptance:
    """Counts of num_accepted over whole cycles, an answer each. A cycle that the answer's end cut short is left out: it
    says how long the answer was, not how good the draft."""

    block_size: int
    answers: list[Counter[int]] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)  # of each answer; "" for none

    def add(self, num_accepted: Iterable[int], category: str = "") -> None:
        """The whole cycles of one answer."""
        self.answers.append(Counter(num_accepted))
        self.categories.append(category)

    @property
    def counts(self) -> Counter[int]:
        total = Counter[int]()
        for answer in self.answers:
            total.update(answer)
        return total

    @property
    def cycles(self) -> int:
        return sum(self.counts.values())

    @property
    def accept_length(self) -> float:
        """Mean tokens gained a cycle, over all cycles: num_accepted + 1."""
        return 1.0 + sum(n * c for n, c in self.counts.items()) / max(1, self.cycles)

    def interval(self) -> tuple[float, float]:
        """95 % of `accept_length` by bootstrap: the 2.5 and 97.5 percentiles over answers drawn with replacement, 4,000
        times, since cycles of one answer are alike. Of fewer than two answers it is the mean itself."""
        gained_A, cycles_A = self._sums()
        if len(gained_A) < 2:
            return self.accept_length, self.accept_length
        means_R = _resampled(gained_A) / _resampled(cycles_A).clamp(min=1)
        low, high = means_R.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return low, high

    def over(self, other: "Acceptance") -> tuple[float, float, float]:
        """accept_length over that of `other` on the same prompts, and the 95 % interval of this: answers are drawn in
        pairs, so what makes a prompt easy for both falls out."""
        assert len(self.answers) == len(other.answers), "not the same prompts"
        means = [_resampled(g) / _resampled(c).clamp(min=1) for g, c in (self._sums(), other._sums())]
        low, high = (means[0] / means[1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return self.accept_length / other.accept_length, low, high

    def histogram(self) -> list[int]:
        """Cycles that gained 1, 2, ... block_size tokens."""
        counts = self.counts
        return [counts[n] for n in range(self.block_size)]

    def by_position(self) -> list[float]:
        """Of the cycles whose first k - 1 guesses were accepted, the share that accepted the k-th, k = 1, 2, ..."""
        counts = self.counts
        reached = [sum(c for n, c in counts.items() if n >= k) for k in range(self.block_size)]
        return [b / a if a else 0.0 for a, b in pairwise(reached)]

    def by_category(self) -> dict[str, "Acceptance"]:
        """The answers of each category, in the order of appearance; none where no answer has one."""
        parts: dict[str, Acceptance] = {}
        for answer, category in zip(self.answers, self.categories, strict=True):
            if category:
                part = parts.setdefault(category, Acceptance(self.block_size))
                part.answers.append(answer)
                part.categories.append(category)
        return parts

    def figures(self) -> dict[str, object]:
        """All of it, as JSON has it."""
        return {
            "accept_length": self.accept_length,
            "interval": list(self.interval()),
            "cycles": self.cycles,
            "lengths": self.histogram(),
            "positions": self.by_position(),
            "categories": {
                name: {"accept_length": part.accept_length, "interval": list(part.interval()), "cycles": part.cycles}
                for name, part in self.by_category().items()
            },
        }

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Tokens gained and cycles of each answer."""
        gained = [sum((n + 1) * c for n, c in answer.items()) for answer in self.answers]
        cycles = [sum(answer.values()) for answer in self.answers]
        return torch.tensor(gained, dtype=torch.float64), torch.tensor(cycles, dtype=torch.float64)


def _resampled(values_A: Tensor) -> Tensor:
    """Sums [R] over answers drawn with replacement, the same draw at every call."""
    generator = torch.Generator().manual_seed(0)
    draws_RA = torch.randint(len(values_A), (_RESAMPLES, len(values_A)), generator=generator)
    return values_A[draws_RA].sum(dim=1)


def walk(right: Mapping[int, int] | Sequence[int], start: int, stop: int, block_size: int, ended: bool) -> list[int]:
    """num_accepted of the whole cycles that decoding an answer takes, from what every anchor would give.

    The answer stands at start .. stop - 1, its first token being the first anchor; `right[t]` guesses in a row are
    those that follow position t. An anchor's cycle takes it to t + right[t] + 1. An answer that an EOS `ended` cuts the
    cycle that would go past it; another ended by its length, and has no whole cycle once less than a block is left.
    """
    accepted, at = [], start
    while (left := stop - 1 - at) > 0 and (ended or left >= block_size):
        if right[at] >= left:
            break
        accepted.append(right[at])
        at += right[at] + 1
    return accepted
