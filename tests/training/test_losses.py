"""The drafter's losses by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from twofold.training.losses import block_weights, weighted_cross_entropy

M, V = 6, 23


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_block_weights() -> None:
    """DFlash: exp(-(k - 1) / gamma), k = 1 .. K - 1; gamma 7 for blocks of 16."""
    got = block_weights(16, 7.0, torch.device("cpu")).tolist()
    assert got == pytest.approx([math.exp(-(k - 1) / 7) for k in range(1, 16)])


def test_weighted_cross_entropy() -> None:
    logits = random(M, V, seed=5, dtype=torch.float32).requires_grad_()
    labels, weights = torch.tensor([0, 3, 22, 7, 7, 1]), torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 0.1])
    log_q = logits.detach().log_softmax(dim=-1)
    terms = [-float(weights[m] * log_q[m, labels[m]]) for m in range(M)]
    loss = weighted_cross_entropy(logits, labels, weights)
    assert loss.item() == pytest.approx(sum(terms) / 3.6, rel=1e-5)
    loss.backward()
    assert logits.grad is not None
    assert (logits.grad.abs().sum(dim=1) > 0).tolist() == (weights > 0).tolist()


def test_no_weight_is_no_loss() -> None:
    logits = random(M, V, seed=5).requires_grad_()
    loss = weighted_cross_entropy(logits, torch.zeros(M, dtype=torch.long), torch.zeros(M))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()
