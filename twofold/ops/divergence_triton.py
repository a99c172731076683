"""Divergences of logits and their gradients in one visit: what `training.divergence`, whose equations these are,
takes many passes over.

One program has a row: a pass for the normalizers, one for d and, but for cross entropy and forward KL whose gradient
needs no sum over the vocabulary, one more for the gradient. A row's numbers are mostly still in the cache then. Logits
are read as they are, in half precision too, and the gradient takes the place of the student's; sums are in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_FORWARD = tl.constexpr(0)
_REVERSE = tl.constexpr(1)
_JENSEN = tl.constexpr(2)
_VARIATION = tl.constexpr(3)
_KINDS = {"forward_kl": 0, "reverse_kl": 1, "jensen_shannon": 2, "total_variation": 3}


@triton.jit
def _row(ptr, v, vocabulary, other):
    return tl.load(ptr + v, mask=v < vocabulary, other=other).to(tl.float32)


@triton.jit
def _norm(ptr, vocabulary, BLOCK: tl.constexpr):
    """logsumexp of a row"""
    top, total = float("-inf"), 0.0
    for start in range(0, vocabulary, BLOCK):
        x = _row(ptr, start + tl.arange(0, BLOCK), vocabulary, float("-inf"))
        new = tl.maximum(top, tl.max(x))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new))
        top = new
    return top + tl.log(total)


@triton.jit
def _pull(log_q, log_p, KIND: tl.constexpr):
    difference = log_q - log_p
    if KIND == _VARIATION:
        return tl.where(difference > 0, 0.5, tl.where(difference < 0, -0.5, difference))  # 0 and NaN as they are
    if KIND == _REVERSE:
        return difference
    # log(q / m) / 2 = (log 2 + log sigmoid(difference)) / 2
    softplus = tl.maximum(-difference, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(difference)))
    return 0.5 * (0.6931471805599453 - softplus)


@triton.jit
def _divergence_kernel(z_ptr, t_ptr, value_ptr, norm_ptr, vocabulary, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * vocabulary
    t_ptr += row * vocabulary
    z_norm, t_norm = _norm(z_ptr, vocabulary, BLOCK), _norm(t_ptr, vocabulary, BLOCK)
    tl.store(norm_ptr + row, z_norm)
    total, center = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        v = start + tl.arange(0, BLOCK)
        log_q, log_p = _row(z_ptr, v, vocabulary, 0.0) - z_norm, _row(t_ptr, v, vocabulary, 0.0) - t_norm
        q, p = tl.exp(log_q), tl.exp(log_p)
        if KIND == _FORWARD:
            part = p * (log_p - log_q)
            tl.store(z_ptr + v, (q - p).to(z_ptr.dtype.element_ty), mask=v < vocabulary)
        else:
            pull = _pull(log_q, log_p, KIND)
            center += tl.where(v < vocabulary, q * pull, 0.0)
            part = q * pull
            if KIND == _JENSEN:
                part += p * _pull(log_p, log_q, KIND)
            elif KIND == _VARIATION:
                part -= p * pull
        total += tl.where(v < vocabulary, part, 0.0)
    tl.store(value_ptr + row, tl.sum(total))
    if KIND != _FORWARD:
        middle = tl.sum(center)
        for start in range(0, vocabulary, BLOCK):
            v = start + tl.arange(0, BLOCK)
            log_q, log_p = _row(z_ptr, v, vocabulary, 0.0) - z_norm, _row(t_ptr, v, vocabulary, 0.0) - t_norm
            slope = tl.exp(log_q) * (_pull(log_q, log_p, KIND) - middle)
            tl.store(z_ptr + v, slope.to(z_ptr.dtype.element_ty), mask=v < vocabulary)


@triton.jit
def _cross_entropy_kernel(z_ptr, label_ptr, value_ptr, norm_ptr, vocabulary, SLOPE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * vocabulary
    label = tl.load(label_ptr + row)
    norm = _norm(z_ptr, vocabulary, BLOCK)
    tl.store(norm_ptr + row, norm)
    tl.store(value_ptr + row, norm - tl.load(z_ptr + label).to(tl.float32))
    if SLOPE:
        tl.debug_barrier()  # the label's logit is read before it is overwritten
        for start in range(0, vocabulary, BLOCK):
            v = start + tl.arange(0, BLOCK)
            slope = tl.exp(_row(z_ptr, v, vocabulary, 0.0) - norm) - tl.where(v == label, 1.0, 0.0)
            tl.store(z_ptr + v, slope.to(z_ptr.dtype.element_ty), mask=v < vocabulary)


def divergence_(kind: str, z_MV: Tensor, t_MV: Tensor) -> tuple[Tensor, Tensor]:
    """d(softmax(t), softmax(z)) [M] and logsumexp(z) [M] in float32; z becomes dd/dz. Rows must be contiguous."""
    assert z_MV.shape == t_MV.shape
    assert z_MV.is_contiguous()
    assert t_MV.is_contiguous()
    value_M, norm_M = torch.empty(2, len(z_MV), dtype=torch.float32, device=z_MV.device)
    _divergence_kernel[(len(z_MV),)](z_MV, t_MV, value_M, norm_M, z_MV.shape[1], _KINDS[kind], _BLOCK, num_warps=8)
    return value_M, norm_M


def cross_entropy_(z_MV: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
    """-log softmax(z)[label] [M] and logsumexp(z) [M] in float32; z becomes the gradient. Rows must be contiguous."""
    return _cross_entropy(z_MV, labels_M, slope=True)


def cross_entropy(z_MV: Tensor, labels_M: Tensor) -> Tensor:
    """-log softmax(z)[label] [M] in float32. Rows must be contiguous."""
    return _cross_entropy(z_MV, labels_M, slope=False)[0]


def _cross_entropy(z_MV: Tensor, labels_M: Tensor, slope: bool) -> tuple[Tensor, Tensor]:
    assert z_MV.is_contiguous()
    value_M, norm_M = torch.empty(2, len(z_MV), dtype=torch.float32, device=z_MV.device)
    _cross_entropy_kernel[(len(z_MV),)](z_MV, labels_M, value_M, norm_M, z_MV.shape[1], slope, _BLOCK, num_warps=8)
    return value_M, norm_M
