"""Losses. M positions, D hidden size, V vocabulary."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 2**21  # logits at a time, 8 MiB: they stay in a CPU's cache, and keep a GPU busy


class LinearKL(torch.autograd.Function):
    """Forward KL from teacher to student logits, weighted mean over positions, without the logits.

        L = sum_m w_m sum_v p_mv (log p_mv - log q_mv) / sum_m w_m,  p = softmax(t W_t^T),  q = softmax(s W_s^T)
        dL/ds_m = w_m sum_v (q_mv - p_mv) W_s[v] / sum_m w_m

    Positions go by in blocks and the vocabulary in chunks: one pass for both normalizers, one for loss and
    gradient, so no more than 2 `_BLOCK` logits exist (or two chunks of one position). Both heads are constants
    (they are not trained). Float32 inside, at least.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student_MD: Tensor,
        head_VD: Tensor,
        teacher_MD: Tensor,
        teacher_head_VD: Tensor,
        weights_M: Tensor,
        chunk: int,
    ) -> Tensor:
        chunk = min(chunk, len(head_VD))
        wide = torch.promote_types(student_MD.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=student_MD.device)
        grad = torch.zeros_like(student_MD)
        for m in torch.arange(len(student_MD)).split(max(1, _BLOCK // chunk)):
            block = slice(int(m[0]), int(m[-1]) + 1)
            kl_M = _kl_block(student_MD[block], head_VD, teacher_MD[block], teacher_head_VD, chunk, grad[block])
            loss += torch.dot(kl_M, weights_M[block].to(wide))
        total = weights_M.sum().clamp(min=1e-9)
        ctx.save_for_backward(grad.mul_((weights_M / total).to(grad.dtype).unsqueeze(1)))
        return loss / total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grads[0] * grad, None, None, None, None, None


def _kl_block(
    student_MD: Tensor, head_VD: Tensor, teacher_MD: Tensor, teacher_head_VD: Tensor, chunk: int, grad_MD: Tensor
) -> Tensor:
    """KL [M] of a block of positions; adds each one's gradient to its row of `grad_MD`."""
    wide = torch.promote_types(student_MD.dtype, torch.float32)

    def scores(rows: slice) -> tuple[Tensor, Tensor]:
        return (student_MD @ head_VD[rows].T).to(wide), (teacher_MD @ teacher_head_VD[rows].T).to(wide)

    chunks = [slice(start, start + chunk) for start in range(0, len(head_VD), chunk)]
    whole = scores(chunks[0]) if len(chunks) == 1 else None
    norms: list[list[Tensor]] = [[], []]
    for rows in chunks:
        for norm, x in zip(norms, whole or scores(rows), strict=True):
            norm.append(x.logsumexp(dim=-1))
    norm_s, norm_t = (torch.stack(norm).logsumexp(dim=0).unsqueeze(1) for norm in norms)
    kl_M = torch.zeros(len(student_MD), dtype=wide, device=student_MD.device)
    for rows in chunks:
        s, t = whole or scores(rows)
        log_q, log_p = s.sub_(norm_s), t.sub_(norm_t)
        p = log_p.exp()
        kl_M += torch.einsum("mv,mv->m", p, log_p.sub_(log_q))
        grad_MD += log_q.exp_().sub_(p).to(grad_MD.dtype) @ head_VD[rows]
    return kl_M


def linear_kl(
    student_MD: Tensor,
    head_VD: Tensor,
    teacher_MD: Tensor,
    teacher_head_VD: Tensor,
    chunk: int = 32_768,
    weights_M: Tensor | None = None,
) -> Tensor:
    """See `LinearKL`; `chunk` vocabulary rows at a time, equal weights unless given."""
    if weights_M is None:
        weights_M = torch.ones(len(student_MD), dtype=student_MD.dtype, device=student_MD.device)
    loss = LinearKL.apply(student_MD, head_VD, teacher_MD, teacher_head_VD, weights_M, chunk)
    assert isinstance(loss, Tensor)
    return loss


def block_weights(block_size: int, gamma: float, device: torch.device) -> Tensor:
    """exp(-(k - 1) / gamma) for k = 1 .. K - 1: early guesses decide how far a block is accepted (DFlash)."""
    return torch.exp(-torch.arange(block_size - 1, device=device) / gamma)


def weighted_cross_entropy(logits_MV: Tensor, labels_M: Tensor, weights_M: Tensor) -> Tensor:
    """sum_m w_m (-log softmax(logits_m)[label_m]) / sum_m w_m; 0 where all weights are 0."""
    loss = F.cross_entropy(logits_MV.float(), labels_M, reduction="none")
    return (loss * weights_M).sum() / weights_M.sum().clamp(min=1e-9)
