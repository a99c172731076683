"""One cycle of speculative decoding: draft, verify, accept, commit. B rows, N block tokens, V vocabulary.

The tokens that come out are the target's own choices, so they are those of plain decoding; the drafter decides only
how many of them come at once. Plain decoding is the same cycle with a block of one.

A cycle reads and writes the buffers of `Rows` alone and lets the host wait for nothing, so it can be captured and
replayed, see `graphs`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter, DraftState
from twofold.models.state import DecodeState
from twofold.ops.sampling import Sampling, choose


@dataclass
class Rows:
    """Where B sequences stand, in tensors that stay where they are."""

    state: DecodeState
    draft_state: DraftState | None
    anchors_B: Tensor  # the newest token of each, chosen but not yet run through the target
    seeds_B: Tensor
    emitted_BN: Tensor  # of the last cycle: how many tokens it gained, then the target's choices, [B, 1 + N]

    def know(self, length: int, *, exact: bool) -> None:
        """What the host knows of the lengths, see `Lengths`."""
        self.state.know(length, exact=exact)
        if self.draft_state is not None:
            self.draft_state.know(length, exact=exact)

    def reset(self, seed: int) -> None:
        self.state.reset()
        if self.draft_state is not None:
            self.draft_state.reset()
        self.seeds_B.fill_(seed)


def new_rows(target: CausalLM, drafter: Drafter | None, batch_size: int, max_length: int, seed: int = 0) -> Rows:
    """Empty sequences. `max_length` covers prompt, answer and one block; a filled-up prompt has room anyway."""
    max_length = filled_size(target, max_length) or max_length
    block = 1 if drafter is None else drafter.config.block_size
    return Rows(
        state=target.new_state(batch_size, max_length),
        draft_state=None if drafter is None else drafter.new_state(batch_size, max_length),
        anchors_B=torch.zeros(batch_size, dtype=torch.long, device=target.device),
        seeds_B=torch.full((batch_size,), seed, device=target.device),
        emitted_BN=torch.zeros(batch_size, 1 + block, dtype=torch.long, device=target.device),
    )


class Cycle(NamedTuple):
    """Tokens gained, their target scores [n, V] where they are kept, and how many of them had been drafted."""

    token_ids: list[int]
    logits: Tensor | None
    num_accepted: int


@torch.inference_mode()
def prefill(target: CausalLM, drafter: Drafter | None, rows: Rows, prompts_BT: Tensor, sampling: Sampling) -> Tensor:
    """Runs the prompts, all of one length, into empty rows and chooses the first token of each; its scores [B, 1, V].

    A short prompt is filled up to the next of the kernels' `prefill_sizes`, a long one goes in chunks.
    """
    batch, length = prompts_BT.shape
    size = filled_size(target, length)
    if size is not None:
        counts_B = torch.full((batch,), length, device=target.device)
        filled_BT = F.pad(prompts_BT, (0, size - length))
        logits = prefill_filled(target, drafter, rows, filled_BT, counts_B, sampling)
        rows.know(length, exact=True)
        return logits
    hidden = None
    for chunk in prompts_BT.split(target.kernels.prefill_chunk, dim=1):
        hidden = _take_in(target, drafter, rows, chunk, chunk.shape[1])
    assert hidden is not None
    return _first(target, rows, hidden[:, -1:], sampling)


def filled_size(target: CausalLM, length: int) -> int | None:
    """To how many tokens a prompt of this length is filled up; None: it goes as it is."""
    return next((size for size in target.kernels.prefill_sizes if length <= size), None)


@torch.inference_mode()
def prefill_filled(
    target: CausalLM, drafter: Drafter | None, rows: Rows, filled_BT: Tensor, counts_B: Tensor, sampling: Sampling
) -> Tensor:
    """`prefill` of prompts that are the first `counts_B` tokens of their rows: what follows is neither seen by them nor
    committed. The host need not know how many they are, so it can be captured and replayed: that the rows are empty it
    does know, so attention is causal over the pass's own tokens and needs no mask."""
    hidden = _take_in(target, drafter, rows, filled_BT, counts_B)
    last_B11 = (counts_B - 1)[:, None, None]
    return _first(target, rows, hidden.gather(1, last_B11.expand(-1, 1, hidden.shape[-1])), sampling)


def _take_in(target: CausalLM, drafter: Drafter | None, rows: Rows, tokens_BT: Tensor, n: int | Tensor) -> Tensor:
    """Runs the tokens and commits the first n of them, of which the context feature is given to the drafter."""
    taps_wanted = () if drafter is None else drafter.config.target_layer_ids
    hidden, taps = target(tokens_BT, state=rows.state, taps=taps_wanted, keep=n)
    rows.state.commit(n)
    if drafter is not None and rows.draft_state is not None:
        drafter.extend(rows.draft_state, taps, n)
    assert isinstance(hidden, Tensor)
    return hidden


def _first(target: CausalLM, rows: Rows, hidden_B1D: Tensor, sampling: Sampling) -> Tensor:
    logits = target.logits(hidden_B1D)
    rows.anchors_B.copy_(choose(logits, rows.state.lengths_B[:, None], sampling, rows.seeds_B)[:, 0])
    return logits


