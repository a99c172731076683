"""The GPU's decode kernels but for products, in the signatures of `Kernels`: what they serve, and what goes to the
references. B rows, T tokens. `overlap` is programmatic dependent launch, see `linear_cuda`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twofold.ops import cache, delta_window, norms
from twofold.ops.attention import attention
from twofold.ops.cache import CachePlace
from twofold.ops.decode.delta import WindowFactors
from twofold.ops.delta_window import Slot
from twofold.ops.linear import Norm

FEW_TOKENS = 64  # of a row, above which a pass that begins at known places takes flash attention
WIDTHS = (16, 32, 64, 128, 256)  # of heads
WINDOW = 16  # tokens that `delta_triton` takes


def store_keys(
    q_BTHD: Tensor | None,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    place: CachePlace,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    *,
    overlap: bool = False,
) -> Tensor | None:
    width, eps = k_BTGD.shape[-1], [norm.eps for norm in (q_norm, k_norm) if norm is not None]
    if width not in WIDTHS or k_BSGD.dtype == torch.float64 or len(set(eps)) > 1:
        return cache.store_keys(q_BTHD, k_BTGD, v_BTGD, q_norm, k_norm, place, k_BSGD, v_BSGD)
    from twofold.ops.decode import attention_triton

    return attention_triton.store_keys(
        q_BTHD,
        k_BTGD,
        v_BTGD,
        None if q_norm is None else q_norm.weight_K,
        None if k_norm is None else k_norm.weight_K,
        eps[0] if eps else 0.0,
        *place.rotary,
        place.lengths_B,
        k_BSGD,
        v_BSGD,
        overlap=overlap,
    )


def cache_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    place: CachePlace,
    gate_BTHD: Tensor | None = None,
    *,
    overlap: bool = False,
) -> Tensor:
    many = place.num_tokens > FEW_TOKENS
    if many and place.exact and place.causal and place.window is None and q_BTHD.dtype in (torch.bfloat16, torch.half):
        return _flash(q_BTHD, k_BSGD, v_BSGD, place, gate_BTHD)
    if q_BTHD.shape[-1] not in WIDTHS or q_BTHD.dtype == torch.float64 or many:
        return cache.cache_attention(q_BTHD, k_BSGD, v_BSGD, place, gate_BTHD)
    from twofold.ops.decode import attention_triton

    return attention_triton.decode_attention(
        q_BTHD,
        k_BSGD,
        v_BSGD,
        place.lengths_B,
        causal=place.causal,
        window=place.window,
        gate_BTHD=gate_BTHD,
        overlap=overlap,
    )


def _flash(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, place: CachePlace, gate_BTHD: Tensor | None) -> Tensor:
    """All rows end at the same place: causal, aligned at the ends, without a mask in memory. Over empty rows PyTorch's
    own call takes fewer key heads as they are."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    rows, num_tokens, heads, _ = q_BTHD.shape
    if place.starts:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # cuDNN's would make a plan for every length
            mixed = attention(q_BTHD, k_BSGD[:, :num_tokens], v_BSGD[:, :num_tokens], causal=True)
        return mixed if gate_BTHD is None else mixed * gate_BTHD.sigmoid()
    repeat = heads // k_BSGD.shape[2]
    k, v = (x[:, : place.num_keys].repeat_interleave(repeat, dim=2).flatten(0, 1) for x in (k_BSGD, v_BSGD))
    steps = torch.arange(rows + 1, dtype=torch.int32, device=q_BTHD.device)
    o = varlen_attn(
        q_BTHD.flatten(0, 1).contiguous(),
        k,
        v,
        steps * num_tokens,
        steps * place.num_keys,
        num_tokens,
        place.num_keys,
        window_size=(-1, 0),
    )
    assert isinstance(o, Tensor)
    o = o.view(q_BTHD.shape)
    return o if gate_BTHD is None else o * gate_BTHD.sigmoid()


class Planned(NamedTuple):
    """What a pass leaves behind whose commit was known before: the states after it."""

    conv_BWC: Tensor
    state_BHKV: Tensor


class FewTokens(NamedTuple):
    """What a pass of few tokens leaves behind; with a slot, as parts of `all_layers`."""

    inputs_BTC: Tensor
    factors: WindowFactors
    all_layers: tuple[Tensor, ...] | None = None  # [L, ...] of inputs and factors


