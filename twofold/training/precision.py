"""What networks compute in. In a training that goes for products and activations; weights and optimizer stay wide."""

from typing import Literal

import torch

Precision = Literal["float32", "bfloat16"]


def dtype_of(precision: Precision) -> torch.dtype:
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """For the networks of one step; a loss sums in float32, so it stays outside. Never around a whole training: the
    casts of weights that it keeps would be those of the first step."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
