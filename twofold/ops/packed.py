"""Token mixing over whole rows of packed documents, as training computes it: differentiable, without a state.

B rows, T tokens, H heads, D head width, C channels, W kernel width; K key width and V value width of Gated DeltaNet.
Without `documents` each row is one. These are the specification; `packed_cuda` is the same, fast, in half precision.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.ops.attention import attention
from twofold.ops.convolution import causal_convolution
from twofold.ops.documents import Documents
from twofold.ops.gated_delta import gated_delta


def packed_attention(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, documents: Documents | None) -> Tensor:
    """Causal attention inside each document, [B, T, H, D]; see `attention`."""
    if documents is None:
        return attention(q_BTHD, k_BTGD, v_BTGD, causal=True)
    return attention(q_BTHD, k_BTGD, v_BTGD, documents.causal_mask)


def packed_convolution(x_BTC: Tensor, weight_CW: Tensor, documents: Documents | None) -> Tensor:
    """Causal convolution and silu, a token seeing only inputs of its own document, [B, T, C].

    Computed without borders first; the few outputs whose inputs cross one are then replaced.
    """
    width = weight_CW.shape[1]
    padded = F.pad(x_BTC, (0, 0, width - 1, 0))
    if documents is None:
        return causal_convolution(padded, weight_CW)
    ids_BT = documents.ids_BT
    y = F.conv1d(padded.transpose(1, 2), weight_CW.unsqueeze(1), groups=len(weight_CW)).transpose(1, 2)
    before = ids_BT[:, :1].expand(-1, width - 1)  # the zeros before a row belong to any document
    shifted = torch.cat((before, ids_BT), dim=1)
    rows, tokens = (shifted[:, : ids_BT.shape[1]] != ids_BT).nonzero(as_tuple=True)
    window = tokens[:, None] + torch.arange(width, device=tokens.device)
    own = shifted[rows[:, None], window] == ids_BT[rows, tokens][:, None]
    inside = padded[rows[:, None], window].masked_fill(~own[..., None], 0.0)
    return F.silu(y.index_put((rows, tokens), (inside * weight_CW.T).sum(dim=1).to(y.dtype)))


def packed_delta(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, documents: Documents | None
) -> Tensor:
    """The gated delta rule over each document, from an empty state, [B, T, H, V]; see `gated_delta`."""
    ids_BT = None if documents is None else documents.ids_BT
    with torch.autocast(v_BTHV.device.type, enabled=False):  # its products are float32 also among layers in bfloat16
        return gated_delta(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, documents_BT=ids_BT)[0]
