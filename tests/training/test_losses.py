"""Losses against autograd on dense log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from twofold.training import losses
from twofold.training.losses import block_weights, linear_kl, weighted_cross_entropy

M, D, V = 6, 5, 23


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense_kl(s: Tensor, head: Tensor, t: Tensor, teacher_head: Tensor, weights: Tensor) -> Tensor:
    log_q, log_p = (s @ head.T).log_softmax(dim=-1), (t @ teacher_head.T).log_softmax(dim=-1)
    return ((log_p.exp() * (log_p - log_q)).sum(dim=-1) * weights).sum() / weights.sum()


@pytest.mark.parametrize("chunk", [1, 7, V, 100])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block", [1, 2**21])
def test_linear_kl_is_the_dense_one(chunk: int, weighted: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_BLOCK", block)  # positions in one block, and one at a time
    s, t = random(M, D, seed=0).requires_grad_(), random(M, D, seed=1)
    head, teacher_head = random(V, D, seed=2), random(V, D, seed=3)
    weights = random(M, seed=4).abs() if weighted else None
    wanted = dense_kl(s, head, t, teacher_head, torch.ones(M).double() if weights is None else weights)
    (wanted_gradient,) = torch.autograd.grad(3 * wanted, s)
    got = linear_kl(s, head, t, teacher_head, chunk, weights)
    (gradient,) = torch.autograd.grad(3 * got, s)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-14)


def test_linear_kl_of_the_same_is_zero() -> None:
    s, head = random(M, D, seed=0, dtype=torch.float32).requires_grad_(), random(V, D, seed=2, dtype=torch.float32)
    loss = linear_kl(s, head, s.detach(), head, 7)
    loss.backward()
    assert abs(loss.item()) < 1e-6
    assert s.grad is not None
    assert float(s.grad.abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_kl_survives_large_logits(dtype: torch.dtype) -> None:
    s, t = (30 * random(M, D, seed=i, dtype=torch.float32).to(dtype) for i in (0, 1))
    head = 10 * random(V, D, seed=2, dtype=torch.float32).to(dtype)
    got = linear_kl(s.requires_grad_(), head, t, head, 7)
    got.backward()
    assert got.isfinite()
    assert s.grad is not None
    assert s.grad.isfinite().all()
    if dtype == torch.float32:
        wanted = dense_kl(s.double(), head.double(), t.double(), head.double(), torch.ones(M).double())
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


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
