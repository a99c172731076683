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
    """The same over whole rows, a token seeing only inputs of its own document. Returns [B, T, C].

    Computed without borders first; the few outputs whose inputs cross one are then replaced.
    """
    width = weight_CW.shape[1]
    padded = F.pad(x_BTC, (0, 0, width - 1, 0))
    if documents_BT is None:
        return causal_convolution(padded, weight_CW)
    y = F.conv1d(padded.transpose(1, 2), weight_CW.unsqueeze(1), groups=len(weight_CW)).transpose(1, 2)
    before = documents_BT[:, :1].expand(-1, width - 1)  # the zeros before a row belong to any document
    documents = torch.cat((before, documents_BT), dim=1)
    rows, tokens = (documents[:, : documents_BT.shape[1]] != documents_BT).nonzero(as_tuple=True)
    window = tokens[:, None] + torch.arange(width, device=tokens.device)
    own = documents[rows[:, None], window] == documents_BT[rows, tokens][:, None]
    inside = padded[rows[:, None], window].masked_fill(~own[..., None], 0.0)
    return F.silu(y.index_put((rows, tokens), (inside * weight_CW.T).sum(dim=1).to(y.dtype)))
