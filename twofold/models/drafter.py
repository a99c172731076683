"""The DFlash drafter (arXiv:2602.06036): guesses a whole block of tokens in one pass.

B rows, N block tokens, S context positions, T new context positions, D hidden size, G key heads.

Context feature of a position: c = hidden_norm(fc([tap_1; ...; tap_m])), from the target's layers named in
`target_layer_ids`. A block is one known token, the anchor, and N - 1 mask tokens, embedded by the target. In every
layer queries come from the block, keys and values from [c; block] by the layer's own projections; a block token sees
the whole context before the anchor and the whole block. The target's head turns the result into scores, position k
of the block guessing token anchor + k.

Keys and values of the context are cached: only newly accepted positions are projected, and a rejected position never
enters, so there is nothing to roll back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from twofold.models.causal_lm import CausalLM
from twofold.models.draft_head import DraftHead
from twofold.models.drafter_config import DrafterConfig
from twofold.models.layers import MLP, Projections, RMSNorm, freeze
from twofold.models.markov_head import MarkovHead
from twofold.models.state import KeyValueCache, Lengths
from twofold.ops.attention import attention
from twofold.ops.cache import CachePlace
from twofold.ops.draft_attention import DraftMask
from twofold.ops.kernels import Kernels
from twofold.ops.norms import rotary_table

KeyValue = tuple[Tensor, Tensor]
Seen = Tensor | DraftMask  # a plain mask is [B, N, S + N]


class DraftAttention(nn.Module):
    """x + o_proj(attention) of norm(x): queries from the block, keys and values from context and block."""

    def __init__(self, config: DrafterConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.head_dim = config.head_dim
        query_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.o_proj = nn.Linear(query_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, 0.0, kernels)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, 0.0, kernels)
        self.block_inputs = Projections(self, "q_proj", "k_proj", "v_proj")
        self.output = Projections(self, "o_proj")

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(self, x_BND: Tensor, norm: RMSNorm, cos: Tensor, sin: Tensor, context: KeyValue, mask: Seen) -> Tensor:
        """In training: beside the keys and values of the context."""
        q, k, v = (self.heads(x) for x in self.block_inputs(x_BND, norm))
        q, k = self.kernels.rotate(self.q_norm(q), cos, sin), self.kernels.rotate(self.k_norm(k), cos, sin)
        k, v = torch.cat((context[0], k), dim=1), torch.cat((context[1], v), dim=1)
        o = attention(q, k, v, mask) if isinstance(mask, Tensor) else self.kernels.draft_attention(q, k, v, mask)
        return self.output(o.flatten(-2), residual=x_BND)[0]

    def draft(self, x_BND: Tensor, norm: RMSNorm, place: CachePlace, cache: KeyValueCache) -> Tensor:
        """In decoding: the block's keys and values stand in the cache behind the context until it grows over them."""
        q, k, v = (self.heads(x) for x in self.block_inputs(x_BND, norm))
        keys = (cache.k_BSGD, cache.v_BSGD)
        q = self.kernels.store_keys(q, k, v, self.q_norm.scale(), self.k_norm.scale(), place, *keys)
        o = self.kernels.cache_attention(q, *keys, place)
        return self.output(o.flatten(-2), residual=x_BND)[0]


class DraftLayer(nn.Module):
    def __init__(self, config: DrafterConfig, kernels: Kernels) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, kernels)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, kernels)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, 0.0, kernels)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, 0.0, kernels)

    def forward(self, x_BND: Tensor, cos: Tensor, sin: Tensor, context: KeyValue, mask: Seen) -> Tensor:
        x_BND = self.self_attn(x_BND, self.input_layernorm, cos, sin, context, mask)
        return self.mlp(x_BND, self.post_attention_layernorm)

    def draft(self, x_BND: Tensor, place: CachePlace, cache: KeyValueCache) -> Tensor:
        x_BND = self.self_attn.draft(x_BND, self.input_layernorm, place, cache)
        return self.mlp(x_BND, self.post_attention_layernorm)


@dataclass
class DraftState(Lengths):
    """Context keys and values of every layer; row b's context is its first lengths_B[b] positions."""

    caches: list[KeyValueCache] = field(default_factory=list)

    def reset(self) -> None:
        """Back to no context, in place."""
        self.lengths_B.zero_()
        self.know(0, exact=True)


