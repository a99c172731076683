"""Causal depthwise convolution. C channels, W kernel width, T new inputs."""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_convolution(x_BSC: Tensor, weight_CW: Tensor) -> Tensor:
    """y_t = silu(sum_w weight[:, w] x_{t + w}): `x` holds W - 1 earlier inputs (or zeros) before the T new ones.

    S = T + W - 1; returns [B, T, C].
    """
    channels, width = weight_CW.shape
    num_new = x_BSC.shape[1] - width + 1
    if num_new <= 16:  # a few products beat the set-up of a convolution
        y = (x_BSC.unfold(1, width, 1) * weight_CW).sum(dim=-1)
        return F.silu(y)
    y = F.conv1d(x_BSC.transpose(1, 2), weight_CW.unsqueeze(1), groups=channels)
    return F.silu(y).transpose(1, 2)


def packed_causal_convolution(x_BTC: Tensor, weight_CW: Tensor, documents_BT: Tensor | None) -> Tensor:
    """The same over whole rows, a token seeing only inputs of its own document. Returns [B, T, C]."""
    width = weight_CW.shape[1]
    padded = F.pad(x_BTC, (0, 0, width - 1, 0))
    if documents_BT is None:
        return causal_convolution(padded, weight_CW)
    documents = F.pad(documents_BT, (width - 1, 0), value=-1)
    num_tokens = x_BTC.shape[1]
    y = torch.zeros_like(x_BTC)
    for w in range(width):
        own = documents[:, w : w + num_tokens] == documents_BT
        y = y + padded[:, w : w + num_tokens] * own.unsqueeze(-1) * weight_CW[:, w]
    return F.silu(y)
