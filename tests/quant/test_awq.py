"""Scales from activations: their values, their folding, their choice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from twofold.quant.awq import InputStatistics, choose_scale, fold_into_norm, smoothing_errors, smoothing_scales
from twofold.quant.rounding import fake_quantize, minmax_grid, search_grid
from twofold.quant.scheme import QuantScheme

SCHEME = QuantScheme(group_size=16)


def heavy_tailed(tokens: int = 512, width: int = 64) -> Tensor:
    """Inputs of which a few channels are 30 times as large as the others."""
    generator = torch.Generator().manual_seed(1)
    size = torch.ones(width)
    size[::13] = 30.0
    return torch.randn(tokens, width, generator=generator) * size


def weights(width: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [0.1 * torch.randn(rows, width, generator=generator) for rows in (24, 40)]


def hessian_of(x_TK: Tensor) -> Tensor:
    return 2 / len(x_TK) * x_TK.T @ x_TK


def changed(x_TK: Tensor, rounded: Tensor, weight: Tensor) -> float:
    """Twice the mean squared change of the output, as it comes out of the layer itself."""
    return float(2 * (x_TK @ rounded.T - x_TK @ weight.T).square().sum(1).mean())


@pytest.mark.parametrize(
    ("w", "s", "offset", "expected"),
    [
        (0.5, 2.0, 1.0, -0.25),
        (-0.5, 0.5, 1.0, 0.0),
        (0.5, 2.0, 0.0, 0.25),
        (-3.0, 4.0, 1.0, -1.5),
        (-1.0, 4.0, 1.0, -1.0),
    ],
)
def test_a_norm_takes_the_scale_by_its_multiplier(w: float, s: float, offset: float, expected: float) -> None:
    weight, scale = fold_into_norm(torch.tensor([w]), torch.tensor([s]), offset)
    assert weight.item() == expected
    assert scale.item() == (1.0 if w + offset == 0 else s)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_norm_survives_storage_and_the_scale_makes_up_for_it(offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    w = 1 - offset + 0.4 * torch.randn(1000, generator=generator)
    s = torch.logspace(-3, 3, 1000)
    weight, scale = fold_into_norm(w, s, offset)
    assert torch.equal(weight, weight.to(torch.bfloat16).float())
    torch.testing.assert_close((weight.double() + offset) * scale, w.double() + offset, rtol=1e-14, atol=0)
    assert (scale > 0).all()
    if offset:  # bfloat16 has no multipliers between 0 and its steps around -1
        assert (weight + offset).abs().min() >= 2.0**-6 - 2.0**-9
    small = s < 8
    near = (scale / s)[small & ((w + offset).abs() > 0.2)]
    assert near.min() > 0.9
    assert near.max() < 1.1
    again, same = fold_into_norm(w, scale, offset)
    assert torch.equal(again, weight)
    assert torch.equal(same, scale)


def test_scales_are_powers_of_the_magnitude_about_their_middle() -> None:
    scales = smoothing_scales(torch.tensor([1.0, 1.0, 16.0]), steps=3)
    expected = [[1, 1, 1], [0.5, 0.5, 2], [0.25, 0.25, 4]]
    torch.testing.assert_close(scales, torch.tensor(expected, dtype=torch.float64))
    assert smoothing_scales(torch.ones(2)).shape == (20, 2)
    assert torch.equal(smoothing_scales(torch.zeros(3), 4), torch.ones(4, 3, dtype=torch.float64))
    dead = smoothing_scales(torch.tensor([0.0, 1.0]))
    assert torch.isfinite(dead).all()
    assert dead[-1, 1] / dead[-1, 0] == pytest.approx(1e4)


def test_statistics_are_those_of_all_tokens_at_once() -> None:
    x = heavy_tailed(40, 8)
    statistics = InputStatistics(torch.empty(3, 8))
    for part in x.split(7):
        statistics.add(part)
    torch.testing.assert_close(statistics.hessian(), hessian_of(x))
    shared = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    wanted = x.double().abs().view(40, 2, 4).mean((0, 1))
    torch.testing.assert_close(statistics.magnitude(shared), wanted, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="no calibration token"):
        InputStatistics(torch.empty(3, 8)).hessian()


def same(hessian: Tensor) -> list[Tensor]:
    """Layers of one input."""
    return [hessian] * len(weights())


@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_errors_are_those_of_the_layers_outputs(symmetric: bool, search: bool) -> None:
    scheme = QuantScheme(group_size=16, symmetric=symmetric)
    x = heavy_tailed()
    scales = smoothing_scales(x.abs().mean(0))[[0, 7, 19]].float()
    errors = smoothing_errors(weights(), same(hessian_of(x)), scales, scheme, search)
    for scale, error in zip(scales, errors, strict=True):
        importance = (x / scale).square().mean(0)
        total = 0.0
        for w in weights():
            grid = search_grid(w * scale, scheme, importance) if search else minmax_grid(w * scale, scheme)
            rounded = fake_quantize(w * scale, grid, scheme)
            total += float(2 * ((x / scale) @ rounded.T - x @ w.T).square().sum(1).mean())
        assert error == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_better_than_rounding_where_channels_differ_in_size(bits: int) -> None:
    scheme = QuantScheme(bits=bits, group_size=16)
    x = heavy_tailed()
    scales = smoothing_scales(x.abs().mean(0)).float()
    chosen = choose_scale(weights(), same(hessian_of(x)), scales, scheme)
    first, best = smoothing_errors(weights(), same(hessian_of(x)), scales[[0, chosen]], scheme, search=True)
    importance = x.square().mean(0)
    plain = sum(changed(x, fake_quantize(w, search_grid(w, scheme), scheme), w) for w in weights())
    weighted = sum(changed(x, fake_quantize(w, search_grid(w, scheme, importance), scheme), w) for w in weights())
    assert first == pytest.approx(weighted, rel=1e-3)  # alpha = 0 is rounding to nearest
    assert best < 0.7 * min(weighted, plain)


def test_layers_of_several_inputs_share_a_scale() -> None:
    """The error of a candidate is the sum of the layers' own."""
    hessians = [hessian_of(heavy_tailed()), hessian_of(heavy_tailed() ** 2)]
    scales = smoothing_scales(heavy_tailed().abs().mean(0)).float()
    both = smoothing_errors(weights()[:2], hessians, scales, SCHEME, search=False)
    alone = [smoothing_errors([w], [h], scales, SCHEME, False) for w, h in zip(weights()[:2], hessians, strict=True)]
    assert both == pytest.approx([a + b for a, b in zip(*alone, strict=True)])


def test_never_worse_than_no_scales() -> None:
    """Also where a candidate only looks better, on grids that clip nothing."""
    looked_better = 0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        h = hessian_of(torch.randn(256, 64, generator=generator))
        scales = torch.cat((torch.ones(1, 64), (0.05 * torch.randn(9, 64, generator=generator)).exp()))
        rough = smoothing_errors(weights(), same(h), scales, SCHEME, search=False)
        fine = smoothing_errors(weights(), same(h), scales, SCHEME, search=True)
        best = rough.index(min(rough))
        looked_better += fine[best] > fine[0]
        assert fine[choose_scale(weights(), same(h), scales, SCHEME)] <= fine[0]
    assert looked_better > 0


def test_channels_of_equal_size_need_no_scales() -> None:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(3)).sign()
    scales = smoothing_scales(x.abs().mean(0))
    assert torch.equal(scales, torch.ones_like(scales))
    assert choose_scale(weights(), same(hessian_of(x)), scales.float(), SCHEME) == 0
