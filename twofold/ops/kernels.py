"""The functions that a model computes with, chosen once and handed to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twofold.ops import cache, delta_window, draft_attention, linear, norms, packed
from twofold.ops.draft_attention import DraftMask
from twofold.ops.linear import Linear


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One implementation for each operation; the signatures are those of the reference functions.

    `freeze_linear(weight [N, K], gated)` may lay the weight out anew; it is called once when a model's weights stop
    changing. `freeze_packed(q int8 [N, K], scale [N, G], zero [N, G] or None, bits, gated, dtype of x)` does so for
    integers; where it is None, or returns None for what it does not serve, packed layers are laid out dense. `join`
    makes one of two products of one input that were laid out apart, where it can.
    """

    name: str
    prefill_chunk: int = 512  # tokens of a prompt that are run together
    prefill_sizes: tuple[int, ...] = ()  # to which shorter prompts are filled up, so that their passes can be replayed
    # a pass with a decode state
    store_keys: Callable[..., Any]
    cache_attention: Callable[..., Tensor]
    delta_pass: Callable[..., tuple[Tensor, Any]]
    delta_commit: Callable[[Sequence[Any], Tensor | int, Tensor, Tensor], None]
    # a pass without
    draft_attention: Callable[[Tensor, Tensor, Tensor, DraftMask], Tensor]
    packed_attention: Callable[..., Tensor]
    packed_convolution: Callable[..., Tensor]
    packed_delta: Callable[..., Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    # of weights that may change
    norm: Callable[[Tensor, Tensor, float, float], Tensor]
    silu_mul: Callable[[Tensor, Tensor], Tensor]
    # of frozen weights
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    gated_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    freeze_linear: Callable[[Tensor, bool], Linear]
    freeze_packed: Callable[..., Linear | None] | None
    join: Callable[[Linear, Linear], Linear | None] | None
    top1: Callable[[Linear, Tensor], Tensor]

    @staticmethod
    def reference() -> "Kernels":
        return Kernels(
            name="reference",
            store_keys=cache.store_keys,
            cache_attention=cache.cache_attention,
            delta_pass=delta_window.delta_pass,
            delta_commit=delta_window.delta_commit,
            draft_attention=draft_attention.draft_attention,
            packed_attention=packed.packed_attention,
            packed_convolution=packed.packed_convolution,
            packed_delta=packed.packed_delta,
            rotate=norms.rotate,
            norm=norms.rms_norm,
            silu_mul=norms.silu_mul,
            rms_norm=norms.rms_norm,
            gated_rms_norm=norms.gated_rms_norm,
            freeze_linear=linear.dense_linear,
            freeze_packed=None,
            join=None,
            top1=linear.top1,
        )

    @staticmethod
    def cpu() -> "Kernels":
        return replace(
            Kernels.reference(), name="cpu", freeze_linear=linear.cpu_linear, freeze_packed=linear.cpu_packed
        )

    @staticmethod
    def cuda(*, overlap: bool = False) -> "Kernels":
        """`overlap`: a decode kernel may start before the one before it has ended (sm_90 and newer)."""
        from twofold.ops import compiled, packed_cuda
        from twofold.ops.decode import products, served

        return replace(
            Kernels.reference(),
            name="cuda",
            prefill_chunk=8192,  # the large products are worth it, and dense weights are made once a chunk
            prefill_sizes=(64, 128, 256, 512, 768, 1024, 1536, 2048),  # the host takes 50 ms to launch a pass
            store_keys=partial(served.store_keys, overlap=overlap),
            cache_attention=partial(served.cache_attention, overlap=overlap),
            delta_pass=partial(served.delta_pass, overlap=overlap),
            delta_commit=partial(served.delta_commit, overlap=overlap),
            draft_attention=draft_attention.flex_draft_attention,
            packed_attention=packed_cuda.packed_attention,
            packed_convolution=packed_cuda.packed_convolution,
            rotate=compiled.rotate,
            norm=compiled.rms_norm,
            silu_mul=compiled.silu_mul,
            rms_norm=partial(served.rms_norm, overlap=overlap),
            gated_rms_norm=partial(served.gated_rms_norm, overlap=overlap),
            freeze_linear=partial(products.freeze_linear, overlap=overlap),
            freeze_packed=partial(products.freeze_packed, overlap=overlap),
            join=products.join,
            top1=products.top1,
        )

    def with_fp8_prefill(self, device: torch.device | str) -> "Kernels | None":
        """Of packed layers, products of more rows than a decode pass has with 8-bit floats on both sides, see `fp8`;
        None where a device has none (sm_89 and newer do)."""
        from twofold.ops import fp8

        if torch.device(device).type != "cuda":
            return replace(self, name=f"{self.name}, FP8", freeze_linear=fp8.fp8_linear, freeze_packed=None)
        if self.freeze_packed is None or torch.cuda.get_device_capability(device) < (8, 9):
            return None
        return replace(self, name=f"{self.name}, FP8 prefill", freeze_packed=partial(self.freeze_packed, fp8=True))

    @staticmethod
    def auto(device: torch.device | str, *, overlap: bool = True) -> "Kernels":
        """The fastest set that this machine can run on `device`."""
        if torch.device(device).type != "cuda":
            return Kernels.cpu()
        from twofold.ops.decode import products

        kernels, reference = Kernels.cuda(overlap=overlap), Kernels.reference()
        if (lack := draft_attention.why_no_flex()) is not None:
            products.say_once(f"slower, and drafters train with more memory, without Triton's kernels: {lack}")
            passes = ("store_keys", "cache_attention", "delta_pass", "delta_commit", "rms_norm", "gated_rms_norm")
            others = ("draft_attention", "packed_convolution", "rotate", "norm", "silu_mul")
            kernels = replace(kernels, **{name: getattr(reference, name) for name in passes + others})
        if (lack := products.why_no_products(device)) is not None:
            products.say_once(f"packed layers are multiplied as dense ones: {lack}")
            parts = ("freeze_linear", "freeze_packed", "join", "top1")
            kernels = replace(kernels, **{name: getattr(reference, name) for name in parts})
        return kernels
