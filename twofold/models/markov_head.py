"""A guess that knows the guess before it (DSpark's Markov head, in its plain form).

All guesses of a block come from one pass, so none knows what the others became. A bias of low rank ties each to the
one before it, z_k = h_k W^T + e(x_{k-1}) U^T with e a table [V, R] and U [V, R]; they are chosen from left to right.
V vocabulary, R rank, C candidates.
"""

import torch
from torch import Tensor, nn

CANDIDATES = 64


class MarkovHead(nn.Module):
    """The bias is computed for the `CANDIDATES` best scores of a guess alone; the others cannot be chosen. So a guess
    reads C R numbers of U, not V R; a block's 15 guesses at 4B's shape would read 1.9 GB."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.before = nn.Embedding(vocab_size, rank)
        self.after = nn.Linear(rank, vocab_size, bias=False)

    def forward(self, scores: Tensor, previous: Tensor) -> Tensor:
        """Scores [..., V] with the bias of the tokens [...] before them; -inf for what is no candidate."""
        best, ids = scores.topk(min(CANDIDATES, scores.shape[-1]), dim=-1)
        bias = torch.einsum("...cr,...r->...c", self.after.weight[ids], self.before(previous))
        return torch.full_like(scores, -torch.inf).scatter_(-1, ids, best + bias.to(best.dtype))
