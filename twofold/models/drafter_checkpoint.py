"""DFlash drafter folders: config.json and model.safetensors, dense or packed; names without prefix.

Two formats are read: z-lab's `DFlashDraftModel`, which is also what is written, and that of speculators.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import check_tensors
from twofold.models.drafter import Drafter, DrafterConfig
from twofold.models.folder import WEIGHTS, read_json, read_tensors
from twofold.models.packed import PACKED_PARTS, install_packed, quantization_config, stored_as
from twofold.models.speculators import BORROWED, from_speculators, is_speculators
from twofold.ops.kernels import Kernels


def packable_groups(config: DrafterConfig) -> list[list[str]]:
    """Names of the layers that are quantized, in the order in which they compute; a group has one input.

    They are `fc`, and attention and MLP of every layer.
    """
    attention, mlp = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    groups = [["fc"]]
    for i in range(config.num_layers):
        groups += [[f"layers.{i}.self_attn.{name}" for name in attention], [f"layers.{i}.self_attn.o_proj"]]
        groups += [[f"layers.{i}.mlp.{name}" for name in mlp], [f"layers.{i}.mlp.down_proj"]]
    return groups


def load_drafter(folder: Path, dtype: torch.dtype = torch.float32, kernels: Kernels | None = None) -> Drafter:
    """The drafter in `folder`, of either format; ValueError as for `load_target`.

    The embedding and head that a speculators folder holds are left out: see `check_fits`.
    """
    hf = read_json(folder / "config.json")
    try:
        if speculators := is_speculators(hf):
            hf = from_speculators(hf)
        config = DrafterConfig.from_hf(hf)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    quantization = hf.get("quantization_config")
    tensors = read_tensors(folder)
    if speculators:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in BORROWED}
    with torch.device("meta"):
        drafter = Drafter(config, kernels)
    install_packed(drafter, tensors, quantization, folder)
    check_tensors(drafter.state_dict(), tensors, folder)
    stored = {name: stored_as(name, tensor, dtype) for name, tensor in tensors.items()}
    drafter.load_state_dict(stored, assign=True)
    return drafter


def check_fits(folder: Path, target: CausalLM) -> None:
    """ValueError, naming what differs, unless the drafter in `folder` is one of `target`.

    Its sizes must be the target's, its taps layers of it, and an embedding or head that it brings along the target's
    own, since the target's are used.
    """
    hf = read_json(folder / "config.json")
    config = DrafterConfig.from_hf(from_speculators(hf) if is_speculators(hf) else hf)
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, target.config.hidden_size),
        ("vocab_size", config.vocab_size, target.config.vocab_size),
        ("num_target_layers", config.num_target_layers or target.config.num_layers, target.config.num_layers),
    ):
        if ours != theirs:
            raise ValueError(f"{folder}: its {name} is {ours}, the target's {theirs}; use a drafter of this target")
    if max(config.target_layer_ids) >= target.config.num_layers:
        raise ValueError(f"{folder}: it taps layer {max(config.target_layer_ids)} of {target.config.num_layers}")
    if not is_speculators(hf):
        return
    tensors = read_tensors(folder)
    for name, module in zip(BORROWED, (target.embed_tokens, target.lm_head), strict=True):
        weight = getattr(module, "weight", None)
        if name not in tensors or weight is None:
            continue
        if not torch.equal(tensors[name].to(torch.bfloat16), weight.detach().cpu().to(torch.bfloat16)):
            raise ValueError(f"{folder}: its {name} is not the target's; a drafter with its own is not supported")


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """Writes `drafter`, dense weights in bfloat16; ValueError as for `save_target`."""
    hf = drafter.config.to_hf()
    if (quantization := quantization_config(drafter)) is not None:
        hf["quantization_config"] = quantization
    tensors = {
        name: (tensor if name.endswith(PACKED_PARTS) else tensor.to(torch.bfloat16)).cpu().contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
