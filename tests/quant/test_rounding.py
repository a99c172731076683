from collections.abc import Callable

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as ct_fake_quantize
from torch import Tensor

from twofold.quant.rounding import (
    CLIP_RATIOS,
    fake_quantize,
    minmax_scale,
    quantize,
    search_scale,
    stored_scale,
)
from twofold.quant.scheme import QuantScheme


def _weight(rows: int, num_inputs: int, seed: int = 0) -> Tensor:
    normal = torch.randn(rows, num_inputs, generator=torch.Generator().manual_seed(seed))
    return 0.02 * normal * normal.abs()  # heavy tails, so that clipping pays


def _least_error(w: Tensor, importance: Tensor) -> tuple[float, Tensor]:
    """Brute force over one group in float64: the least error, and the error at every candidate."""
    widest = w.abs().max() / 7
    errors = []
    for ratio in CLIP_RATIOS:
        s = (widest * ratio).to(torch.bfloat16).double()
        q = torch.round(w.double() / s).clamp(-8, 7)
        errors.append((importance.double() * (w.double() - s * q) ** 2).sum())
    return float(min(errors)), torch.stack(errors)


@pytest.mark.parametrize(("shape", "group_size"), [((3, 64), 32), ((5, 24), 8), ((2, 40), -1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_search_finds_the_best_candidate(shape: tuple[int, int], group_size: int, weighted: bool) -> None:
    scheme = QuantScheme(group_size=group_size)
    weight = _weight(*shape)
    importance = torch.rand(shape[1], generator=torch.Generator().manual_seed(3)) if weighted else None
    scale = search_scale(weight, scheme, importance)
    assert scale.dtype == torch.bfloat16
    ours = (fake_quantize(weight, scale, scheme).double() - weight.double()) ** 2
    weights = torch.ones(shape[1]) if importance is None else importance
    group = scheme.group_length(shape[1])
    for row in range(shape[0]):
        for j in range(shape[1] // group):
            members = slice(j * group, (j + 1) * group)
            least, errors = _least_error(weight[row, members], weights[members])
            assert errors.max() > least * 1.01  # the candidates differ, so this can fail
            found = float((weights[members].double() * ours[row, members]).sum())
            assert found == pytest.approx(least, rel=1e-4)


def test_search_over_several_chunks_is_the_search_over_rows() -> None:
    weight = _weight(70, 4096)  # more than two chunks of rows
    scheme = QuantScheme()
    alone = torch.cat([search_scale(part, scheme) for part in weight.split([7, 30, 33])])
    assert torch.equal(search_scale(weight, scheme), alone)


def test_among_equals_the_widest_wins() -> None:
    weight, scheme = _weight(4, 64), QuantScheme()
    assert torch.equal(search_scale(weight, scheme, torch.zeros(64)), minmax_scale(weight, scheme))


def test_minmax_clips_nothing() -> None:
    scheme = QuantScheme(group_size=16)
    weight = _weight(64, 128)
    scale = minmax_scale(weight, scheme)
    error = (fake_quantize(weight, scale, scheme) - weight).abs().unflatten(1, (-1, 16))
    assert bool((error <= 0.5001 * scale.float().unsqueeze(-1)).all())
    assert int(quantize(weight, scale, scheme).abs().max()) == 7


def test_a_largest_weight_below_zero_can_use_minus_eight() -> None:
    weight = torch.tensor([[-8.0, 7.0, 3.0, 1.0, -1.0, 2.0, -5.0, 6.0]])
    scheme = QuantScheme(group_size=8)
    scale = search_scale(weight, scheme)
    assert scale.tolist() == [[1.0]]
    assert torch.equal(fake_quantize(weight, scale, scheme), weight)


@pytest.mark.parametrize("scale_of", [minmax_scale, search_scale])
@pytest.mark.parametrize("value", [0.0, 1e-42])
def test_a_group_of_zeros_has_scale_one(scale_of: Callable[[Tensor, QuantScheme], Tensor], value: float) -> None:
    weight = _weight(2, 64)
    weight[1, :32] = value
    scheme = QuantScheme()
    scale = scale_of(weight, scheme)
    assert scale[1, 0] == 1
    assert bool(torch.isfinite(scale).all())
    assert not fake_quantize(weight, scale, scheme)[1, :32].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weight = _weight(4, 32)
    weight[2, 5] = bad
    with pytest.raises(ValueError, match="output row 2"):
        search_scale(weight, QuantScheme())


@pytest.mark.parametrize("group_size", [8, 32, -1])
def test_fake_quantize_is_that_of_compressed_tensors(group_size: int) -> None:
    scheme = QuantScheme(group_size=group_size)
    weight = _weight(16, 96)
    weight[0, :8] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 7.5, -8.5])  # ties and both ends
    scale = search_scale(weight, scheme)
    if group_size == 8:
        scale[0, 0] = 1
    args = QuantizationArgs(num_bits=4, symmetric=True, group_size=group_size)
    theirs = ct_fake_quantize(weight, scale.float(), None, args)
    assert torch.equal(fake_quantize(weight, scale, scheme), theirs)


def test_a_quantized_weight_is_a_fixed_point() -> None:
    scheme = QuantScheme()
    weight = _weight(8, 64)
    scale = search_scale(weight, scheme)
    q = quantize(weight, scale, scheme)
    assert torch.equal(quantize(fake_quantize(weight, scale, scheme), scale, scheme), q)


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight = _weight(4, 64)
    with pytest.raises(ValueError, match=r"scale has shape \[4, 3\]"):
        quantize(weight, torch.ones(4, 3), QuantScheme())
    with pytest.raises(ValueError, match="importance"):
        search_scale(weight, QuantScheme(), torch.ones(32))


def test_a_scale_that_bfloat16_would_change_is_refused() -> None:
    assert stored_scale(torch.tensor([[0.5]])).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="bfloat16"):
        stored_scale(torch.tensor([[0.1]]))
