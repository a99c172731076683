"""Training a DFlash drafter against a frozen target. B rows, T tokens, A anchors a row, K block size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from twofold.data.conversations import PackedRows
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.ops.attention import document_ids
from twofold.training.loop import Checkpoints, History, OptimizerConfig, Report, train
from twofold.training.losses import block_weights, weighted_cross_entropy


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Cross-entropy on the target's own answers, position k of a block weighted exp(-(k - 1) / gamma)."""

    optimizer: OptimizerConfig
    batch_rows: int = 4
    row_length: int = 512
    anchors: int = 24
    gamma: float = 4.0


class Blocks(NamedTuple):
    """Draft blocks of packed rows. Labels and weights are for positions 1 .. K - 1 of each block."""

    anchors_BA: Tensor
    block_ids_BN: Tensor  # N = A * K: anchor token, then masks
    positions_BN: Tensor
    labels_BAK: Tensor  # K - 1 wide
    valid_BAK: Tensor


def make_blocks(rows: PackedRows, anchors_BA: Tensor, block_size: int, mask_token_id: int) -> Blocks:
    """A label is valid where it is an answer token of the anchor's own document."""
    ids, positions = rows.token_ids_NT, rows.positions_NT
    num_tokens = ids.shape[1]
    offset = torch.arange(1, block_size, device=ids.device)
    place = anchors_BA[..., None] + offset
    inside = place < num_tokens
    flat = place.clamp(max=num_tokens - 1).flatten(1)
    documents = document_ids(positions)
    same = documents.gather(1, flat).view_as(place) == documents.gather(1, anchors_BA)[..., None]
    valid = inside & same & rows.answer_NT.gather(1, flat).view_as(place)
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


def draft_logits(drafter: Drafter, target: CausalLM, rows: PackedRows, blocks: Blocks) -> Tensor:
    """Scores [B, A, K - 1, V] of the blocks' guesses; gradients reach the drafter alone."""
    config = drafter.config
    with torch.no_grad():
        _, taps = target(rows.token_ids_NT, rows.positions_NT, taps=config.target_layer_ids)
        x_BND = target.embed_tokens(blocks.block_ids_BN)
    contexts = drafter.contexts(taps, rows.positions_NT)
    mask = drafter.training_mask(document_ids(rows.positions_NT), blocks.anchors_BA)
    hidden = drafter(x_BND, blocks.positions_BN, contexts, mask)
    guesses = hidden.unflatten(1, (-1, config.block_size))[:, :, 1:]
    return target.logits(guesses)


def train_drafter(
    drafter: Drafter,
    target: CausalLM,
    rows: PackedRows,
    config: DraftConfig,
    seed: int,
    checkpoints: Checkpoints,
    report: Report,
    validate: Callable[[], dict[str, float]],
) -> History:
    """Trains `drafter` in place on the answers in `rows`; the full schedule runs whatever the weights started from."""
    target.requires_grad_(False)
    drafter.requires_grad_(True)
    block_size = drafter.config.block_size

    def loss_at(step: int) -> Tensor:
        batch = rows.batch(config.batch_rows, step, seed).to(target.device)
        anchors = sample_anchors(batch, config.anchors, seed * 1_000_003 + step)
        blocks = make_blocks(batch, anchors, block_size, drafter.config.mask_token_id)
        logits = draft_logits(drafter, target, batch, blocks)
        weights = blocks.valid_BAK * block_weights(block_size, config.gamma, target.device)
        return weighted_cross_entropy(logits.flatten(0, 2), blocks.labels_BAK.flatten(), weights.flatten())

    history = train(dict(drafter.named_parameters()), loss_at, config.optimizer, checkpoints, report, validate)
    drafter.requires_grad_(False)
    return history


@torch.no_grad()
def teacher_forced_acceptance(drafter: Drafter, target: CausalLM, rows: PackedRows, num_anchors: int) -> float:
    """Mean accept length when every anchor's block is judged by the text in `rows`: 1 + guesses right in a row.

    On the target's own greedy text this is what greedy decoding gives, anchors weighted equally.
    """
    anchors = sample_anchors(rows, num_anchors, seed=0)
    blocks = make_blocks(rows, anchors, drafter.config.block_size, drafter.config.mask_token_id)
    right = draft_logits(drafter, target, rows, blocks).argmax(dim=-1) == blocks.labels_BAK
    run = (right & blocks.valid_BAK).long().cumprod(dim=-1).sum(dim=-1)
    return 1.0 + float(run[blocks.valid_BAK[..., 0]].float().mean())
