"""Training a DFlash drafter against a frozen target. B rows, T tokens, A anchors a row, K block size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from twofold.data.conversations import PackedRows
from twofold.data.features import Features, feature_source
from twofold.models.causal_lm import CausalLM
from twofold.models.draft_quantization import fake_quantize_drafter
from twofold.models.drafter import Drafter
from twofold.models.layers import dense_weight
from twofold.ops.documents import most_documents
from twofold.quant.linear import pack_linears
from twofold.quant.scheme import QuantScheme
from twofold.training.blocks import Blocks, draft_hidden, make_blocks, sample_anchors
from twofold.training.divergence import linear_cross_entropy, linear_divergence
from twofold.training.loop import Checkpoints, History, Report, train
from twofold.training.losses import HARD, DraftLoss, block_weights, dpace_weights
from twofold.training.optimizer import OptimizerConfig
from twofold.training.precision import Precision, autocast, dtype_of
from twofold.training.step import Inputs


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The defaults are the paper's loss (arXiv:2607.04244): hard labels, weights that decay along the block.

    `positions`: how the guesses of a block are weighted: "decay" by exp(-(k - 1) / gamma), "dpace" by what each adds
    to the expected accept length at the moment (see `dpace_weights`). `precision`: of products and activations; weights
    and optimizer are float32. `quantize`: the layers are trained as they will be packed, rounded on their searched
    grids with a straight-through estimator; "learned" `scales` have a learning rate of their own, a tenth of the
    weights' unless given, and no weight decay. `joined`: every so many rows are one document each (0: none): a drafter
    guesses badly after contexts longer than those it learned from. `rows_at_once`: of a step's rows, whose activations
    are in memory together (0: of all); the step is the same.
    """

    optimizer: OptimizerConfig
    loss: DraftLoss = HARD
    positions: Literal["decay", "dpace"] = "decay"
    gamma: float = 4.0
    alpha: float = 0.5
    batch_rows: int = 4
    rows_at_once: int = 0
    row_length: int = 512
    anchors: int = 24
    joined: int = 0
    heldout_rows: int = 16  # of the held-out answers, that validation reads
    store_features: bool = False  # the target reads every row once, not once an epoch; see `data.features`
    precision: Precision = "float32"
    vocab_chunk: int = 32_768
    quantize: QuantScheme | None = None
    scales: Literal["frozen", "learned"] = "frozen"
    scale_learning_rate: float | None = None

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise ValueError(f"gamma = {self.gamma} is no decay; use a positive number")
        if min(self.batch_rows, self.anchors, self.heldout_rows) < 1 or self.row_length < 2:
            raise ValueError(
                f"batch_rows = {self.batch_rows}, anchors = {self.anchors}, heldout_rows = {self.heldout_rows}, "
                f"row_length = {self.row_length}: a step needs one or more, and rows of two tokens"
            )
        if self.rows_at_once < 0:
            raise ValueError(f"rows_at_once = {self.rows_at_once}: so many rows of a step in memory; 0 is all")
        if self.joined < 0:
            raise ValueError(f"joined = {self.joined}: every so many rows are one document; 0 is none")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha = {self.alpha} is not in [0, 1]")
        if self.scales == "learned" and self.quantize is None:
            raise ValueError('scales = "learned" is for a quantized training; set quantize, or leave it out')
        if self.scale_learning_rate is not None and not self.scale_learning_rate > 0:
            raise ValueError(f"scale_learning_rate = {self.scale_learning_rate} learns nothing; use a positive number")
        if self.scale_learning_rate is not None and self.scales == "frozen":
            raise ValueError('scale_learning_rate is for scales = "learned"; set that or leave it out')


