"""`packed` on an NVIDIA GPU, for bfloat16 and float16; wider inputs ask for exactness and take the reference.

Gated DeltaNet has no function here: its reference is a few large products, and its loop a kernel (`scan_triton`).
"""

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from twofold.ops import packed
from twofold.ops.documents import Documents


def packed_attention(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, documents: Documents | None) -> Tensor:
    if documents is None or q_BTHD.itemsize > 2:
        return packed.packed_attention(q_BTHD, k_BTGD, v_BTGD, documents)
    repeat = q_BTHD.shape[2] // k_BTGD.shape[2]
    q, k, v = (x.flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGD))
    k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v)) if repeat > 1 else (k, v)
    borders, longest = documents.borders, documents.longest
    o = varlen_attn(q, k, v, borders, borders, longest, longest, window_size=(-1, 0))
    assert isinstance(o, Tensor)
    return o.view_as(q_BTHD)


def packed_convolution(x_BTC: Tensor, weight_CW: Tensor, documents: Documents | None) -> Tensor:
    if x_BTC.itemsize > 2:
        if documents is not None and torch.cuda.is_current_stream_capturing():
            raise ValueError("a convolution in float32 is in no CUDA graph; compute in bfloat16, or capture nothing")
        return packed.packed_convolution(x_BTC, weight_CW, documents)
    from twofold.ops.convolution_triton import convolution

    return convolution(x_BTC, weight_CW, None if documents is None else documents.ids_BT)
