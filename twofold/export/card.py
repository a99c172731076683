"""README.md of an exported folder: what it is, how it was made, how good and fast it is, how it is served."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twofold.export.engines import Engine
from twofold.models.config import ModelConfig
from twofold.models.drafter_config import DrafterConfig


@dataclass(frozen=True, kw_only=True)
class Card:
    """What the folders do not say themselves. `recipe` has the configuration of every stage that they were made by,
    `report` is the content of a run's report.json on them."""

    name: str
    base_model: str
    recipe: Mapping[str, Any] | None = None
    report: Mapping[str, Any] | None = None


def target_card(card: Card, config: ModelConfig, engine: Engine, command: str) -> str:
    lines = [
        *_front(card),
        f"# {card.name}: target",
        "",
        f"{config.num_layers} layers, hidden size {config.hidden_size}, vocabulary {config.vocab_size}; made by "
        f"Twofold from `{card.base_model}`, for {engine.name} ({engine.versions}). Ends with ids "
        f"{list(config.eos_token_ids)}.",
    ]
    return _page(lines, card, engine, command)


def drafter_card(card: Card, config: DrafterConfig, engine: Engine, command: str) -> str:
    window = "none" if config.sliding_window is None else f"{config.sliding_window} positions, not causal"
    lines = [
        *_front(card),
        f"# {card.name}: drafter",
        "",
        f"A DFlash drafter of {config.num_layers} layers for the target beside it, and of no use without: block "
        f"{config.block_size} ({config.block_size - 1} drafted tokens), mask token {config.mask_token_id}, taps after "
        f"layers {list(config.target_layer_ids)}, sliding window: {window}. It is read by {engine.name} "
        f"({engine.versions}).",
    ]
    return _page(lines, card, engine, command)


def _front(card: Card) -> list[str]:
    return ["---", f"base_model: {card.base_model}", "library_name: transformers", "tags: [twofold]", "---", ""]


def _page(lines: list[str], card: Card, engine: Engine, command: str) -> str:
    lines += ["", "## Serve", "", "```", command, "```", "", "## Measured", "", *_measured(card.report)]
    if card.recipe is not None:
        lines += ["", "## Recipe", "", "```json", json.dumps(card.recipe, indent=1), "```"]
    return "\n".join(lines) + "\n"


def _measured(report: Mapping[str, Any] | None) -> list[str]:
    if report is None:
        return ["Nothing yet: the run has not come to a report on these artifacts."]
    lines = ["By Twofold itself, on the machine that the run was made on:", ""]
    if environment := report.get("environment"):
        lines += [", ".join(str(value) for value in environment.values()) + ".", ""]
    lines += ["| target | KL to the original | top-1 agreement | perplexity |", "|---|---|---|---|"]
    for key, name in (("ptq", "rounded"), ("qad", "healed")):
        figures = report["target"][key]
        lines.append(f"| {name} | {_number(figures, 'kl')} | {_number(figures, 'top1')} | {_number(figures, 'ppl')} |")
    lines += ["", "| step | ms per token | speed-up | accept length |", "|---|---|---|---|"]
    for row in report["ledger"]:
        figures = [_number(row, key) for key in ("ms_per_token", "speedup", "accept_length")]
        lines.append(f"| {' | '.join([row['name'], *figures])} |")
    return lines


def _number(figures: Mapping[str, Any], key: str) -> str:
    value = figures.get(key)
    return "" if value is None else f"{value:.4g}"
