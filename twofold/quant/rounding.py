"""Round weights to an integer grid: the choice of scales and zero points, the integers, and what they stand for.

Scales are bfloat16 everywhere, because checkpoints store them so: they are rounded before the zero points and the
integers are computed from them, and what training saw is what is saved.

N output features, K input features, G groups of g inputs, K = G * g.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twofold.ops.integers import dequantize
from twofold.quant.scheme import QuantScheme

# From "nothing is clipped" down to half of that. Among them is 7/8: it puts a largest weight that is negative
# on -8.
CLIP_RATIOS = tuple(1.0 - step / 80 for step in range(41))

# Below it a scale has no full precision, and 0 would give 0 / 0.
SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny

# Rows are taken so many elements at a time: on a CPU a chunk and its temporaries stay in the cache.
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 26}


class Grid(NamedTuple):
    """The numbers that group j of row n can be: (q - zero[n, j]) * scale[n, j], q in [qmin, qmax].

    scale bfloat16 [N, G], positive; zero int8 [N, G] in [qmin, qmax], None when symmetric. 0 is on every grid.
    """

    scale_NG: Tensor
    zero_NG: Tensor | None = None


@torch.no_grad()
def minmax_grid(weight_NK: Tensor, scheme: QuantScheme) -> Grid:
    """The narrowest grid that clips no weight, to within the rounding of its scale and zero point.

    Symmetric: scale = max |w| / qmax. Asymmetric, with l = min(w, 0) and h = max(w, 0) over the group:

        scale = (h - l) / (qmax - qmin),    zero = clamp(round(qmin - l / scale), qmin, qmax).

    A group of zeros has scale 1. Raises ValueError on weights that are not finite.
    """
    low_NG, high_NG = _range(_grouped(weight_NK, scheme))
    return _spanning(low_NG, high_NG, scheme)


@torch.no_grad()
def search_grid(weight_NK: Tensor, scheme: QuantScheme, importance_K: Tensor | None = None) -> Grid:
    """The grid with the least sum_k importance[k] * (w[k] - Q(w)[k])^2 over each group, Q as in `fake_quantize`.

    The candidates are the grids of `minmax_grid` for ranges [r l, r h], r in `CLIP_RATIOS`; among equals the widest
    wins. `importance_K` weighs the inputs (their mean squares, for instance); None weighs all alike.
    """
    w_NGg = _grouped(weight_NK, scheme)
    low_NG, high_NG = _range(w_NGg)
    importance_Gg = None
    if importance_K is not None:
        if importance_K.shape != weight_NK.shape[1:]:
            raise ValueError(
                f"importance has shape {list(importance_K.shape)}, the weight has {weight_NK.shape[1]} inputs"
            )
        importance_Gg = importance_K.to(w_NGg).view(w_NGg.shape[1:])
    rows = max(1, _CHUNK[weight_NK.device.type] // weight_NK.shape[1])
    chunks = zip(w_NGg.split(rows), low_NG.split(rows), high_NG.split(rows), strict=True)
    grids = [_search_rows(w, low, high, scheme, importance_Gg) for w, low, high in chunks]
    zeros = [grid.zero_NG for grid in grids if grid.zero_NG is not None]
    return Grid(torch.cat([grid.scale_NG for grid in grids]), torch.cat(zeros) if zeros else None)


@torch.no_grad()
def quantize(weight_NK: Tensor, grid: Grid, scheme: QuantScheme) -> Tensor:
    """q = clamp(round(w / scale + zero), qmin, qmax), ties to even, int8 [N, K]; ValueError on a grid that misfits."""
    _check_fit(grid, weight_NK.shape, scheme)
    return _integers(_grouped(weight_NK, scheme), grid, scheme).to(torch.int8).flatten(1)


def fake_quantize(weight_NK: Tensor, grid: Grid, scheme: QuantScheme) -> Tensor:
    """Q(w) = (quantize(w) - zero) * scale, in the dtype of the weight, [N, K]."""
    group = scheme.group_length(weight_NK.shape[1])
    return dequantize(quantize(weight_NK, grid, scheme), *grid, group, weight_NK.dtype)


def stored_scale(scale_NG: Tensor) -> Tensor:
    """The scale in bfloat16, as a checkpoint holds it; ValueError if that would change a value."""
    stored = scale_NG.to(torch.bfloat16)
    if not torch.equal(stored.to(scale_NG.dtype), scale_NG):
        raise ValueError("scales are not bfloat16 values; compute them with minmax_grid or search_grid")
    return stored


@torch.no_grad()
def stored_grid(grid: Grid, shape: Sequence[int], scheme: QuantScheme) -> Grid:
    """The grid as a checkpoint holds it, for a weight of `shape` [N, K] under `scheme`.

    Raises ValueError when it does not fit them, or when its values are not what `Grid` says.
    """
    _check_fit(grid, shape, scheme)
    scale_NG, zero_NG = stored_scale(grid.scale_NG), grid.zero_NG
    if not bool((scale_NG >= SMALLEST_SCALE).all()):
        raise ValueError("a scale is zero, negative or too small; compute them with minmax_grid or search_grid")
    if zero_NG is None:
        return Grid(scale_NG)
    if not bool(((zero_NG >= scheme.qmin) & (zero_NG <= scheme.qmax)).all()):
        raise ValueError(f"zero points of {scheme.bits} bits lie in [{scheme.qmin}, {scheme.qmax}]; some do not")
    return Grid(scale_NG, zero_NG.to(torch.int8))


def _check_fit(grid: Grid, shape: Sequence[int], scheme: QuantScheme) -> None:
    scheme.validate("weight", shape)
    needed = [shape[0], scheme.num_groups(shape[1])]
    if list(grid.scale_NG.shape) != needed:
        raise ValueError(f"scales {list(grid.scale_NG.shape)} do not fit a weight {list(shape)}, which needs {needed}")
    if (grid.zero_NG is None) != scheme.symmetric:
        has = "no zero points" if grid.zero_NG is None else "zero points"
        raise ValueError(f"the grid has {has}, but symmetric = {str(scheme.symmetric).lower()}")
    if grid.zero_NG is not None and list(grid.zero_NG.shape) != needed:
        raise ValueError(f"zero points {list(grid.zero_NG.shape)} do not fit a weight {list(shape)}")


def _grouped(weight_NK: Tensor, scheme: QuantScheme) -> Tensor:
    scheme.validate("weight", weight_NK.shape)
    # Narrow dtypes are widened: w / scale in bfloat16 would round twice.
    wide = weight_NK.to(torch.promote_types(weight_NK.dtype, torch.float32))
    return wide.unflatten(1, (-1, scheme.group_length(weight_NK.shape[1])))


def _range(w_NGg: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest number of each group, 0 among them."""
    low_NG, high_NG = w_NGg.amin(-1).clamp_(max=0), w_NGg.amax(-1).clamp_(min=0)
    finite_N = (torch.isfinite(low_NG) & torch.isfinite(high_NG)).all(-1)
    if not bool(finite_N.all()):
        row = int((~finite_N).nonzero()[0])
        raise ValueError(f"the weight has NaN or infinity in output row {row}; check the checkpoint it came from")
    return low_NG, high_NG


