"""GPTQ (arXiv:2210.17323): round column by column and let the columns to come make up for the error.

It minimizes tr((W - Q) H (W - Q)^T) with H = 2/n sum_t x_t x_t^T, greedily in the order of the inputs. With
H^-1 = U^T U, U upper triangular, column k of W becomes q_k = round(w_k), and for all j > k

    w_j <- w_j - (w_k - q_k) U[k, j] / U[k, k].

N output features, K input features, G groups of g inputs.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twofold.ops.integers import dequantize
from twofold.quant.rounding import Grid, quantize, search_grid, stored_grid
from twofold.quant.scheme import CHANNEL, QuantScheme

_BLOCK = 128
_LARGEST_DAMPING = 1.0


class Hessian:
    """Running H = 2/n sum_t x_t x_t^T over the inputs of one layer, [K, K]."""

    def __init__(self, num_inputs: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> None:
        self.num_tokens = 0
        self._sum_KK = torch.zeros(num_inputs, num_inputs, dtype=dtype, device=device)

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Count in the inputs x [..., K]; every row is one token, so leave padding out."""
        x_TK = x.detach().reshape(-1, x.shape[-1]).to(self._sum_KK)
        self._sum_KK.addmm_(x_TK.T, x_TK)
        self.num_tokens += x_TK.shape[0]

    def matrix(self) -> Tensor:
        """H [K, K]; ValueError if no token was added."""
        if self.num_tokens == 0:
            raise ValueError("no calibration token reached this layer; give more or longer samples")
        return self._sum_KK * (2.0 / self.num_tokens)


@dataclass(frozen=True, kw_only=True)
class GptqReport:
    """How one layer was rounded.

    `damping` is the share of the mean diagonal that was added to H; it exceeds the one asked for when H could
    not be factorized with that. `rounded_to_nearest` tells that no damping helped and the layer was merely
    rounded. `error` = tr((W - Q) H (W - Q)^T), `relative_error` = error / tr(W H W^T).
    """

    damping: float
    rounded_to_nearest: bool
    dead_columns: int
    error: float
    relative_error: float


@torch.no_grad()
def gptq(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    scheme: QuantScheme,
    damping: float = 0.01,
    grid: Grid | None = None,
) -> tuple[Tensor, Grid, GptqReport]:
    """Round W [N, K] to q int8 [N, K] on a grid, given H [K, K].

    Without `grid`, that of a group is searched when the group is reached, on weights which already make up for
    earlier errors. An input that was always zero (H_kk = 0) counts as one of average size that does not
    depend on the others, so its weights are rounded to nearest. H is factorized in its own dtype, the
    weights are float32. Raises ValueError when shapes do not fit or H is not finite.
    """
    scheme.validate("weight", weight_NK.shape)
    num_inputs = weight_NK.shape[1]
    if tuple(hessian_KK.shape) != (num_inputs, num_inputs):
        raise ValueError(f"a weight with {num_inputs} inputs needs H that large, got {list(hessian_KK.shape)}")
    if not bool(torch.isfinite(hessian_KK).all()):
        raise ValueError("H has NaN or infinity; the inputs of this layer overflowed during calibration")
    group = scheme.group_length(num_inputs)
    weight = weight_NK.to(torch.float32)
    if grid is not None:
        grid = stored_grid(grid, weight.shape, scheme)
    live_KK, dead_columns = _revive(hessian_KK)
    factor, used_damping = _inverse_factor(live_KK, damping)
    if factor is None:
        grid = search_grid(weight, scheme) if grid is None else grid
        q_NK = quantize(weight, grid, scheme)
    else:
        q_NK, grid = _round_columns(weight, factor.to(torch.float32), scheme, grid)
    error = hessian_error(weight - dequantize(q_NK, *grid, group, torch.float32), hessian_KK)
    energy = hessian_error(weight, hessian_KK)
    report = GptqReport(
        damping=used_damping,
        rounded_to_nearest=factor is None,
        dead_columns=dead_columns,
        error=error,
        relative_error=error / energy if energy > 0 else 0.0,
    )
    return q_NK, grid, report


@torch.no_grad()
def even_scales(weight_NK: Tensor, hessian_KK: Tensor, damping: float = 0.01) -> Tensor:
    """s, float64 [K], for W diag(s) on groups of inputs, where what makes the inputs can take 1 / s.

    The step of a group follows its largest weights, so that an input with small ones is left few levels. Compensated
    rounding of input k costs step^2 d_k / s_k^2, with d_k = 1 / [H^-1]_kk; with the 4-norm of the columns' root mean
    squares w_k s_k for the largest, (sum_k (w_k s_k)^4)^(1/2) sum_k d_k / s_k^2 is least where s_k^6 ~ d_k / w_k^4. The
    geometric mean of s is 1. All ones where H cannot be factorized.
    """
    live_KK, _ = _revive(hessian_KK)
    factor, _ = _inverse_factor(live_KK, damping)
    if factor is None:
        return torch.ones(weight_NK.shape[1], dtype=torch.float64, device=weight_NK.device)
    conditional_K = factor.to(torch.float64).square().sum(0).reciprocal()
    square_K = weight_NK.to(torch.float64).square().mean(0)
    square_K = square_K.clamp(min=1e-12 * float(square_K.max()))
    log_K = (conditional_K.log() - 2 * square_K.log()) / 6
    return (log_K - log_K.mean()).exp()


