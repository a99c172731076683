"""Quantization-aware distillation: the quantized model learns to be the original again.

M counted positions, D hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from twofold.data.conversations import PackedRows
from twofold.data.features import feature_source
from twofold.data.teacher import top_k_of
from twofold.models.causal_lm import CausalLM
from twofold.models.layers import dense_weight
from twofold.quant.linear import FakeQuantLinear
from twofold.training.divergence import Divergence, linear_divergence, top_k_divergence
from twofold.training.loop import Checkpoints, History, Report, train
from twofold.training.optimizer import OptimizerConfig
from twofold.training.precision import Precision, autocast


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """The defaults are the paper's (arXiv:2607.04244): forward KL to the teacher at temperature 1, straight-through
    estimator, scales frozen.

    `text`: whose answers are learned from. `tokens`: which positions count, all of a conversation or the answers
    only. `teacher`: asked at every step, or once for each row, of which then its hidden states are "stored" (4 D bytes
    a token in float32), or its `top_k` largest probabilities and their tail (6 top_k + 2 bytes, see
    `top_k_divergence`). `scales`: "learned" ones have a learning rate of their own, a tenth of the weights' unless
    given, and no weight decay. `head`: the head learns too, where it is quantized; without `layers` it learns alone, in
    steps that cost a quarter. `best`: the weights kept are those of the validation with the least KL; without it the
    last ones. `precision`: of products and activations, the student's and the teacher's; masters stay float32.
    """

    optimizer: OptimizerConfig
    batch_rows: int = 4
    row_length: int = 512
    text: Literal["teacher", "student"] = "teacher"
    tokens: Literal["all", "answer"] = "all"
    divergence: Divergence = "forward_kl"
    teacher: Literal["online", "stored", "topk"] = "online"
    top_k: int = 64
    scales: Literal["frozen", "learned"] = "frozen"
    scale_learning_rate: float | None = None
    head: bool = False
    layers: bool = True
    best: bool = False
    activation_checkpointing: bool = False  # least memory: a layer's inner activations are computed again
    vocab_chunk: int = 32_768
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if self.teacher == "topk" and self.divergence != "forward_kl":
            raise ValueError(
                f'divergence = "{self.divergence}" needs all of the teacher\'s probabilities; '
                'set teacher to "online" or "stored"'
            )
        if self.scale_learning_rate is not None and self.scales == "frozen":
            raise ValueError('scale_learning_rate is for scales = "learned"; set that or leave it out')
        if not (self.head or self.layers):
            raise ValueError("layers = false leaves nothing to learn; set head = true too, or leave it out")
        if self.best and not self.optimizer.validate_every:
            raise ValueError("best = true chooses among validations; set optimizer.validate_every")


def trainable(student: CausalLM, head: bool = False, layers: bool = True) -> dict[str, nn.Parameter]:
    """What distillation changes: layers and head, as asked. Embedding and final norm stay the teacher's."""
    prefixes = ("layers.",) * layers + ("lm_head.",) * head
    return {name: p for name, p in student.named_parameters() if name.startswith(prefixes)}


def distill(
    student: CausalLM,
    teacher: CausalLM,
    rows: PackedRows,
    config: DistillConfig,
    seed: int,
    checkpoints: Checkpoints,
    report: Report,
    validate: Callable[[], dict[str, float]],
) -> History:
    """Trains `student`, whose linear layers are fake-quantized, in place. Returns its validations.

    ValueError when the head is to learn and is not fake-quantized.
    """
    if config.head and not isinstance(student.lm_head, FakeQuantLinear):
        raise ValueError("head = true trains a quantized head, and this one is not; quantize it or set head to false")
    parameters = trainable(student, config.head, config.layers)
    scales = [name for name in parameters if name.endswith(".scale")]
    assert bool(scales) == (config.scales == "learned"), "the student's scales are not of the config's kind"
    rate = config.optimizer.learning_rate
    multiple = 0.1 if config.scale_learning_rate is None else config.scale_learning_rate / rate
    student.requires_grad_(False)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    student.checkpointing = config.activation_checkpointing
    loss_of = _loss_to(teacher, rows, config)
    dtype = _head_dtype(student, config)
    frozen_head = None if config.head else dense_weight(student.lm_head, dtype)

    def loss_at(step: int) -> Tensor:
        numbers = rows.batch(config.batch_rows, step, seed)
        batch = rows.select(numbers).to(student.device)
        counted = batch.answer_NT if config.tokens == "answer" else batch.used_NT
        with autocast(config.precision, student.device):
            hidden, _ = student(batch.token_ids_NT, batch.positions_NT)
        head_VD = _head(student, dtype) if frozen_head is None else frozen_head
        return loss_of(hidden[counted].to(dtype), head_VD, numbers, counted)

    def blame(step: int) -> str:
        batch = rows.select(rows.batch(config.batch_rows, step, seed)).to(student.device)
        return _first_broken(teacher, "the teacher's ", batch) or _first_broken(student, "", batch) or "the logits"

    history = train(
        parameters,
        loss_at,
        config.optimizer,
        checkpoints,
        report,
        validate,
        multiples=dict.fromkeys(scales, multiple),
        keep_least="kl" if config.best else None,
        blame=blame,
    )
    student.requires_grad_(False)
    student.checkpointing = False
    return history


def _head_dtype(model: CausalLM, config: DistillConfig) -> torch.dtype:
    """In which the hidden states are multiplied with the head."""
    return torch.bfloat16 if config.precision == "bfloat16" else model.norm.weight.dtype


def _head(student: CausalLM, dtype: torch.dtype) -> Tensor:
    assert isinstance(student.lm_head, FakeQuantLinear)
    return student.lm_head.dense_weight(dtype)


def _loss_to(
    teacher: CausalLM, rows: PackedRows, config: DistillConfig
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """(the student's hidden states [M, D], its head [V, D], numbers of the rows, counted positions) -> the loss."""
    if config.teacher == "topk":
        kept = top_k_of(teacher, rows, config.top_k, config.batch_rows)

        def to_kept(student_MD: Tensor, head_VD: Tensor, numbers: Tensor, counted: Tensor) -> Tensor:
            wanted = kept.select(numbers).to(student_MD.device).select(counted)
            return top_k_divergence(student_MD, head_VD, wanted, chunk=config.vocab_chunk)

        return to_kept

    with autocast(config.precision, teacher.device):
        features = feature_source(teacher, rows, (), config.teacher == "stored", config.batch_rows)
    teacher_head_VD = dense_weight(teacher.lm_head, _head_dtype(teacher, config))

    def to_all(student_MD: Tensor, head_VD: Tensor, numbers: Tensor, counted: Tensor) -> Tensor:
        with autocast(config.precision, teacher.device):
            hidden = features(numbers).hidden
        return linear_divergence(
            student_MD,
            head_VD,
            hidden[counted].to(teacher_head_VD.dtype),
            teacher_head_VD,
            kind=config.divergence,
            chunk=config.vocab_chunk,
        )

    return to_all


@torch.no_grad()
def _first_broken(model: CausalLM, whose: str, batch: PackedRows) -> str | None:
    """The first layer whose output on the batch is not finite."""
    _, taps = model(batch.token_ids_NT, batch.positions_NT, taps=range(model.config.num_layers))
    return next((f"{whose}layers.{i}" for i, tap in enumerate(taps) if not tap.isfinite().all()), None)
