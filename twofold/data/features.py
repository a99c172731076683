"""What a frozen target says about packed rows: made once, read at every step. N rows, T tokens, D hidden size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twofold.data.conversations import PackedRows
from twofold.models.causal_lm import CausalLM


@dataclass(frozen=True)
class Features:
    """Final hidden states [N, T, D], and one [N, T, D] for each tap."""

    hidden: Tensor
    taps: list[Tensor]

    def select(self, rows: Tensor) -> "Features":
        return Features(self.hidden[rows], [tap[rows] for tap in self.taps])


@torch.no_grad()
def features_of(
    target: CausalLM, rows: PackedRows, taps: Sequence[int] = (), most_documents: int | None = None
) -> Features:
    """One forward pass, on the target's device; `most_documents` is for `CausalLM.forward`."""
    rows = rows.to(target.device)
    return Features(*target(rows.token_ids_NT, rows.positions_NT, taps=taps, most_documents=most_documents))


def feature_source(
    target: CausalLM,
    rows: PackedRows,
    taps: Sequence[int],
    stored: bool,
    batch_rows: int,
    most_documents: int | None = None,
) -> Callable[[Tensor, PackedRows], Features]:
    """A function from the numbers of rows, and the rows, to their features: looked up if `stored` (4 N T D (1 + taps)
    bytes), else computed.

    Stored features are those of batches of `batch_rows` in order; up to rounding they equal the computed ones.
    """
    if not stored:
        return lambda _, batch: features_of(target, batch, taps, most_documents)
    size = (len(rows), rows.token_ids_NT.shape[1], target.config.hidden_size)
    new = target.norm.weight.detach().new_empty
    whole = Features(new(size), [new(size) for _ in taps])
    for part in torch.arange(len(rows)).split(batch_rows):
        made = features_of(target, rows.select(part), taps)
        for kept, x in zip((whole.hidden, *whole.taps), (made.hidden, *made.taps), strict=True):
            kept[part] = x
    return lambda numbers, _: whole.select(numbers)
