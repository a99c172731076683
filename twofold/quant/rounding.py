"""Round weights to the INT4 grid: the choice of scales, the integers, and what they stand for.

Scales are bfloat16 everywhere, because checkpoints store them so: they are rounded before the integers are
computed from them, and what training saw is what is saved.

N output features, K input features, G groups of g inputs, K = G * g.
"""

import torch
from torch import Tensor

from twofold.ops.int4 import QMAX, QMIN, dequantize
from twofold.quant.scheme import QuantScheme

# From "nothing is clipped" down to half of that. Among them is 7/8: it puts a largest weight that is negative
# on -8.
CLIP_RATIOS = tuple(1.0 - step / 80 for step in range(41))

# Rows are taken so many elements at a time: a chunk and its temporaries stay in the cache.
_CHUNK = 1 << 17


@torch.no_grad()
def minmax_scale(weight_NK: Tensor, scheme: QuantScheme) -> Tensor:
    """scale[n, j] = max |w| / 7 over group j of row n, bfloat16 [N, G]: no weight is clipped.

    A group of zeros has scale 1. Raises ValueError on weights that are not finite.
    """
    return _stored(_widest(_grouped(weight_NK, scheme)))


@torch.no_grad()
def search_scale(weight_NK: Tensor, scheme: QuantScheme, importance_K: Tensor | None = None) -> Tensor:
    """argmin over s of sum_k importance[k] * (w[k] - s * clamp(round(w[k] / s), -8, 7))^2, bfloat16 [N, G].

    s runs over `CLIP_RATIOS` times the scale of `minmax_scale`, each rounded to bfloat16; among equals the
    widest wins. `importance_K` weighs the inputs (their mean squares, for instance); None weighs all alike.
    """
    w_NGg = _grouped(weight_NK, scheme)
    widest_NG = _widest(w_NGg)
    importance_Gg = None
    if importance_K is not None:
        if importance_K.shape != weight_NK.shape[1:]:
            raise ValueError(
                f"importance has shape {list(importance_K.shape)}, the weight has {weight_NK.shape[1]} inputs"
            )
        importance_Gg = importance_K.to(w_NGg).view(w_NGg.shape[1:])
    rows = max(1, _CHUNK // weight_NK.shape[1])
    chunks = zip(w_NGg.split(rows), widest_NG.split(rows), strict=True)
    return torch.cat([_search_rows(w, widest, importance_Gg) for w, widest in chunks])


def _search_rows(w_RGg: Tensor, widest_RG: Tensor, importance_Gg: Tensor | None) -> Tensor:
    best = _stored(widest_RG)
    least = torch.full_like(widest_RG, torch.inf)
    error = torch.empty_like(w_RGg)
    for ratio in CLIP_RATIOS:
        scale = _stored(widest_RG * ratio)
        step = scale.to(w_RGg.dtype).unsqueeze(-1)
        torch.div(w_RGg, step, out=error)
        error.round_().clamp_(QMIN, QMAX).mul_(step).sub_(w_RGg).square_()
        if importance_Gg is not None:
            error.mul_(importance_Gg)
        total = error.sum(-1)
        better = total < least
        best = torch.where(better, scale, best)
        least = torch.where(better, total, least)
    return best


@torch.no_grad()
def quantize(weight_NK: Tensor, scale_NG: Tensor, scheme: QuantScheme) -> Tensor:
    """q = clamp(round(w / scale), -8, 7), ties to even, int8 [N, K]."""
    w_NGg = _grouped(weight_NK, scheme)
    if scale_NG.shape != w_NGg.shape[:2]:
        raise ValueError(f"scale has shape {list(scale_NG.shape)}, this weight needs {list(w_NGg.shape[:2])}")
    steps_NGg = w_NGg / scale_NG.to(w_NGg.dtype).unsqueeze(-1)
    return steps_NGg.round_().clamp_(QMIN, QMAX).to(torch.int8).flatten(1)


def fake_quantize(weight_NK: Tensor, scale_NG: Tensor, scheme: QuantScheme) -> Tensor:
    """Q(w) = scale * quantize(w), in the dtype of the weight, [N, K]."""
    group = scheme.group_length(weight_NK.shape[1])
    return dequantize(quantize(weight_NK, scale_NG, scheme), scale_NG, group, weight_NK.dtype)


def stored_scale(scale_NG: Tensor) -> Tensor:
    """The scale in bfloat16, as a checkpoint holds it; ValueError if that would change a value.

    A cast of a whole module to float16 does change some, and the integers no longer belong to them.
    """
    stored = scale_NG.to(torch.bfloat16)
    if not torch.equal(stored.to(scale_NG.dtype), scale_NG):
        raise ValueError("scales are not bfloat16 values; compute them with minmax_scale or search_scale")
    return stored


def _grouped(weight_NK: Tensor, scheme: QuantScheme) -> Tensor:
    scheme.validate("weight", weight_NK.shape)
    # Narrow dtypes are widened: w / scale in bfloat16 would round twice.
    wide = weight_NK.to(torch.promote_types(weight_NK.dtype, torch.float32))
    return wide.unflatten(1, (-1, scheme.group_length(weight_NK.shape[1])))


def _widest(w_NGg: Tensor) -> Tensor:
    # amax and amin, since abs() would copy the weight.
    amax_NG = torch.maximum(w_NGg.amax(-1), -w_NGg.amin(-1))
    if not bool(torch.isfinite(amax_NG).all()):
        row = int((~torch.isfinite(amax_NG)).any(-1).nonzero()[0])
        raise ValueError(f"the weight has NaN or infinity in output row {row}; check the checkpoint it came from")
    return amax_NG / QMAX


def _stored(scale: Tensor) -> Tensor:
    # A scale that bfloat16 cannot hold as a normal number (0, above all) would give 0 / 0.
    stored = scale.to(torch.bfloat16)
    return torch.where(stored < torch.finfo(torch.bfloat16).tiny, torch.ones_like(stored), stored)
