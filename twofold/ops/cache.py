"""A pass over a cache of keys and values whose lengths stay on the device: what it writes there, and what it sees.

B rows, T tokens of the pass, S cached positions, C of them looked at, H query heads, G key heads, D head width, R <= D
its rotated part.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from twofold.ops.attention import attention
from twofold.ops.linear import Norm
from twofold.ops.norms import rms_norm, rotate


@dataclass(frozen=True)
class CachePlace:
    """Where a pass stands: token t of row b at position p = lengths[b] + t.

    It sees the cached positions s <= p (not `causal`, as a draft: the whole pass, s < lengths[b] + T), and with a
    window s > p - window, which is no smaller than T. `num_keys` is what the host knows: no row's last token stands at
    num_keys or later; with `exact`, every row's last token stands right before it.
    """

    lengths_B: Tensor
    num_tokens: int
    num_keys: int
    exact: bool
    rotary: tuple[Tensor, Tensor]  # cos and sin of every position, [S, R]
    causal: bool = True
    window: int | None = None
    keep: int | Tensor | None = None  # how many tokens will be committed, one number or [B], where that is known before

    @cached_property
    def positions_BT(self) -> Tensor:  # noqa: N802
        return self.lengths_B[:, None] + torch.arange(self.num_tokens, device=self.lengths_B.device)

    @cached_property
    def rotation(self) -> tuple[Tensor, Tensor]:
        """cos and sin of the pass, [B, T, R]."""
        cos_SR, sin_SR = self.rotary
        return cos_SR[self.positions_BT], sin_SR[self.positions_BT]

    @cached_property
    def rows(self) -> Tensor:
        """[B, 1]"""
        return torch.arange(len(self.lengths_B), device=self.lengths_B.device)[:, None]

    @property
    def starts(self) -> bool:
        """Whether nothing is cached before the pass."""
        return self.exact and self.num_keys == self.num_tokens

    @cached_property
    def sliding(self) -> Tensor | None:
        """[B, C]: the positions that a window reaches, below 0 where there is none, if that is less than the whole."""
        if self.window is None or self.num_keys <= self.window - 1 + self.num_tokens:
            return None
        steps_C = torch.arange(1 - self.window, self.num_tokens, device=self.lengths_B.device)
        return self.lengths_B[:, None] + steps_C

    @cached_property
    def dense(self) -> Tensor | None:
        """[B, T, C], true where a token sees a key; None where all are seen."""
        if self.exact and self.window is None and (self.num_tokens == 1 or not self.causal):
            return None
        keys = torch.arange(self.num_keys, device=self.lengths_B.device) if self.sliding is None else self.sliding
        keys, positions = keys.expand(len(self.lengths_B), -1)[:, None], self.positions_BT[..., None]
        seen = keys <= (positions if self.causal else positions[:, -1:])
        if self.window is not None:
            seen = seen & (keys > positions - self.window) & (keys >= 0)
        return seen.expand(-1, self.num_tokens, -1)


def store_keys(
    q_BTHD: Tensor | None,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    place: CachePlace,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
) -> Tensor | None:
    """Norm (where one is given) and rotary embedding of q and k; k and v go to the cache at their positions. Returns
    the new q [B, T, H, D]; None without one."""
    cos, sin = place.rotation
    k_BTGD = rotate(k_BTGD if k_norm is None else rms_norm(k_BTGD, *k_norm), cos, sin)
    k_BSGD.index_put_((place.rows, place.positions_BT), k_BTGD.to(k_BSGD.dtype))
    v_BSGD.index_put_((place.rows, place.positions_BT), v_BTGD.to(v_BSGD.dtype))
    if q_BTHD is None:
        return None
    return rotate(q_BTHD if q_norm is None else rms_norm(q_BTHD, *q_norm), cos, sin)


def cache_attention(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, place: CachePlace, gate_BTHD: Tensor | None = None
) -> Tensor:
    """`attention` over a cache that has the pass's own keys already, times sigmoid(gate) where one is given."""
    if place.sliding is None:
        k, v = k_BSGD[:, : place.num_keys], v_BSGD[:, : place.num_keys]
    else:
        keys_BC = place.sliding.clamp(min=0)
        k, v = k_BSGD[place.rows, keys_BC], v_BSGD[place.rows, keys_BC]
    if place.starts and place.causal and place.window is None and place.num_tokens > 1:
        o = attention(q_BTHD, k, v, causal=True)
    else:
        o = attention(q_BTHD, k, v, place.dense)
    return o if gate_BTHD is None else o * gate_BTHD.sigmoid()