def _room(slot: Slot, qkv_BTC: Tensor, state_BHKV: Tensor) -> tuple[Tensor, ...]:
    """[L, ...] for inputs and factors of all layers, in memory that the state keeps."""
    (batch, num_tokens, channels), (heads, width, value_width) = qkv_BTC.shape, state_BHKV.shape[1:]
    key_heads = (channels - heads * value_width) // (2 * width)
    parts = {
        "inputs": (qkv_BTC.dtype, (batch, num_tokens, channels)),
        "k": (torch.float32, (batch, key_heads, num_tokens, width)),
        "u": (torch.float32, (batch, heads, num_tokens, value_width)),
        "decay": (torch.float32, (batch, heads, num_tokens)),
    }
    views = []
    for name, (dtype, shape) in parts.items():
        shape = (slot.layers, *shape)
        size = math.prod(shape)
        if name not in slot.held or len(slot.held[name]) < size:
            slot.held[name] = qkv_BTC.new_empty(size // num_tokens * WINDOW, dtype=dtype)
        views.append(slot.held[name][:size].view(shape))
    return tuple(views)


def delta_pass(
    qkv_BTC: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    weight_CW: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    conv_BWC: Tensor,
    state_BHKV: Tensor,
    keep: int | Tensor | None = None,
    slot: Slot | None = None,
    *,
    overlap: bool = False,
) -> tuple[Tensor, FewTokens | Planned | delta_window.OpenWindow]:
    widths, (batch, num_tokens, _) = state_BHKV.shape[2:], qkv_BTC.shape
    served = state_BHKV.dtype == torch.float32 and all(width in WIDTHS for width in widths)
    if served and num_tokens > WINDOW and keep is not None:
        from twofold.ops import delta_chunks_triton

        if isinstance(keep, int):
            keep = None if keep == num_tokens else torch.full((batch,), keep, device=qkv_BTC.device)
        o_BTHV, *after = delta_chunks_triton.delta_chunks(
            qkv_BTC, a_BTH, b_BTH, weight_CW, A_log_H, dt_bias_H, conv_BWC, state_BHKV, keep
        )
        return o_BTHV, Planned(*after)
    if num_tokens > WINDOW or not served:
        return delta_window.delta_pass(
            qkv_BTC, a_BTH, b_BTH, weight_CW, A_log_H, dt_bias_H, conv_BWC, state_BHKV, convolve=_convolve
        )
    from twofold.ops.decode import delta_triton

    inputs = qkv_BTC, conv_BWC, weight_CW, a_BTH, b_BTH, A_log_H, dt_bias_H, state_BHKV
    if slot is None:
        o_BTHV, factors = delta_triton.delta_window(*inputs, overlap=overlap)
        return o_BTHV, FewTokens(qkv_BTC, factors)
    room = _room(slot, qkv_BTC, state_BHKV)
    copy_BTC, *parts = (x[slot.layer] for x in room)
    factors = WindowFactors(*parts)
    o_BTHV, _ = delta_triton.delta_window(*inputs, factors=factors, copy_BTC=copy_BTC, overlap=overlap)
    return o_BTHV, FewTokens(copy_BTC, factors, room)


def _convolve(x_BSC: Tensor, weight_CW: Tensor) -> Tensor:
    if x_BSC.itemsize > 2:
        return delta_window.causal_convolution(x_BSC, weight_CW)
    from twofold.ops import convolution_triton

    return convolution_triton.convolution(x_BSC, weight_CW, None)[:, weight_CW.shape[1] - 1 :]


def delta_commit(
    windows: Sequence[FewTokens | Planned | delta_window.OpenWindow],
    n_B: Tensor | int,
    conv_LBWC: Tensor,
    state_LBHKV: Tensor,
    *,
    overlap: bool = False,
) -> None:
    """Of a pass of few tokens, and of a planned one, all layers at once."""
    planned = [window for window in windows if isinstance(window, Planned)]
    if planned:
        assert len(planned) == len(windows)
        torch._foreach_copy_(list(conv_LBWC), [window.conv_BWC for window in planned])
        torch._foreach_copy_(list(state_LBHKV), [window.state_BHKV for window in planned])
        return
    few = [window for window in windows if isinstance(window, FewTokens)]
    if len(few) < len(windows):
        delta_window.delta_commit(
            [window for window in windows if isinstance(window, delta_window.OpenWindow)], n_B, conv_LBWC, state_LBHKV
        )
        return
    if not few:
        return
    from twofold.ops.decode import delta_triton

    if isinstance(n_B, int):
        n_B = torch.full((conv_LBWC.shape[1],), n_B, device=conv_LBWC.device)
    inputs, *factors = few[0].all_layers or (torch.stack(parts) for parts in zip(*map(_parts, few), strict=True))
    assert len(inputs) == len(few)
    delta_triton.commit_delta_(state_LBHKV, WindowFactors(*factors), n_B, overlap=overlap)
    delta_triton.commit_convolution_(conv_LBWC, inputs, n_B, overlap=overlap)


def _parts(window: FewTokens) -> tuple[Tensor, ...]:
    return window.inputs_BTC, *window.factors


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, *, overlap: bool = False) -> Tensor:
    if x.dtype == torch.float64 or x.requires_grad:
        return norms.rms_norm(x, weight_D, eps)
    from twofold.ops.decode import norms_triton

    return norms_triton.rms_norm(x, weight_D, eps, overlap=overlap)


def gated_rms_norm(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float, *, overlap: bool = False) -> Tensor:
    if x.dtype == torch.float64 or x.requires_grad or gate.requires_grad or weight_D.requires_grad:
        return norms.gated_rms_norm(x, gate, weight_D, eps)
    from twofold.ops.decode import norms_triton

    x = x if len(x) == 1 else x.contiguous()
    return norms_triton.gated_rms_norm(x, gate, weight_D, eps, overlap=overlap)
