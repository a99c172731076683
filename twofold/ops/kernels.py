"""The functions that a model computes with, chosen once and handed to it."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.ops import attention, delta_window, draft_attention, packed
from twofold.ops.attention import CacheMask
from twofold.ops.draft_attention import ContextMask, DraftMask

Linear = Callable[[Tensor], Tensor]


def _dense_linear(weight_NK: Tensor) -> Linear:
    return lambda x: F.linear(x, weight_NK)


FEW_ROWS = 64


def _cpu_linear(weight_NK: Tensor) -> Linear:
    """y = x W^T. At up to `FEW_ROWS` rows PyTorch's own product spends most of its time on a weight laid out in rows:
    a wide weight is laid out once in oneDNN's blocks, a narrow one multiplied from the left, W x^T.

    oneDNN's product has no gradient, so autograd takes PyTorch's.
    """
    able = weight_NK.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    if not able or len(weight_NK) < 512:
        return lambda x: _left_product(x, weight_NK)
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight_NK.detach().contiguous(), 8)

    def apply(x: Tensor) -> Tensor:
        if x.requires_grad or x.numel() // x.shape[-1] > FEW_ROWS:
            return F.linear(x, weight_NK)
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), blocked, None, "none", [], "")

    return apply


def _left_product(x: Tensor, weight_NK: Tensor) -> Tensor:
    if not 1 < x.numel() // x.shape[-1] <= FEW_ROWS:
        return F.linear(x, weight_NK)
    return (weight_NK @ x.flatten(0, -2).T).T.view(*x.shape[:-1], -1)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One implementation for each operation; the signatures are those of the reference functions.

    `freeze_linear(weight [N, K]) -> (x [..., K] -> x W^T)` may lay the weight out anew; it is called once when a
    model's weights stop changing.
    """

    name: str
    # a pass with a decode state
    cache_attention: Callable[[Tensor, Tensor, Tensor, CacheMask], Tensor]
    context_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, ContextMask], Tensor]
    delta_pass: Callable[..., tuple[Tensor, Any]]
    delta_commit: Callable[[Any, Tensor | int, Tensor, Tensor], None]
    # a pass without
    draft_attention: Callable[[Tensor, Tensor, Tensor, DraftMask], Tensor]
    packed_attention: Callable[..., Tensor]
    packed_convolution: Callable[..., Tensor]
    packed_delta: Callable[..., Tensor]
    freeze_linear: Callable[[Tensor], Linear]

    @staticmethod
    def reference() -> "Kernels":
        return Kernels(
            name="reference",
            cache_attention=attention.cache_attention,
            context_attention=draft_attention.context_attention,
            delta_pass=delta_window.delta_pass,
            delta_commit=delta_window.delta_commit,
            draft_attention=draft_attention.draft_attention,
            packed_attention=packed.packed_attention,
            packed_convolution=packed.packed_convolution,
            packed_delta=packed.packed_delta,
            freeze_linear=_dense_linear,
        )

    @staticmethod
    def cpu() -> "Kernels":
        return replace(Kernels.reference(), name="cpu", freeze_linear=_cpu_linear)

    @staticmethod
    def cuda() -> "Kernels":
        from twofold.ops import packed_cuda

        return replace(
            Kernels.reference(),
            name="cuda",
            draft_attention=draft_attention.flex_draft_attention,
            packed_attention=packed_cuda.packed_attention,
            packed_convolution=packed_cuda.packed_convolution,
        )

    @staticmethod
    def auto(device: torch.device | str) -> "Kernels":
        """The fastest set that this machine can run on `device`."""
        if torch.device(device).type != "cuda":
            return Kernels.cpu()
        if (lack := draft_attention.why_no_flex()) is None:
            return Kernels.cuda()
        _say_once(f"drafters train without flex attention, slower and with more memory: {lack}")
        return replace(Kernels.cuda(), draft_attention=draft_attention.draft_attention)


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr)
