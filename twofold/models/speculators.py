"""The config.json of a DFlash drafter in the speculators format, to and from `DrafterConfig`.

It counts layers from 1, so that id i + 1 is the output of layer i; keeps what a decoder needs apart, in
`transformer_layer_config`; and its weights hold the target's embedding and head beside the drafter's own.
"""

from collections.abc import Mapping
from typing import Any

from twofold.models.drafter_config import DrafterConfig

BORROWED = ("embed_tokens.weight", "lm_head.weight")


def is_speculators(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config or "speculators_config" in config


def to_speculators(config: DrafterConfig, verifier: str, architecture: str) -> dict[str, Any]:
    """`verifier` is the path of the target as a reader of the folder should write it, `architecture` its class."""
    layer = config.to_hf()
    for outer in ("architectures", "block_size", "dflash_config", "dtype"):
        del layer[outer]
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "draft_vocab_size": config.vocab_size,
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": [architecture]},
        },
        "dtype": "bfloat16",
    }


def from_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same drafter as a `DFlashDraftModel` config, for `DrafterConfig.from_hf`; or ValueError."""
    kind = config.get("speculators_model_type")
    if kind != "dflash":
        raise ValueError(f"speculators_model_type is {kind!r}; only 'dflash' is supported")
    for key in ("transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id", "block_size"):
        if config.get(key) is None:
            raise ValueError(f"the speculator's config.json has no {key!r}")
    if config.get("sample_from_anchor"):
        raise ValueError("sample_from_anchor is true; only drafters whose anchor is a known token are supported")
    layer = config["transformer_layer_config"]
    sizes = config.get("draft_vocab_size"), layer.get("vocab_size")
    if sizes[0] is not None and sizes[0] != sizes[1]:
        raise ValueError(
            f"draft_vocab_size is {sizes[0]}, vocab_size {sizes[1]}; a reduced vocabulary is not supported"
        )
    quantization = config.get("quantization_config") or layer.get("quantization_config")
    return {
        "num_target_layers": None,  # the format does not say; what we write does
        **layer,
        "architectures": ["DFlashDraftModel"],
        "block_size": config["block_size"],
        "dflash_config": {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": [i - 1 for i in config["aux_hidden_state_layer_ids"]],
            "causal": not config.get("sliding_window_non_causal", True),
        },
        **({"quantization_config": quantization} if quantization else {}),
    }
