"""What a model is made of, read from a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only language model: the Qwen3.5 hybrid, or plain attention (Llama, Qwen3).

    `norm_offset` is 1 where RMSNorm multiplies by (1 + w). `linear_*` describe Gated DeltaNet and are 0 without it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rotary_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_embeddings: bool
    attention_bias: bool = False
    norm_offset: float = 0.0
    qk_norm: bool = False
    output_gate: bool = False
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_width: int = 0
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def linear_key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @staticmethod
    def from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "ModelConfig":
        """From the dictionaries of `config.json` and `generation_config.json`.

        EOS ids are the union of both files, since either may lack one (Qwen3.5's differ). ValueError for a model
        that is not supported, naming what is not.
        """
        text = config.get("text_config", config)
        model_type = text.get("model_type")
        if model_type not in ("qwen3_5_text", "llama", "qwen3"):
            raise ValueError(
                f"model_type {model_type!r} is not supported; Twofold reads qwen3_5, qwen3 and llama models"
            )
        hybrid = model_type == "qwen3_5_text"
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ValueError(f"rope_type {rope_type!r} is not supported; only 'default' is")
        if text.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {text['hidden_act']!r} is not supported; only 'silu' is")
        if text.get("mlp_bias"):
            raise ValueError("mlp_bias is not supported")
        num_layers = text["num_hidden_layers"]
        if hybrid:
            interval = text.get("full_attention_interval", 4)
            default_types = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
        else:
            default_types = [FULL] * num_layers
        layer_types = tuple(text.get("layer_types") or default_types)
        if unknown := set(layer_types) - ({FULL, LINEAR} if hybrid else {FULL}):
            raise ValueError(f"layer_types {sorted(unknown)} are not supported for {model_type}")
        if len(layer_types) != num_layers:
            raise ValueError(f"layer_types lists {len(layer_types)} layers, num_hidden_layers says {num_layers}")
        head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        partial = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25 if hybrid else 1.0))
        linear = hybrid and LINEAR in layer_types
        return ModelConfig(
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
            intermediate_size=text["intermediate_size"],
            layer_types=layer_types,
            num_heads=text["num_attention_heads"],
            num_kv_heads=text.get("num_key_value_heads") or text["num_attention_heads"],
            head_dim=head_dim,
            rope_theta=float(rope.get("rope_theta") or text.get("rope_theta", 10_000.0)),
            rotary_dim=int(head_dim * partial),
            rms_norm_eps=text["rms_norm_eps"],
            max_position_embeddings=text["max_position_embeddings"],
            tie_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            attention_bias=bool(text.get("attention_bias", False)),
            norm_offset=1.0 if hybrid else 0.0,
            qk_norm=model_type != "llama",
            output_gate=hybrid,
            linear_num_key_heads=text["linear_num_key_heads"] if linear else 0,
            linear_num_value_heads=text["linear_num_value_heads"] if linear else 0,
            linear_key_head_dim=text["linear_key_head_dim"] if linear else 0,
            linear_value_head_dim=text["linear_value_head_dim"] if linear else 0,
            linear_conv_width=text["linear_conv_kernel_dim"] if linear else 0,
            eos_token_ids=_eos_union(config, text, generation or {}),
        )


def _eos_union(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in sources:
        eos = source.get("eos_token_id")
        ids.update([eos] if isinstance(eos, int) else eos or [])
    return tuple(sorted(ids))
