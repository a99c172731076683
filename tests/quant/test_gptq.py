import pytest
import torch
from torch import Tensor

from twofold.ops.integers import dequantize
from twofold.quant.gptq import Hessian, even_scales, gptq, hessian_error
from twofold.quant.rounding import Grid, minmax_grid, quantize, search_grid
from twofold.quant.scheme import QuantScheme


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _weight(rows: int, num_inputs: int) -> Tensor:
    return 0.1 * torch.randn(rows, num_inputs, generator=_generator(0))


def _inputs(tokens: int, num_inputs: int, rank: int | None = None) -> Tensor:
    """Correlated inputs: a mixture of `rank` sources of falling strength."""
    rank = rank or num_inputs
    mix = torch.randn(rank, num_inputs, generator=_generator(1)) * torch.logspace(0, -2, rank)[:, None]
    return torch.randn(tokens, rank, generator=_generator(2)) @ mix


def _hessian(x: Tensor) -> Tensor:
    hessian = Hessian(x.shape[-1])
    hessian.add(x)
    return hessian.matrix()


def _gptq_in_float64(weight: Tensor, hessian: Tensor, grid: Grid, scheme: QuantScheme, damping: float) -> Tensor:
    """The method as its derivation states it (optimal brain surgeon): after each column, the free columns
    move by -(w - q) / [F^-1]_kk F^-1[k, :], F being the part of H of the columns that are not yet rounded."""
    w = weight.double().clone()
    h = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(len(hessian)).double()
    inverse = torch.linalg.inv(h)
    q = torch.empty_like(w)
    zeros = torch.zeros_like(grid.scale_NG) if grid.zero_NG is None else grid.zero_NG
    for k in range(w.shape[1]):
        j = k // scheme.group_length(w.shape[1])
        s, zero = grid.scale_NG[:, j].double(), zeros[:, j].double()
        q[:, k] = torch.round(w[:, k] / s + zero).clamp(scheme.qmin, scheme.qmax)
        error = (w[:, k] - s * (q[:, k] - zero)) / inverse[0, 0]
        w[:, k:] -= error[:, None] * inverse[0]
        # The inverse without the first row and column of the matrix, by its Schur complement.
        inverse = inverse[1:, 1:] - torch.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
    return q.to(torch.int8)


KINDS = [(4, True), (4, False), (8, True), (8, False)]
each_kind = pytest.mark.parametrize(("bits", "symmetric"), KINDS)


@each_kind
@pytest.mark.parametrize(("num_inputs", "group_size"), [(48, 8), (320, 32), (192, 192), (320, 160), (200, -1)])
def test_it_is_the_method_as_derived(num_inputs: int, group_size: int, bits: int, symmetric: bool) -> None:
    scheme = QuantScheme(bits=bits, group_size=group_size, symmetric=symmetric)
    weight, h = _weight(6, num_inputs), _hessian(_inputs(1024, num_inputs))
    grid = search_grid(weight, scheme)
    q, used, _ = gptq(weight, h.double(), scheme, grid=grid)
    assert _same(used, grid)
    expected = _gptq_in_float64(weight, h, grid, scheme, 0.01)
    # float32 against float64: a weight half-way between two integers may fall either way.
    assert (q != expected).float().mean() < (0.01 if bits == 4 else 0.02)


def _same(one: Grid, other: Grid) -> bool:
    zeros = [grid.zero_NG for grid in (one, other) if grid.zero_NG is not None]
    return torch.equal(one.scale_NG, other.scale_NG) and (not zeros or torch.equal(zeros[0], zeros[-1]))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [24, 80, 160])
