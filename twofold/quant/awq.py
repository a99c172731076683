"""Activation-aware scaling (AWQ, arXiv:2306.00978): hand the size of an input channel over to the weights.

A linear layer is the same function with x / s and W diag(s). Rounded, it is another one: a channel with large s
loses less. 1 / s goes into whatever makes x, so that inference computes nothing more.

N output features, K inputs, P channels of what makes the inputs, A candidates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twofold.quant.gptq import Hessian, hessian_error
from twofold.quant.rounding import fake_quantize, minmax_grid, search_grid
from twofold.quant.scheme import QuantScheme

# The least magnitude that counts, as a share of the largest: a channel that is never used must not send s to 0.
_LEAST_MAGNITUDE = 1e-4

# A channel of a norm with an offset stays this far from zero: bfloat16 is coarse around -offset (steps of 2^-8
# above -1).
_LEAST_GAIN = 2.0**-6


class InputStatistics:
    """Running H = 2/n sum_t x_t x_t^T and mean |x| over the inputs of a layer with the given weight [N, K]."""

    def __init__(self, weight_NK: Tensor) -> None:
        wide, num_inputs = torch.promote_types(weight_NK.dtype, torch.float32), weight_NK.shape[1]
        self._hessian = Hessian(num_inputs, dtype=wide, device=weight_NK.device)
        self._absolute_K = torch.zeros(num_inputs, dtype=wide, device=weight_NK.device)

    @torch.no_grad()
    def add(self, x_TK: Tensor) -> None:
        """Count in the inputs of T tokens; leave padding out."""
        self._hessian.add(x_TK)
        self._absolute_K += x_TK.abs().sum(0, dtype=self._absolute_K.dtype)

    def hessian(self) -> Tensor:
        """H [K, K]; ValueError if no token was added."""
        return self._hessian.matrix()

    def magnitude(self, owner_K: Tensor) -> Tensor:
        """Mean |x| over the tokens and over the inputs k with the same owner_K[k] = p, float64 [P], on the CPU."""
        total_P = torch.bincount(owner_K, self._absolute_K.cpu().to(torch.float64))
        return total_P / (torch.bincount(owner_K) * self._hessian.num_tokens)


def smoothing_scales(magnitude_P: Tensor, steps: int = 20) -> Tensor:
    """s = m^alpha / sqrt(max m^alpha * min m^alpha), m = mean |x|, alpha = 0 .. 1 in equal steps; float64 [A, P].

    The first candidate is all ones.
    """
    magnitude = magnitude_P.to(torch.float64)
    largest = magnitude.max()
    if not bool(largest > 0):
        return torch.ones(steps, len(magnitude), dtype=torch.float64, device=magnitude.device)
    log_P = (magnitude / largest).clamp_min(_LEAST_MAGNITUDE).log()
    centred_P = log_P - (log_P.max() + log_P.min()) / 2
    alpha_A1 = torch.linspace(0, 1, steps, dtype=torch.float64, device=magnitude.device)[:, None]
    return (alpha_A1 * centred_P).exp()


def fold_into_norm(weight_D: Tensor, scale_D: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    """1 / s into a norm that multiplies by (offset + w): w' = (offset + w) / s - offset.

    A checkpoint holds w' in bfloat16, and near w' = -offset a rounding there is a large change of the multiplier.
    So w' is rounded here, and the s that belongs to it, (offset + w) / (offset + w'), returned for the consumers:
    together they change nothing. Returns w' in the dtype of w, and s float64. With an offset, s is limited so
    that |offset + w'| >= 2^-6; a multiplier of zero stays, with s = 1.
    """
    gain_D = weight_D.to(torch.float64) + offset
    if offset:
        scale_D = torch.minimum(scale_D.to(torch.float64), gain_D.abs() / _LEAST_GAIN)
    dead_D = gain_D == 0
    stored_D = (gain_D / scale_D.to(torch.float64).masked_fill(dead_D, 1.0) - offset).to(torch.bfloat16)
    new_gain_D = stored_D.to(torch.float64) + offset
    new_weight_D = torch.where(dead_D, weight_D, stored_D.to(weight_D.dtype))
    return new_weight_D, torch.where(dead_D, 1.0, gain_D / new_gain_D.masked_fill(dead_D, 1.0))


def choose_scale(weights: Sequence[Tensor], hessians: Sequence[Tensor], scales_AK: Tensor, scheme: QuantScheme) -> int:
    """The candidate with the least error, on grids that clip nothing; then, on searched grids, it or the first.

    With a first candidate of ones the choice is never worse than rounding to nearest on searched grids.
    """
    rough = smoothing_errors(weights, hessians, scales_AK, scheme, search=False)
    best = min(range(len(rough)), key=lambda a: rough[a])
    first, chosen = smoothing_errors(weights, hessians, scales_AK[[0, best]], scheme, search=True)
    return best if chosen < first else 0


@torch.no_grad()
def smoothing_errors(
    weights: Sequence[Tensor], hessians: Sequence[Tensor], scales_AK: Tensor, scheme: QuantScheme, search: bool
) -> list[float]:
    """sum over layers of tr(D H D^T), D = Q(W diag(s)) diag(1/s) - W, for each candidate s.

    H = 2/n sum_t x_t x_t^T over the inputs x of a layer, so an error is twice the mean squared change of the layers'
    joint output. Q rounds on the grid of `minmax_grid` or, with `search`, on that which `search_grid` finds
    with the mean squares of x / s, at 40 times the cost.
    """
    errors = []
    for scale_K in scales_AK:
        total = 0.0
        for weight_NK, hessian_KK in zip(weights, hessians, strict=True):
            energy_K, s_K = hessian_KK.diagonal(), scale_K.to(weight_NK)
            scaled_NK = weight_NK * s_K
            importance_K = energy_K / s_K.to(energy_K.dtype).square()
            grid = search_grid(scaled_NK, scheme, importance_K) if search else minmax_grid(scaled_NK, scheme)
            total += hessian_error(fake_quantize(scaled_NK, grid, scheme) / s_K - weight_NK, hessian_KK)
        errors.append(total)
    return errors
