"""Fused divergences against autograd on dense log-probabilities in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from twofold.data.teacher import TopK, top_k
from twofold.training import divergence
from twofold.training.divergence import (
    Divergence,
    label_logprobs,
    linear_cross_entropy,
    linear_divergence,
    top_k_divergence,
)

M, D, V = 6, 5, 23
KINDS: tuple[Divergence, ...] = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation")
WEIGHTS = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 0.1], dtype=torch.float64)

every_kind = pytest.mark.parametrize("kind", KINDS)
# the vocabulary in chunks of one, of some with a rest, of all, of more; positions in one block, and one at a time
every_split = pytest.mark.parametrize(("chunk", "block"), list(itertools.product([1, 7, V, 100], [1, 2**21])))


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(dim=-1)


def dense(kind: Divergence, log_q: Tensor, log_p: Tensor) -> Tensor:
    if kind == "forward_kl":
        return kl(log_p, log_q)
    if kind == "reverse_kl":
        return kl(log_q, log_p)
    if kind == "total_variation":
        return (log_p.exp() - log_q.exp()).abs().sum(dim=-1) / 2
    log_m = ((log_q.exp() + log_p.exp()) / 2).log()
    return (kl(log_p, log_m) + kl(log_q, log_m)) / 2


def mean(values: Tensor, weights: Tensor | None) -> Tensor:
    return values.mean() if weights is None else (values * weights).sum() / weights.sum()


def set_block(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(divergence, "_BLOCK", {"cpu": block})


@every_kind
@every_split
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
def test_value_and_gradients_are_the_dense_ones(
    kind: Divergence, chunk: int, block: int, weights: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_block(monkeypatch, block)
    s, t = random(M, D, seed=0).requires_grad_(), random(M, D, seed=1)
    head, teacher_head = random(V, D, seed=2).requires_grad_(), random(V, D, seed=3)
    log_q, log_p = (s @ head.T).log_softmax(dim=-1), (t @ teacher_head.T).log_softmax(dim=-1)
    wanted = mean(dense(kind, log_q, log_p), weights)
    wanted_gradients = torch.autograd.grad(3 * wanted, (s, head))
    got = linear_divergence(s, head, t, teacher_head, kind=kind, chunk=chunk, weights_M=weights)
    gradients = torch.autograd.grad(3 * got, (s, head))
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-11, atol=1e-13)
    if weights is not None:
        assert (gradients[0].abs().sum(dim=1) > 0).tolist() == (weights > 0).tolist()


@every_kind
def test_by_hand(kind: Divergence) -> None:
    """p = (3/4, 1/4), q = (1/2, 1/2): m = (5/8, 3/8)."""
    p, q = torch.tensor([[0.75, 0.25]]).double(), torch.tensor([[0.5, 0.5]]).double()
    wanted = {
        "forward_kl": 0.75 * math.log(3 / 2) + 0.25 * math.log(1 / 2),
        "reverse_kl": 0.5 * math.log(2 / 3) + 0.5 * math.log(2),
        "jensen_shannon": 0.5 * (0.75 * math.log(6 / 5) + 0.25 * math.log(2 / 3))
        + 0.5 * (0.5 * math.log(4 / 5) + 0.5 * math.log(4 / 3)),
        "total_variation": 0.25,
    }
    identity = torch.eye(2).double()
    got = linear_divergence(q.log(), identity, p.log(), identity, kind=kind)
    assert got.item() == pytest.approx(wanted[kind], rel=1e-12)


@every_kind
def test_of_the_same_is_zero(kind: Divergence) -> None:
    s, head = random(M, D, seed=0, dtype=torch.float32).requires_grad_(), random(V, D, seed=2, dtype=torch.float32)
    loss = linear_divergence(s, head, s.detach(), head, kind=kind, chunk=7)
    loss.backward()
    assert abs(loss.item()) < 1e-6
    assert s.grad is not None
    assert float(s.grad.abs().max()) < 1e-6


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_survives_large_logits(kind: Divergence, dtype: torch.dtype) -> None:
    s, t = (30 * random(M, D, seed=i, dtype=torch.float32).to(dtype) for i in (0, 1))
    head = (10 * random(V, D, seed=2, dtype=torch.float32)).to(dtype).requires_grad_()
    got = linear_divergence(s.requires_grad_(), head, t, head.detach(), kind=kind, chunk=7)
    got.backward()
    assert got.dtype == torch.float32
    assert got.isfinite()
    for leaf in (s, head):
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
        assert leaf.grad.isfinite().all()
    log_q, log_p = ((x.detach().double() @ head.detach().double().T).log_softmax(dim=-1) for x in (s, t))
    if kind == "jensen_shannon":
        assert 0 <= got.item() <= math.log(2) * (1 + 1e-5)
    if kind == "total_variation":
        assert 0 <= got.item() <= 1 + 1e-5
    if dtype == torch.float32 and kind != "jensen_shannon":  # the dense one overflows
        torch.testing.assert_close(got.double(), dense(kind, log_q, log_p).mean(), rtol=1e-5, atol=1e-5)


@every_kind
def test_bfloat16_is_near_the_float64_of_the_same_numbers(kind: Divergence, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over many blocks stay as good as one product: the head's gradient is accumulated in float32."""
    set_block(monkeypatch, 1)
    s, t = (random(256, 16, seed=i).bfloat16() for i in (0, 1))
    head = random(V, 16, seed=2).bfloat16().requires_grad_()
    (gradient,) = torch.autograd.grad(
        linear_divergence(s.requires_grad_(), head, t, head.detach(), kind=kind, chunk=10), head
    )
    exact = head.detach().double().requires_grad_()
    log_q, log_p = (s.detach().double() @ exact.T, t.double() @ exact.detach().T)
    (wanted,) = torch.autograd.grad(dense(kind, log_q.log_softmax(dim=-1), log_p.log_softmax(dim=-1)).mean(), exact)
    assert float((gradient.double() - wanted).norm() / wanted.norm()) < 0.02


