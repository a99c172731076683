from collections.abc import Callable

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as ct_fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from twofold.quant.rounding import (
    CLIP_RATIOS,
    Grid,
    fake_quantize,
    minmax_grid,
    quantize,
    search_grid,
    stored_grid,
    stored_scale,
)
from twofold.quant.scheme import QuantScheme

KINDS = [(4, True), (4, False), (8, True), (8, False)]
each_kind = pytest.mark.parametrize(("bits", "symmetric"), KINDS)


def _weight(rows: int, num_inputs: int, seed: int = 0) -> Tensor:
    normal = torch.randn(rows, num_inputs, generator=torch.Generator().manual_seed(seed))
    return 0.02 * normal * normal.abs()  # heavy tails, so that clipping pays


def _errors(w: Tensor, importance: Tensor, scheme: QuantScheme) -> Tensor:
    """The error of one group at every candidate, each number from its definition in float64."""
    w, importance = w.double(), importance.double()
    low, high = min(float(w.min()), 0.0), max(float(w.max()), 0.0)
    errors = []
    for ratio in CLIP_RATIOS:
        span = max(high, -low) / scheme.qmax if scheme.symmetric else (high - low) / (scheme.qmax - scheme.qmin)
        s = torch.tensor(ratio * span).to(torch.bfloat16).double()
        zero = torch.tensor(0.0).double()
        if not scheme.symmetric:
            zero = torch.round(scheme.qmin - ratio * low / s).clamp(scheme.qmin, scheme.qmax)
        q = torch.round(w / s + zero).clamp(scheme.qmin, scheme.qmax)
        errors.append((importance * (w - s * (q - zero)) ** 2).sum())
    return torch.stack(errors)


