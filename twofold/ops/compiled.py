"""Element by element functions, compiled: one kernel forward and one backward, not one for every line of them.

For passes without a decode state on a GPU, where a training launches thousands of small kernels and moves every
activation through memory again and again. Between the roundings of the reference, the results stay in float32.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from twofold.ops import norms


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Sizes differ from pass to pass. Not `fullgraph`: past 8 kinds of call it raises, and this goes on uncompiled.
    return torch.compile(function, dynamic=True)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return _compiled(norms.rms_norm)(x, weight_D, eps, offset)


def rotate(x_BTHD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    return _compiled(norms.rotate)(x_BTHD, cos_BTR, sin_BTR)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _compiled(norms.silu_mul)(gate, up)
