"""Normalizations and the rotary embedding. D is the normalized width, R <= D the rotated part of a head."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (offset + w) over the last dimension, computed in float32 at least.

    Qwen3.5 stores w around 0 and uses offset 1; Llama and Qwen3 store w around 1 and use offset 0.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = weight_D.to(wide)
    return F.rms_norm(x.to(wide), (x.shape[-1],), scale + offset if offset else scale, eps).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """y = rms_norm(x) * w * silu(gate): the output norm of Gated DeltaNet (w is a plain multiplier)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.rms_norm(x.to(wide), (x.shape[-1],), weight_D.to(wide), eps)
    return (y * F.silu(gate.to(wide))).to(x.dtype)


def rotary_table(positions: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of p * theta^(-2i/R), each [..., R], halves repeated (the "rotate half" convention)."""
    exponent = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32) / rotary_dim
    angle = positions[..., None].float() * (1.0 / theta**exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x_BTHD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Rotary embedding of the first R dimensions of every head; the rest passes unchanged."""
    cos, sin = cos_BTR.unsqueeze(-2).to(x_BTHD.dtype), sin_BTR.unsqueeze(-2).to(x_BTHD.dtype)
    rotary_dim = cos.shape[-1]
    turned, rest = x_BTHD[..., :rotary_dim], x_BTHD[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """y = silu(gate) * up."""
    return F.silu(gate) * up
