"""Norms and rotary embedding against the formulas written out."""

import math

import pytest
import torch

from twofold.ops.norms import gated_rms_norm, rms_norm, rotary_table, rotate


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_is_its_formula(offset: float) -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    w = torch.tensor([0.5, -2.0], dtype=torch.float64)
    rms = math.sqrt(12.5 + 0.1)
    expected = torch.tensor([[3.0 / rms * (offset + 0.5), 4.0 / rms * (offset - 2.0)]], dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, w, 0.1, offset), expected, atol=1e-15, rtol=0)


def test_rms_norm_of_bfloat16_is_computed_wide() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(7, 96).bfloat16(), torch.randn(96).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + w.double())
    y = rms_norm(x, w, 1e-6, 1.0)
    assert y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= 2**-8 * exact.abs()).all()  # one rounding to 8 bits


def test_gated_norm_multiplies_by_weight_and_silu_of_gate() -> None:
    torch.manual_seed(0)
    x, z, w = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 8), (2, 3, 8), (8,)))
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w * z / (1 + (-z).exp())
    torch.testing.assert_close(gated_rms_norm(x, z, w, 1e-6), expected)


def test_rotation_is_a_complex_product() -> None:
    """The pair (x_i, x_{i + R/2}) turns by p theta^(-2i/R); the rest of the head stays."""
    torch.manual_seed(0)
    head, rotary, theta = 12, 8, 100.0
    x = torch.randn(1, 5, 2, head, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 7, 300, 2]])
    y = rotate(x, *rotary_table(positions, rotary, theta))
    for t, p in enumerate([0, 1, 7, 300, 2]):
        for i in range(rotary // 2):
            turn = complex(0, p * theta ** (-2 * i / rotary))
            for h in range(2):
                pair = complex(x[0, t, h, i], x[0, t, h, i + rotary // 2])
                real, imag = y[0, t, h, i], y[0, t, h, i + rotary // 2]
                # the table is float32: angles up to 300 carry 2e-5
                assert abs(complex(real, imag) - pair * complex(math.cos(turn.imag), math.sin(turn.imag))) < 1e-4
    assert torch.equal(y[..., rotary:], x[..., rotary:])
    assert torch.equal(y[:, 0], x[:, 0])
    assert not torch.allclose(y[:, 1], x[:, 1], atol=0.1)


def test_scores_depend_on_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16)

    def score(query: int, key: int) -> float:
        turned = [rotate(x, *rotary_table(torch.tensor([[p]]), 16, 10_000.0)) for x, p in ((q, query), (k, key))]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2
