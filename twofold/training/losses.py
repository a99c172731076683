"""Losses of the drafter. M positions, V vocabulary; for the KL to the target see `training.divergence`."""

import torch
import torch.nn.functional as F
from torch import Tensor


def block_weights(block_size: int, gamma: float, device: torch.device) -> Tensor:
    """exp(-(k - 1) / gamma) for k = 1 .. K - 1: early guesses decide how far a block is accepted (DFlash)."""
    return torch.exp(-torch.arange(block_size - 1, device=device) / gamma)


def weighted_cross_entropy(logits_MV: Tensor, labels_M: Tensor, weights_M: Tensor) -> Tensor:
    """sum_m w_m (-log softmax(logits_m)[label_m]) / sum_m w_m; 0 where all weights are 0."""
    loss = F.cross_entropy(logits_MV.float(), labels_M, reduction="none")
    return (loss * weights_M).sum() / weights_M.sum().clamp(min=1e-9)