def test_no_position_and_no_weight_are_no_loss() -> None:
    head = random(V, D, seed=2).requires_grad_()
    for s, weights in ((random(0, D, seed=0), None), (random(M, D, seed=0), torch.zeros(M))):
        labels = torch.zeros(len(s.requires_grad_()), dtype=torch.long)
        for loss in (
            linear_divergence(s, head, s.detach() + 1, head.detach(), weights_M=weights),
            linear_cross_entropy(s, head, labels, weights_M=weights),
        ):
            gradients = torch.autograd.grad(loss, (s, head))
            assert loss.item() == 0.0
            assert not any(gradient.any() for gradient in gradients)
    assert label_logprobs(random(0, D, seed=0), head, torch.zeros(0, dtype=torch.long)).shape == (0,)


@every_split
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
def test_cross_entropy_is_the_dense_one(
    chunk: int, block: int, weights: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_block(monkeypatch, block)
    s, head = random(M, D, seed=0).requires_grad_(), random(V, D, seed=2).requires_grad_()
    labels = torch.tensor([0, 6, 7, V - 1, 7, 1])  # at the edges of chunks, too
    log_q = (s @ head.T).log_softmax(dim=-1)[torch.arange(M), labels]
    wanted = mean(-log_q, weights)
    wanted_gradients = torch.autograd.grad(3 * wanted, (s, head))
    got = linear_cross_entropy(s, head, labels, chunk=chunk, weights_M=weights)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.autograd.grad(3 * got, (s, head)), wanted_gradients, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(label_logprobs(s, head, labels, chunk=chunk), log_q.detach(), rtol=1e-12, atol=1e-14)


@every_kind
@every_split
@pytest.mark.parametrize("trained_head", [False, True])
@pytest.mark.parametrize("total", [None, 3.0])
def test_weights_by_the_probability_of_the_label(
    kind: Divergence, chunk: int, block: int, trained_head: bool, total: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are constants: no gradient flows through them."""
    set_block(monkeypatch, block)
    s, head = random(M, D, seed=0).requires_grad_(), random(V, D, seed=2).requires_grad_(trained_head)
    t, teacher_head = random(M, D, seed=1), random(V, D, seed=3)
    leaves, labels = (s, head) if trained_head else (s,), torch.tensor([0, 6, 7, V - 1, 7, 1])
    log_q, log_p = (s @ head.T).log_softmax(dim=-1), (t @ teacher_head.T).log_softmax(dim=-1)
    label_log_q = log_q[torch.arange(M), labels]

    def weigh(log_q_M: Tensor) -> Tensor:
        return WEIGHTS * log_q_M.exp() ** 0.5

    weights = weigh(label_log_q.detach())
    by = weights.sum() if total is None else total
    given = {"weights_M": weigh, "total": None if total is None else torch.tensor(total), "chunk": chunk}
    for values, got in (
        (dense(kind, log_q, log_p), linear_divergence(s, head, t, teacher_head, kind=kind, labels_M=labels, **given)),
        (-label_log_q, linear_cross_entropy(s, head, labels, **given)),
    ):
        wanted = (weights * values).sum() / by
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
        gradients = torch.autograd.grad(wanted, leaves, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(got, leaves), gradients, rtol=1e-11, atol=1e-13)


@every_kind
@pytest.mark.parametrize("kept", [None, 4])
def test_no_more_than_a_chunk_of_logits_exists(
    kind: Divergence, kept: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor that an operation makes is as large as the logits, or as a block of them."""
    set_block(monkeypatch, 40)
    s, t = random(50, 3, seed=0).requires_grad_(), random(50, 3, seed=1)
    head = random(200, 3, seed=2).requires_grad_()
    teacher = None if kept is None else top_k(t @ head.detach().T, kept)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out._base is None:
                largest = max(largest, out.numel())
            return out

    with Sizes():
        if teacher is None:
            linear_divergence(s, head, t, head.detach(), kind=kind, chunk=20).backward()
        else:
            top_k_divergence(s, head, teacher, chunk=20).backward()
    assert largest == head.numel() == 600  # the head's gradient; all logits are 10,000, a block's 400


@every_split
@pytest.mark.parametrize("k", [1, 4, V])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
def test_top_k_is_the_dense_one(
    k: int, chunk: int, block: int, weights: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_block(monkeypatch, block)
    s, t = random(M, D, seed=0).requires_grad_(), random(M, D, seed=1)
    head, teacher_head = random(V, D, seed=2).requires_grad_(), random(V, D, seed=3)
    q, p = (s @ head.T).softmax(dim=-1), (t @ teacher_head.T).softmax(dim=-1)
    order = p.argsort(dim=-1, descending=True)
    first_q, first_p = (x.gather(1, order[:, :k]) for x in (q, p))
    values = (first_p * (first_p / first_q).log()).sum(dim=-1)
    if k < V:
        tail_q, tail_p = (x.gather(1, order[:, k:]).sum(dim=-1) for x in (q, p))
        values = values + tail_p * (tail_p / tail_q).log()
    wanted = mean(values, weights)
    wanted_gradients = torch.autograd.grad(3 * wanted, (s, head))
    teacher = top_k(t @ teacher_head.T, k, torch.float64)
    got = top_k_divergence(s, head, teacher, chunk=chunk, weights_M=weights)
    gradients = torch.autograd.grad(3 * got, (s, head))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-11, atol=1e-13)
    whole = linear_divergence(s, head, t, teacher_head, weights_M=weights)
    if k == V:
        torch.testing.assert_close(got, whole, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradients, torch.autograd.grad(3 * whole, (s, head)), rtol=1e-11, atol=1e-13)
    else:
        assert got < whole  # a coarser partition


def test_a_tail_that_is_almost_nothing() -> None:
    """Student and teacher with 1e-30 outside the top: 1 - sum would be 0 and its logarithm -inf."""
    z = torch.tensor([[70.0, 1.0, 0.0, -1.0]], dtype=torch.float32)
    teacher = top_k(torch.tensor([[71.0, 0.0, 0.0, 0.0]]), 1)
    assert teacher.tail.item() == pytest.approx(math.log(3) - 71, rel=1e-3)
    z.requires_grad_()
    loss = top_k_divergence(z, torch.eye(4), teacher)
    loss.backward()
    assert z.grad is not None
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert z.grad.isfinite().all()


def test_float16_masses_are_made_one_again() -> None:
    """The gradient of a student that is the teacher is 0 up to float16's rounding, and the loss no less than 0."""
    t, head = random(200, D, seed=1, dtype=torch.float32), 2 * random(V, D, seed=3, dtype=torch.float32)
    teacher = top_k(t @ head.T, 5)
    assert teacher.logprobs.dtype == torch.float16
    s = t.clone().requires_grad_()
    loss = top_k_divergence(s, head, teacher)
    loss.backward()
    assert s.grad is not None
    assert -1e-7 < loss.item() < 1e-5
    assert float(s.grad.norm() * 200**0.5) < 1e-2
    masses = torch.cat((teacher.logprobs, teacher.tail[:, None]), dim=1).float().exp().sum(dim=1)
    assert float((masses - 1).abs().max()) > 1e-5


def test_ids_at_the_edges_of_chunks() -> None:
    """The kept tokens are the first, the last, and both sides of a border."""
    ids = torch.tensor([[0, 6, 7, V - 1]], dtype=torch.int32)
    p = torch.tensor([[0.1, 0.2, 0.3, 0.15]], dtype=torch.float64)
    teacher = TopK(ids, p.log(), torch.tensor([0.25]).double().log())
    z = random(1, V, seed=8).requires_grad_()
    loss = top_k_divergence(z, torch.eye(V).double(), teacher, chunk=7)
    (gradient,) = torch.autograd.grad(loss, z)
    q = z.detach().softmax(dim=-1)
    kept = torch.zeros(V, dtype=torch.bool)
    kept[ids.long()] = True
    wanted = q - 0.25 * torch.where(kept, 0, q / q[0, ~kept].sum())
    wanted[0, ids[0].long()] -= p[0]
    torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-13)
