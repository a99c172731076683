"""DFlash drafter folders: config.json and model.safetensors, dense or packed; names without prefix.

A draft head is our own: it lies beside them, in draft_head.safetensors, described under "draft_head" in config.json.
Other engines, which know neither, draft with the target's.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from twofold.models.checkpoint import check_tensors
from twofold.models.draft_head import DraftHead, DraftHeadConfig
from twofold.models.drafter import Drafter, DrafterConfig
from twofold.models.folder import WEIGHTS, read_json, read_tensors
from twofold.models.packed import PACKED_PARTS, install_packed, quantization_config, stored_as
from twofold.ops.kernels import Kernels

HEAD, _HEAD_WEIGHTS = "draft_head", "draft_head.safetensors"


def load_drafter(folder: Path, dtype: torch.dtype = torch.float32, kernels: Kernels | None = None) -> Drafter:
    """The drafter in `folder`; ValueError as for `load_target`."""
    hf = read_json(folder / "config.json")
    config = DrafterConfig.from_hf(hf)
    quantization = hf.get("quantization_config")
    tensors = read_tensors(folder)
    with torch.device("meta"):
        drafter = Drafter(config, kernels)
    install_packed(drafter, tensors, quantization, folder)
    check_tensors(drafter.state_dict(), tensors, folder)
    stored = {name: stored_as(name, tensor, dtype) for name, tensor in tensors.items()}
    drafter.load_state_dict(stored, assign=True)
    if HEAD in hf:
        drafter.draft_head = _load_head(hf[HEAD], config, folder, dtype)
    return drafter


def _load_head(said: Mapping[str, Any], config: DrafterConfig, folder: Path, dtype: torch.dtype) -> DraftHead:
    path = folder / _HEAD_WEIGHTS
    if not path.is_file():
        raise ValueError(f"config.json describes a {HEAD}, but {path} is missing; fetch or write the folder again")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); fetch or write it again") from None
    try:
        with torch.device("meta"):
            head = DraftHead(DraftHeadConfig(**said), config.hidden_size, config.vocab_size)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'}: {HEAD}: {error}") from None
    check_tensors(head.state_dict(), tensors, folder)
    rows = tensors.get("row_ids")
    if rows is not None and not bool(((rows >= 0) & (rows < config.vocab_size)).all()):
        raise ValueError(f"{path}: row_ids are no tokens of a vocabulary of {config.vocab_size}; write it again")
    stored = {name: t if name == "row_ids" else stored_as(name, t, dtype) for name, t in tensors.items()}
    head.load_state_dict(stored, assign=True)
    return head.requires_grad_(False)


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """Writes `drafter`, dense weights in bfloat16; ValueError as for `save_target`."""
    hf, head = drafter.config.to_hf(), drafter.draft_head
    if (quantization := quantization_config(drafter, beside=f"{HEAD}.")) is not None:
        hf["quantization_config"] = quantization
    tensors = {name: t for name, t in drafter.state_dict().items() if not name.startswith(f"{HEAD}.")}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_written(tensors), folder / WEIGHTS, metadata={"format": "pt"})
    if head is not None:
        hf[HEAD] = asdict(head.config)
        save_file(_written(head.state_dict()), folder / _HEAD_WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")


def _written(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Dense weights in bfloat16, integers as they are."""
    return {
        name: (t.to(torch.bfloat16) if t.is_floating_point() and not name.endswith(PACKED_PARTS) else t)
        .cpu()
        .contiguous()
        for name, t in tensors.items()
    }
