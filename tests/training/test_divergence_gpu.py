"""The fused losses of a GPU against the dense ones in float64 on the CPU; skipped where there is no GPU."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from twofold.training.divergence import Divergence, label_logprobs, linear_cross_entropy, linear_divergence

pytestmark = pytest.mark.gpu


def compare(loss: Callable[..., Tensor], dtype: torch.dtype, vocabulary: int, *, trained_head: bool = True) -> None:
    """Loss and gradients, of the same inputs on both sides.

    In half precision they are such that every logit is exact too (a multiple of 1/4 below 16): total variation asks
    which of two probabilities is the greater, and rounded logits of near-equal ones answer at random.
    """
    torch.manual_seed(0)
    if dtype == torch.float32:
        student, teacher = (2 * torch.randn(37, 32) for _ in range(2))
        head, teacher_head = (torch.randn(vocabulary, 32) / 4 for _ in range(2))
    else:
        student, teacher = (torch.randint(-2, 3, (37, 32)).to(dtype) for _ in range(2))
        head, teacher_head = (torch.randint(-1, 2, (vocabulary, 32)).to(dtype) / 4 for _ in range(2))
    found = []
    for device, wide in (("cuda", dtype), ("cpu", torch.float64)):
        s, h, t, g = (x.to(device, wide) for x in (student, head, teacher, teacher_head))
        weights = torch.arange(37.0, device=device)
        leaves = [s.requires_grad_(), *([h.requires_grad_()] if trained_head else [])]
        value = loss(s, h, t, g, weights)
        found.append([x.detach().cpu().double() for x in (value, *torch.autograd.grad(value, leaves))])
    for a, b in zip(*found, strict=True):
        assert float((a - b).norm() / b.norm()) < (1e-4 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5, 4096, 49153])
@pytest.mark.parametrize("kind", get_args(Divergence))
def test_divergences(kind: Divergence, vocabulary: int, dtype: torch.dtype) -> None:
    def loss(s: Tensor, h: Tensor, t: Tensor, g: Tensor, weights: Tensor) -> Tensor:
        return linear_divergence(s, h, t, g, kind=kind, weights_M=weights)

    torch.backends.cuda.matmul.allow_tf32 = False
    compare(loss, dtype, vocabulary)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5, 4096, 49153])
def test_cross_entropy(vocabulary: int, dtype: torch.dtype) -> None:
    def loss(s: Tensor, h: Tensor, t: Tensor, g: Tensor, weights: Tensor) -> Tensor:
        return linear_cross_entropy(s, h, torch.arange(37, device=s.device) % vocabulary, weights_M=weights)

    compare(loss, dtype, vocabulary)


@pytest.mark.parametrize("trained_head", [False, True])
@pytest.mark.parametrize("vocabulary", [5, 49153])
@pytest.mark.parametrize("kind", [*get_args(Divergence), None])
def test_weights_by_the_probability_of_the_label(kind: Divergence | None, vocabulary: int, trained_head: bool) -> None:
    def loss(s: Tensor, h: Tensor, t: Tensor, g: Tensor, weights: Tensor) -> Tensor:
        labels, total = torch.arange(37, device=s.device) % vocabulary, weights.new_tensor(7)

        def weigh(log_q_M: Tensor) -> Tensor:
            return weights * log_q_M.exp() ** 0.5

        if kind is None:
            return linear_cross_entropy(s, h, labels, weights_M=weigh, total=total)
        return linear_divergence(s, h, t, g, kind=kind, weights_M=weigh, labels_M=labels, total=total)

    torch.backends.cuda.matmul.allow_tf32 = False
    compare(loss, torch.float32, vocabulary, trained_head=trained_head)


@pytest.mark.parametrize("vocabulary", [5, 49153])
def test_logprobs_of_labels(vocabulary: int) -> None:
    torch.manual_seed(0)
    student, head = torch.randn(37, 32), torch.randn(vocabulary, 32) / 4
    labels = torch.arange(37) % vocabulary
    wanted = (student.double() @ head.double().T).log_softmax(dim=-1)[torch.arange(37), labels]
    torch.backends.cuda.matmul.allow_tf32 = False
    found = label_logprobs(student.cuda(), head.cuda(), labels.cuda())
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-4, atol=1e-4)
    assert label_logprobs(student[:0].cuda(), head.cuda(), labels[:0].cuda()).shape == (0,)


def test_what_is_not_a_number_reaches_the_loss() -> None:
    head = torch.randn(9, 4, device="cuda")
    for kind in get_args(Divergence):
        assert linear_divergence(torch.full((1, 4), torch.nan, device="cuda"), head, head[:1], head, kind=kind).isnan()
