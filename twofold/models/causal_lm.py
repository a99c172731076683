"""The target: a causal language model whose decode state is a transaction.

B batch, T tokens, D hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twofold.models.config import FULL, ModelConfig
from twofold.models.layers import MLP, Projections, RMSNorm, freeze
from twofold.models.mixers import Attention, GatedDeltaNet, Place
from twofold.models.state import DecodeState, new_state
from twofold.ops.documents import Documents, document_ids
from twofold.ops.kernels import Kernels
from twofold.ops.norms import rotary_table


class Layer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)). Parameter names are those of Hugging Face checkpoints."""

    def __init__(self, config: ModelConfig, index: int, kernels: Kernels) -> None:
        super().__init__()
        self.attends = config.layer_types[index] == FULL
        if self.attends:
            self.self_attn = Attention(config, kernels)
        else:
            self.linear_attn = GatedDeltaNet(config, kernels)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, kernels)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset, kernels)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset, kernels)

    def forward(self, x_BTD: Tensor, place: Place, state: object) -> Tensor:
        mixer = self.self_attn if self.attends else self.linear_attn
        x_BTD = mixer(x_BTD, self.input_layernorm, place, state)
        return self.mlp(x_BTD, self.post_attention_layernorm)


class CausalLM(nn.Module):
    """forward gives hidden states, `logits` turns them into scores: apart, so that a loss can take the vocabulary
    in chunks and a prefill can skip it."""

    def __init__(self, config: ModelConfig, kernels: Kernels | None = None) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels or Kernels.reference()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i, self.kernels) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset, self.kernels)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.head = Projections(self, "lm_head")
        self.checkpointing = False  # passes with gradients keep the layers' inputs alone, and compute each layer twice

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def freeze(self) -> "CausalLM":
        """Ends training: no gradients, weights laid out for decoding."""
        self.requires_grad_(False)
        freeze(self, self.kernels, self.embed_tokens.weight.dtype)
        return self.eval()

    def new_state(self, batch_size: int, max_length: int) -> DecodeState:
        dtype = self.embed_tokens.weight.dtype
        return new_state(self.config, self.kernels, batch_size, max_length, dtype, self.device)

    def forward(
        self,
        token_ids_BT: Tensor,
        positions_BT: Tensor | None = None,
        state: DecodeState | None = None,
        taps: Sequence[int] = (),
        keep: int | Tensor | None = None,
        most_documents: int | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states [B, T, D] after the final norm, and the outputs [B, T, D] of the layers named in `taps`.

        Without a state: whole rows, with autograd; a position of 0 starts a new packed document (`most_documents`: see
        `Documents`), and without positions each row is one document. With a state: the pass stands at the state's
        lengths and opens a window, see `DecodeState`; `keep` is what will be committed of it, where that is known, as
        in a prefill. Tap i is the residual stream after layer i (transformers' hidden_states[i + 1]).
        ValueError for a tap that is not a layer.
        """
        if bad := [i for i in taps if not 0 <= i < self.config.num_layers]:
            raise ValueError(f"taps {bad} are not layers of a model with {self.config.num_layers} layers")
        place = self.place(token_ids_BT, positions_BT, state, keep, most_documents)
        x_BTD = self.embed_tokens(token_ids_BT)
        outputs: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            if state is None and self.checkpointing and torch.is_grad_enabled():
                x_BTD = checkpoint(layer, x_BTD, place, None, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BTD = layer(x_BTD, place, None if state is None else state.layers[i])
            if i in taps:
                outputs[i] = x_BTD
        return self.norm(x_BTD), [outputs[i] for i in taps]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., V] of the hidden states [..., D]."""
        return self.head(hidden)[0]

    def top1(self, hidden: Tensor) -> Tensor:
        """The token [...] of the best score of the hidden states [..., D], the lowest id among equals."""
        return self.head.top1(hidden, self.kernels)

    def place(
        self,
        token_ids_BT: Tensor,
        positions_BT: Tensor | None,
        state: DecodeState | None,
        keep: int | Tensor | None = None,
        most_documents: int | None = None,
    ) -> Place:
        """What all layers of a pass share; it opens the state's window."""
        batch, num_tokens = token_ids_BT.shape
        if state is not None:
            assert positions_BT is None, "with a state, positions follow from its lengths"
            return Place(cache=state.open(num_tokens, keep))
        documents = None
        if positions_BT is None:
            positions_BT = torch.arange(num_tokens, device=token_ids_BT.device).expand(batch, -1)
        else:
            documents = Documents(document_ids(positions_BT), most_documents)
        return Place(rotary_table(positions_BT, self.config.rotary_dim, self.config.rope_theta), documents)
