"""Fake quantization of a weight and the gradient of its scales, fused on a GPU.

N output features, K input features, G groups of g inputs; s the scale and z the zero point (0 where None) of a group.

    q = clamp(round(w / s + z), qmin, qmax)    Q = (q - z) s
    dL/ds[n, j] = sum_{k in group j} dL/dQ[n, k] * (q - z - w / s where not clipped, q - z where clipped)

Ties round to even and the quotient is a correctly rounded one, so that Q is bit for bit what packing makes of w.
"""

import torch
from torch import Tensor


def round_to_grid(
    weight_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, qmin: int, qmax: int, dtype: torch.dtype
) -> Tensor:
    """Q [N, K], computed in the dtype of the weight (float32 at least) and rounded once to `dtype`."""
    if weight_NK.is_cuda and weight_NK.dtype == torch.float32:
        from twofold.ops import rounding_triton

        return rounding_triton.round_to_grid(weight_NK, scale_NG, zero_NG, qmin, qmax, dtype)
    steps_NGg, step_size = _steps(weight_NK, scale_NG)
    if zero_NG is None:
        q_NGg = steps_NGg.round_().clamp_(qmin, qmax)
    else:
        q_NGg = steps_NGg.add_(zero_NG.unsqueeze(-1)).round_().clamp_(qmin, qmax).sub_(zero_NG.unsqueeze(-1))
    return q_NGg.mul_(step_size).flatten(1).to(dtype)


def inside_grid(weight_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """[N, K]: true where w is not clipped."""
    q_NGg = _levels(weight_NK, scale_NG, zero_NG)
    return ((q_NGg >= qmin) & (q_NGg <= qmax)).flatten(1)


def scale_gradient(
    weight_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, qmin: int, qmax: int, grad_NK: Tensor
) -> Tensor:
    """dL/ds [N, G] from dL/dQ [N, K], in the dtype of the weight."""
    if weight_NK.is_cuda and weight_NK.dtype == torch.float32:
        from twofold.ops import rounding_triton

        return rounding_triton.scale_gradient(weight_NK, scale_NG, zero_NG, qmin, qmax, grad_NK)
    steps_NGg, _ = _steps(weight_NK, scale_NG)
    q_NGg = _levels(weight_NK, scale_NG, zero_NG)
    inside_NGg = (q_NGg >= qmin) & (q_NGg <= qmax)
    zero = 0 if zero_NG is None else zero_NG.unsqueeze(-1)
    slope_NGg = q_NGg.clamp_(qmin, qmax).sub_(zero).sub_(steps_NGg.masked_fill_(~inside_NGg, 0))
    return slope_NGg.mul_(grad_NK.reshape(slope_NGg.shape)).sum(-1)


def _steps(weight_NK: Tensor, scale_NG: Tensor) -> tuple[Tensor, Tensor]:
    """w / s [N, G, g] and s [N, G, 1]."""
    step_size = scale_NG.to(weight_NK.dtype).unsqueeze(-1)
    return weight_NK.unflatten(1, (scale_NG.shape[1], -1)) / step_size, step_size


def _levels(weight_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None) -> Tensor:
    steps_NGg, _ = _steps(weight_NK, scale_NG)
    return steps_NGg.add_(0 if zero_NG is None else zero_NG.unsqueeze(-1)).round_()
