"""The gated delta rule: the recurrence against its definition, the chunked form against the recurrence."""

import pytest
import torch
from torch import Tensor

from twofold.ops.gated_delta import (
    CHUNK,
    UnitTriangularInverse,
    commit_delta,
    gated_delta,
    gated_delta_recurrent,
)

KEYS, VALUES = 6, 5  # neither equal nor powers of two
LENGTHS = [1, 2, 5, 16, CHUNK - 1, CHUNK, CHUNK + 1, 70, 2 * CHUNK + 3]


def inputs(
    num_tokens: int, batch: int = 2, key_heads: int = 2, heads: int = 4, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """q, k, v, g, beta, state."""
    torch.manual_seed(num_tokens)
    q, k = torch.randn(2, batch, num_tokens, key_heads, KEYS, dtype=dtype)
    v = torch.randn(batch, num_tokens, heads, VALUES, dtype=dtype)
    g = -torch.rand(batch, num_tokens, heads, dtype=dtype) * 0.3
    beta = torch.rand(batch, num_tokens, heads, dtype=dtype)
    return [q, k, v, g, beta, torch.randn(batch, heads, KEYS, VALUES, dtype=dtype)]


def test_recurrence_is_the_equations() -> None:
    """One row and head by hand: the erase-and-write form of arXiv:2412.06464, equation 10."""
    q, k, v, g, beta, start = (x[0] for x in inputs(7, batch=1, key_heads=1, heads=1))
    state = start[0]
    o, states = gated_delta_recurrent(*(x[None] for x in (q, k, v, g, beta)), start[None])
    for t in range(7):
        key = k[t, 0] / (k[t, 0].square().sum() + 1e-6).sqrt()
        query = q[t, 0] / (q[t, 0].square().sum() + 1e-6).sqrt() / KEYS**0.5
        erase = torch.eye(KEYS, dtype=torch.float64) - beta[t, 0] * torch.outer(key, key)
        state = g[t, 0].exp() * erase @ state + beta[t, 0] * torch.outer(key, v[t, 0])
        torch.testing.assert_close(states[0, t, 0], state, atol=1e-12, rtol=0)
        torch.testing.assert_close(o[0, t, 0], state.T @ query, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("with_state", [False, True])
def test_chunks_equal_recurrence(num_tokens: int, with_state: bool) -> None:
    *tokens, start = inputs(num_tokens)
    state = start if with_state else None
    expected, states = gated_delta_recurrent(*tokens, state)
    o, window = gated_delta(*tokens, state)
    torch.testing.assert_close(o, expected, atol=1e-10, rtol=0)
    last = commit_delta(window, torch.full((2,), num_tokens))
    torch.testing.assert_close(last, states[:, -1], atol=1e-10, rtol=0)


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 70, 2 * CHUNK])
def test_commit_ends_a_pass_after_any_token(num_tokens: int) -> None:
    *tokens, start = inputs(num_tokens)
    _, states = gated_delta_recurrent(*tokens, start)
    states = torch.cat((start[:, None], states), dim=1)
    _, window = gated_delta(*tokens, start)
    for n in range(num_tokens + 1):
        other = num_tokens - n  # the rows of a batch end apart
        state = commit_delta(window, torch.tensor([n, other]))
        torch.testing.assert_close(state[0], states[0, n], atol=1e-10, rtol=0)
        torch.testing.assert_close(state[1], states[1, other], atol=1e-10, rtol=0)
    assert torch.equal(commit_delta(window, torch.tensor([0, 0])), start)


@pytest.mark.parametrize("num_tokens", [16, 70, 2 * CHUNK])
def test_float32_commit_is_close_to_the_exact_state(num_tokens: int) -> None:
    *tokens, start = inputs(num_tokens)
    _, states = gated_delta_recurrent(*tokens, start)
    _, window = gated_delta(*(x.float() for x in tokens), start.float())
    for n in range(1, num_tokens + 1):
        error = commit_delta(window, torch.tensor([n, n])).double() - states[:, n - 1]
        assert error.norm() <= 1e-5 * states[:, n - 1].norm()


BORDERS = [[1], [3, 70, 1, 1, 64, 20], [64, 64, 5], [5, 59, 64], [130], [60, 10, 200]]


@pytest.mark.parametrize("lengths", BORDERS)
def test_packed_documents_equal_separate_ones(lengths: list[int]) -> None:
    *tokens, _ = inputs(sum(lengths))
    documents = torch.repeat_interleave(torch.arange(len(lengths)) + 1, torch.tensor(lengths))
    o, _ = gated_delta(*tokens, documents_BT=documents.expand(2, -1))
    start = 0
    for length in lengths:
        alone, _ = gated_delta_recurrent(*(x[:, start : start + length] for x in tokens))
        torch.testing.assert_close(o[:, start : start + length], alone, atol=1e-10, rtol=0)
        start += length


