"""Stages that make the drafter: pretrain on the original target, finetune on the quantized one, quantize."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twofold.data.conversations import load_conversations, pack
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter, DrafterConfig, DraftShape
from twofold.models.drafter_checkpoint import check_fits, load_drafter, packable_groups, save_drafter
from twofold.ops.kernels import Kernels
from twofold.pipeline.digest import Json
from twofold.pipeline.stage import StageContext
from twofold.pipeline.target_stages import HELDOUT, TRAIN, With, device, load_frozen
from twofold.quant.calibrate import DraftQuantizeConfig, gptq_in_order
from twofold.quant.scheme import QuantScheme
from twofold.training.draft import (
    DraftConfig,
    draft_logits,
    make_blocks,
    sample_anchors,
    teacher_forced_acceptance,
    train_drafter,
)

Metrics = dict[str, Json]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What stage 1 starts from: a drafter's folder, or noise in a shape."""

    drafter: Path | None
    shape: DraftShape | None
    training: DraftConfig

    def __post_init__(self) -> None:
        if (self.drafter is None) == (self.shape is None):
            raise ValueError("give either `drafter`, a folder to start from, or [draft], the shape of a new one")


def load_draft(folder: Path) -> Drafter:
    return load_drafter(folder, kernels=Kernels.auto(device())).to(device())


def pretrain(context: StageContext[With[Start]]) -> Metrics:
    """Stage 1: on the original target and its answers."""
    target, start = load_frozen(context.config.model), context.config.own
    if start.drafter is not None:
        check_fits(start.drafter, target)
        drafter = load_draft(start.drafter)
        drafter.config = dataclasses.replace(drafter.config, num_target_layers=target.config.num_layers)
    else:
        assert start.shape is not None
        config = DrafterConfig.for_target(target.config, start.shape)
        drafter = Drafter.initialized(config, context.seed, Kernels.auto(device())).to(device())
    return _train(drafter, target, context, context.inputs["generate"], start.training)


def finetune(context: StageContext[DraftConfig]) -> Metrics:
    """Stage 2: weights-only warm start, full schedule, on the quantized target and its answers."""
    drafter = load_draft(context.inputs["draft_pretrain"])
    return _train(drafter, load_frozen(context.inputs["pack"]), context, context.inputs["regenerate"], context.config)


def _train(
    drafter: Drafter, target: CausalLM, context: StageContext[Any], answers: Path, config: DraftConfig
) -> Metrics:
    rows = pack(load_conversations(answers / TRAIN), config.row_length)
    heldout = pack(load_conversations(answers / HELDOUT), config.row_length).to(device())

    def validate() -> dict[str, float]:
        return {"accept_length": teacher_forced_acceptance(drafter, target, heldout, config.anchors)}

    history = train_drafter(drafter, target, rows, config, context.seed, context.checkpoints, context.report, validate)
    save_drafter(drafter, context.output)
    return {"curve": [dict(entry) for entry in history]}


def quantize_drafter(context: StageContext[DraftQuantizeConfig]) -> Metrics:
    """GPTQ, calibrated on what the drafter sees: contexts and blocks of the quantized target's answers."""
    config = context.config
    drafter = load_draft(context.inputs["draft_finetune"])
    target = load_frozen(context.inputs["pack"])
    rows = pack(load_conversations(context.inputs["regenerate"] / TRAIN), 512)
    rows = rows.select(rows.batch(config.rows, 0, context.seed)).to(device())
    anchors = sample_anchors(rows, config.anchors, context.seed)
    blocks = make_blocks(rows, anchors, drafter.config.block_size, drafter.config.mask_token_id)
    reports = gptq_in_order(
        drafter,
        packable_groups(drafter.config),
        lambda: draft_logits(drafter, target, rows, blocks),
        QuantScheme(group_size=config.group_size),
        config.damping,
        context.report,
    )
    fallbacks = sorted(name for name, report in reports.items() if report.rounded_to_nearest)
    if len(fallbacks) > config.max_fallbacks * len(reports):
        raise ValueError(
            f"GPTQ fell back to round-to-nearest for {len(fallbacks)} of {len(reports)} layers, {fallbacks[0]} first; "
            "use more calibration rows or more damping"
        )
    drafter.config = dataclasses.replace(drafter.config, sliding_window=config.sliding_window)
    save_drafter(drafter, context.output)
    errors = [report.relative_error for report in reports.values()]
    return {
        "layers": len(reports),
        "fallbacks": list(fallbacks),
        "mean_relative_error": sum(errors) / len(errors),
        "bytes": (context.output / "model.safetensors").stat().st_size,
    }
