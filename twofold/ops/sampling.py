"""Choosing tokens. B rows, T positions, V vocabulary.

A sampled token is argmax(log p + Gumbel noise), which has distribution p, and the noise depends on nothing but
(seed, position, token). So a sequence drawn token by token and one verified in blocks are the same sequence, and a
drafter that adds the target's noise to its own scores guesses the target's sample, not just its mode.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 switch those filters off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # of 64 bits

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"temperature {self.temperature} is not between 0 and 100")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} is negative; 0 switches it off")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is not in (0, 1]")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p {self.min_p} is not in [0, 1)")


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in int64) without visible structure: murmur3's finalizer."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def gumbel_noise(seeds_B: Tensor, positions_BT: Tensor, vocab_size: int) -> Tensor:
    """-log(-log u) [B, T, V], u in (0, 1) a function of (seed, position, token) alone, on every device."""
    device = positions_BT.device
    seeds_B1 = seeds_B.to(device)[:, None]
    seeds_B1 = (seeds_B1 ^ (seeds_B1 >> 32) * 0x85EBCA6B) & _MASK
    place_BT = _mix((_mix(seeds_B1) + positions_BT * 0x9E3779B1) & _MASK)
    token_V = _mix((torch.arange(vocab_size, device=device) * 0x9E3779B1 + 0x7F4A7C15) & _MASK)
    bits = _mix(place_BT[..., None] ^ token_V) >> 9
    return -torch.log(-torch.log((bits.float() + 0.5) * 2.0**-23))  # 23 bits and a half: never 0, never 1


def choose(logits_BTV: Tensor, positions_BT: Tensor, sampling: Sampling, seeds_B: Tensor | None = None) -> Tensor:
    """The token [B, T] for each position that is being filled: argmax, or a sample at that position's noise.

    `seeds_B` gives each row its own seed in place of `sampling.seed`.
    """
    if sampling.temperature == 0:
        return logits_BTV.argmax(dim=-1)
    scores = filtered(_tempered(logits_BTV, sampling), sampling)
    if seeds_B is None:
        seeds_B = torch.full((len(scores),), sampling.seed, device=scores.device)
    return (scores + gumbel_noise(seeds_B, positions_BT, scores.shape[-1])).argmax(dim=-1)


def _tempered(logits: Tensor, sampling: Sampling) -> Tensor:
    """(z - max z) / temperature: 0 at the best, and nowhere infinite but downwards, however small the temperature."""
    scores = logits.float()
    return (scores - scores.max(dim=-1, keepdim=True).values) / sampling.temperature


def lead(logits_V: Tensor, position: int, sampling: Sampling) -> float:
    """By how much the token that is chosen for a position leads the next, in logits: infinite if there is no other."""
    if sampling.temperature == 0:
        best = logits_V.float().topk(2).values
        return float(best[0] - best[1])
    scores = filtered(_tempered(logits_V, sampling), sampling)
    place = torch.tensor([[position]], device=logits_V.device)
    noise = gumbel_noise(torch.tensor([sampling.seed]), place, len(logits_V))[0, 0]
    best = (scores + noise).topk(2).values
    return float(best[0] - best[1]) * sampling.temperature


def filtered(scores: Tensor, sampling: Sampling) -> Tensor:
    """Scores [..., V] with -inf outside top-k, then top-p (the smallest set of mass >= p), then min-p of the rest."""
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p < 1:
        # stable and in float64, so that a row's nucleus does not depend on the rows beside it
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        mass = ordered.double().softmax(dim=-1)
        before = mass.cumsum(dim=-1) - mass
        outside = before >= sampling.top_p
        outside[..., 0] = False  # also where top_p is 0 in floating point
        ordered = ordered.masked_fill(outside, -torch.inf)
        scores = torch.empty_like(scores).scatter_(-1, order, ordered)
    if sampling.min_p > 0:
        floor = scores.max(dim=-1, keepdim=True).values + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < floor, -torch.inf)
    return scores