def hessian_error(difference_NK: Tensor, hessian_KK: Tensor) -> float:
    """tr(D H D^T): twice the mean squared change of a layer's output when its weight changes by D."""
    difference = difference_NK.to(hessian_KK.dtype)
    return float(((difference @ hessian_KK) * difference).sum())


def _revive(hessian_KK: Tensor) -> tuple[Tensor, int]:
    diagonal = hessian_KK.diagonal()
    dead = diagonal == 0
    count = int(dead.sum())
    live = hessian_KK.clone()
    average = diagonal[~dead].mean() if count < diagonal.numel() else diagonal.new_ones(())
    live.diagonal()[dead] = average
    return live, count


def _inverse_factor(hessian_KK: Tensor, damping: float) -> tuple[Tensor | None, float]:
    """U with H^-1 = U^T U, and the damping it took; None when none up to the largest was enough.

    With J the reversal of the order, J H J = L L^T gives H = (J L J)(J L J)^T, so U = (J L J)^-1: one
    factorization and no inverse of H.
    """
    reversed_KK = hessian_KK.flip(0, 1)
    mean = hessian_KK.diagonal().mean()
    while True:
        damped = reversed_KK.clone()
        damped.diagonal().add_(damping * mean)
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0:
            eye = torch.eye(lower.shape[0], dtype=lower.dtype, device=lower.device)
            factor = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
            if bool(torch.isfinite(factor).all()):
                return factor, damping
        if damping >= _LARGEST_DAMPING:
            return None, damping
        damping = min(max(10 * damping, 1e-4), _LARGEST_DAMPING)


def _round_columns(weight_NK: Tensor, factor_KK: Tensor, scheme: QuantScheme, grid: Grid | None) -> tuple[Tensor, Grid]:
    rows, num_inputs = weight_NK.shape
    group = scheme.group_length(num_inputs)
    # Transposed, a column of W is contiguous.
    w_KN = weight_NK.T.contiguous().clone()
    q_KN = torch.empty(num_inputs, rows, dtype=torch.int8, device=weight_NK.device)
    importance_K = factor_KK.diagonal().square().reciprocal()
    search = grid is None
    if grid is None:
        scale_NG = torch.empty(rows, num_inputs // group, dtype=torch.bfloat16, device=weight_NK.device)
        grid = Grid(scale_NG, None if scheme.symmetric else torch.empty_like(scale_NG, dtype=torch.int8))
    channel = replace(scheme, group_size=CHANNEL)
    for start, end in _blocks(num_inputs, group):
        errors = torch.empty(end - start, rows, device=weight_NK.device)
        for k in range(start, end):
            j = k // group
            if search and k % group == 0:
                members = slice(k, k + group)
                found = search_grid(w_KN[members].T, channel, importance_K[members])
                grid.scale_NG[:, j] = found.scale_NG[:, 0]
                if grid.zero_NG is not None and found.zero_NG is not None:
                    grid.zero_NG[:, j] = found.zero_NG[:, 0]
            step_N = grid.scale_NG[:, j].to(torch.float32)
            zero_N = 0 if grid.zero_NG is None else grid.zero_NG[:, j]
            level_N = (w_KN[k] / step_N + zero_N).round_().clamp_(scheme.qmin, scheme.qmax)
            q_KN[k] = level_N
            error_N = (w_KN[k] - (level_N - zero_N) * step_N) / factor_KK[k, k]
            w_KN[k + 1 : end].addr_(factor_KK[k, k + 1 : end], error_N, alpha=-1)
            errors[k - start] = error_N
        w_KN[end:].addmm_(factor_KK[start:end, end:].T, errors, alpha=-1)
    return q_KN.T.contiguous(), grid


def _blocks(num_inputs: int, group: int) -> list[tuple[int, int]]:
    """Ranges of columns whose errors go to the columns behind the block together.

    A group must be up to date when its scale is searched, so a block holds whole groups or lies inside one.
    """
    if group <= _BLOCK:
        step = _BLOCK // group * group
        return [(start, min(start + step, num_inputs)) for start in range(0, num_inputs, step)]
    return [
        (start, min(start + _BLOCK, first + group))
        for first in range(0, num_inputs, group)
        for start in range(first, first + group, _BLOCK)
    ]
