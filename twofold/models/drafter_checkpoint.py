"""DFlash drafter folders: config.json and model.safetensors, dense or packed; names without prefix."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from twofold.models.checkpoint import check_tensors
from twofold.models.drafter import Drafter, DrafterConfig
from twofold.models.folder import WEIGHTS, read_json, read_tensors
from twofold.models.packed import PACKED_PARTS, install_packed, quantization_config, stored_as
from twofold.ops.kernels import Kernels


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
    return drafter


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
