"""A cheaper head for drafting alone: the target's rounded, or cut to its most frequent tokens, or both.

Reading the head is half of the bytes of a speculative cycle when the layers are INT4. The target still judges with its
own head, so the answer is the same; a guess that this head cannot make is one that is not accepted.
R rows kept, V vocabulary, D hidden size.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from twofold.models.layers import Projections, dense_weight
from twofold.ops.kernels import Kernels
from twofold.quant.linear import PackedLinear
from twofold.quant.rounding import quantize, search_grid
from twofold.quant.scheme import QuantScheme


@dataclass(frozen=True, kw_only=True)
class DraftHeadConfig:
    """`bits` 16 keeps the numbers as they are; `rows` keeps the tokens that the training answers have most often."""

    bits: Literal[4, 8, 16] = 16
    group_size: int = 32
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.bits == 16 and self.rows is None:
            raise ValueError(
                "a draft head of 16 bits and all rows is the target's own; set bits or rows, or leave it out"
            )
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows = {self.rows} leaves nothing to guess; use 1 or more")
        _ = self.scheme  # has checks of its own

    @property
    def scheme(self) -> QuantScheme | None:
        return None if self.bits == 16 else QuantScheme(bits=self.bits, group_size=self.group_size)


class DraftHead(nn.Module):
    """Scores [..., V] of hidden states [..., D]; -inf for a token that has no row."""

    row_ids: Tensor | None

    def __init__(self, config: DraftHeadConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        if config.rows is not None and config.rows > vocab_size:
            raise ValueError(f"rows = {config.rows} is more than the vocabulary of {vocab_size}; use fewer")
        self.config, self.vocab_size = config, vocab_size
        rows = vocab_size if config.rows is None else config.rows
        self.linear: nn.Module
        if config.scheme is None:
            self.linear = nn.Linear(hidden_size, rows, bias=False).requires_grad_(False)
        else:
            self.linear = PackedLinear(hidden_size, rows, config.scheme)
        self.register_buffer("row_ids", None if config.rows is None else torch.arange(rows))
        self.product = Projections(self, "linear")

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.product(hidden)[0]
        if self.row_ids is None:
            return scores
        return scores.new_full((*scores.shape[:-1], self.vocab_size), -torch.inf).index_copy_(-1, self.row_ids, scores)

    def top1(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """The token [...] of the best score of the hidden states [..., D]."""
        best = self.product.top1(hidden, kernels)
        return best if self.row_ids is None else self.row_ids[best]


@torch.no_grad()
def make_draft_head(config: DraftHeadConfig, head: nn.Module, counts_V: Tensor) -> DraftHead:
    """From the target's head; `counts_V` says how often each token is in the training answers, the first ids winning
    ties. Rounded to nearest on searched grids. ValueError where the groups or the rows do not fit."""
    weight_VD = dense_weight(head, torch.float32)
    made = DraftHead(config, weight_VD.shape[1], len(weight_VD))
    if config.rows is not None:
        hottest = counts_V.argsort(descending=True, stable=True)[: config.rows]
        made.row_ids = hottest.sort().values.to(weight_VD.device)
        weight_VD = weight_VD[made.row_ids]
    if config.scheme is None:
        made.linear.weight = nn.Parameter(weight_VD.clone(), requires_grad=False)
    else:
        grid = search_grid(weight_VD, config.scheme)
        q_VD = quantize(weight_VD, grid, config.scheme)
        made.linear = PackedLinear.from_integers(q_VD, grid, config.scheme)
    return made


def count_tokens(answers: Iterable[list[int]], vocab_size: int) -> Tensor:
    """How often each token is in the answers, [V]."""
    tokens = torch.tensor([token for answer in answers for token in answer], dtype=torch.long)
    return torch.bincount(tokens, minlength=vocab_size)
