"""Divergences of a student's next token from a teacher's, fused with the product by the head.

M positions, D hidden size, V vocabulary, K largest probabilities of a cached teacher.

    L = sum_m w_m d(p_m, q_m) / sum_m w_m,   q = softmax(z),  z = s W^T,  p the teacher's
    dL/ds = dL/dz W,   dL/dW = dL/dz^T s

    forward_kl      d = sum_v p_v log(p_v / q_v)                  dd/dz_v = q_v - p_v
    reverse_kl      d = sum_v q_v log(q_v / p_v)                  dd/dz_v = q_v (log(q_v / p_v) - d)
    jensen_shannon  d = (KL(p || m) + KL(q || m)) / 2             dd/dz_v = q_v (log(q_v / m_v) - KL(q || m)) / 2
                    m = (p + q) / 2
    total_variation d = sum_v |p_v - q_v| / 2                     dd/dz_v = q_v (f_v - sum_u q_u f_u)
                    f = sign(q - p) / 2, the share of drafts of q that p would not take is d
    cross_entropy   d = -log q_y, y a label                       dd/dz_v = q_v - [v = y]

Positions go by in blocks and the vocabulary in chunks, so that no more than a few times `_BLOCK` numbers of that size
exist (or a chunk of one position). What needs a sum over the vocabulary first (normalizers, d inside dd/dz) takes a
pass of its own over the chunks, unless there is only one. The gradient is made in the forward pass. Products are in
the dtype of the inputs; all else, sums of gradients too, is float32 at least.

On a GPU the whole vocabulary of fewer positions goes by at a time: as little memory, but scores are made once, and one
kernel (`ops.divergence_triton`) turns them into losses and gradient.

Weights may be a function of log q_y: worked out in the end, from the normalizers of the same scores. A head with a
gradient needs them before, so for one they take scores of their own.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.data.teacher import TopK

Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation"]

# Logits at a time. 8 MiB stay in a CPU's cache; a GPU is kept busy, and reads the head less often, with more.
_BLOCK = {"cpu": 2**21, "cuda": 2**25}
_FUSED_BLOCK = 2**27  # which makes no copies of them

Weigh = Callable[[Tensor], Tensor]  # log q_y [M] -> weights [M]

_Scores = Callable[[slice], Tensor]  # chunk of the vocabulary -> logits [M, chunk] of a block of positions
# (block of positions, chunks, the student's hidden states of the block, its head) -> for each chunk: it, its part of
# d [M], dd/dz [M, chunk], logsumexp(z) [M]. Scores are the judge's own: its last pass may overwrite them.
_Judged = Iterator[tuple[slice, Tensor, Tensor, Tensor]]
_Judge = Callable[[slice, list[slice], Tensor, Tensor], _Judged]


def linear_divergence(
    student_MD: Tensor,
    head_VD: Tensor,
    teacher_MD: Tensor,
    teacher_head_VD: Tensor,
    *,
    kind: Divergence = "forward_kl",
    chunk: int = 32_768,
    weights_M: Tensor | Weigh | None = None,
    labels_M: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """The mean over positions of d(p, q), p = softmax(teacher_MD teacher_head_VD^T); see above.

    `chunk` vocabulary rows at a time; equal weights unless given, as numbers or as a function of log q(label), and 0
    where all are 0. The weighted sum is divided by `total`, by the sum of the weights unless given. Gradients reach
    `student_MD`, and `head_VD` where it requires one; the teacher is a constant, and so are weights.
    """
    if _fuses(student_MD):
        judge = _fused_judge(teacher_MD, teacher_head_VD, kind)
        return _apply(student_MD, head_VD, weights_M, judge, len(head_VD), labels_M, total, _FUSED_BLOCK)
    judge = _dense_judge(teacher_MD, teacher_head_VD, kind)
    return _apply(student_MD, head_VD, weights_M, judge, chunk, labels_M, total)


def top_k_divergence(
    student_MD: Tensor, head_VD: Tensor, teacher: TopK, *, chunk: int = 32_768, weights_M: Tensor | None = None
) -> Tensor:
    """Forward KL between distributions over K + 1 events: the teacher's K tokens, and any other.

        d = sum_k p_k log(p_k / q_k) + p_tail log(p_tail / q_tail),   q_tail = sum of q over the other tokens
        dd/dz_v = q_v - p_v among the K;  q_v - p_tail q_v / q_tail elsewhere

    At most the full KL, and equal to it where K = V. log q_tail is a logsumexp over the other tokens, not 1 minus a
    sum that may be 1; the teacher's K + 1 masses are made to sum to 1 again, since they may be stored in float16.
    """
    return _apply(student_MD, head_VD, weights_M, _top_k_judge(teacher), chunk)


def linear_cross_entropy(
    student_MD: Tensor,
    head_VD: Tensor,
    labels_M: Tensor,
    *,
    chunk: int = 32_768,
    weights_M: Tensor | Weigh | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """The mean over positions of -log q(label), q = softmax(student_MD head_VD^T); see `linear_divergence`."""
    if _fuses(student_MD):
        judge = _fused_label_judge(labels_M)
        return _apply(student_MD, head_VD, weights_M, judge, len(head_VD), labels_M, total, _FUSED_BLOCK)
    return _apply(student_MD, head_VD, weights_M, _label_judge(labels_M), chunk, labels_M, total)


@torch.no_grad()
def label_logprobs(student_MD: Tensor, head_VD: Tensor, labels_M: Tensor, *, chunk: int = 32_768) -> Tensor:
    """log q(label) [M], in the same blocks and chunks."""
    if _fuses(student_MD):
        from twofold.ops.divergence_triton import cross_entropy

        size = max(1, _FUSED_BLOCK // len(head_VD))
        blocks = zip(student_MD.split(size), labels_M.split(size), strict=True)
        return -torch.cat([cross_entropy(s_MD @ head_VD.T, labels) for s_MD, labels in blocks])
    vocabulary, found = len(head_VD), []
    chunk = min(chunk, vocabulary)
    size = max(1, _BLOCK[student_MD.device.type] // chunk)
    chunks = [slice(start, min(start + chunk, vocabulary)) for start in range(0, vocabulary, chunk)]
    for s_MD, labels in zip(student_MD.split(size), labels_M.split(size), strict=True):
        scores = _scores(s_MD, head_VD, len(chunks) == 1)
        norm_M = torch.stack([scores(rows).logsumexp(dim=-1) for rows in chunks]).logsumexp(dim=0)
        found.append(torch.einsum("md,md->m", s_MD, head_VD[labels].to(s_MD.dtype)).to(norm_M.dtype) - norm_M)
    return torch.cat(found) if found else student_MD.new_zeros(0)


def _apply(
    student_MD: Tensor,
    head_VD: Tensor,
    weights_M: Tensor | Weigh | None,
    judge: _Judge,
    chunk: int,
    labels_M: Tensor | None = None,
    total: Tensor | None = None,
    at_a_time: int | None = None,
) -> Tensor:
    if weights_M is None:
        weights_M = torch.ones(len(student_MD), dtype=_wide(student_MD), device=student_MD.device)
    if callable(weights_M) and head_VD.requires_grad:
        assert labels_M is not None
        weights_M = weights_M(label_logprobs(student_MD, head_VD, labels_M, chunk=chunk))
    size = max(1, (at_a_time or _BLOCK[student_MD.device.type]) // min(chunk, len(head_VD)))
    loss = _FusedLoss.apply(student_MD, head_VD, weights_M, labels_M, total, judge, chunk, size)
    assert isinstance(loss, Tensor)
    return loss


class _FusedLoss(torch.autograd.Function):
    """L and both gradients, from a judge that turns logits into d and dd/dz."""

    @staticmethod
    def forward(
        ctx: Any,
        student_MD: Tensor,
        head_VD: Tensor,
        weights_M: Tensor | Weigh,
        labels_M: Tensor | None,
        total: Tensor | None,
        judge: _Judge,
        chunk: int,
        size: int,
    ) -> Tensor:
        num_positions, vocabulary = len(student_MD), len(head_VD)
        chunk = min(chunk, vocabulary)
        chunks = [slice(start, min(start + chunk, vocabulary)) for start in range(0, vocabulary, chunk)]
        wide, dtype = _wide(student_MD), student_MD.dtype

        def shares(weights_M: Tensor) -> Tensor:
            weights_M = weights_M.to(wide)
            return weights_M / (weights_M.sum() if total is None else total.to(wide)).clamp(min=1e-9)

        share_M = None if callable(weights_M) else shares(weights_M)
        d_M, norm_M = student_MD.new_zeros(2, num_positions, dtype=wide)
        grad_MD = torch.zeros_like(student_MD, dtype=wide) if ctx.needs_input_grad[0] else None
        head_grad_VD = torch.zeros_like(head_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        for start in range(0, num_positions, size):
            block = slice(start, start + size)
            s_MD = student_MD[block]
            for rows, part_M, slope_MV, norms_M in judge(block, chunks, s_MD, head_VD):
                d_M[block] += part_M
                norm_M[block] = norms_M
                slope_MV = slope_MV.to(dtype)
                if grad_MD is not None:
                    grad_MD[block] += slope_MV @ head_VD[rows]
                if head_grad_VD is not None:
                    assert share_M is not None
                    head_grad_VD[rows] += slope_MV.T @ (s_MD * share_M[block, None]).to(dtype)
        if callable(weights_M):
            assert labels_M is not None
            log_q_M = _label_scores(student_MD, head_VD, labels_M, size) - norm_M
            share_M = shares(weights_M(log_q_M.clamp(max=0)))  # above it by the rounding of scores
        assert share_M is not None
        if grad_MD is not None:
            grad_MD = grad_MD.mul_(share_M[:, None]).to(dtype)
        ctx.save_for_backward(grad_MD, None if head_grad_VD is None else head_grad_VD.to(head_VD.dtype))
        return torch.dot(d_M, share_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slopes = [None if slope is None else grads[0] * slope for slope in ctx.saved_tensors]
        return slopes[0], slopes[1], None, None, None, None, None, None


def _label_scores(student_MD: Tensor, head_VD: Tensor, labels_M: Tensor, size: int) -> Tensor:
    """z_y [M]"""
    blocks = zip(student_MD.split(size), labels_M.split(size), strict=True)
    return torch.cat([(s_MD.to(_wide(s_MD)) * head_VD[labels]).sum(dim=1) for s_MD, labels in blocks])


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _scores(x_MD: Tensor, head_VD: Tensor, single: bool) -> _Scores:
    """The logits of a chunk; made once where the vocabulary is a single one."""
    if single:
        whole = (x_MD @ head_VD.T).to(_wide(x_MD))
        return lambda _: whole
    return lambda rows: (x_MD @ head_VD[rows].T).to(_wide(x_MD))


def _dense_judge(teacher_MD: Tensor, teacher_head_VD: Tensor, kind: Divergence) -> _Judge:
    def judge(block: slice, chunks: list[slice], s_MD: Tensor, head_VD: Tensor) -> _Judged:
        student = _scores(s_MD, head_VD, len(chunks) == 1)
        teacher = _scores(teacher_MD[block], teacher_head_VD, len(chunks) == 1)
        norm_s, norm_t = (
            torch.stack([z(rows).logsumexp(dim=-1) for rows in chunks]).logsumexp(dim=0).unsqueeze(1)
            for z in (student, teacher)
        )
        if kind == "forward_kl":
            for rows in chunks:
                log_q, log_p = student(rows).sub_(norm_s), teacher(rows).sub_(norm_t)
                p = log_p.exp()
                part_M = torch.einsum("mv,mv->m", p, log_p.sub_(log_q))
                yield rows, part_M, log_q.exp_().sub_(p), norm_s.squeeze(1)
            return
        center_M = torch.zeros_like(norm_s.squeeze(1))  # sum_v q_v f_v: dd/dz_v = q_v (f_v - center)
        for rows in chunks:
            log_q, log_p = student(rows) - norm_s, teacher(rows) - norm_t
            center_M += torch.einsum("mv,mv->m", log_q.exp(), _pull(kind, log_q, log_p))
        for rows in chunks:
            log_q, log_p = student(rows).sub_(norm_s), teacher(rows).sub_(norm_t)
            q, pull = log_q.exp(), _pull(kind, log_q, log_p)
            part_M = torch.einsum("mv,mv->m", q, pull)
            if kind == "jensen_shannon":
                part_M += torch.einsum("mv,mv->m", log_p.exp(), _pull(kind, log_p, log_q))
            elif kind == "total_variation":
                part_M -= torch.einsum("mv,mv->m", log_p.exp(), pull)
            yield rows, part_M, pull.sub_(center_M.unsqueeze(1)).mul_(q), norm_s.squeeze(1)

    return judge


def _fuses(student_MD: Tensor) -> bool:
    return student_MD.is_cuda and student_MD.dtype != torch.float64


def _fused_judge(teacher_MD: Tensor, teacher_head_VD: Tensor, kind: Divergence) -> _Judge:
    from twofold.ops.divergence_triton import divergence_

    def judge(block: slice, chunks: list[slice], s_MD: Tensor, head_VD: Tensor) -> _Judged:
        scores_MV = s_MD @ head_VD.T
        part_M, norm_M = divergence_(kind, scores_MV, teacher_MD[block] @ teacher_head_VD.T)
        yield chunks[0], part_M, scores_MV, norm_M

    return judge


def _fused_label_judge(labels_M: Tensor) -> _Judge:
    from twofold.ops.divergence_triton import cross_entropy_

    def judge(block: slice, chunks: list[slice], s_MD: Tensor, head_VD: Tensor) -> _Judged:
        scores_MV = s_MD @ head_VD.T
        part_M, norm_M = cross_entropy_(scores_MV, labels_M[block])
        yield chunks[0], part_M, scores_MV, norm_M

    return judge


def _pull(kind: Divergence, log_q: Tensor, log_p: Tensor) -> Tensor:
    """log(q / p), or sign(q - p) / 2, or log(q / m) / 2 with q / m = 2 q / (q + p) = 2 sigmoid(log q - log p)."""
    difference = log_q - log_p
    if kind == "total_variation":
        return difference.sign_().mul_(0.5)
    return difference if kind == "reverse_kl" else F.logsigmoid(difference).add_(math.log(2)).mul_(0.5)


def _label_judge(labels_M: Tensor) -> _Judge:
    def judge(block: slice, chunks: list[slice], s_MD: Tensor, head_VD: Tensor) -> _Judged:
        student = _scores(s_MD, head_VD, len(chunks) == 1)
        labels = labels_M[block, None]
        norm_M1 = torch.stack([student(rows).logsumexp(dim=-1) for rows in chunks]).logsumexp(dim=0).unsqueeze(1)
        for rows in chunks:
            log_q = student(rows).sub_(norm_M1)
            inside, column, _ = _within(labels, rows)
            found = log_q.gather(1, column.clamp(max=log_q.shape[1] - 1))
            part_M = torch.where(inside, -found, 0.0).squeeze(1)
            slope_MV = log_q.exp_()
            slope_MV.scatter_add_(1, column.clamp(max=log_q.shape[1] - 1), -inside.to(slope_MV.dtype))
            yield rows, part_M, slope_MV, norm_M1.squeeze(1)

    return judge


def _top_k_judge(teacher: TopK) -> _Judge:
    def judge(block: slice, chunks: list[slice], s_MD: Tensor, head_VD: Tensor) -> _Judged:
        student = _scores(s_MD, head_VD, len(chunks) == 1)
        ids_MK = teacher.ids[block].long()
        num_kept = ids_MK.shape[1]
        z_MK: Tensor | None = None  # the student's logits of the teacher's tokens
        others: list[Tensor] = []
        for rows in chunks:
            z = student(rows)
            inside, column, hit = _within(ids_MK, rows)
            found = z.gather(1, column.clamp(max=z.shape[1] - 1))
            z_MK = found if z_MK is None else torch.where(inside, found, z_MK)
            others.append(z.masked_fill(hit, -math.inf).logsumexp(dim=1))
        assert z_MK is not None
        rest_M = torch.stack(others).logsumexp(dim=0)
        norm_M = torch.logaddexp(z_MK.logsumexp(dim=1), rest_M)
        masses = torch.cat((teacher.logprobs[block], teacher.tail[block, None]), dim=1).to(z_MK.dtype)
        log_p, log_p_tail = masses.log_softmax(dim=1).tensor_split([num_kept], dim=1)
        p_MK, p_tail_M = log_p.exp(), log_p_tail.exp().squeeze(1)
        none_M = p_tail_M == 0  # all of the vocabulary is kept: 0 log 0 = 0
        tail_M = p_tail_M * (log_p_tail.squeeze(1) - (rest_M - norm_M)).masked_fill(none_M, 0.0)
        value_M = torch.einsum("mk,mk->m", p_MK, log_p - (z_MK - norm_M.unsqueeze(1))) + tail_M
        rest_M = torch.where(none_M, norm_M, rest_M)
        for rows in chunks:
            z = student(rows)
            _, column, hit = _within(ids_MK, rows)
            kept = z.new_zeros(len(z), z.shape[1] + 1).scatter_(1, column, p_MK)[:, :-1]
            other = (z - rest_M.unsqueeze(1)).exp_().mul_(p_tail_M.unsqueeze(1))
            yield rows, value_M, z.sub_(norm_M.unsqueeze(1)).exp_().sub_(torch.where(hit, kept, other)), norm_M
            value_M = torch.zeros_like(value_M)

    return judge


def _within(ids_MK: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Which ids lie in the chunk; their columns there, one past the last for those that do not; the columns hit."""
    width = rows.stop - rows.start
    inside = (ids_MK >= rows.start) & (ids_MK < rows.stop)
    column = torch.where(inside, ids_MK - rows.start, width)
    hit = torch.zeros(len(ids_MK), width + 1, dtype=torch.bool, device=ids_MK.device)
    return inside, column, hit.scatter_(1, column, True)[:, :-1]
