"""Draft blocks of packed rows, and what a drafter makes of them. B rows, T tokens, A anchors a row, K block size."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twofold.data.conversations import PackedRows
from twofold.data.features import Features, features_of
from twofold.decoding.acceptance import Acceptance, walk
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter, KeyValue, Seen
from twofold.ops.documents import document_ids


class Blocks(NamedTuple):
    """Draft blocks of packed rows. Labels and weights are for positions 1 .. K - 1 of each block."""

    anchors_BA: Tensor
    block_ids_BN: Tensor  # N = A * K: anchor token, then masks
    positions_BN: Tensor
    labels_BAK: Tensor  # K - 1 wide
    valid_BAK: Tensor

    def previous(self) -> Tensor:
        """The token before each label [B, A, K - 1]: the anchor's, then labels."""
        anchor_BA1 = self.block_ids_BN.unflatten(1, (self.anchors_BA.shape[1], -1))[..., :1]
        return torch.cat((anchor_BA1, self.labels_BAK[..., :-1]), dim=-1)


def make_blocks(rows: PackedRows, anchors_BA: Tensor, block_size: int, mask_token_id: int) -> Blocks:
    """A label is valid where it is an answer token of the anchor's own document, as all before it in the block are."""
    ids, positions = rows.token_ids_NT, rows.positions_NT
    num_tokens = ids.shape[1]
    offset = torch.arange(1, block_size, device=ids.device)
    place = anchors_BA[..., None] + offset
    inside = place < num_tokens
    flat = place.clamp(max=num_tokens - 1).flatten(1)
    documents = document_ids(positions)
    same = documents.gather(1, flat).view_as(place) == documents.gather(1, anchors_BA)[..., None]
    valid = (inside & same & rows.answer_NT.gather(1, flat).view_as(place)).long().cumprod(dim=-1).bool()
    block_ids = torch.full((*anchors_BA.shape, block_size), mask_token_id, device=ids.device)
    block_ids[..., 0] = ids.gather(1, anchors_BA)
    block_positions = positions.gather(1, anchors_BA)[..., None] + torch.arange(block_size, device=ids.device)
    labels = ids.gather(1, flat).view_as(place)
    return Blocks(anchors_BA, block_ids.flatten(1), block_positions.flatten(1), labels, valid)


def sample_anchors(rows: PackedRows, num_anchors: int, seed: int) -> Tensor:
    """[B, A] random positions whose next token is an answer token of the same document.

    A row with fewer such positions gets others besides, whose labels are not valid. Drawn on the CPU, so that the
    draw is the same on every device.
    """
    after = rows.answer_NT.cpu()[:, 1:] & (rows.positions_NT.cpu()[:, 1:] > 0)
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(after.shape, generator=generator) + after
    anchors = score.topk(min(num_anchors, after.shape[1]), dim=1).indices
    return anchors.sort(dim=1).values.to(rows.answer_NT.device)


def draft_hidden(
    drafter: Drafter, target: CausalLM, rows: PackedRows, blocks: Blocks, features: Features
) -> tuple[Tensor, Tensor]:
    """What the head turns into scores: the drafter's guesses [B, A, K - 1, D], and the target's own hidden states
    [B, A, K - 1, D] for the same tokens. Gradients reach the drafter alone."""
    config = drafter.config
    with torch.no_grad():
        hidden = features.hidden
        before = blocks.anchors_BA[..., None] + torch.arange(config.block_size - 1, device=hidden.device)
        before = before.clamp(max=hidden.shape[1] - 1)
        wanted = hidden[torch.arange(len(hidden), device=hidden.device)[:, None, None], before]
    contexts = drafter.contexts(features.taps, rows.positions_NT)
    mask = drafter.training_mask(document_ids(rows.positions_NT), blocks.anchors_BA)
    return _block_hidden(drafter, target, blocks, contexts, mask), wanted


