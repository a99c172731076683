"""The compiled element by element functions are the references', forward and backward."""

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from twofold.ops import compiled, norms

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def case(name: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    if name == "silu_mul":
        return [drawn(2, 5, 24), drawn(2, 5, 24)]
    if name == "rotate":  # heads that are columns of a wider product, half of each turned
        angle = torch.randn(2, 5, 4, generator=generator).to(device)
        return [drawn(2, 5, 40)[..., :32].unflatten(-1, (4, 8)), angle.cos(), angle.sin()]
    return [drawn(2, 5, 24), torch.randn(24, generator=generator).to(device)]


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], *more: float) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(x.dtype.is_floating_point) for x in inputs]
    y = function(*leaves, *more)
    weight = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
    (y.float() * weight).sum().backward()
    return [y.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "more"), [("rms_norm", (1e-6, 1.0)), ("rotate", ()), ("silu_mul", ())])
def test_values_and_gradients(name: str, more: tuple[float, ...], dtype: torch.dtype, device: str) -> None:
    inputs = case(name, device, dtype)
    exact = gradients(getattr(norms, name), [x.double() for x in inputs], *more)
    found = gradients(getattr(compiled, name), inputs, *more)
    assert found[0].dtype == dtype
    for x, y in zip(found, exact, strict=True):
        scale = float(y.abs().max())
        torch.testing.assert_close(x.double() / scale, y / scale, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_many_kinds_of_calls(device: str) -> None:
    """More than torch.compile keeps versions for: each eps is one."""
    x = torch.randn(2, 3, 24, device=device)
    weight = torch.rand(24, device=device)
    for kind in range(10):
        eps = 10.0 ** -(kind + 1)
        torch.testing.assert_close(compiled.rms_norm(x, weight, eps), norms.rms_norm(x, weight, eps))
