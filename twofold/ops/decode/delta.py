"""The verify window of Gated DeltaNet and its commit, in place; the references of delta_triton.py.

L layers (in front, where there are any), B rows, T tokens of the window, H value heads, G key heads, K key width,
V value width, C = 2 G K + H V convolution channels, W convolution width. The rule is in ops/gated_delta.py.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.ops.convolution import causal_convolution
from twofold.ops.gated_delta import DeltaWindow, commit_delta, gated_delta
from twofold.ops.norms import gated_rms_norm


class WindowFactors(NamedTuple):
    """What `commit_delta_` needs to end the window after any of its tokens; float32, leading dimensions [L, B]."""

    k_BGTK: Tensor
    u_BHTV: Tensor
    decay_BHT: Tensor  # the running sum of g


def delta_window(
    x_BTC: Tensor,
    conv_BWC: Tensor,
    weight_CW: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    state_BHKV: Tensor,
    *,
    z_BTHV: Tensor | None = None,
    norm_V: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, WindowFactors]:
    """(o [B, T, H, V], factors) of a window that follows `conv` (the last W - 1 inputs) and `state`, which stay.

    q, k, v = split(silu(conv(x))), g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), then the gated delta rule
    (q and k of unit length); with z also the gated norm, o / rms(o) * norm * silu(z).
    """
    heads, width, value_width = state_BHKV.shape[1:]
    key_dim = (x_BTC.shape[-1] - heads * value_width) // 2
    mixed = causal_convolution(torch.cat((conv_BWC, x_BTC), dim=1), weight_CW)
    q, k, v = mixed.split((key_dim, key_dim, heads * value_width), dim=-1)
    wide = torch.promote_types(a_BTH.dtype, torch.float32)
    tokens = (
        q.unflatten(-1, (-1, width)),
        k.unflatten(-1, (-1, width)),
        v.unflatten(-1, (heads, -1)),
        -A_log_H.to(wide).exp() * F.softplus(a_BTH.to(wide) + dt_bias_H.to(wide)),
        b_BTH.sigmoid(),
    )
    o_BTHV, window = gated_delta(*tokens, state_BHKV=state_BHKV)
    k_BGTK = window.k_BHCLK[:, :: heads // (key_dim // width), 0]
    factors = WindowFactors(k_BGTK, window.u_BHCLV[:, :, 0], window.decay_BHCL[:, :, 0])
    if z_BTHV is not None:
        assert norm_V is not None
        o_BTHV = gated_rms_norm(o_BTHV, z_BTHV, norm_V, eps)
    return o_BTHV, factors


def commit_delta_(state_BHKV: Tensor, factors: WindowFactors, n_B: Tensor) -> Tensor:
    """S becomes S_n = e^{G_n} S + sum_{j <= n} e^{G_n - G_j} k_j u_j^T, 0 <= n <= T for each row. Of all layers at once
    if state and factors have L in front."""
    if state_BHKV.dim() == 5:
        for layer, state in enumerate(state_BHKV):
            commit_delta_(state, WindowFactors(*(x[layer] for x in factors)), n_B)
        return state_BHKV
    k, u, decay = factors
    k = k.repeat_interleave(u.shape[1] // k.shape[1], dim=1)
    window = DeltaWindow(*(x.unsqueeze(2) for x in (state_BHKV, k, u, decay)))
    return state_BHKV.copy_(commit_delta(window, n_B))


def commit_convolution_(conv_BWC: Tensor, x_BTC: Tensor, n_B: Tensor) -> Tensor:
    """The W - 1 inputs that end at token n of the window, 0 <= n <= T; L may stand in front of both."""
    width = conv_BWC.shape[-2]
    inputs = torch.cat((conv_BWC, x_BTC), dim=-2)
    index_BW = n_B[:, None] + torch.arange(width, device=n_B.device)
    return conv_BWC.copy_(inputs.gather(-2, index_BW[..., None].expand_as(conv_BWC)))
