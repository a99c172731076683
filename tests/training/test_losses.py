"""The drafter's weights and shares by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from twofold.training.losses import DraftLoss, block_weights, dpace_weights


def test_block_weights() -> None:
    """DFlash: exp(-(k - 1) / gamma), k = 1 .. K - 1; gamma 7 for blocks of 16."""
    got = block_weights(16, 7.0, torch.device("cpu")).tolist()
    assert got == pytest.approx([math.exp(-(k - 1) / 7) for k in range(1, 16)])


def test_dpace_weights_by_hand() -> None:
    """alpha = 1/2 makes q = (1, 1/2, 0) to (1, 3/4, 1/2): products 1, 3/4, 3/8."""
    log_q = torch.tensor([[0.0, math.log(0.5), -1e9]])
    got = dpace_weights(log_q, torch.ones(1, 3, dtype=torch.bool), 0.5)[0].tolist()
    assert got == pytest.approx([1 + 3 / 4 + 3 / 8, 3 / 4 + 3 / 8, 3 / 8])


def test_dpace_weights_are_the_gradient_of_the_expected_length() -> None:
    """E = sum over all outcomes of (guesses right in a row) * probability; w_j = dE / d log q_j."""
    log_q = torch.tensor([-0.3, -1.2, -0.1, -2.0], dtype=torch.float64, requires_grad=True)
    q, expected = log_q.exp(), torch.zeros((), dtype=torch.float64)
    for right in itertools.product((True, False), repeat=4):
        run = next((i for i, ok in enumerate(right) if not ok), 4)
        chance = torch.stack([q[i] if ok else 1 - q[i] for i, ok in enumerate(right)]).prod()
        expected = expected + run * chance
    (wanted,) = torch.autograd.grad(expected, log_q)
    got = dpace_weights(log_q[None], torch.ones(1, 4, dtype=torch.bool), 0.0)[0]
    torch.testing.assert_close(got, wanted)
    assert not got.requires_grad


def test_a_guess_that_is_not_valid_ends_the_block() -> None:
    log_q, valid = torch.full((2, 3), math.log(0.5)), torch.tensor([[True, True, False], [False, False, False]])
    got = dpace_weights(log_q, valid, 0.0)
    assert got.tolist() == [pytest.approx([0.5 + 0.25, 0.25, 0.0]), [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("shares", [{}, {"hard": -1.0, "soft": 2.0}])
def test_shares_that_are_none(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="one of them above 0"):
        DraftLoss(**shares)
