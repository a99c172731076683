"""Losses. M positions, D hidden size, V vocabulary."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class LinearKL(torch.autograd.Function):
    """Forward KL from teacher to student logits, mean over positions, without the logits.

        L = 1/M sum_m sum_v p_mv (log p_mv - log q_mv),  p = softmax(t W_t^T),  q = softmax(s W_s^T)
        dL/ds_m = 1/M sum_v (q_mv - p_mv) W_s[v]

    The vocabulary goes by in chunks: one pass for both normalizers, one for loss and gradient, so that no more than
    [M, chunk] logits exist. Both heads are constants (they are not trained). Float32 inside.
    """

    @staticmethod
    def forward(
        ctx: Any, student_MD: Tensor, head_VD: Tensor, teacher_MD: Tensor, teacher_head_VD: Tensor, chunk: int
    ) -> Tensor:
        vocab, num = len(head_VD), len(student_MD)
        starts = range(0, vocab, chunk)

        def scores(start: int) -> tuple[Tensor, Tensor]:
            s = student_MD @ head_VD[start : start + chunk].T
            return s.float(), (teacher_MD @ teacher_head_VD[start : start + chunk].T).float()

        single = scores(0) if chunk >= vocab else None
        norm_s = torch.full((num,), -torch.inf, device=student_MD.device)
        norm_t = norm_s.clone()
        for start in starts:
            s, t = single or scores(start)
            norm_s = torch.logaddexp(norm_s, s.logsumexp(dim=-1))
            norm_t = torch.logaddexp(norm_t, t.logsumexp(dim=-1))
        loss = torch.zeros((), device=student_MD.device)
        grad = torch.zeros_like(student_MD)
        for start in starts:
            s, t = single or scores(start)
            log_q, log_p = s - norm_s[:, None], t - norm_t[:, None]
            p = log_p.exp()
            loss = loss + (p * (log_p - log_q)).sum()
            grad += (log_q.exp_() - p).to(grad.dtype) @ head_VD[start : start + chunk]
        ctx.save_for_backward(grad / num)
        return loss / num

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grads[0] * grad, None, None, None, None


def linear_kl(student_MD: Tensor, head_VD: Tensor, teacher_MD: Tensor, teacher_head_VD: Tensor, chunk: int) -> Tensor:
    """See `LinearKL`; `chunk` vocabulary rows at a time."""
    loss = LinearKL.apply(student_MD, head_VD, teacher_MD, teacher_head_VD, chunk)
    assert isinstance(loss, Tensor)
    return loss


def block_weights(block_size: int, gamma: float, device: torch.device) -> Tensor:
    """exp(-(k - 1) / gamma) for k = 1 .. K - 1: early guesses decide how far a block is accepted (DFlash)."""
    return torch.exp(-torch.arange(block_size - 1, device=device) / gamma)


def weighted_cross_entropy(logits_MV: Tensor, labels_M: Tensor, weights_M: Tensor) -> Tensor:
    """sum_m w_m (-log softmax(logits_m)[label_m]) / sum_m w_m; 0 where all weights are 0."""
    loss = F.cross_entropy(logits_MV.float(), labels_M, reduction="none")
    return (loss * weights_M).sum() / weights_M.sum().clamp(min=1e-9)
