"""The GPU's functions against their references; skipped where there is no GPU."""

import pytest
import torch
from torch import Tensor

from twofold.ops import packed, packed_cuda, rounding
from twofold.ops.documents import Documents
from twofold.ops.gated_delta import commit_delta, gated_delta, gated_delta_recurrent

pytestmark = pytest.mark.gpu

IDS = torch.tensor([[1] * 10 + [2] + [3] * 70 + [4] * 119, [1] * 150 + [2] * 50])


def compare(fast: object, slow: object, inputs: list[Tensor], tolerance: float, documents: bool) -> None:
    """Outputs and gradients: half precision on the GPU against float64 on the CPU, by relative Frobenius norm."""
    found, expected = (
        run(function, [x.to(*where) for x in inputs], documents)
        for function, where in ((fast, ("cuda",)), (slow, ("cpu", torch.float64)))
    )
    for a, b in zip(found, expected, strict=True):
        assert float((a.cpu().double() - b).norm() / b.norm()) < tolerance


def run(function: object, inputs: list[Tensor], packed: bool) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(True) for x in inputs]
    documents = Documents(IDS.to(leaves[0].device)) if packed else None
    y = function(*leaves, documents)  # type: ignore[operator]
    torch.manual_seed(1)
    slope = torch.randn(y.shape).to(y)
    return [y, *torch.autograd.grad(y, leaves, slope)]


def randn(*shape: int) -> Tensor:
    return torch.randn(2, 200, *shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("documents", [False, True])
def test_packed_attention(documents: bool) -> None:
    torch.manual_seed(0)
    inputs = [randn(6, 64), randn(2, 64), randn(2, 64)]
    compare(packed_cuda.packed_attention, packed.packed_attention, inputs, 0.01, documents)


def test_packed_attention_of_a_fixed_number_of_documents() -> None:
    """Empty documents at the end change nothing."""
    torch.manual_seed(0)
    inputs = [randn(6, 64), randn(2, 64), randn(2, 64)]

    def fast(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        return packed_cuda.packed_attention(q, k, v, Documents(documents.ids_BT, most=11))

    compare(fast, packed.packed_attention, inputs, 0.01, True)


@pytest.mark.parametrize("documents", [False, True])
def test_packed_delta(documents: bool) -> None:
    torch.manual_seed(0)
    decay = -torch.rand(2, 200, 4)
    inputs = [randn(2, 128), randn(2, 128), randn(4, 128), decay, torch.rand(2, 200, 4).bfloat16()]
    compare(packed.packed_delta, packed.packed_delta, inputs, 0.02, documents)


def test_prefill_goes_on_from_a_state() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 200, heads, 128) for heads in (2, 2, 4))
    tokens = [q, k, v, -torch.rand(2, 200, 4), torch.rand(2, 200, 4), torch.randn(2, 4, 128, 128)]
    o, window = gated_delta(*(x.cuda() for x in tokens))
    expected, states = gated_delta_recurrent(*(x.double() for x in tokens))
    torch.testing.assert_close(o.cpu().double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(commit_delta(window, 150).cpu().double(), states[:, 149], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("documents", [False, True])
def test_packed_convolution(documents: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 4, dtype=torch.bfloat16)

    def fast(x: Tensor, documents: Documents | None) -> Tensor:
        return packed_cuda.packed_convolution(x, weight.to(x), documents)

    def slow(x: Tensor, documents: Documents | None) -> Tensor:
        return packed.packed_convolution(x, weight.to(x), documents)

    compare(fast, slow, [randn(96)], 0.01, documents)


@pytest.mark.parametrize("group", [32, 576])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_bit_equal(group: int, symmetric: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, 576)
    scale = (torch.rand(70, 576 // group) * 0.3 + 0.05).bfloat16()
    weight[:, :300] = (weight[:, :300] / 0.0625).round() * 0.03125  # many ties
    scale[:7] = 0.0625
    zero = None if symmetric else torch.randint(-8, 8, scale.shape, dtype=torch.int8)
    grid = weight, scale, zero
    expected = rounding.round_to_grid(*grid, -8, 7, dtype)
    found = rounding.round_to_grid(*(None if x is None else x.cuda() for x in grid), -8, 7, dtype)
    assert torch.equal(found.cpu(), expected)


def test_rounding_keeps_what_is_not_a_number() -> None:
    weight = torch.full((2, 32), torch.nan, device="cuda")
    assert rounding.round_to_grid(weight, torch.ones(2, 1, device="cuda"), None, -8, 7, torch.bfloat16).isnan().all()


@pytest.mark.parametrize("group", [32, 576])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gradient_of_scales(group: int, symmetric: bool) -> None:
    torch.manual_seed(0)
    weight, grad = torch.randn(70, 576), torch.randn(70, 576)
    scale = (torch.rand(70, 576 // group) * 0.3 + 0.05).bfloat16()
    zero = None if symmetric else torch.randint(-8, 8, scale.shape, dtype=torch.int8)
    expected = rounding.scale_gradient(weight, scale, zero, -8, 7, grad)
    on_gpu = [None if x is None else x.cuda() for x in (weight, scale, zero)]
    found = rounding.scale_gradient(*on_gpu, -8, 7, grad.cuda())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