def agreed(block_BN: Tensor, chosen_BN: Tensor) -> Tensor:
    """num_accepted [B]: the length of the longest prefix of the draft that the target chose itself."""
    return (block_BN[:, 1:] == chosen_BN[:, :-1]).long().cumprod(dim=1).sum(dim=1)


Accept = Callable[[Tensor, Tensor], Tensor]


@torch.inference_mode()
def decode_cycle(
    target: CausalLM,
    drafter: Drafter | None,
    rows: Rows,
    sampling: Sampling,
    num_tokens: int,
    *,
    scores: bool = True,
    accept: Accept = agreed,
) -> Tensor | None:
    """Gains at least one token a row and at most `num_tokens`, which goes up to the drafter's block size.

    They are in `rows.emitted_BN`; their scores [B, N, V] are returned where `scores` are wanted.
    """
    state, draft_state = rows.state, rows.draft_state
    taps_wanted = () if drafter is None else drafter.config.target_layer_ids
    block_BN = draft(target, drafter, rows, sampling, num_tokens)

    # verify: the target's own choice after every token of the block
    hidden, taps = target(block_BN, state=state, taps=taps_wanted)
    logits = None
    if sampling.temperature == 0 and not scores:
        chosen_BN = target.top1(hidden)
    else:
        logits = target.logits(hidden)
        chosen_BN = choose(logits, state.ahead(num_tokens).positions_BT + 1, sampling, rows.seeds_B)

    # accept the longest prefix of the draft that the target chose itself, and one token more
    gained_B = accept(block_BN, chosen_BN) + 1

    # commit what is now certain; the rest of the window was never there
    state.commit(gained_B)
    if drafter is not None and draft_state is not None:
        drafter.extend(draft_state, taps, gained_B)
    rows.anchors_B.copy_(chosen_BN.gather(1, gained_B[:, None] - 1)[:, 0])
    rows.emitted_BN[:, 0].copy_(gained_B)
    rows.emitted_BN[:, 1 : num_tokens + 1].copy_(chosen_BN)
    return logits if scores else None


def draft(target: CausalLM, drafter: Drafter | None, rows: Rows, sampling: Sampling, num_tokens: int) -> Tensor:
    """[B, N] anchor and N - 1 guesses. Guesses at a temperature use the target's own noise, see `ops.sampling`."""
    if drafter is None or num_tokens == 1:
        return rows.anchors_B[:, None]
    assert rows.draft_state is not None
    device = target.device
    block_BN = torch.full((len(rows.anchors_B), num_tokens), drafter.config.mask_token_id, device=device)
    block_BN[:, 0] = rows.anchors_B
    hidden = drafter.draft(rows.draft_state, target.embed_tokens(block_BN))
    if sampling.temperature == 0 and drafter.markov_head is None:
        block_BN[:, 1:] = drafter.top1(target, hidden[:, 1:])
        return block_BN
    positions_BN = rows.state.ahead(num_tokens - 1).positions_BT + 1
    scores = drafter.scores(target, hidden[:, 1:])
    if drafter.markov_head is None:
        block_BN[:, 1:] = choose(scores, positions_BN, sampling, rows.seeds_B)
        return block_BN
    for k in range(1, num_tokens):  # a guess knows the one before it
        place = slice(k - 1, k)
        biased = drafter.markov_head(scores[:, place], block_BN[:, place])
        block_BN[:, k] = choose(biased, positions_BN[:, place], sampling, rows.seeds_B)[:, 0]
    return block_BN


def decode(
    target: CausalLM,
    drafter: Drafter | None,
    prompt_ids: tuple[int, ...],
    max_tokens: int,
    sampling: Sampling,
    stop_ids: frozenset[int] = frozenset(),
) -> Iterator[Cycle]:
    """The cycles of one answer, the prefill's first: exactly `max_tokens` tokens, or fewer with a stop id last."""
    size = 1 if drafter is None else drafter.config.block_size
    rows = new_rows(target, drafter, 1, len(prompt_ids) + max_tokens + size, sampling.seed)

    def cycles() -> Iterator[Cycle]:
        logits = prefill(target, drafter, rows, torch.tensor([prompt_ids], device=target.device), sampling)
        yield Cycle(rows.anchors_B.tolist(), logits[0], 0)
        done = 1
        while True:
            scores = decode_cycle(target, drafter, rows, sampling, min(size, max_tokens - done))
            assert scores is not None
            gained, *token_ids = rows.emitted_BN[0].tolist()
            done += gained
            rows.know(len(prompt_ids) + done - 1, exact=True)
            yield Cycle(token_ids[:gained], scores[0, :gained], gained - 1)

    return until(cycles(), max_tokens, stop_ids)


def until(cycles: Iterator[Cycle], max_tokens: int, stop_ids: frozenset[int]) -> Iterator[Cycle]:
    """The cycles that make exactly `max_tokens` tokens, or fewer with a stop id last: what comes after is dropped."""
    left = max_tokens
    for cycle in cycles:
        ending = next((i + 1 for i, token in enumerate(cycle.token_ids) if token in stop_ids), None)
        token_ids = cycle.token_ids[: left if ending is None else min(left, ending)]
        left -= len(token_ids)
        yield cycle._replace(token_ids=token_ids)
        if left == 0 or (ending is not None and len(token_ids) == ending):
            return
