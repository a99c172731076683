"""Training a DFlash drafter against a frozen target. B rows, T tokens, A anchors a row, K block size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from twofold.data.conversations import PackedRows
from twofold.data.features import Features, feature_source, features_of
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.models.layers import dense_weight
from twofold.ops.documents import document_ids
from twofold.training.divergence import linear_divergence
from twofold.training.loop import Checkpoints, History, Report, train
from twofold.training.losses import block_weights, weighted_cross_entropy
from twofold.training.optimizer import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Position k of a block is weighted exp(-(k - 1) / gamma).

    `loss`: "hard" is cross-entropy on the token that the target wrote (the paper's), "soft" the KL to the target's
    distribution for that token, which costs one more product with the head.
    """

    optimizer: OptimizerConfig
    loss: Literal["hard", "soft"] = "hard"
    batch_rows: int = 4
    row_length: int = 512
    anchors: int = 24
    gamma: float = 4.0
    store_features: bool = False  # the target reads every row once, not once an epoch; see `data.features`


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


def draft_hidden(
    drafter: Drafter, target: CausalLM, rows: PackedRows, blocks: Blocks, features: Features
) -> tuple[Tensor, Tensor]:
    """What the head turns into scores: the drafter's guesses [B, A, K - 1, D], and the target's own hidden states
    [B, A, K - 1, D] for the same tokens. Gradients reach the drafter alone."""
    config = drafter.config
    with torch.no_grad():
        hidden = features.hidden
        x_BND = target.embed_tokens(blocks.block_ids_BN)
        before = blocks.anchors_BA[..., None] + torch.arange(config.block_size - 1, device=hidden.device)
        before = before.clamp(max=hidden.shape[1] - 1)
        wanted = hidden[torch.arange(len(hidden), device=hidden.device)[:, None, None], before]
    contexts = drafter.contexts(features.taps, rows.positions_NT)
    mask = drafter.training_mask(document_ids(rows.positions_NT), blocks.anchors_BA)
    guesses = drafter(x_BND, blocks.positions_BN, contexts, mask)
    return guesses.unflatten(1, (-1, config.block_size))[:, :, 1:], wanted


def draft_logits(drafter: Drafter, target: CausalLM, rows: PackedRows, blocks: Blocks) -> Tensor:
    """Scores [B, A, K - 1, V] of the blocks' guesses."""
    features = features_of(target, rows, drafter.config.target_layer_ids)
    return target.logits(draft_hidden(drafter, target, rows, blocks, features)[0])


def draft_loss(
    drafter: Drafter, target: CausalLM, rows: PackedRows, blocks: Blocks, features: Features, config: DraftConfig
) -> Tensor:
    """See `DraftConfig`; the mean over the valid labels."""
    guesses, wanted = draft_hidden(drafter, target, rows, blocks, features)
    decay = block_weights(drafter.config.block_size, config.gamma, guesses.device)
    valid = blocks.valid_BAK
    weights = decay.expand(valid.shape)[valid]
    if config.loss == "soft":
        head = dense_weight(target.lm_head, guesses.dtype)
        return linear_divergence(guesses[valid], head, wanted[valid], head, weights_M=weights)
    return weighted_cross_entropy(target.logits(guesses[valid]), blocks.labels_BAK[valid], weights)


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
    taps = drafter.config.target_layer_ids
    features = feature_source(target, rows, taps, config.store_features, config.batch_rows)

    def loss_at(step: int) -> Tensor:
        numbers = rows.batch(config.batch_rows, step, seed)
        batch = rows.select(numbers).to(target.device)
        anchors = sample_anchors(batch, config.anchors, seed * 1_000_003 + step)
        blocks = make_blocks(batch, anchors, block_size, drafter.config.mask_token_id)
        return draft_loss(drafter, target, batch, blocks, features(numbers), config)

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
