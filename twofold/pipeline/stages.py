"""The stages of a run, in order. Adding one: write its function, add an entry here."""

from collections.abc import Callable
from typing import Any

from twofold.pipeline.draft_stages import Start, check_start, finetune, pretrain, quantize_drafter
from twofold.pipeline.measure_stages import bench, evaluate, quality_gates, report, speed_gates
from twofold.pipeline.recipe import Recipe
from twofold.pipeline.stage import Stage
from twofold.pipeline.target_stages import (
    With,
    generate_answers,
    heal,
    pack_target,
    prompts,
    quantize,
    regenerate_answers,
)


def _with_model(select: Callable[[Recipe], Any]) -> Callable[[Recipe], With[Any]]:
    return lambda recipe: With(model=recipe.model, own=select(recipe))


def _start(recipe: Recipe) -> Start:
    """ValueError where the drafter is none of this target, before anything is made."""
    check_start(recipe.model, recipe.drafter, recipe.draft)
    return Start(drafter=recipe.drafter, shape=recipe.draft, training=recipe.draft_pretrain)


STAGES: tuple[Stage[Any], ...] = (
    Stage(name="prompts", version=2, config=_with_model(lambda r: r.prompts), run=prompts),
    Stage(
        name="generate",
        version=1,
        config=_with_model(lambda r: r.generate),
        run=generate_answers,
        parents=("prompts",),
        unit="answers",
    ),
    Stage(
        name="quantize",
        version=2,
        config=_with_model(lambda r: r.quantize),
        run=quantize,
        parents=("generate",),
        unit="layers",
    ),
    Stage(
        name="distill",
        version=2,
        config=_with_model(lambda r: r.distill),
        run=heal,
        parents=("generate", "quantize"),
    ),
    Stage(name="pack", version=1, config=lambda r: r.model, run=pack_target, parents=("quantize", "distill")),
    Stage(
        name="regenerate",
        version=1,
        config=lambda r: r.regenerate,
        run=regenerate_answers,
        parents=("prompts", "pack"),
        unit="answers",
    ),
    Stage(name="draft_pretrain", version=3, config=_with_model(_start), run=pretrain, parents=("generate",)),
    Stage(
        name="draft_finetune",
        version=2,
        config=lambda r: r.draft_finetune,
        run=finetune,
        parents=("pack", "regenerate", "draft_pretrain"),
    ),
    Stage(
        name="draft_quantize",
        version=3,
        config=lambda r: r.draft_quantize,
        run=quantize_drafter,
        parents=("pack", "regenerate", "draft_finetune"),
        unit="groups",
    ),
    Stage(
        name="evaluate",
        version=3,
        config=_with_model(lambda r: r.evaluate),
        run=evaluate,
        parents=("prompts", "generate", "quantize", "pack", "draft_pretrain", "draft_finetune", "draft_quantize"),
        gates=quality_gates,
        unit="answers",
    ),
    Stage(
        name="bench",
        version=1,
        config=_with_model(lambda r: r.bench),
        run=bench,
        parents=("generate", "pack", "draft_finetune", "draft_quantize"),
        gates=speed_gates,
        unit="rounds",
    ),
    Stage(
        name="report",
        version=1,
        config=lambda r: r,
        run=report,
        parents=("distill", "evaluate", "bench"),
        publish=("report.json", "report.html"),
    ),
)