def _spanning(low_NG: Tensor, high_NG: Tensor, scheme: QuantScheme, ratio: float = 1.0) -> Grid:
    """The grid of the range [ratio * low, ratio * high]."""
    if scheme.symmetric:
        return Grid(_normal(torch.maximum(high_NG, -low_NG) / scheme.qmax * ratio))
    scale_NG = _normal((high_NG - low_NG) / (scheme.qmax - scheme.qmin) * ratio)
    zero_NG = (scheme.qmin - low_NG * ratio / scale_NG.to(low_NG.dtype)).round_().clamp_(scheme.qmin, scheme.qmax)
    return Grid(scale_NG, zero_NG.to(torch.int8))


def _normal(scale: Tensor) -> Tensor:
    stored = scale.to(torch.bfloat16)
    return torch.where(stored < SMALLEST_SCALE, torch.ones_like(stored), stored)


def _integers(w_NGg: Tensor, grid: Grid, scheme: QuantScheme, out: Tensor | None = None) -> Tensor:
    steps = torch.div(w_NGg, grid.scale_NG.to(w_NGg.dtype).unsqueeze(-1), out=out)
    if grid.zero_NG is not None:
        steps.add_(grid.zero_NG.unsqueeze(-1))
    return steps.round_().clamp_(scheme.qmin, scheme.qmax)


def _search_rows(
    w_RGg: Tensor, low_RG: Tensor, high_RG: Tensor, scheme: QuantScheme, importance_Gg: Tensor | None
) -> Grid:
    best_scale, best_zero = _spanning(low_RG, high_RG, scheme)
    least = torch.full_like(low_RG, torch.inf)
    error = torch.empty_like(w_RGg)
    for ratio in CLIP_RATIOS:
        scale, zero = grid = _spanning(low_RG, high_RG, scheme, ratio)
        _integers(w_RGg, grid, scheme, out=error)
        if zero is not None:
            error.sub_(zero.unsqueeze(-1))
        error.mul_(scale.to(w_RGg.dtype).unsqueeze(-1)).sub_(w_RGg).square_()
        if importance_Gg is not None:
            error.mul_(importance_Gg)
        total = error.sum(-1)
        better = total < least
        best_scale = torch.where(better, scale, best_scale)
        if zero is not None and best_zero is not None:
            best_zero = torch.where(better, zero, best_zero)
        least = torch.where(better, total, least)
    return Grid(best_scale, best_zero)
