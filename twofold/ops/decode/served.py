"""The GPU's decode kernels in the signatures of `Kernels`: what they serve, and what goes to the references.

B rows, T tokens, N outputs, K inputs. Passes of up to `FEW_ROWS` rows multiply with packed weights; more rows, as in a
prefill, with the matrix they stand for, of integers made anew for each product. `overlap` is programmatic dependent
launch, see `linear_cuda`.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.ops import cache, delta_window, linear, norms
from twofold.ops.cache import CachePlace
from twofold.ops.decode import linear_cuda
from twofold.ops.decode.delta import WindowFactors
from twofold.ops.decode.packed_weight import PackedWeight, pack_bf16, pack_w4, pack_w8
from twofold.ops.linear import Linear, Norm

FEW_ROWS = 128
FEW_TOKENS = 64  # of a row, above which a pass that begins at known places takes flash attention
WIDTHS = (16, 32, 64, 128, 256)  # of heads
WINDOW = 16  # tokens that `delta_triton` takes


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr)


@dataclass(frozen=True)
class PackedProduct:
    """A `Linear` over a packed weight; `dense` is the matrix, where that is kept anyway. With a `tail`, of 16 bits
    behind a weight of 4, its outputs come behind the others'."""

    weight: PackedWeight
    dense: Tensor | None = None
    overlap: bool = False
    tail: PackedProduct | None = None

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        residual_MN = None if residual is None else residual.reshape(-1, residual.shape[-1])
        product = self._few if len(x_MK) <= FEW_ROWS else self._many
        return product(x_MK, norm, residual_MN).view(*x.shape[:-1], -1)

    def _few(self, x_MK: Tensor, norm: Norm | None, residual_MN: Tensor | None) -> Tensor:
        return linear_cuda.packed_linear(
            x_MK,
            self.weight,
            norm_K=None if norm is None else norm.weight_K,
            eps=0.0 if norm is None else norm.eps,
            residual_MN=residual_MN,
            overlap=self.overlap,
            tail=None if self.tail is None else self.tail.weight,
        )

    def _many(self, x_MK: Tensor, norm: Norm | None, residual_MN: Tensor | None) -> Tensor:
        x_MK = x_MK if norm is None else rms_norm(x_MK, *norm)
        weight_NK = self.matrix()
        if residual_MN is not None:
            return torch.addmm(residual_MN, x_MK, weight_NK.T)
        y_MN = F.linear(x_MK, weight_NK)
        if not self.weight.gated:
            return y_MN
        from twofold.ops.decode import norms_triton

        return norms_triton.silu_mul(y_MN)

    def matrix(self) -> Tensor:
        if self.dense is not None:
            return self.dense
        if self.tail is None:
            return linear_cuda.unpack(self.weight)
        tail_NK, outputs = self.tail.matrix(), self.weight.num_outputs
        both = tail_NK.new_empty(outputs + len(tail_NK), tail_NK.shape[1])
        linear_cuda.unpack(self.weight, both[:outputs])
        both[outputs:] = tail_NK
        return both


def join(first: Linear, second: Linear) -> Linear | None:
    """Of a weight of 4 bits and one of 16; None for others."""
    if not isinstance(first, PackedProduct) or not isinstance(second, PackedProduct):
        return None
    served = (first.weight.bits, second.weight.bits) == (4, 16) and not (first.weight.gated or second.weight.gated)
    return replace(first, tail=second) if served else None


def freeze_linear(weight_NK: Tensor, gated: bool, *, overlap: bool = False) -> Linear:
    outputs, inputs = weight_NK.shape
    if weight_NK.dtype != torch.bfloat16 or not weight_NK.is_cuda or inputs % 64 or outputs % (16 if gated else 8):
        return linear.dense_linear(weight_NK, gated)
    return PackedProduct(pack_bf16(weight_NK, gated), weight_NK, overlap)


def freeze_packed(
    q_NK: Tensor,
    scale_NG: Tensor,
    zero_NG: Tensor | None,
    bits: int,
    gated: bool,
    dtype: torch.dtype,
    *,
    overlap: bool = False,
) -> Linear | None:
    """None, said once, for weights that the kernel does not serve, and for models of another dtype than bfloat16."""
    if dtype != torch.bfloat16:
        return None
    group_size = q_NK.shape[1] // scale_NG.shape[1]
    try:
        if bits == 4:
            return PackedProduct(pack_w4(q_NK, scale_NG, zero_NG, group_size, gated), None, overlap)
        if zero_NG is None:
            return PackedProduct(pack_w8(q_NK, scale_NG, group_size, gated), None, overlap)
        lack = "8 bits with zero points"
    except ValueError as error:
        lack = str(error)
    _say_once(f"a packed layer is multiplied as a dense one: {lack}")
    return None


def top1(head: Linear, x: Tensor) -> Tensor:
    if not isinstance(head, PackedProduct) or head.weight.gated:
        return linear.top1(head, x)
    ids_M, _ = linear_cuda.top1(x.reshape(-1, x.shape[-1]), head.weight, overlap=head.overlap)
    return ids_M.view(x.shape[:-1])


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
    """All rows end at the same place: causal, aligned at the ends, without a mask in memory."""
    from torch.nn.attention.varlen import varlen_attn

    rows, num_tokens, heads, _ = q_BTHD.shape
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
    """What a pass of few tokens leaves behind."""

    inputs_BTC: Tensor
    factors: WindowFactors


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

    o_BTHV, factors = delta_triton.delta_window(
        qkv_BTC, conv_BWC, weight_CW, a_BTH, b_BTH, A_log_H, dt_bias_H, state_BHKV, overlap=overlap
    )
    return o_BTHV, FewTokens(qkv_BTC, factors)


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
    factors = WindowFactors(*(torch.stack(parts) for parts in zip(*(window.factors for window in few), strict=True)))
    delta_triton.commit_delta_(state_LBHKV, factors, n_B, overlap=overlap)
    inputs = _stacked([window.inputs_BTC for window in few])
    delta_triton.commit_convolution_(conv_LBWC, inputs, n_B, overlap=overlap)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """torch.stack. Columns at the start of wider rows go with all of them: dense copies are several times as fast."""
    width = parts[0].shape[-1]
    rows = [_whole_rows(part) for part in parts]
    same = all(row.shape == rows[0].shape for row in rows)
    return torch.stack(rows)[..., :width] if same else torch.stack(list(parts))


def _whole_rows(x_BTC: Tensor) -> Tensor:
    """The rows that x's columns begin, where these and nothing else lie in its memory; else x."""
    batch, num_tokens, _ = x_BTC.shape
    width = x_BTC.stride(1) if num_tokens > 1 else x_BTC.stride(0)
    size = x_BTC.untyped_storage().nbytes() // x_BTC.itemsize
    strides = (num_tokens * width, width, 1)
    dense = x_BTC.storage_offset() == 0 and size == batch * num_tokens * width
    if not dense or (batch > 1 and x_BTC.stride(0) != strides[0]) or x_BTC.stride(2) != 1:
        return x_BTC
    return x_BTC.as_strided((batch, num_tokens, width), strides)


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


def why_no_products(device: torch.device | str) -> str | None:
    """What products with packed weights lack on a machine with a GPU; None where nothing."""
    try:
        found = importlib.util.find_spec("cuda.bindings")
    except ModuleNotFoundError:
        found = None
    if found is None:
        return "cuda-bindings is not installed (pip install 'twofold[gpu]')"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None
