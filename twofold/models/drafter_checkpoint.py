"""DFlash drafter folders: config.json and model.safetensors, dense or packed; names without prefix.

Two formats are read: z-lab's `DFlashDraftModel`, which is also what is written, and that of speculators.
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
from safetensors.torch import load_file
from torch import Tensor

from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import check_tensors
from twofold.models.config import ModelConfig
from twofold.models.draft_head import DraftHead, DraftHeadConfig
from twofold.models.drafter import Drafter
from twofold.models.drafter_config import DrafterConfig
from twofold.models.folder import WEIGHTS, read_json, read_tensors, save_weights
from twofold.models.packed import PACKED_PARTS, install_packed, quantization_config, stored_as
from twofold.models.speculators import BORROWED, from_speculators, is_speculators
from twofold.ops.kernels import Kernels

HEAD, _HEAD_WEIGHTS = "draft_head", "draft_head.safetensors"


def load_drafter(folder: Path, dtype: torch.dtype = torch.float32, kernels: Kernels | None = None) -> Drafter:
    """The drafter in `folder`, of either format; ValueError as for `load_target`.

    The embedding and head that a speculators folder holds are left out: see `check_fits`.
    """
    config, hf = _read_config(folder)
    quantization = hf.get("quantization_config")
    tensors = read_tensors(folder)
    if is_speculators(read_json(folder / "config.json")):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in BORROWED}
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


def check_fits(folder: Path, target: CausalLM) -> None:
    """ValueError, naming what differs, unless the drafter in `folder` is one of `target`.

    Its sizes must be the target's, its taps layers of it, and an embedding or head that it brings along the target's
    own, since the target's are used.
    """
    check_sizes(folder, target.config)
    if not is_speculators(read_json(folder / "config.json")):
        return
    tensors = read_tensors(folder)
    for name, module in zip(BORROWED, (target.embed_tokens, target.lm_head), strict=True):
        weight = getattr(module, "weight", None)
        if name not in tensors or weight is None:
            continue
        if not torch.equal(tensors[name].to(torch.bfloat16), weight.detach().cpu().to(torch.bfloat16)):
            raise ValueError(f"{folder}: its {name} is not the target's; a drafter with its own is not supported")


def check_sizes(folder: Path, target: ModelConfig) -> None:
    """The part of `check_fits` that configs tell."""
    config, _ = _read_config(folder)
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers or target.num_layers, target.num_layers),
    ):
        if ours != theirs:
            raise ValueError(f"{folder}: its {name} is {ours}, the target's {theirs}; use a drafter of this target")
    if max(config.target_layer_ids) >= target.num_layers:
        raise ValueError(f"{folder}: it taps layer {max(config.target_layer_ids)} of {target.num_layers}")


def _read_config(folder: Path) -> tuple[DrafterConfig, Mapping[str, Any]]:
    """And the folder's config.json, as of a folder of our own format."""
    hf = read_json(folder / "config.json")
    try:
        hf = from_speculators(hf) if is_speculators(hf) else hf
        return DrafterConfig.from_hf(hf), hf
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """Writes `drafter`, dense weights in bfloat16; ValueError as for `save_target`."""
    hf, head = drafter.config.to_hf(), drafter.draft_head
    if (quantization := quantization_config(drafter, beside=f"{HEAD}.")) is not None:
        hf["quantization_config"] = quantization
    tensors = {name: t for name, t in drafter.state_dict().items() if not name.startswith(f"{HEAD}.")}
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(_written(tensors), folder / WEIGHTS)
    if head is not None:
        hf[HEAD] = asdict(head.config)
        save_weights(_written(head.state_dict()), folder / _HEAD_WEIGHTS)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")


def _written(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Dense weights in bfloat16, integers as they are."""
    return {
        name: (t.to(torch.bfloat16) if t.is_floating_point() and not name.endswith(PACKED_PARTS) else t)
        .cpu()
        .contiguous()
        for name, t in tensors.items()
    }
