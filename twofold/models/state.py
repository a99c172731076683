"""Decode state as a transaction.

A forward pass with a state opens a window of T positions; `commit(n)` makes its first n permanent, a number for
each row. Whatever is not committed was never there: there is no undo. The law: after commit(n) the state equals
that of a fresh run over n tokens, for every n from 0 to T.

Every tensor stays where it is: a commit writes in place, n may stay on the device, and the host reads nothing. So a
pass and its commit can be captured and replayed.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from twofold.models.config import LINEAR, ModelConfig
from twofold.ops.cache import CachePlace
from twofold.ops.delta_window import Slot
from twofold.ops.kernels import Kernels
from twofold.ops.norms import rotary_table


@dataclass
class KeyValueCache:
    """Keys and values by position, [B, S, G, D]. Entries at or past a row's length are no part of the state."""

    k_BSGD: Tensor
    v_BSGD: Tensor


@dataclass
class DeltaState:
    """Gated DeltaNet: the last W - 1 convolution inputs and the recurrent state (float32), a layer's part of tensors
    that all layers share."""

    conv_BWC: Tensor
    state_BHKV: Tensor
    slot: Slot
    window: Any = None  # of the open pass, in the form that the kernels give it


@dataclass
class Lengths:
    """How long rows are, and what the host knows of it.

    `lengths_B` lives on the device. `bound` is no less than any of them, and with `exact` it equals them all; a
    captured pass, which outlives what the host knows, is bounded by the capacity, `max_length`.
    """

    lengths_B: Tensor
    max_length: int
    rotary: tuple[Tensor, Tensor]  # cos and sin of every position, [S, R]
    bound: int = 0
    exact: bool = True

    def ahead(self, num_tokens: int, *, causal: bool = True, window: int | None = None) -> CachePlace:
        """Where a pass over the next T positions stands."""
        num_keys = self.bound + num_tokens
        return CachePlace(self.lengths_B, num_tokens, num_keys, self.exact, self.rotary, causal, window)

    def advance(self, n: int | Tensor, at_most: int) -> None:
        self.lengths_B.add_(n)
        self.bound += n if isinstance(n, int) else at_most
        self.exact = self.exact and isinstance(n, int)

    def know(self, bound: int, *, exact: bool) -> None:
        """Takes what the host has found out, or how far it wants passes to look."""
        self.bound, self.exact = bound, exact


@dataclass
class DecodeState(Lengths):
    """The state of all layers for B rows of up to `max_length` positions."""

    layers: list[KeyValueCache | DeltaState] = field(default_factory=list)
    conv_LBWC: Tensor | None = None  # of the layers with Gated DeltaNet
    state_LBHKV: Tensor | None = None
    kernels: Kernels = field(default_factory=Kernels.reference)
    window: int = 0  # positions of the open window
    keep: int | Tensor | None = None  # of them, where that is known already

    def open(self, num_tokens: int, keep: int | Tensor | None = None) -> CachePlace:
        """Opens a window of T positions, discarding one that was not committed. With `keep` only a commit of that many
        can follow, which a long pass needs not hold its factors for."""
        if self.bound + num_tokens > self.max_length:
            raise ValueError(
                f"{self.bound} + {num_tokens} positions exceed the context of {self.max_length}; "
                "use a shorter prompt or a larger context"
            )
        self.window, self.keep = num_tokens, keep
        return replace(self.ahead(num_tokens), keep=keep)

    def commit(self, n: int | Tensor) -> None:
        """Makes the first n positions of the window permanent; 0 <= n <= T, one number or [B] on the device."""
        assert not isinstance(n, int) or 0 <= n <= self.window, f"commit({n}) of a window of {self.window}"
        planned = self.keep is None or n is self.keep or (isinstance(n, int) and n == self.keep)
        assert planned, f"commit({n}), but another was planned"
        delta = [layer for layer in self.layers if isinstance(layer, DeltaState)]
        if self.conv_LBWC is not None and self.state_LBHKV is not None:
            assert all(layer.window is not None for layer in delta)
            self.kernels.delta_commit([layer.window for layer in delta], n, self.conv_LBWC, self.state_LBHKV)
        for layer in delta:
            layer.window = None
        self.advance(n, at_most=self.window)
        self.window, self.keep = 0, None

    def select(self, rows: Tensor) -> None:
        """Keeps the given rows (in that order), in new tensors: finished sequences leave a batch."""
        assert self.window == 0
        self.lengths_B = self.lengths_B[rows]
        for layer in self.layers:
            if isinstance(layer, KeyValueCache):
                layer.k_BSGD, layer.v_BSGD = layer.k_BSGD[rows], layer.v_BSGD[rows]
        if self.conv_LBWC is not None and self.state_LBHKV is not None:
            self.conv_LBWC, self.state_LBHKV = self.conv_LBWC[:, rows], self.state_LBHKV[:, rows]
            delta = (layer for layer in self.layers if isinstance(layer, DeltaState))
            for layer, conv_BWC, state_BHKV in zip(delta, self.conv_LBWC, self.state_LBHKV, strict=True):
                layer.conv_BWC, layer.state_BHKV = conv_BWC, state_BHKV

    def reset(self) -> None:
        """Back to no tokens, in place. Keys and values need no erasing: they are past every length."""
        self.lengths_B.zero_()
        self.know(0, exact=True)
        for tensor in (self.conv_LBWC, self.state_LBHKV):
            if tensor is not None:
                tensor.zero_()
        for layer in self.layers:
            if isinstance(layer, DeltaState):
                layer.window = None


def new_state(
    config: ModelConfig,
    kernels: Kernels,
    batch_size: int,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeState:
    """An empty state. Key-value memory: 2 B S G D entries for each attention layer."""

    wide = torch.promote_types(dtype, torch.float32)
    shape = (batch_size, max_length, config.num_kv_heads, config.head_dim)
    channels = 2 * config.linear_key_dim + config.linear_value_dim
    heads = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    linear = sum(kind == LINEAR for kind in config.layer_types)
    conv_LBWC = torch.zeros(
        linear, batch_size, max(0, config.linear_conv_width - 1), channels, dtype=dtype, device=device
    )
    state_LBHKV = torch.zeros(linear, batch_size, *heads, dtype=wide, device=device)
    held: dict[str, Tensor] = {}
    slots = [Slot(layer, linear, held) for layer in range(linear)]
    parts = zip(conv_LBWC, state_LBHKV, slots, strict=True)

    def cache() -> KeyValueCache:
        k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return KeyValueCache(k, v)

    return DecodeState(
        lengths_B=torch.zeros(batch_size, dtype=torch.long, device=device),
        max_length=max_length,
        rotary=rotary_table(torch.arange(max_length, device=device), config.rotary_dim, config.rope_theta),
        layers=[DeltaState(*next(parts)) if kind == LINEAR else cache() for kind in config.layer_types],
        conv_LBWC=conv_LBWC if linear else None,
        state_LBHKV=state_LBHKV if linear else None,
        kernels=kernels,
    )