def draft_loss(
    drafter: Drafter,
    target: CausalLM,
    rows: PackedRows,
    blocks: Blocks,
    features: Features,
    config: DraftConfig,
    head_VD: Tensor,
    total: Tensor | None = None,
) -> Tensor:
    """sum_m w_m l_m / sum_m w_m over the valid guesses, l the mixture of `DraftLoss` and w the decay; with D-PACE's
    weights the sum is divided by the number of blocks; where these are a part of a step's, by the `total_weight` of
    all. `head_VD` is the target's head, whose dtype the products have.
    In a captured training all guesses are taken, with weight 0 where they are not valid.
    """
    with autocast(config.precision, target.device):
        guesses, wanted = draft_hidden(drafter, target, rows, blocks, features)
    valid = blocks.valid_BAK
    captured = config.optimizer.captured  # else once: the host waits for how many there are
    places_M = slice(None) if captured else valid.flatten().nonzero().flatten()

    def chosen(x: Tensor) -> Tensor:
        return x.flatten(0, 2)[places_M]

    guesses_MD, wanted_MD = chosen(guesses).to(head_VD.dtype), chosen(wanted).to(head_VD.dtype)
    labels_M, scorer_VD = chosen(blocks.labels_BAK), head_VD
    if drafter.markov_head is not None:  # [h; e] [W; U]^T: the bias is more columns of the product
        before_MR = drafter.markov_head.before(chosen(blocks.previous())).to(head_VD.dtype)
        guesses_MD = torch.cat((guesses_MD, before_MR), dim=1)
        scorer_VD = torch.cat((head_VD, drafter.markov_head.after.weight.to(head_VD.dtype)), dim=1)

    def dpace(log_q_M: Tensor) -> Tensor:
        log_q = torch.zeros(valid.numel(), device=guesses.device)
        log_q[places_M] = log_q_M.float()
        return chosen(dpace_weights(log_q.view(valid.shape), valid, config.alpha))

    weights = dpace if config.positions == "dpace" else chosen(_decayed(valid, config))
    total = total_weight(valid, config) if total is None else total
    given: dict[str, Any] = {"chunk": config.vocab_chunk, "weights_M": weights, "total": total}

    def to_target(kind: Literal["forward_kl", "total_variation"]) -> Tensor:
        return linear_divergence(guesses_MD, scorer_VD, wanted_MD, head_VD, kind=kind, labels_M=labels_M, **given)

    terms = []
    if config.loss.hard:
        terms.append(config.loss.hard * linear_cross_entropy(guesses_MD, scorer_VD, labels_M, **given))
    if config.loss.soft:
        terms.append(config.loss.soft * to_target("forward_kl"))
    if config.loss.total_variation:
        terms.append(config.loss.total_variation * to_target("total_variation"))
    return torch.stack(terms).sum()


def total_weight(valid_BAK: Tensor, config: DraftConfig) -> Tensor:
    """What the weighted sum over a step's guesses is divided by."""
    if config.positions == "dpace":
        return valid_BAK[..., 0].sum().clamp(min=1)
    return _decayed(valid_BAK, config).sum().clamp(min=1)  # the first guess of a block has weight 1


def _decayed(valid_BAK: Tensor, config: DraftConfig) -> Tensor:
    return block_weights(valid_BAK.shape[-1] + 1, config.gamma, valid_BAK.device) * valid_BAK


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
    """Trains `drafter` in place on the answers in `rows`; the full schedule runs whatever the weights started from.

    With `quantize` its layers are packed in the end: the weights that the last validation saw, bit for bit.
    """
    target.requires_grad_(False)
    rows = rows.joined(config.joined)
    if config.quantize is not None:
        fake_quantize_drafter(drafter, config.quantize, config.scales == "learned")
    drafter.requires_grad_(True)
    block_size = drafter.config.block_size
    taps = drafter.config.target_layer_ids
    most = most_documents(rows.positions_NT, config.batch_rows) if config.optimizer.captured else None
    with autocast(config.precision, target.device):
        features = feature_source(target, rows, taps, config.store_features, config.batch_rows, most)
    head_VD = dense_weight(target.lm_head, dtype_of(config.precision))

    def inputs_at(step: int) -> Inputs:
        numbers = rows.batch(config.batch_rows, step, seed)
        batch = rows.select(numbers)
        anchors = sample_anchors(batch, config.anchors, seed * 1_000_003 + step)
        return numbers, anchors, *vars(batch).values()

    def loss_of(numbers: Tensor, anchors: Tensor, *fields: Tensor) -> Tensor:
        """The value is that of all rows; what is left to differentiate is of the last that are in memory."""
        whole = make_blocks(PackedRows(*fields), anchors, block_size, drafter.config.mask_token_id)
        total, value = total_weight(whole.valid_BAK, config), torch.zeros((), device=anchors.device)
        some = config.rows_at_once or len(anchors)
        for start in range(0, len(anchors), some):
            own = slice(start, start + some)
            batch, blocks = PackedRows(*(x[own] for x in fields)), Blocks(*(x[own] for x in whole))
            with autocast(config.precision, target.device):
                found = features(numbers[own], batch)
            loss = draft_loss(drafter, target, batch, blocks, found, config, head_VD, total)
            if start + some < len(anchors):
                loss.backward()
                loss = loss.detach()
            value = value + loss
        return value

    parameters = {name: p for name, p in drafter.named_parameters() if not name.startswith("draft_head.")}
    scale_rate, rate = config.scale_learning_rate, config.optimizer.learning_rate
    multiple = 0.1 if scale_rate is None else scale_rate / rate
    multiples = {name: multiple for name in parameters if name.endswith(".scale")}
    history = train(
        parameters, inputs_at, loss_of, config.optimizer, checkpoints, report, validate, multiples=multiples
    )
    drafter.requires_grad_(False)
    pack_linears(drafter, cache_dtype=drafter.norm.weight.dtype)
    return history
