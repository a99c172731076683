"""Causal depthwise convolution. C channels, W kernel width, T new inputs."""

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
