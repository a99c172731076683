"""A decode pass of Gated DeltaNet: convolution and delta rule from a state, and the commit that ends it in place.

L layers, B batch, T tokens of the pass, S = T + W - 1, C channels (queries, keys, values), W convolution width,
H value heads, K key width, V value width.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.ops.convolution import causal_convolution
from twofold.ops.gated_delta import DeltaWindow, commit_delta, gated_delta


class OpenWindow(NamedTuple):
    """What a pass leaves behind, from which `delta_commit` makes the state after any of its tokens."""

    inputs_BSC: Tensor  # of the convolution, the W - 1 before the pass first
    factors: DeltaWindow


class Slot(NamedTuple):
    """A layer among those that are committed together, and what its kernels keep for all of them."""

    layer: int
    layers: int
    held: dict[str, Tensor]


def decay_and_strength(a_BTH: Tensor, b_BTH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b); g in float32 at least, since a decay rounded to
    bfloat16 is another decay."""
    wide = torch.promote_types(a_BTH.dtype, torch.float32)
    return -A_log_H.to(wide).exp() * F.softplus(a_BTH.to(wide) + dt_bias_H.to(wide)), b_BTH.sigmoid()


def delta_pass(
    qkv_BTC: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    weight_CW: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    conv_BWC: Tensor,
    state_BHKV: Tensor,
    keep: Tensor | int | None = None,
    slot: Slot | None = None,
    convolve: Callable[[Tensor, Tensor], Tensor] = causal_convolution,
) -> tuple[Tensor, OpenWindow]:
    """The delta rule of `ops.gated_delta` over silu(conv([conv; qkv])), from the state. Changes neither state.

    `conv_BWC` holds the W - 1 inputs before the pass. `keep` is the n of the commit to come, where that is known: o may
    then be anything past it, and the window serves no other commit (this one, the reference, serves them all). With a
    `slot` the window may lie in what it holds, until the layer's next pass. Returns (o [B, T, H, V], window).
    """
    _, heads, width, value_width = state_BHKV.shape
    value_dim = heads * value_width
    key_dim = (qkv_BTC.shape[-1] - value_dim) // 2
    inputs_BSC = torch.cat((conv_BWC, qkv_BTC), dim=1)
    q, k, v = convolve(inputs_BSC, weight_CW).split((key_dim, key_dim, value_dim), dim=-1)
    o_BTHV, factors = gated_delta(
        q.unflatten(-1, (-1, width)),
        k.unflatten(-1, (-1, width)),
        v.unflatten(-1, (heads, -1)),
        *decay_and_strength(a_BTH, b_BTH, A_log_H, dt_bias_H),
        state_BHKV=state_BHKV,
    )
    return o_BTHV, OpenWindow(inputs_BSC, factors)


def delta_commit(windows: Sequence[OpenWindow], n_B: Tensor | int, conv_LBWC: Tensor, state_LBHKV: Tensor) -> None:
    """Moves the states of all layers, in place, to after n tokens of their pass; 0 <= n <= T, one number or one for
    each row."""
    for window, conv_BWC, state_BHKV in zip(windows, conv_LBWC, state_LBHKV, strict=True):
        width = conv_BWC.shape[1]
        state_BHKV.copy_(commit_delta(window.factors, n_B))
        if isinstance(n_B, int):
            conv_BWC.copy_(window.inputs_BSC[:, n_B : n_B + width])
        else:
            kept_BW = n_B[:, None] + torch.arange(width, device=n_B.device)
            rows_B1 = torch.arange(len(n_B), device=n_B.device)[:, None]
            conv_BWC.copy_(window.inputs_BSC[rows_B1, kept_BW])
