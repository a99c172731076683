"""Products of 8-bit floats, a scale for each row of x and of the weight; the reference of the GPU's (fp8_triton.py).

    q[m, k] = e4m3(x[m, k] / s[m]),  s[m] = max_k |x[m, k]| / 448        rows of zeros: s = 1
    y[m, n] = s[m] t[n] sum_k q[m, k] r[n, k],  r and t those of the weight

e4m3 has 3 bits behind the point: a number is off by up to 1/16 of it, by 2.5 % in the mean square, on both sides of the
product. M rows, N outputs, K inputs.
"""

import torch
from torch import Tensor

from twofold.ops.linear import Linear, around

LARGEST = 448.0  # of e4m3


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(q [M, K] in float8_e4m3fn, s [M, 1] in float32)."""
    wide = x_MK.float()
    scale_M1 = wide.abs().amax(dim=1, keepdim=True) / LARGEST
    scale_M1 = torch.where(scale_M1 > 0, scale_M1, 1.0)
    return (wide / scale_M1).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale_M1


def scaled_product(q_MK: Tensor, scale_M1: Tensor, q_NK: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    """y [M, N]"""
    return (q_MK.float() @ q_NK.float().T * scale_M1 * scale_N1.T).to(dtype)


def fp8_linear(weight_NK: Tensor, gated: bool = False) -> Linear:
    """The product that a prefill makes of it with 8-bit floats, whatever the number of rows."""
    q_NK, scale_N1 = quantize_rows(weight_NK)

    def product(x: Tensor) -> Tensor:
        q_MK, scale_M1 = quantize_rows(x.flatten(0, -2) if x.dim() > 1 else x[None])
        return scaled_product(q_MK, scale_M1, q_NK, scale_N1, x.dtype).view(*x.shape[:-1], -1)

    return around(product, gated)
