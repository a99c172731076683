"""A frozen teacher's largest probabilities, kept for training. N rows, T tokens, K kept, M positions, V vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

from twofold.data.conversations import PackedRows
from twofold.data.features import features_of
from twofold.models.causal_lm import CausalLM

_BLOCK = 2**24  # logits at a time


@dataclass(frozen=True)
class TopK:
    """Tokens `ids` [..., K] (int32), the logarithms of their probabilities [..., K], largest first, and `tail` [...],
    that of what all others have together: -inf where K = V. 6 K + 2 bytes a position in float16."""

    ids: Tensor
    logprobs: Tensor
    tail: Tensor

    def select(self, where: Tensor) -> "TopK":
        """At the given rows, or positions (a mask)."""
        return TopK(self.ids[where], self.logprobs[where], self.tail[where])

    def to(self, device: torch.device) -> "TopK":
        return TopK(self.ids.to(device), self.logprobs.to(device), self.tail.to(device))


@torch.no_grad()
def top_k(logits_MV: Tensor, k: int, dtype: torch.dtype = torch.float16) -> TopK:
    """Of softmax(logits), in float32 at least; the tail is a logsumexp, so that it keeps its digits next to 1."""
    log_p = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)).log_softmax(dim=-1)
    logprobs, ids = log_p.topk(k, dim=-1)
    tail = log_p.scatter_(1, ids, -torch.inf).logsumexp(dim=-1)
    return TopK(ids.int(), logprobs.to(dtype), tail.to(dtype))


@torch.no_grad()
def top_k_of(target: CausalLM, rows: PackedRows, k: int, batch_rows: int, dtype: torch.dtype = torch.float16) -> TopK:
    """[N, T, K] on the CPU: one pass over the rows, `batch_rows` at a time. ValueError for more than the vocabulary."""
    vocabulary, (num_rows, num_tokens) = target.config.vocab_size, rows.token_ids_NT.shape
    if not 1 <= k <= vocabulary:
        raise ValueError(f"top_k = {k} does not fit a vocabulary of {vocabulary}; set it between 1 and that")
    kept = TopK(
        torch.empty(num_rows, num_tokens, k, dtype=torch.int32),
        torch.empty(num_rows, num_tokens, k, dtype=dtype),
        torch.empty(num_rows, num_tokens, dtype=dtype),
    )
    for numbers in torch.arange(num_rows).split(batch_rows):
        hidden_MD = features_of(target, rows.select(numbers)).hidden.flatten(0, 1)
        parts = [top_k(target.logits(h), k, dtype) for h in hidden_MD.split(max(1, _BLOCK // vocabulary))]
        shape = (len(numbers), num_tokens)
        kept.ids[numbers] = torch.cat([p.ids for p in parts]).unflatten(0, shape).cpu()
        kept.logprobs[numbers] = torch.cat([p.logprobs for p in parts]).unflatten(0, shape).cpu()
        kept.tail[numbers] = torch.cat([p.tail for p in parts]).unflatten(0, shape).cpu()
    return kept
