"""Quantization-aware distillation: the quantized model learns to be the original again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from twofold.data.conversations import PackedRows
from twofold.data.features import feature_source
from twofold.models.causal_lm import CausalLM
from twofold.training.loop import Checkpoints, History, OptimizerConfig, Report, train
from twofold.training.losses import linear_kl


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Forward KL to the teacher at temperature 1, straight-through estimator, scales frozen (arXiv:2607.04244).

    `tokens`: which positions count, all of a conversation or the answers only.
    """

    optimizer: OptimizerConfig
    batch_rows: int = 4
    row_length: int = 512
    tokens: Literal["all", "answer"] = "all"
    vocab_chunk: int = 32_768
    store_features: bool = False  # the teacher reads every row once, not once an epoch; see `data.features`


def trainable(student: CausalLM) -> dict[str, nn.Parameter]:
    """What distillation changes: the layers. Embedding, head and final norm stay the teacher's."""
    return {name: p for name, p in student.named_parameters() if name.startswith("layers.")}


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
    """Trains `student`, whose linear layers are fake-quantized, in place. Returns its validations."""
    parameters = trainable(student)
    student.requires_grad_(False)
    for parameter in parameters.values():
        parameter.requires_grad_(True)

    teach = feature_source(teacher, rows, (), config.store_features, config.batch_rows)

    def loss_at(step: int) -> Tensor:
        numbers = rows.batch(config.batch_rows, step, seed)
        batch = rows.select(numbers).to(student.device)
        counted = batch.answer_NT if config.tokens == "answer" else batch.used_NT
        wanted = teach(numbers).hidden
        hidden, _ = student(batch.token_ids_NT, batch.positions_NT)
        return linear_kl(
            hidden[counted],
            student.lm_head.weight,
            wanted[counted],
            teacher.lm_head.weight,
            config.vocab_chunk,
        )

    history = train(parameters, loss_at, config.optimizer, checkpoints, report, validate)
    student.requires_grad_(False)
    return history
