"""Token mixers: gated attention and Gated DeltaNet. Each reads and writes its own part of the decode state.

B batch, T tokens, H heads, D head width, C convolution channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from twofold.models.config import ModelConfig
from twofold.models.layers import Projections, RMSNorm
from twofold.models.state import DeltaState, KeyValueCache
from twofold.ops.cache import CachePlace
from twofold.ops.delta_window import decay_and_strength
from twofold.ops.documents import Documents
from twofold.ops.kernels import Kernels


class Place(NamedTuple):
    """Where a pass stands: the same for all layers, computed once."""

    rotation: tuple[Tensor, Tensor] | None = None  # cos and sin [B, T, R], of a pass without a state
    documents: Documents | None = None  # of such a pass; None: each row is one
    cache: CachePlace | None = None  # of a pass with a state


class Attention(nn.Module):
    """x + o_proj(attention(q, k, v) * sigmoid(gate)) of norm(x), with QK-norm and gate where the family has them."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.output_gate = config.output_gate
        self.kernels = kernels
        hidden, bias = config.hidden_size, config.attention_bias
        query_dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, query_dim * (2 if self.output_gate else 1), bias=bias)
        self.k_proj = nn.Linear(hidden, kv_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_dim, bias=bias)
        self.o_proj = nn.Linear(query_dim, hidden, bias=bias)
        if config.qk_norm:
            self.q_norm: nn.Module = RMSNorm(self.head_dim, config.rms_norm_eps, config.norm_offset, self.kernels)
            self.k_norm: nn.Module = RMSNorm(self.head_dim, config.rms_norm_eps, config.norm_offset, self.kernels)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.inputs = Projections(self, "q_proj", "k_proj", "v_proj")
        self.output = Projections(self, "o_proj")

    def forward(self, x_BTD: Tensor, norm: RMSNorm, place: Place, cache: KeyValueCache | None) -> Tensor:
        projected = self.inputs(x_BTD, norm)
        q, k, v = (y.unflatten(-1, (heads, -1)) for y, heads in zip(projected, self._heads, strict=True))
        q, gate = q.chunk(2, dim=-1) if self.output_gate else (q, None)
        if cache is None:
            assert place.rotation is not None
            rotate = self.kernels.rotate
            q, k = rotate(self.q_norm(q), *place.rotation), rotate(self.k_norm(k), *place.rotation)
            o = self.kernels.packed_attention(q, k, v, place.documents)
            o = o if gate is None else o * gate.sigmoid()
        else:
            norms = (norm.scale() if isinstance(norm, RMSNorm) else None for norm in (self.q_norm, self.k_norm))
            q = self.kernels.store_keys(q, k, v, *norms, place.cache, cache.k_BSGD, cache.v_BSGD)
            o = self.kernels.cache_attention(q, cache.k_BSGD, cache.v_BSGD, place.cache, gate)
        return self.output(o.flatten(-2), residual=x_BTD)[0]

    @property
    def _heads(self) -> tuple[int, int, int]:
        return self.num_heads, self.num_kv_heads, self.num_kv_heads


class GatedDeltaNet(nn.Module):
    """x + out_proj(gated_norm(delta rule over silu(conv(q, k, v)), z)) of norm(x); the rule is in `ops.gated_delta`,
    decay and strength in `ops.delta_window`."""

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.sizes = (config.linear_key_dim, config.linear_key_dim, config.linear_value_dim)
        self.num_key_heads, self.num_value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.eps = config.rms_norm_eps
        hidden, heads = config.hidden_size, config.linear_num_value_heads
        self.in_proj_qkv = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.in_proj_z = nn.Linear(hidden, config.linear_value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, heads, bias=False)
        self.conv1d = nn.Conv1d(
            sum(self.sizes), sum(self.sizes), config.linear_conv_width, groups=sum(self.sizes), bias=False
        )
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.norm = RMSNorm(config.linear_value_head_dim, config.rms_norm_eps, 0.0, self.kernels)
        self.out_proj = nn.Linear(config.linear_value_dim, hidden, bias=False)
        self.inputs = Projections(self, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        self.output = Projections(self, "out_proj")

    def forward(self, x_BTD: Tensor, norm: RMSNorm, place: Place, state: DeltaState | None) -> Tensor:
        qkv_BTC, z, b, a = self.inputs(x_BTD, norm)
        weight_CW = self.conv1d.weight.squeeze(1)
        if state is None:
            mixed = self.kernels.packed_convolution(qkv_BTC, weight_CW, place.documents)
            q, k, v = mixed.split(self.sizes, dim=-1)
            o = self.kernels.packed_delta(
                q.unflatten(-1, (self.num_key_heads, -1)),
                k.unflatten(-1, (self.num_key_heads, -1)),
                v.unflatten(-1, (self.num_value_heads, -1)),
                *decay_and_strength(a, b, self.A_log, self.dt_bias),
                place.documents,
            )
        else:
            assert place.cache is not None
            o, state.window = self.kernels.delta_pass(
                qkv_BTC,
                a,
                b,
                weight_CW,
                self.A_log,
                self.dt_bias,
                state.conv_BWC,
                state.state_BHKV,
                place.cache.keep,
                state.slot,
            )
        z = z.unflatten(-1, (self.num_value_heads, -1))
        normed = self.kernels.gated_rms_norm(o, z, self.norm.weight, self.eps)
        return self.output(normed.flatten(-2), residual=x_BTD)[0]
