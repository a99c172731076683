"""`packed` on an NVIDIA GPU: attention by PyTorch's variable-length flash kernel, Gated DeltaNet and its convolution by
flash-linear-attention (fla-core), whose chunks are one kernel each where the reference loops over them.

For bfloat16 and float16. Wider inputs ask for exactness and take the reference: these kernels multiply in half
precision or TF32.
"""

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from twofold.ops import packed
from twofold.ops.documents import Documents


def has_fla() -> bool:
    try:
        import fla.modules.causal_conv1d
        import fla.ops.gated_delta_rule  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("fla", "einops"):
            raise
        return False
    return True


def packed_attention(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, documents: Documents | None) -> Tensor:
    if documents is None or q_BTHD.itemsize > 2:
        return packed.packed_attention(q_BTHD, k_BTGD, v_BTGD, documents)
    repeat = q_BTHD.shape[2] // k_BTGD.shape[2]
    q, k, v = (x.flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGD))
    k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v)) if repeat > 1 else (k, v)
    borders, longest = documents.borders.int(), documents.longest
    o = varlen_attn(q, k, v, borders, borders, longest, longest, window_size=(-1, 0))
    assert isinstance(o, Tensor)
    return o.view_as(q_BTHD)


def packed_convolution(x_BTC: Tensor, weight_CW: Tensor, documents: Documents | None) -> Tensor:
    if x_BTC.itemsize > 2:
        return packed.packed_convolution(x_BTC, weight_CW, documents)
    from fla.modules.causal_conv1d import causal_conv1d

    rows, borders = _in_one_row(x_BTC, documents=documents)
    y, _ = causal_conv1d(*rows, weight_CW.to(x_BTC.dtype), activation="silu", cu_seqlens=borders)
    return y.view_as(x_BTC)


def packed_delta(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, documents: Documents | None
) -> Tensor:
    if v_BTHV.itemsize > 2:
        return packed.packed_delta(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, documents)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    rows, borders = _in_one_row(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, documents=documents)
    o, _ = chunk_gated_delta_rule(*rows, use_qk_l2norm_in_kernel=True, cu_seqlens=borders)
    return o.view_as(v_BTHV)


def _in_one_row(*tensors: Tensor, documents: Documents | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The rows one behind the other where they hold documents, and the borders of those."""
    if documents is None:
        return tensors, None
    return tuple(x.flatten(0, 1).unsqueeze(0) for x in tensors), documents.borders
