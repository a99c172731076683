"""Hugging Face folders to and from `CausalLM`, dense or packed (compressed-tensors `pack-quantized`).

The names in a file are ours behind a prefix, see `folder`.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twofold.models.causal_lm import CausalLM
from twofold.models.config import FULL, LINEAR, ModelConfig
from twofold.models.folder import TOKENIZER_FILES, WEIGHTS, file_name, own_names, read_json, read_tensors, save_weights
from twofold.models.packed import PACKED_PARTS, install_packed, quantization_config, stored_as
from twofold.ops.kernels import Kernels
from twofold.quant.linear import FakeQuantLinear, PackedLinear


def packable_linears(config: ModelConfig) -> list[str]:
    """Names of the layers that Twofold quantizes: MLPs, attention, the wide projections of Gated DeltaNet.

    Not embedding, head, convolution and norms, nor `in_proj_a` and `in_proj_b`, which steer the state.
    """
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    full = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    delta = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj")
    return [
        f"layers.{i}.{part}"
        for i, kind in enumerate(config.layer_types)
        for part in (full if kind == FULL else delta) + mlp
    ]


def load_target(folder: Path, dtype: torch.dtype = torch.float32, kernels: Kernels | None = None) -> CausalLM:
    """The model in `folder`, its dense weights in `dtype`, its packed ones as `PackedLinear`.

    Reads config.json, generation_config.json if there, and model.safetensors or the shards of its index. The
    tensors must be those that the config says, with their shapes; ValueError names the one that is not.
    """
    config, hf = read_config(folder), read_json(folder / "config.json")
    quantization = hf.get("quantization_config") or hf.get("text_config", {}).get("quantization_config")
    tensors = own_names(read_tensors(folder), folder)
    with torch.device("meta"):
        model = CausalLM(config, kernels)
    install_packed(model, tensors, quantization, folder)
    expected = model.state_dict()
    if _is_tied(model):
        del expected["lm_head.weight"]
        _drop_tied_head(tensors, folder)
    check_tensors(expected, tensors, folder)
    stored = {name: stored_as(name, tensor, dtype) for name, tensor in tensors.items()}
    model.load_state_dict(stored, strict=False, assign=True)
    if _is_tied(model):
        model.lm_head.weight = model.embed_tokens.weight
    return model


def read_config(folder: Path) -> ModelConfig:
    """What config.json, and generation_config.json if there, say of the model in `folder`."""
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return _model_config(folder / "config.json", read_json(folder / "config.json"), generation)


def save_target(
    model: CausalLM, folder: Path, source: Path | None = None, extra_config: Mapping[str, Any] | None = None
) -> None:
    """Writes `model` as a folder that transformers and `load_target` read; dense weights in bfloat16.

    config.json and the tokenizer's files come from `source`; `extra_config` updates the former. Without a
    source the config is made from the model's. The head of tied embeddings is not written twice; a packed
    head is a matrix of its own, and the embedding stays dense beside it, no longer tied. ValueError when the config
    would not describe the model, or when the format cannot say how its layers are quantized.
    """
    tensors: dict[str, Tensor] = {}
    if fake := [name for name, layer in model.named_modules() if isinstance(layer, FakeQuantLinear)]:
        raise ValueError(f"{_some(fake)} is still in training; call pack_linears before saving")
    tied = _is_tied(model)
    assert not tied or model.lm_head.weight is model.embed_tokens.weight, "the tied head has come apart"
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stored = tensor if name.endswith(PACKED_PARTS) else tensor.to(torch.bfloat16)
        tensors[file_name(name)] = stored.detach().cpu().contiguous()
    hf = _written_config(model, source, extra_config or {})
    generation = {}
    if source is not None and (source / "generation_config.json").exists():
        generation = read_json(source / "generation_config.json")
    if model.config.eos_token_ids:
        generation["eos_token_id"] = hf["eos_token_id"]
    described = _model_config(folder / "config.json", hf, generation)
    config = replace(model.config, tie_embeddings=tied)
    if different := [key for key, value in vars(config).items() if getattr(described, key) != value]:
        raise ValueError(
            f"the config of {source} does not describe this model ({', '.join(different)} differ); "
            "give the folder that the model came from"
        )

    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{WEIGHTS}.writing"
    save_weights(tensors, temporary)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if source is not None and source.resolve() != folder.resolve():
        for name in TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, folder / name)
    os.replace(temporary, folder / WEIGHTS)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `ModelConfig.from_hf` reads as `config`."""
    hybrid = config.output_gate
    model_type = "qwen3_5_text" if hybrid else "qwen3" if config.qk_norm else "llama"
    architecture = {
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "llama": "LlamaForCausalLM",
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    hf: dict[str, Any] = {
        "architectures": [architecture[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "bfloat16",
    }
    if hybrid:
        rope["partial_rotary_factor"] = config.rotary_dim / config.head_dim
        hf |= {
            "layer_types": list(config.layer_types),
            "attn_output_gate": True,
            "linear_num_key_heads": config.linear_num_key_heads,
            "linear_num_value_heads": config.linear_num_value_heads,
            "linear_key_head_dim": config.linear_key_head_dim,
            "linear_value_head_dim": config.linear_value_head_dim,
            "linear_conv_kernel_dim": config.linear_conv_width,
        }
    return hf


def _model_config(path: Path, hf: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    try:
        return ModelConfig.from_hf(hf, generation)
    except KeyError as error:
        raise ValueError(f"{path} has no {error.args[0]!r}; is it the config.json of a language model?") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _written_config(model: CausalLM, source: Path | None, extra_config: Mapping[str, Any]) -> dict[str, Any]:
    if source is None:
        hf = hf_config(model.config)
    else:
        hf = read_json(source / "config.json")
        if "text_config" in hf:  # the vision tower is not kept, and so the text model stands alone
            tied = {"tie_word_embeddings": model.config.tie_embeddings}
            hf = {**hf["text_config"], **tied, "architectures": ["Qwen3_5ForCausalLM"]}
    for stale in ("quantization_config", "torch_dtype"):
        hf.pop(stale, None)
    hf["dtype"] = "bfloat16"
    if ids := model.config.eos_token_ids:
        hf["eos_token_id"] = ids[0] if len(ids) == 1 else list(ids)
    if isinstance(model.lm_head, PackedLinear):
        hf["tie_word_embeddings"] = False
    hf |= extra_config
    if (quantization := _quantization_config(model)) is not None:
        hf["quantization_config"] = quantization
    return hf


def _quantization_config(model: CausalLM) -> dict[str, Any] | None:
    ignore = ["lm_head"] if isinstance(model.lm_head, nn.Linear) else []
    if LINEAR in model.config.layer_types:
        ignore.append("re:.*in_proj_[ab]$")
    return quantization_config(model, ignore, file_name)


def _is_tied(model: CausalLM) -> bool:
    """Whether head and embedding are one matrix; a packed head stands for itself."""
    return model.config.tie_embeddings and isinstance(model.lm_head, nn.Linear)


def _drop_tied_head(tensors: dict[str, Tensor], folder: Path) -> None:
    head, embedding = tensors.pop("lm_head.weight", None), tensors.get("embed_tokens.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise ValueError(
            f"{folder}: lm_head.weight differs from the embedding although config.json ties them; "
            "set tie_word_embeddings to false"
        )


def check_tensors(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """ValueError, naming the tensor, unless `tensors` has the names and shapes of `expected`."""
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ValueError(f"{folder} has no tensor {_some(missing)}; a shard may be missing, or config.json wrong")
    if unexpected := sorted(tensors.keys() - expected.keys()):
        raise ValueError(f"{folder} has an unexpected tensor {_some(unexpected)}; config.json may be wrong")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{folder}: {name} has shape {list(tensor.shape)}, where config.json needs {list(expected[name].shape)}"
            )
        if tensor.is_floating_point() != expected[name].is_floating_point():
            raise ValueError(f"{folder}: {name} is {tensor.dtype}, which is no dtype of this format")


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