class Drafter(nn.Module):
    """Has no embedding, and unless given one no head: it borrows the target's."""

    @staticmethod
    def initialized(config: DrafterConfig, seed: int, kernels: Kernels | None = None) -> "Drafter":
        """Matrices N(0, 1 / fan_in), norms 1: at any width the layers outweigh the embedding of the mask token, which
        is all that most of a block starts from."""
        drafter = Drafter(config, kernels)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
            if drafter.markov_head is not None:
                drafter.markov_head.after.weight.zero_()  # no bias to begin with
        return drafter

    def __init__(self, config: DrafterConfig, kernels: Kernels | None = None) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels or Kernels.reference()
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, 0.0, self.kernels)
        self.layers = nn.ModuleList(DraftLayer(config, self.kernels) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, 0.0, self.kernels)
        self.markov_head = MarkovHead(config.vocab_size, config.markov_rank) if config.markov_rank else None
        self.draft_head: DraftHead | None = None  # in place of the target's
        self.feature = Projections(self, "fc")
        names = [f"layers.{i}.self_attn.{part}" for i in range(config.num_layers) for part in ("k_proj", "v_proj")]
        self.context_inputs = Projections(self, *names)  # one product: all layers see the same context

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def _layers(self) -> list[DraftLayer]:
        return cast(list[DraftLayer], list(self.layers))

    def freeze(self) -> "Drafter":
        self.requires_grad_(False)
        freeze(self, self.kernels, self.norm.weight.dtype)
        return self.eval()

    def _table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_table(positions, self.config.head_dim, self.config.rope_theta)

    def _projected(self, taps: Sequence[Tensor]) -> list[KeyValue]:
        """Keys and values [B, T, G, head_dim] of every layer, neither normed nor rotated."""
        feature = self.hidden_norm(self.feature(torch.cat(list(taps), dim=-1))[0])
        parts = [x.unflatten(-1, (-1, self.config.head_dim)) for x in self.context_inputs(feature)]
        return list(zip(parts[::2], parts[1::2], strict=True))

    def contexts(self, taps: Sequence[Tensor], positions_BT: Tensor) -> list[KeyValue]:
        """Keys and values [B, T, G, head_dim] that the target's taps [B, T, D] give each layer."""
        cos, sin = self._table(positions_BT)
        projected = zip(self._layers, self._projected(taps), strict=True)
        return [(self.kernels.rotate(layer.self_attn.k_norm(k), cos, sin), v) for layer, (k, v) in projected]

    def forward(self, x_BND: Tensor, positions_BN: Tensor, contexts: Sequence[KeyValue], mask: Seen) -> Tensor:
        """Hidden states [B, N, D] for the head; the mask covers context and block keys, [B, N, S + N]."""
        cos, sin = self._table(positions_BN)
        for layer, context in zip(self.layers, contexts, strict=True):
            x_BND = layer(x_BND, cos, sin, context, mask)
        return self.norm(x_BND)

    def scores(self, target: CausalLM, hidden: Tensor, previous: Tensor | None = None) -> Tensor:
        """Scores [..., V] of what `forward` gives, by the head that drafts, and by the tokens [...] before, where they
        are given and there is a Markov head."""
        scores = target.logits(hidden) if self.draft_head is None else self.draft_head(hidden)
        return scores if self.markov_head is None or previous is None else self.markov_head(scores, previous)

    def top1(self, target: CausalLM, hidden: Tensor) -> Tensor:
        """The token [...] with the best of `scores`, where no Markov head has a say."""
        if self.draft_head is None:
            return target.top1(hidden)
        return self.draft_head.top1(hidden, self.kernels)

    def new_state(self, batch_size: int, max_length: int) -> DraftState:
        shape = (batch_size, max_length, self.config.num_kv_heads, self.config.head_dim)
        new = self.norm.weight.new_zeros
        return DraftState(
            lengths_B=torch.zeros(batch_size, dtype=torch.long, device=self.device),
            max_length=max_length,
            rotary=self._table(torch.arange(max_length, device=self.device)),
            caches=[KeyValueCache(new(shape), new(shape)) for _ in self.layers],
        )

    def extend(self, state: DraftState, taps: Sequence[Tensor], n: int | Tensor) -> None:
        """Appends the first n of T new positions to the context, a number for all rows or one for each [B], which may
        stay on the device: all T are written then, and those past the new lengths are no part of the context."""
        if isinstance(n, int):
            taps = [tap[:, :n] for tap in taps]
        place = state.ahead(taps[0].shape[1])
        for layer, cache, (k, v) in zip(self._layers, state.caches, self._projected(taps), strict=True):
            norm = layer.self_attn.k_norm.scale()
            self.kernels.store_keys(None, k, v, None, norm, place, cache.k_BSGD, cache.v_BSGD)
        state.advance(n, at_most=place.num_tokens)

    def draft(self, state: DraftState, x_BND: Tensor) -> Tensor:
        """Hidden states [B, N, D] for a block (anchor and masks, embedded) that follows the context."""
        place = state.ahead(x_BND.shape[1], causal=False, window=self.config.sliding_window)
        for layer, cache in zip(self._layers, state.caches, strict=True):
            x_BND = layer.draft(x_BND, place, cache)
        hidden: Tensor = self.norm(x_BND)
        return hidden

    def training_mask(self, documents_BT: Tensor, anchors_BA: Tensor) -> DraftMask:
        """For blocks at the anchors (indices in the row) of packed rows."""
        return DraftMask(documents_BT, anchors_BA, self.config.block_size, self.config.sliding_window)