def test_grids_do_not_depend_on_the_blocks(group_size: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    num_inputs = 480
    weight, h = _weight(8, num_inputs), _hessian(_inputs(1024, num_inputs)).double()
    scheme = QuantScheme(group_size=group_size, symmetric=symmetric)
    q, grid, _ = gptq(weight, h, scheme)
    monkeypatch.setattr("twofold.quant.gptq._BLOCK", num_inputs)
    q_one_block, grid_one_block, _ = gptq(weight, h, scheme)
    assert (grid.scale_NG != grid_one_block.scale_NG).float().mean() < 0.02
    assert (q != q_one_block).float().mean() < 0.02


def _error(weight: Tensor, q: Tensor, grid: Grid, scheme: QuantScheme, h: Tensor) -> float:
    dense = dequantize(q, *grid, scheme.group_length(weight.shape[1]), torch.float32)
    difference = (weight - dense).double()
    return float(torch.trace(difference @ h.double() @ difference.T))


def _rounded_error(weight: Tensor, scheme: QuantScheme, h: Tensor) -> float:
    """The least error of three ways to round to nearest."""
    grids = (minmax_grid(weight, scheme), search_grid(weight, scheme), search_grid(weight, scheme, h.diagonal()))
    return min(_error(weight, quantize(weight, grid, scheme), grid, scheme, h) for grid in grids)


@each_kind
@pytest.mark.parametrize(("num_inputs", "group_size"), [(64, 8), (256, 32), (320, 160), (384, 128), (96, -1)])
def test_no_worse_than_rounding_in_hessian_norm(num_inputs: int, group_size: int, bits: int, symmetric: bool) -> None:
    scheme = QuantScheme(bits=bits, group_size=group_size, symmetric=symmetric)
    weight, h = _weight(32, num_inputs), _hessian(_inputs(2048, num_inputs))
    rounded = _rounded_error(weight, scheme, h)
    for static in (None, search_grid(weight, scheme)):
        q, grid, report = gptq(weight, h, scheme, grid=static)
        error = _error(weight, q, grid, scheme, h)
        assert error < 0.6 * rounded
        assert report.error == pytest.approx(error, rel=1e-2)
        assert report.relative_error == pytest.approx(error / hessian_error(weight, h), rel=1e-2)
        assert (report.damping, report.rounded_to_nearest, report.dead_columns) == (0.01, False, 0)


def test_zero_points_pay_where_weights_lie_to_one_side() -> None:
    weight, h = _weight(32, 128) + 0.1, _hessian(_inputs(1024, 128))
    even, uneven = (QuantScheme(group_size=32, symmetric=symmetric) for symmetric in (True, False))
    error = {scheme: _error(weight, *gptq(weight, h, scheme)[:2], scheme, h) for scheme in (even, uneven)}
    assert error[uneven] < 0.8 * error[even]


@each_kind
@pytest.mark.parametrize("group_size", [8, 160, -1])
def test_uncorrelated_inputs_give_plain_rounding(group_size: int, bits: int, symmetric: bool) -> None:
    scheme = QuantScheme(bits=bits, group_size=group_size, symmetric=symmetric)
    weight = _weight(16, 320)
    grid = search_grid(weight, scheme)
    for static in (None, grid):
        q, used, _ = gptq(weight, torch.eye(320), scheme, grid=static)
        assert _same(used, grid)
        assert torch.equal(q, quantize(weight, grid, scheme))


def _assert_sane(weight: Tensor, h: Tensor, scheme: QuantScheme, q: Tensor, grid: Grid) -> None:
    assert bool(torch.isfinite(grid.scale_NG).all())
    dense = dequantize(q, *grid, scheme.group_length(weight.shape[1]), torch.float32)
    assert float(dense.abs().max()) < 4 * float(weight.abs().max())
    nearest = search_grid(weight, scheme)
    assert _error(weight, q, grid, scheme, h) <= _error(weight, quantize(weight, nearest, scheme), nearest, scheme, h)


@each_kind
@pytest.mark.parametrize("static", [False, True])
def test_inputs_of_low_rank(static: bool, bits: int, symmetric: bool) -> None:
    scheme = QuantScheme(bits=bits, group_size=16, symmetric=symmetric)
    weight, h = _weight(16, 128), _hessian(_inputs(256, 128, rank=5))
    q, grid, report = gptq(weight, h, scheme, grid=search_grid(weight, scheme) if static else None)
    assert not report.rounded_to_nearest
    _assert_sane(weight, h, scheme, q, grid)


def test_zero_and_duplicated_columns() -> None:
    scheme = QuantScheme(group_size=16)
    weight, x = _weight(16, 128), _inputs(1024, 128)
    x[:, 3] = 0
    x[:, 40:60] = 0  # a whole group and more
    x[:, 70] = x[:, 5]
    x[:, 71] = x[:, 70]
    h = _hessian(x)
    q, grid, report = gptq(weight, h, scheme)
    assert report.dead_columns == 21
    assert not report.rounded_to_nearest
    _assert_sane(weight, h, scheme, q, grid)
    dead = slice(40, 60)
    group_scale = grid.scale_NG.repeat_interleave(16, dim=1)[:, dead].float()
    assert torch.equal(q[:, dead].float(), (weight[:, dead] / group_scale).round().clamp(-8, 7))


@pytest.mark.parametrize("symmetric", [True, False])
def test_inputs_that_were_all_zero_give_plain_rounding(symmetric: bool) -> None:
    scheme = QuantScheme(group_size=8, symmetric=symmetric)
    weight = _weight(4, 32)
    q, grid, report = gptq(weight, torch.zeros(32, 32), scheme)
    nearest = search_grid(weight, scheme)
    assert _same(grid, nearest)
    assert torch.equal(q, quantize(weight, nearest, scheme))
    assert (report.dead_columns, report.rounded_to_nearest, report.relative_error) == (32, False, 0.0)


def test_damping_grows_until_it_factorizes_and_is_reported() -> None:
    h = torch.eye(32)
    h[0, 1] = h[1, 0] = 1.05  # smallest eigenvalue -0.05
    _, _, report = gptq(_weight(4, 32), h, QuantScheme(group_size=8), damping=0.01)
    assert report.damping == pytest.approx(0.1)
    assert not report.rounded_to_nearest


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_hopeless_hessian_is_rounded_and_reported(symmetric: bool) -> None:
    scheme = QuantScheme(group_size=8, symmetric=symmetric)
    weight = _weight(4, 32)
    h = torch.eye(32)
    h[0, 1] = h[1, 0] = 5.0
    q, grid, report = gptq(weight, h, scheme)
    assert report.rounded_to_nearest
    assert torch.equal(q, quantize(weight, grid, scheme))


def test_bad_arguments_are_refused() -> None:
    weight = _weight(4, 32)
    scheme = QuantScheme(group_size=8)
    with pytest.raises(ValueError, match="32 inputs"):
        gptq(weight, torch.eye(31), scheme)
    with pytest.raises(ValueError, match="NaN"):
        gptq(weight, torch.full((32, 32), torch.nan), scheme)
    with pytest.raises(ValueError, match="do not fit"):
        gptq(weight, torch.eye(32), scheme, grid=Grid(torch.ones(4, 3)))
    with pytest.raises(ValueError, match="no zero points"):
        gptq(weight, torch.eye(32), QuantScheme(group_size=8, symmetric=False), grid=Grid(torch.ones(4, 4)))
    with pytest.raises(ValueError, match="does not divide"):
        gptq(weight, torch.eye(32), QuantScheme(group_size=24))
    with pytest.raises(ValueError, match="no calibration token"):
        Hessian(8).matrix()


def test_the_hessian_is_twice_the_mean_outer_product() -> None:
    x = _inputs(60, 16)
    hessian = Hessian(16, dtype=torch.float64)
    hessian.add(x[:13])
    hessian.add(x[13:40].reshape(3, 9, 16))
    hessian.add(x[40:])
    expected = 2 * torch.stack([torch.outer(row, row) for row in x.double()]).mean(0)
    assert hessian.num_tokens == 60
    assert torch.allclose(hessian.matrix(), expected, rtol=1e-12)


def test_the_error_is_twice_the_mean_square_of_the_output() -> None:
    x, difference = _inputs(500, 24).double(), _weight(7, 24).double()
    hessian = Hessian(24, dtype=torch.float64)
    hessian.add(x)
    expected = 2 * (x @ difference.T).square().sum() / 500
    assert hessian_error(difference, hessian.matrix()) == pytest.approx(float(expected), rel=1e-10)


def _uneven(rows: int, num_inputs: int) -> Tensor:
    return (
        _weight(rows, num_inputs)
        * torch.logspace(-1, 1, num_inputs)[torch.randperm(num_inputs, generator=_generator(3))]
    )


def test_even_scales_are_where_the_estimated_error_is_least() -> None:
    weight, h = _uneven(40, 24), _hessian(_inputs(512, 24))
    damped = h.double() + 0.01 * h.double().diagonal().mean() * torch.eye(24, dtype=torch.float64)
    conditional = torch.linalg.inv(damped).diagonal().reciprocal()
    fourth = weight.double().square().mean(0).square()

    def estimated(s: Tensor) -> float:
        return float((fourth * s**4).sum().sqrt() * (conditional / s.square()).sum())

    s = even_scales(weight, h)
    assert float(s.log().mean()) == pytest.approx(0, abs=1e-9)
    for seed in range(20):
        other = torch.randn(24, generator=_generator(seed)).double().mul(0.02).exp()
        assert estimated(s * other) > estimated(s) * (1 - 1e-6)
    assert estimated(torch.ones(24).double()) > 2 * estimated(s)


def test_rounding_behind_even_scales_errs_less() -> None:
    scheme = QuantScheme(bits=4, group_size=32)
    weight, h = _uneven(64, 128), _hessian(_inputs(1024, 128))
    s = even_scales(weight, h).float()
    plain, scaled = gptq(weight, h, scheme)[2], gptq(weight * s, h / (s[:, None] * s), scheme)[2]
    assert scaled.error < 0.5 * plain.error


def test_even_scales_stand_unused_inputs() -> None:
    weight, x = _weight(8, 16), _inputs(64, 16)
    weight[:, 3], x[:, 5] = 0, 0
    s = even_scales(weight, _hessian(x))
    assert bool(s.isfinite().all())
    assert bool((s > 0).all())
