"""The drafter's losses. A blocks, K - 1 guesses a block, M guesses; what is summed is in `training.divergence`."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DraftLoss:
    """Shares of the terms of a guess: cross-entropy on the token that the target wrote (`hard`), KL from the target's
    distribution (`soft`), and half the absolute difference from it (`total_variation`), the probability that a sampled
    guess is rejected. The last two cost a product more with the head each."""

    hard: float = 0.0
    soft: float = 0.0
    total_variation: float = 0.0

    def __post_init__(self) -> None:
        shares = (self.hard, self.soft, self.total_variation)
        if min(shares) < 0 or max(shares) == 0:
            raise ValueError("a loss has shares of hard, soft and total_variation: none negative, one of them above 0")


HARD = DraftLoss(hard=1.0)


def block_weights(block_size: int, gamma: float, device: torch.device) -> Tensor:
    """exp(-(k - 1) / gamma) for k = 1 .. K - 1: early guesses decide how far a block is accepted (DFlash)."""
    return torch.exp(-torch.arange(block_size - 1, device=device) / gamma)


def dpace_weights(log_q_AK: Tensor, valid_AK: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv:2605.18810): w_j = sum_{m >= j} prod_{i <= m} ((1 - alpha) q_i + alpha), a constant.

    q_i is the drafter's own probability of the label. sum_m prod_{i <= m} q_i is the expected number of guesses
    accepted when q_i is the chance that guess i is right; its derivative by log q_j is w_j at alpha = 0. A guess that
    is not valid ends the block. Increasing confidence early in the block moves weight to its end.
    """
    q_AK = log_q_AK.detach().exp().masked_fill(~valid_AK, 0.0)
    reached_AK = torch.where(valid_AK, (1 - alpha) * q_AK + alpha, 0.0).cumprod(dim=-1)
    return reached_AK.flip(-1).cumsum(dim=-1).flip(-1)