def _block_hidden(
    drafter: Drafter, target: CausalLM, blocks: Blocks, contexts: Sequence[KeyValue], mask: Seen
) -> Tensor:
    with torch.no_grad():
        x_BND = target.embed_tokens(blocks.block_ids_BN)
    guesses: Tensor = drafter(x_BND, blocks.positions_BN, contexts, mask)
    return guesses.unflatten(1, (-1, drafter.config.block_size))[:, :, 1:]


def draft_logits(drafter: Drafter, target: CausalLM, rows: PackedRows, blocks: Blocks) -> Tensor:
    """Scores [B, A, K - 1, V] of the blocks' guesses."""
    features = features_of(target, rows, drafter.config.target_layer_ids)
    return drafter.scores(target, draft_hidden(drafter, target, rows, blocks, features)[0], blocks.previous())


def calibration_drafts(
    drafter: Drafter, target: CausalLM, rows: PackedRows, num_anchors: int, seed: int
) -> Callable[[], object]:
    """A function that passes drafts at random anchors of `rows` through the drafter, with their whole contexts."""
    anchors = sample_anchors(rows, num_anchors, seed)
    blocks = make_blocks(rows, anchors, drafter.config.block_size, drafter.config.mask_token_id)
    taps = features_of(target, rows, drafter.config.target_layer_ids).taps
    used = rows.used_NT[..., None]
    taps = [tap * used for tap in taps]  # what pads a row's end is no input: zeros count for nothing
    mask = drafter.training_mask(document_ids(rows.positions_NT), anchors).dense  # used once: nothing to compile for

    def run() -> Tensor:
        contexts = drafter.contexts(taps, rows.positions_NT)
        return _block_hidden(drafter, target, blocks, contexts, mask)

    return run


@torch.no_grad()
def teacher_forced_acceptance(
    drafter: Drafter, target: CausalLM, rows: PackedRows, *, batch_rows: int = 8, anchors_at_once: int = 64
) -> Acceptance:
    """What the decode loop would accept if the target answered as in `rows`: on its own greedy answers, what greedy
    decoding accepts. Every anchor of an answer is drafted once; `walk` goes through those that decoding comes to.
    """
    config, found = drafter.config, Acceptance(drafter.config.block_size)
    eos = set(target.config.eos_token_ids)
    for numbers in torch.arange(len(rows)).split(batch_rows):
        batch = rows.select(numbers.to(rows.answer_NT.device)).to(target.device)
        features = features_of(target, batch, config.target_layer_ids)
        contexts = drafter.contexts(features.taps, batch.positions_NT)
        anchors = sample_anchors(batch, max(1, int(batch.answer_NT.sum(dim=1).max())), seed=0)  # all there are
        right_BT = torch.zeros_like(batch.token_ids_NT)
        for part in anchors.split(anchors_at_once, dim=1):
            blocks = make_blocks(batch, part, config.block_size, config.mask_token_id)
            # few blocks of changing number: a kernel compiled for each would take longer than the mask
            mask = drafter.training_mask(document_ids(batch.positions_NT), part).dense
            hidden = _block_hidden(drafter, target, blocks, contexts, mask).to(features.hidden.dtype)  # the head's
            # after guesses that were right, the token before a guess is the label before it
            guesses = drafter.scores(target, hidden, blocks.previous()).argmax(dim=-1)
            right = (guesses == blocks.labels_BAK) & blocks.valid_BAK
            right_BT.scatter_(1, part, right.long().cumprod(dim=-1).sum(dim=-1))
        for row, right_T in enumerate(right_BT.tolist()):
            for start, stop in _answers(batch.positions_NT[row].tolist(), batch.answer_NT[row].tolist()):
                ended = int(batch.token_ids_NT[row, stop - 1]) in eos
                found.add(walk(right_T, start, stop, config.block_size, ended))
    return found


def _answers(positions: list[int], answer: list[bool]) -> list[tuple[int, int]]:
    """(start, stop) of the answers in a row, one a document."""
    spans: list[tuple[int, int]] = []
    for at, inside in enumerate(answer):
        if inside and at and answer[at - 1] and positions[at] > 0:
            spans[-1] = (spans[-1][0], at + 1)
        elif inside:
            spans.append((at, at + 1))
    return spans
