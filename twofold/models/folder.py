"""The files of a Hugging Face model folder, with errors that name the file at fault."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)

# `model.language_model.` where Qwen3.5 has its vision tower beside it.
PREFIXES = ("model.language_model.", "model.")

# Parts of a checkpoint that decoding text does not use.
_UNUSED = re.compile(r"mtp\.|(model\.)?visual\.|.*\.rotary_emb\.inv_freq$")


def save_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file that may be read by whom the umask allows; the library makes them its owner's alone."""
    save_file(tensors, path, metadata={"format": "pt"})
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's folder; ValueError when folder, file or object are not there."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no model folder {path.parent}")
    if not path.is_file():
        raise ValueError(f"there is no {path.name} in {path.parent}; give the folder of a Hugging Face model")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards of its index; ValueError names a missing or damaged file."""
    if (folder / WEIGHTS).is_file():
        files = [WEIGHTS]
    elif (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{folder / INDEX} has no weight_map")
        files = sorted(set(weight_map.values()))
    else:
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}; only safetensors weights are read")
    for name in files:
        if not (folder / name).is_file():
            raise ValueError(f"the shard {name}, named in {INDEX}, is missing from {folder}; fetch it again")
    tensors: dict[str, Tensor] = {}
    for name in files:
        try:
            tensors |= load_file(folder / name)
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{folder / name} is damaged ({error}); fetch or write it again") from None
    return tensors


def own_names(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """By our names, without what decoding text does not use; ValueError for a name that is there twice."""
    own: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if _UNUSED.match(key):
            continue
        prefix = next((prefix for prefix in PREFIXES if key.startswith(prefix)), "")
        name = key.removeprefix(prefix)
        if name in own:
            raise ValueError(f"{folder} holds {name} twice, under two prefixes")
        own[name] = tensor
    return own


def file_name(name: str) -> str:
    """The name of our tensor in a file."""
    return name if name.split(".")[0] == "lm_head" else f"model.{name}"
