"""Decode state as a transaction.

A forward pass with a state opens a window of T positions; `commit(n)` makes its first n permanent, a number for
each row. Whatever is not committed was never there: there is no undo. The law: after commit(n) the state equals
that of a fresh run over n tokens, for every n from 0 to T.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from twofold.models.config import LINEAR, ModelConfig
from twofold.ops.gated_delta import DeltaWindow
from twofold.ops.kernels import Kernels


@dataclass
class KeyValueCache:
    """Keys and values by position, [B, S, G, D]. Entries at or past a row's length are no part of the state."""

    k_BSGD: Tensor
    v_BSGD: Tensor

    def write(self, positions_BT: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> None:
        rows = torch.arange(len(positions_BT), device=positions_BT.device)[:, None]
        self.k_BSGD.index_put_((rows, positions_BT), k_BTGD.to(self.k_BSGD.dtype))
        self.v_BSGD.index_put_((rows, positions_BT), v_BTGD.to(self.v_BSGD.dtype))

    def read(self, num_keys: int) -> tuple[Tensor, Tensor]:
        return self.k_BSGD[:, :num_keys], self.v_BSGD[:, :num_keys]


@dataclass
class DeltaState:
    """Gated DeltaNet: the last W - 1 convolution inputs and the recurrent state (float32)."""

    conv_BWC: Tensor
    state_BHKV: Tensor
    window: tuple[Tensor, DeltaWindow] | None = None

    def commit(self, n_B: Tensor | int, kernels: Kernels) -> None:
        assert self.window is not None
        inputs_BSC, delta = self.window
        self.window = None
        width = self.conv_BWC.shape[1]
        self.state_BHKV = kernels.commit_delta(delta, n_B)
        if isinstance(n_B, int):
            self.conv_BWC = inputs_BSC[:, n_B : n_B + width]
            return
        kept = n_B[:, None] + torch.arange(width, device=n_B.device)
        rows = torch.arange(len(n_B), device=n_B.device)[:, None]
        self.conv_BWC = inputs_BSC[rows, kept]


@dataclass
class DecodeState:
    """The state of all layers for B rows of up to `max_length` positions."""

    layers: list[KeyValueCache | DeltaState]
    lengths_B: Tensor
    max_length: int
    kernels: Kernels
    bound: int = 0  # host-side upper bound of lengths_B: what attention has to look at
    window: int = field(default=0)  # positions of the open window

    def open(self, num_tokens: int) -> Tensor:
        """Opens a window of T positions, discarding one that was not committed. Returns positions [B, T]."""
        if self.bound + num_tokens > self.max_length:
            raise ValueError(
                f"{self.bound} + {num_tokens} positions exceed the context of {self.max_length}; "
                "use a shorter prompt or a larger context"
            )
        self.window = num_tokens
        return self.lengths_B[:, None] + torch.arange(num_tokens, device=self.lengths_B.device)

    def commit(self, n: int | Tensor) -> None:
        """Makes the first n positions of the window permanent; 0 <= n <= T, one number or [B]."""
        if isinstance(n, int):
            assert 0 <= n <= self.window, f"commit({n}) of a window of {self.window}"
            self.bound += n
        else:
            # on a GPU the exact bound would make the host wait
            self.bound = self.bound + self.window if n.is_cuda else int((self.lengths_B + n).max())
        for layer in self.layers:
            if isinstance(layer, DeltaState):
                layer.commit(n, self.kernels)
        self.lengths_B = self.lengths_B + n
        self.window = 0

    def select(self, rows: Tensor) -> None:
        """Keeps the given rows (in that order): finished sequences leave a batch."""
        assert self.window == 0
        self.lengths_B = self.lengths_B[rows]
        for layer in self.layers:
            if isinstance(layer, DeltaState):
                layer.conv_BWC, layer.state_BHKV = layer.conv_BWC[rows], layer.state_BHKV[rows]
            else:
                layer.k_BSGD, layer.v_BSGD = layer.k_BSGD[rows], layer.v_BSGD[rows]


def new_state(
    config: ModelConfig,
    kernels: Kernels,
    batch_size: int,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeState:
    """An empty state. Key-value memory: 2 B S G D entries for each attention layer."""

    def layer(kind: str) -> KeyValueCache | DeltaState:
        if kind == LINEAR:
            channels = 2 * config.linear_key_dim + config.linear_value_dim
            heads = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
            wide = torch.promote_types(dtype, torch.float32)
            return DeltaState(
                torch.zeros(batch_size, config.linear_conv_width - 1, channels, dtype=dtype, device=device),
                torch.zeros(batch_size, *heads, dtype=wide, device=device),
            )
        shape = (batch_size, max_length, config.num_kv_heads, config.head_dim)
        return KeyValueCache(
            torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
        )

    return DecodeState(
        layers=[layer(kind) for kind in config.layer_types],
        lengths_B=torch.zeros(batch_size, dtype=torch.long, device=device),
        max_length=max_length,
        kernels=kernels,
    )
