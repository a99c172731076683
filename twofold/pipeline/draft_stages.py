"""Stages that make the drafter: pretrain on the original target, finetune on the quantized one, quantize."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from twofold.data.conversations import load_conversations, pack
from twofold.models import draft_quantization
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import read_config
from twofold.models.draft_head import count_tokens, make_draft_head
from twofold.models.draft_quantization import DraftQuantizeConfig
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import check_fits, check_sizes, save_drafter
from twofold.models.drafter_config import DrafterConfig, DraftShape
from twofold.models.drafter_start import start_from_target
from twofold.ops.kernels import Kernels
from twofold.pipeline.digest import Json
from twofold.pipeline.models import device, load_draft, load_frozen
from twofold.pipeline.stage import StageContext
from twofold.pipeline.target_stages import HELDOUT, TRAIN, With
from twofold.training.blocks import calibration_drafts, teacher_forced_acceptance
from twofold.training.draft import DraftConfig, train_drafter
from twofold.training.precision import autocast

Metrics = dict[str, Json]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What stage 1 starts from: a drafter's folder, or a shape, with the target's weights where they have it."""

    drafter: Path | None
    shape: DraftShape | None
    training: DraftConfig


def check_start(model: Path, drafter: Path | None, shape: DraftShape | None) -> None:
    """ValueError unless, by the configs, the drafter in a folder, or of a shape, is one of the target in `model`."""
    target = read_config(model)
    if drafter is not None:
        check_sizes(drafter, target)
    if shape is not None:
        try:
            DrafterConfig.for_target(target, shape)
        except ValueError as error:
            raise ValueError(f"[draft] {error}; correct the recipe") from None


def pretrain(context: StageContext[With[Start]]) -> Metrics:
    """Stage 1: on the original target and its answers."""
    start = context.config.own
    target = load_frozen(context.config.model, start.training.precision)
    metrics: Metrics = {}
    if start.drafter is not None:
        check_fits(start.drafter, target)
        drafter = load_draft(start.drafter)
        drafter.config = replace(drafter.config, num_target_layers=target.config.num_layers)
    else:
        assert start.shape is not None
        config = DrafterConfig.for_target(target.config, start.shape)
        drafter = Drafter.initialized(config, context.seed, Kernels.auto(device())).to(device())
        metrics["weights_from_target"] = len(start_from_target(drafter, target))
    return metrics | _train(drafter, target, context, context.inputs["generate"], start.training)


def finetune(context: StageContext[DraftConfig]) -> Metrics:
    """Stage 2: weights-only warm start, full schedule, on the quantized target and its answers."""
    drafter = load_draft(context.inputs["draft_pretrain"])
    target = load_frozen(context.inputs["pack"], context.config.precision)
    return _train(drafter, target, context, context.inputs["regenerate"], context.config)


def _train(
    drafter: Drafter, target: CausalLM, context: StageContext[Any], answers: Path, config: DraftConfig
) -> Metrics:
    rows = pack(load_conversations(answers / TRAIN), config.row_length)
    heldout = pack(load_conversations(answers / HELDOUT), config.row_length)
    heldout = heldout.select(torch.arange(min(config.heldout_rows, len(heldout))))

    def validate() -> dict[str, float]:
        with autocast(config.precision, target.device):
            return {"accept_length": teacher_forced_acceptance(drafter, target, heldout).accept_length}

    history = train_drafter(drafter, target, rows, config, context.seed, context.checkpoints, context.report, validate)
    save_drafter(drafter, context.output)
    return {"curve": [dict(entry) for entry in history]}


def quantize_drafter(context: StageContext[DraftQuantizeConfig]) -> Metrics:
    """Quantizes, calibrated on what the drafter sees: contexts and blocks of the quantized target's answers.

    `layers.json` says how each layer came out. A drafter that finetuning left quantized only gets its window and head.
    """
    config = context.config
    drafter = load_draft(context.inputs["draft_finetune"])
    target = load_frozen(context.inputs["pack"])
    answered = load_conversations(context.inputs["regenerate"] / TRAIN)
    if config.head is not None:  # before any work, since it may not fit
        counts_V = count_tokens((c.answer_ids for c in answered), target.config.vocab_size)
        drafter.draft_head = make_draft_head(config.head, target.lm_head, counts_V)
    metrics: Metrics = {"fallbacks": []}
    if config.method != "trained":
        rows = pack(answered, 512)
        rows = rows.select(rows.batch(config.rows, 0, context.seed)).to(device())
        run = calibration_drafts(drafter, target, rows, config.anchors, context.seed)
        reports = draft_quantization.quantize_drafter(drafter, run, config, context.report)
        (context.output / "layers.json").write_text(json.dumps([asdict(layer) for layer in reports], indent=1))
        errors = [layer.output_error for layer in reports]
        metrics = {
            "layers": len(reports),
            "fallbacks": [layer.name for layer in reports if layer.fallback],
            "mean_relative_error": sum(errors) / len(errors),
        }
    if config.sliding_window is not None:
        drafter.config = replace(drafter.config, sliding_window=config.sliding_window)
    save_drafter(drafter, context.output)
    return metrics | {"bytes": sum(path.stat().st_size for path in context.output.glob("*.safetensors"))}
