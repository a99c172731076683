"""Forward KL of logits and its gradient in one visit: what `training.divergence` takes several passes over.

    L = sum_v p_v (log p_v - log q_v),  dL/dz_v = q_v - p_v,   p = softmax(t), q = softmax(z), in float32

One program has a row: a pass for both normalizers, and one for L and the gradient, whose numbers are mostly still in
the cache. Logits are read as they are, in half precision too, and the gradient takes their place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _kl_kernel(z_ptr, t_ptr, kl_ptr, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * vocabulary
    t_ptr += row * vocabulary
    z_top, z_sum, t_top, t_sum = float("-inf"), 0.0, float("-inf"), 0.0
    for start in range(0, vocabulary, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
        t = tl.load(t_ptr + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
        z_new, t_new = tl.maximum(z_top, tl.max(z)), tl.maximum(t_top, tl.max(t))
        z_sum = z_sum * tl.exp(z_top - z_new) + tl.sum(tl.exp(z - z_new))
        t_sum = t_sum * tl.exp(t_top - t_new) + tl.sum(tl.exp(t - t_new))
        z_top, t_top = z_new, t_new
    z_norm, t_norm = z_top + tl.log(z_sum), t_top + tl.log(t_sum)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        v = start + tl.arange(0, BLOCK)
        log_q = tl.load(z_ptr + v, mask=v < vocabulary, other=0.0).to(tl.float32) - z_norm
        log_p = tl.load(t_ptr + v, mask=v < vocabulary, other=0.0).to(tl.float32) - t_norm
        p = tl.exp(log_p)
        total += tl.where(v < vocabulary, p * (log_p - log_q), 0.0)
        tl.store(z_ptr + v, (tl.exp(log_q) - p).to(z_ptr.dtype.element_ty), mask=v < vocabulary)
    tl.store(kl_ptr + row, tl.sum(total))


def forward_kl_(z_MV: Tensor, t_MV: Tensor) -> Tensor:
    """KL(softmax(t) || softmax(z)) [M] in float32; z becomes the gradient q - p. Rows must be contiguous."""
    assert z_MV.shape == t_MV.shape
    assert z_MV.is_contiguous()
    assert t_MV.is_contiguous()
    kl_M = torch.empty(len(z_MV), dtype=torch.float32, device=z_MV.device)
    _kl_kernel[(len(z_MV),)](z_MV, t_MV, kl_M, z_MV.shape[1], _BLOCK, num_warps=8)
    return kl_M