@each_kind
@pytest.mark.parametrize(("shape", "group_size"), [((3, 64), 32), ((5, 24), 8), ((2, 40), -1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_search_finds_the_best_candidate(
    shape: tuple[int, int], group_size: int, weighted: bool, bits: int, symmetric: bool
) -> None:
    scheme = QuantScheme(bits=bits, group_size=group_size, symmetric=symmetric)
    weight = _weight(*shape) + (0.0 if symmetric else 0.01)
    importance = torch.rand(shape[1], generator=torch.Generator().manual_seed(3)) if weighted else None
    grid = search_grid(weight, scheme, importance)
    assert grid.scale_NG.dtype == torch.bfloat16
    assert (grid.zero_NG is None) == symmetric
    ours = (fake_quantize(weight, grid, scheme).double() - weight.double()) ** 2
    weights = torch.ones(shape[1]) if importance is None else importance
    group = scheme.group_length(shape[1])
    for row in range(shape[0]):
        for j in range(shape[1] // group):
            members = slice(j * group, (j + 1) * group)
            errors = _errors(weight[row, members], weights[members], scheme)
            assert errors.max() > errors.min() * 1.01  # the candidates differ, so this can fail
            found = float((weights[members].double() * ours[row, members]).sum())
            assert found == pytest.approx(float(errors.min()), rel=1e-3)


@pytest.mark.parametrize("symmetric", [True, False])
def test_search_over_several_chunks_is_the_search_over_rows(symmetric: bool) -> None:
    weight = _weight(70, 4096)  # more than two chunks of rows
    scheme = QuantScheme(symmetric=symmetric)
    parts = [search_grid(part, scheme) for part in weight.split([7, 30, 33])]
    whole = search_grid(weight, scheme)
    assert torch.equal(whole.scale_NG, torch.cat([part.scale_NG for part in parts]))
    if whole.zero_NG is not None:
        assert torch.equal(whole.zero_NG, torch.cat([part.zero_NG for part in parts if part.zero_NG is not None]))


@each_kind
def test_among_equals_the_widest_wins(bits: int, symmetric: bool) -> None:
    weight, scheme = _weight(4, 64), QuantScheme(bits=bits, symmetric=symmetric)
    found, widest = search_grid(weight, scheme, torch.zeros(64)), minmax_grid(weight, scheme)
    assert torch.equal(found.scale_NG, widest.scale_NG)
    assert symmetric or torch.equal(found.zero_NG, widest.zero_NG)


@each_kind
@pytest.mark.parametrize("shift", [0.0, 0.05, -0.05])  # with a shift, all weights have one sign
def test_minmax_clips_nothing(bits: int, symmetric: bool, shift: float) -> None:
    scheme = QuantScheme(bits=bits, group_size=16, symmetric=symmetric)
    weight = _weight(64, 128).clamp(-0.04, 0.04) + shift
    grid = minmax_grid(weight, scheme)
    error = (fake_quantize(weight, grid, scheme) - weight).abs().unflatten(1, (-1, 16))
    # The range is qmax or qmax - qmin steps long, and a step is off by up to 2^-8 of itself. The zero point is
    # rounded as well: the ends may lie half a step outside.
    steps = scheme.qmax if symmetric else scheme.qmax - scheme.qmin
    allowed = 0.5 + steps * 2**-8 * (not symmetric)
    assert bool((error <= (allowed + 1e-3) * grid.scale_NG.float().unsqueeze(-1)).all())
    q = quantize(weight, grid, scheme).unflatten(1, (-1, 16))
    if symmetric:
        assert int(q.abs().max()) == scheme.qmax
    else:  # both ends are in use, unless rounding took one
        used = q.amax(-1).int() - q.amin(-1).int()
        span = (weight.unflatten(1, (-1, 16)).amax(-1) - weight.unflatten(1, (-1, 16)).amin(-1)) / grid.scale_NG.float()
        assert bool(((used - span).abs() <= 1.5).all())


def test_minmax_is_that_of_compressed_tensors() -> None:
    """Their scale and zero point, theirs in float32 before the rounding to bfloat16."""
    weight, scheme = _weight(32, 64) + 0.01, QuantScheme(symmetric=False)
    args = QuantizationArgs(num_bits=4, symmetric=False, group_size=32)
    groups = weight.unflatten(1, (2, 32))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    grid = minmax_grid(weight, scheme)
    assert grid.zero_NG is not None
    assert torch.equal(grid.scale_NG, scale.to(torch.bfloat16))
    # The zero point belongs to the scale that is stored, so a few differ by one.
    assert int((grid.zero_NG.int() - zero.int()).abs().max()) <= 1
    assert (grid.zero_NG == zero).float().mean() > 0.9


def test_a_shifted_weight_needs_the_zero_point() -> None:
    """Sixteen equal steps from 3 to 18: exact with a zero point, and impossible without."""
    weight = torch.arange(3.0, 19.0).unsqueeze(0).repeat(2, 1)
    weight[1] = 0.25 * torch.arange(-10.0, 6.0)
    scheme = QuantScheme(group_size=16, symmetric=False)
    grid = search_grid(weight[1:], scheme)
    assert (grid.scale_NG.item(), grid.zero_NG.item() if grid.zero_NG is not None else None) == (0.25, 2)
    assert torch.equal(fake_quantize(weight[1:], grid, scheme), weight[1:])
    even = QuantScheme(group_size=16)
    assert not torch.equal(fake_quantize(weight[1:], search_grid(weight[1:], even), even), weight[1:])
    # 0 is on every grid, so a range that leaves it out is widened to it.
    outside = minmax_grid(weight[:1], scheme)
    assert outside.zero_NG is not None
    assert outside.zero_NG.item() == -8
    assert outside.scale_NG.item() == torch.tensor(18 / 15).to(torch.bfloat16).item()


def test_a_largest_weight_below_zero_can_use_minus_eight() -> None:
    weight = torch.tensor([[-8.0, 7.0, 3.0, 1.0, -1.0, 2.0, -5.0, 6.0]])
    scheme = QuantScheme(group_size=8)
    grid = search_grid(weight, scheme)
    assert grid.scale_NG.tolist() == [[1.0]]
    assert torch.equal(fake_quantize(weight, grid, scheme), weight)


@each_kind
@pytest.mark.parametrize("grid_of", [minmax_grid, search_grid])
@pytest.mark.parametrize("value", [0.0, 1e-42])
def test_a_group_of_zeros_has_scale_one(
    grid_of: Callable[[Tensor, QuantScheme], Grid], value: float, bits: int, symmetric: bool
) -> None:
    weight = _weight(2, 64)
    weight[1, :32] = value
    scheme = QuantScheme(bits=bits, symmetric=symmetric)
    grid = grid_of(weight, scheme)
    assert grid.scale_NG[1, 0] == 1
    assert bool(torch.isfinite(grid.scale_NG).all())
    assert not fake_quantize(weight, grid, scheme)[1, :32].any()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(bad: float, symmetric: bool) -> None:
    weight = _weight(4, 32)
    weight[2, 5] = bad
    with pytest.raises(ValueError, match="output row 2"):
        search_grid(weight, QuantScheme(symmetric=symmetric))


@each_kind
@pytest.mark.parametrize("group_size", [8, 32, -1])
def test_fake_quantize_is_that_of_compressed_tensors(group_size: int, bits: int, symmetric: bool) -> None:
    scheme = QuantScheme(bits=bits, group_size=group_size, symmetric=symmetric)
    weight = _weight(16, 96) + (0.0 if symmetric else 0.01)
    weight[0, :8] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 7.5, -8.5])  # ties and both ends
    scale, zero = search_grid(weight, scheme)
    if group_size == 8:
        scale[0, 0] = 1
        if zero is not None:
            zero[0, 0] = 3  # odd, so that a tie falls the other way
    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, group_size=group_size)
    theirs = ct_fake_quantize(weight, scale.float(), zero, args)
    assert torch.equal(fake_quantize(weight, Grid(scale, zero), scheme), theirs)


@pytest.mark.parametrize(
    ("bits", "symmetric", "dtype"),
    # bfloat16 has 8 bits itself and may take an integer of 8 bits to its neighbour
    [(*kind, torch.float32) for kind in KINDS] + [(*kind, torch.bfloat16) for kind in KINDS[:2]],
)
def test_a_quantized_weight_is_a_fixed_point(bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    scheme = QuantScheme(bits=bits, symmetric=symmetric)
    weight = _weight(8, 64)
    grid = search_grid(weight, scheme)
    q = quantize(weight, grid, scheme)
    assert torch.equal(quantize(fake_quantize(weight, grid, scheme).to(dtype), grid, scheme), q)


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight = _weight(4, 64)
    with pytest.raises(ValueError, match=r"scales \[4, 3\] do not fit a weight \[4, 64\], which needs \[4, 2\]"):
        quantize(weight, Grid(torch.ones(4, 3)), QuantScheme())
    with pytest.raises(ValueError, match="importance"):
        search_grid(weight, QuantScheme(), torch.ones(32))


def test_grids_that_do_not_belong_to_the_scheme_are_refused() -> None:
    ones, even, uneven = torch.ones(4, 2), QuantScheme(), QuantScheme(symmetric=False)
    with pytest.raises(ValueError, match="the grid has no zero points, but symmetric = false"):
        stored_grid(Grid(ones), (4, 64), uneven)
    with pytest.raises(ValueError, match="the grid has zero points, but symmetric = true"):
        stored_grid(Grid(ones, torch.zeros(4, 2)), (4, 64), even)
    with pytest.raises(ValueError, match=r"zero points \[4, 1\] do not fit"):
        stored_grid(Grid(ones, torch.zeros(4, 1)), (4, 64), uneven)
    with pytest.raises(ValueError, match=r"lie in \[-8, 7\]"):
        stored_grid(Grid(ones, torch.full((4, 2), 8)), (4, 64), uneven)
    for bad in (0.0, -1.0, torch.nan):
        with pytest.raises(ValueError, match="scale"):
            stored_grid(Grid(torch.full((4, 2), bad)), (4, 64), even)
    stored = stored_grid(Grid(ones, torch.full((4, 2), 7)), (4, 64), uneven)
    assert stored.zero_NG is not None
    assert (stored.scale_NG.dtype, stored.zero_NG.dtype) == (torch.bfloat16, torch.int8)


def test_a_scale_that_bfloat16_would_change_is_refused() -> None:
    assert stored_scale(torch.tensor([[0.5]])).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="bfloat16"):
        stored_scale(torch.tensor([[0.1]]))
