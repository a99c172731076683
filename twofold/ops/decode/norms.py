"""Norms and gating between the products of a decode pass; the references of norms_triton.py. M rows, D width."""

import torch
from torch import Tensor

from twofold.ops import norms


def add_rms_norm(x_MD: Tensor, residual_MD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(h, y): h = x + residual, y = h / rms(h) * weight (offset included); h is rounded once and y is of that h."""
    h = x_MD + residual_MD
    return h, norms.rms_norm(h, weight_D, eps)


def silu_mul(gate_up_MD: Tensor) -> Tensor:
    """silu(gate) * up [M, D / 2] of rows [gate, up], computed in float32 at least."""
    gate, up = gate_up_MD.to(torch.promote_types(gate_up_MD.dtype, torch.float32)).chunk(2, dim=-1)
    return norms.silu_mul(gate, up).to(gate_up_MD.dtype)