@pytest.mark.parametrize("strength", [1.0, 50.0])
@pytest.mark.parametrize("lengths", BORDERS[1:4])
def test_a_document_does_not_change_the_next_by_one_bit(lengths: list[int], strength: float) -> None:
    *tokens, _ = inputs(sum(lengths), dtype=torch.float32)
    tokens[3] = tokens[3] * strength
    documents = torch.repeat_interleave(torch.arange(len(lengths)) + 1, torch.tensor(lengths)).expand(2, -1)
    first = lengths[0]
    changed = [x.clone() for x in tokens]
    for x in changed:
        x[:, :first] = x[:, :first] * 0.37
    o, _ = gated_delta(*tokens, documents_BT=documents)
    other, _ = gated_delta(*changed, documents_BT=documents)
    assert torch.isfinite(o).all()
    assert not torch.equal(other[:, :first], o[:, :first])
    assert torch.equal(other[:, first:], o[:, first:])


@pytest.mark.parametrize("lengths", [None, [3, 70, 1, 26]])
def test_gradients_equal_those_of_the_recurrence(lengths: list[int] | None) -> None:
    num_tokens = 100
    *tokens, _ = inputs(num_tokens)
    weight = torch.randn(2, num_tokens, 4, VALUES, dtype=torch.float64)
    slow = [x.clone().requires_grad_() for x in tokens]
    if lengths is None:
        expected, documents = gated_delta_recurrent(*slow)[0], None
    else:
        parts = zip(*(x.split(lengths, dim=1) for x in slow), strict=True)
        expected = torch.cat([gated_delta_recurrent(*part)[0] for part in parts], dim=1)
        documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).expand(2, -1)
    (expected * weight).sum().backward()
    fast = [x.clone().requires_grad_() for x in tokens]
    (gated_delta(*fast, documents_BT=documents)[0] * weight).sum().backward()
    for a, b in zip(fast, slow, strict=True):
        assert b.grad is not None
        assert b.grad.abs().max() > 1e-2
        torch.testing.assert_close(a.grad, b.grad, atol=1e-9, rtol=0)


@pytest.mark.parametrize("documents", [None, [40, 60, 30]])
def test_strong_decays_stay_finite(documents: list[int] | None) -> None:
    *tokens, _ = inputs(130, dtype=torch.float32)
    tokens[3] = tokens[3] / 0.3 * 50  # g from 0 down to -50
    tokens[3][:, 10:100:7] = -50.0
    tokens = [x.requires_grad_() for x in tokens]
    ids = documents and torch.repeat_interleave(torch.arange(3), torch.tensor(documents)).expand(2, -1)
    o, window = gated_delta(*tokens, documents_BT=ids)
    o.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in tokens if x.grad is not None)
    if documents is None:
        expected, states = gated_delta_recurrent(*(x.detach().double() for x in tokens))
        # G runs to -3,000, where float32 steps by 2e-4
        torch.testing.assert_close(o.double(), expected, atol=1e-3, rtol=0)
        state = commit_delta(window, torch.tensor([130, 67])).double()
        torch.testing.assert_close(state[1], states[1, 66], atol=1e-3, rtol=0)


def test_half_precision_comes_back_as_it_came_and_the_state_stays_wide() -> None:
    *tokens, start = inputs(20)
    narrow = [x.bfloat16() for x in tokens]
    o, window = gated_delta(*narrow, start.float())
    assert o.dtype == torch.bfloat16
    assert commit_delta(window, torch.tensor([3, 20])).dtype == torch.float32
    expected, _ = gated_delta_recurrent(*(x.double() for x in narrow), start)
    torch.testing.assert_close(o.double(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("length", [1, 2, 3, 16, 63, 64])
def test_block_inverse_and_its_gradient(length: int) -> None:
    torch.manual_seed(length)
    mix = torch.randn(2, 3, length, length, dtype=torch.float64).tril(-1) * 0.3
    mix.requires_grad_()
    weight = torch.randn_like(mix)
    inverse = UnitTriangularInverse.apply(mix)
    exact = torch.linalg.inv(torch.eye(length, dtype=torch.float64) + mix.tril(-1))
    torch.testing.assert_close(inverse, exact, atol=1e-9, rtol=1e-9)
    (gradient,) = torch.autograd.grad((inverse * weight).sum(), mix)
    (expected,) = torch.autograd.grad((exact * weight).sum(), mix)
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-9)
