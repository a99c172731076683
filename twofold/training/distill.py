"""Quantization-aware distillation: the quantized model learns to be the original again.

M counted positions, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twofold.data.conversations import PackedRows
from twofold.data.features import feature_source
from twofold.data.teacher import TopK, top_k_of
from twofold.models.causal_lm import CausalLM
from twofold.models.layers import dense_weight
from twofold.ops.documents import most_documents
from twofold.quant.linear import FakeQuantLinear
from twofold.training.divergence import Divergence, linear_divergence, top_k_divergence
from twofold.training.loop import Checkpoints, History, Report, train
from twofold.training.optimizer import OptimizerConfig
from twofold.training.precision import Precision, autocast
from twofold.training.step import Inputs


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
        if self.batch_rows < 1 or self.row_length < 2:
            raise ValueError(
                f"batch_rows = {self.batch_rows}, row_length = {self.row_length}: a step needs a row, of two tokens"
            )
        if self.teacher == "topk" and self.divergence != "forward_kl":
            raise ValueError(
                f'divergence = "{self.divergence}" needs all of the teacher\'s probabilities; '
                'set teacher to "online" or "stored"'
            )
        if self.scale_learning_rate is not None and not self.scale_learning_rate > 0:
            raise ValueError(f"scale_learning_rate = {self.scale_learning_rate} learns nothing; use a positive number")
        if self.scale_learning_rate is not None and self.scales == "frozen":
            raise ValueError('scale_learning_rate is for scales = "learned"; set that or leave it out')
        if not (self.head or self.layers):
            raise ValueError("layers = false leaves nothing to learn; set head = true too, or leave it out")
        if self.best and not self.optimizer.validate_every:
            raise ValueError("best = true chooses among validations; set optimizer.validate_every")
        if self.activation_checkpointing and self.optimizer.captured:
            raise ValueError("activation_checkpointing = true is in no CUDA graph; set one of it and captured to false")


def _before_answers(rows: PackedRows) -> Tensor:
    """[N, T]: the positions that predict an answer's tokens, one before each."""
    return F.pad(rows.answer_NT[:, 1:] & (rows.positions_NT[:, 1:] > 0), (0, 1))


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
    captured = config.optimizer.captured
    most = most_documents(rows.positions_NT, config.batch_rows) if captured else None
    kept = top_k_of(teacher, rows, config.top_k, config.batch_rows) if config.teacher == "topk" else None
    with autocast(config.precision, teacher.device):  # stored ones are made here
        features = feature_source(teacher, rows, (), config.teacher == "stored", config.batch_rows, most)
    loss_to = _loss_to(teacher, config)
    dtype = _head_dtype(student, config)
    frozen_head = None if config.head else dense_weight(student.lm_head, dtype)

    def inputs_at(step: int) -> Inputs:
        numbers = rows.batch(config.batch_rows, step, seed)
        told = () if kept is None else vars(kept.select(numbers)).values()
        return numbers, *vars(rows.select(numbers)).values(), *told

    def loss_of(numbers: Tensor, *tensors: Tensor) -> Tensor:
        batch, told = PackedRows(*tensors[:4]), tensors[4:]
        with autocast(config.precision, student.device):
            hidden, _ = student(batch.token_ids_NT, batch.positions_NT, most_documents=most)
            told = told or (features(numbers, batch).hidden,)
        head_VD = _head(student, dtype) if frozen_head is None else frozen_head
        counted_M = (_before_answers(batch) if config.tokens == "answer" else batch.used_NT).flatten()
        # captured, all positions are taken, with weight 0 if they do not count: the host would wait for how many do
        places, weights_M = (slice(None), counted_M) if captured else (counted_M, None)
        student_MD, *told_MX = (x.flatten(0, 1)[places] for x in (hidden, *told))
        return loss_to(student_MD.to(dtype), head_VD, told_MX, weights_M)

    def blame(step: int) -> str:
        batch = rows.select(rows.batch(config.batch_rows, step, seed)).to(student.device)
        return _first_broken(teacher, "the teacher's ", batch) or _first_broken(student, "", batch) or "the logits"

    history = train(
        parameters,
        inputs_at,
        loss_of,
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
    teacher: CausalLM, config: DistillConfig
) -> Callable[[Tensor, Tensor, Sequence[Tensor], Tensor | None], Tensor]:
    """(the student's hidden states [M, D], its head [V, D], the teacher's hidden states [M, D], or its top k, weights
    of the positions [M]) -> the loss."""
    chunk = config.vocab_chunk
    if config.teacher == "topk":

        def to_kept(student_MD: Tensor, head_VD: Tensor, told: Sequence[Tensor], weights_M: Tensor | None) -> Tensor:
            return top_k_divergence(student_MD, head_VD, TopK(*told), chunk=chunk, weights_M=weights_M)

        return to_kept

    teacher_head_VD = dense_weight(teacher.lm_head, _head_dtype(teacher, config))

    def to_all(student_MD: Tensor, head_VD: Tensor, told: Sequence[Tensor], weights_M: Tensor | None) -> Tensor:
        teacher_MD, kind = told[0].to(teacher_head_VD.dtype), config.divergence
        return linear_divergence(
            student_MD, head_VD, teacher_MD, teacher_head_VD, kind=kind, chunk=chunk, weights_M=weights_M
        )

    return to_all


@torch.no_grad()
def _first_broken(model: CausalLM, whose: str, batch: PackedRows) -> str | None:
    """The first layer whose output on the batch is not finite."""
    _, taps = model(batch.token_ids_NT, batch.positions_NT, taps=range(model.config.num_layers))
    return next((f"{whose}layers.{i}" for i, tap in enumerate(taps) if not tap.isfinite().all()), None)
