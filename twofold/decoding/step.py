"""One cycle of speculative decoding: draft, verify, commit. B rows, N block tokens.

The tokens that come out are the target's own choices, so they are those of plain decoding; the drafter decides only
how many of them come at once. Plain decoding is the same cycle with a block of one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter, DraftState
from twofold.models.state import DecodeState
from twofold.ops.sampling import Sampling, choose

PREFILL_CHUNK = 512


@dataclass
class Sequence:
    """Where one sequence stands: `anchor` is its newest token, chosen but not yet run through the target."""

    state: DecodeState
    draft_state: DraftState | None
    anchor: int


class Cycle(NamedTuple):
    """Tokens gained, their target scores [n, V], and how many of them had been drafted."""

    token_ids: list[int]
    logits: Tensor
    num_accepted: int


@torch.inference_mode()
def prefill(
    target: CausalLM,
    drafter: Drafter | None,
    prompt_ids: tuple[int, ...],
    max_length: int,
    sampling: Sampling,
) -> tuple[Sequence, Cycle]:
    """Runs the prompt, in chunks, and chooses the first token. `max_length` covers prompt, answer and one block."""
    state = target.new_state(1, max_length)
    draft_state = None if drafter is None else drafter.new_state(1, max_length)
    ids = torch.tensor([prompt_ids], device=target.device)
    taps_wanted = () if drafter is None else drafter.config.target_layer_ids
    hidden = None
    for chunk in ids.split(PREFILL_CHUNK, dim=1):
        hidden, taps = target(chunk, state=state, taps=taps_wanted)
        state.commit(chunk.shape[1])
        if drafter is not None and draft_state is not None:
            drafter.extend(draft_state, taps, chunk.shape[1])
    assert hidden is not None
    logits = target.logits(hidden[:, -1:])
    token = int(choose(logits, state.lengths_B[:, None], sampling))
    return Sequence(state, draft_state, token), Cycle([token], logits[0], 0)


@torch.inference_mode()
def decode_cycle(
    target: CausalLM, drafter: Drafter | None, sequence: Sequence, sampling: Sampling, max_block: int
) -> Cycle:
    """At least one token, at most `max_block` (and the drafter's block size)."""
    state = sequence.state
    block = torch.tensor([[sequence.anchor]], device=target.device)
    taps_wanted: tuple[int, ...] = ()
    if drafter is not None and max_block > 1:
        block = draft(target, drafter, sequence, sampling, min(max_block, drafter.config.block_size))
    if drafter is not None:
        taps_wanted = drafter.config.target_layer_ids

    # verify: the target's own choice after every token of the block
    hidden, taps = target(block, state=state, taps=taps_wanted)
    logits = target.logits(hidden)
    positions = state.lengths_B[:, None] + torch.arange(1, block.shape[1] + 1, device=target.device)
    chosen = choose(logits, positions, sampling)

    # accept the longest prefix of the draft that the target chose itself
    num_accepted = int((block[0, 1:] == chosen[0, :-1]).long().cumprod(dim=0).sum())

    # commit what is now certain; the rest of the window was never there
    state.commit(num_accepted + 1)
    if drafter is not None and sequence.draft_state is not None:
        drafter.extend(sequence.draft_state, taps, num_accepted + 1)
    token_ids = chosen[0, : num_accepted + 1].tolist()
    sequence.anchor = token_ids[-1]
    return Cycle(token_ids, logits[0, : num_accepted + 1], num_accepted)


def draft(target: CausalLM, drafter: Drafter, sequence: Sequence, sampling: Sampling, num_tokens: int) -> Tensor:
    """[1, N] anchor and N - 1 guesses. Guesses at a temperature use the target's own noise, see `ops.sampling`."""
    assert sequence.draft_state is not None
    block = torch.full((1, num_tokens), drafter.config.mask_token_id, device=target.device)
    block[0, 0] = sequence.anchor
    hidden = drafter.draft(sequence.draft_state, target.embed_tokens(block))
    positions = sequence.state.lengths_B[:, None] + torch.arange(1, num_tokens, device=target.device)
    scores = drafter.scores(target, hidden[:, 1:])
    if drafter.markov_head is None:
        block[:, 1:] = choose(scores, positions, sampling)
        return block
    for k in range(1, num_tokens):  # a guess knows the one before it
        place = slice(k - 1, k)
        biased = drafter.markov_head(scores[:, place], block[:, place])
        block[:, k] = choose(biased, positions[:, place], sampling)[:, 0]
    return block


def decode(
    target: CausalLM,
    drafter: Drafter | None,
    prompt_ids: tuple[int, ...],
    max_tokens: int,
    sampling: Sampling,
    stop_ids: frozenset[int] = frozenset(),
) -> Iterator[Cycle]:
    """The cycles of one answer, the prefill's first: exactly `max_tokens` tokens, or fewer with a stop id last."""
    block = 1 if drafter is None else drafter.config.block_size
    sequence, cycle = prefill(target, drafter, prompt_ids, len(prompt_ids) + max_tokens + block, sampling)
    left = max_tokens
    while True:
        ending = next((i + 1 for i, token in enumerate(cycle.token_ids) if token in stop_ids), None)
        yield cycle if ending is None else cycle._replace(token_ids=cycle.token_ids[:ending])
        left -= len(cycle.token_ids)
        if ending is not None or left == 0:
            return
        cycle = decode_cycle(target, drafter, sequence, sampling, max_block=left)
