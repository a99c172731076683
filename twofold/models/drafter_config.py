"""The shape of a DFlash drafter, and its place in a checkpoint's config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twofold.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """What is free to choose in a drafter; the rest follows from the target. A `sliding_window` here is trained in; a
    `markov_rank` above 0 adds a `MarkovHead`."""

    num_layers: int = 5
    intermediate_size: int = 9728
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    sliding_window: int | None = None
    markov_rank: int = 0


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """`sliding_window` W: a block token at position p sees context positions > p - W; None is all of them.

    `num_target_layers` is None where the folder that it was read from does not say.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    max_position_embeddings: int
    sliding_window: int | None = None
    markov_rank: int = 0

    def __post_init__(self) -> None:
        layers = self.num_target_layers
        if bad := [i for i in self.target_layer_ids if i < 0 or (layers is not None and i >= layers)]:
            of = "any target" if layers is None else f"a target with {layers}"
            raise ValueError(f"target_layer_ids {bad} are not layers of {of}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is no row of an embedding of {self.vocab_size}")
        if self.block_size < 2:
            raise ValueError(f"block_size {self.block_size} drafts nothing; use 2 or more")
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(f"sliding_window {self.sliding_window} is smaller than a block of {self.block_size}")
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank {self.markov_rank} is negative; 0 is no Markov head")

    @staticmethod
    def for_target(target: ModelConfig, shape: DraftShape) -> "DrafterConfig":
        return DrafterConfig(
            hidden_size=target.hidden_size,
            rope_theta=target.rope_theta,
            rms_norm_eps=target.rms_norm_eps,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
            max_position_embeddings=target.max_position_embeddings,
            **vars(shape),
        )

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "DrafterConfig":
        """From a `DFlashDraftModel` config.json; ValueError that names a missing or unsupported key."""
        try:
            dflash = config["dflash_config"]
            _refuse_unknown(config, dflash)
            rope = config.get("rope_parameters") or {}
            sliding = "sliding_attention" in (config.get("layer_types") or ())
            return DrafterConfig(
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=config["num_attention_heads"],
                num_kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                rope_theta=float(rope.get("rope_theta") or config["rope_theta"]),
                rms_norm_eps=config["rms_norm_eps"],
                vocab_size=config["vocab_size"],
                block_size=config["block_size"],
                mask_token_id=dflash["mask_token_id"],
                target_layer_ids=tuple(dflash["target_layer_ids"]),
                num_target_layers=config["num_target_layers"],
                max_position_embeddings=config["max_position_embeddings"],
                sliding_window=config.get("sliding_window") if sliding else None,
                markov_rank=dflash.get("markov_rank", 0),
            )
        except KeyError as error:
            raise ValueError(f"the drafter's config.json has no {error}; it is not a DFlash drafter") from None

    def to_hf(self) -> dict[str, Any]:
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": True,
            "max_position_embeddings": self.max_position_embeddings,
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "causal": False,
                **({"markov_rank": self.markov_rank} if self.markov_rank else {}),
            },
            "num_target_layers": self.num_target_layers,
            "layer_types": [kind] * self.num_layers,
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            "dtype": "bfloat16",
        }


def _refuse_unknown(config: Mapping[str, Any], dflash: Mapping[str, Any]) -> None:
    """ValueError that names what the config asks for and `Drafter` is not."""
    layer_types = config.get("layer_types") or ["full_attention"]
    sliding = "sliding_attention" in layer_types
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for key, value, supported in (
        ("architectures", config.get("architectures") or ["DFlashDraftModel"], ["DFlashDraftModel"]),
        ("layer_types", sorted(set(layer_types)), layer_types[:1]),  # all of one kind
        # Without it, engines take a sliding window for causal.
        ("dflash_config.causal", dflash.get("causal", sliding), False),
        ("dflash_config.use_swa", dflash.get("use_swa", False), False),
        ("dflash_config.attention_sink_bias", dflash.get("attention_sink_bias", False), False),
        ("attention_bias", config.get("attention_bias", False), False),
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
        ("is_neox_style", config.get("is_neox_style", True), True),
        ("draft_vocab_size", config.get("draft_vocab_size") or config["vocab_size"], config["vocab_size"]),
    ):
        if value != supported:
            raise ValueError(f"the drafter's config.json: {key} is {value!r}; only {supported!r} is supported")
