"""Stages that measure: evaluate (quality and acceptance), bench (latency), report."""

import copy
import dataclasses
import json
import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

from twofold import __version__
from twofold.data.conversations import Conversation, load_conversations, pack
from twofold.evaluation.acceptance import EvaluateConfig, check_lossless, measure_acceptance
from twofold.evaluation.fidelity import fidelity
from twofold.evaluation.gates import Gate
from twofold.evaluation.latency import BenchConfig, Variant, measure_latency
from twofold.models.drafter import Drafter
from twofold.ops.sampling import Sampling
from twofold.pipeline.artifact import read_artifact
from twofold.pipeline.digest import Json, plain
from twofold.pipeline.models import decode_precision, load_draft, load_frozen
from twofold.pipeline.recipe import Recipe
from twofold.pipeline.report import build_report
from twofold.pipeline.stage import StageContext
from twofold.pipeline.target_stages import CATEGORIES, HELDOUT, With

Metrics = dict[str, Json]


def without_window(drafter: Drafter) -> Drafter:
    """The same drafter seeing its whole context."""
    other = copy.deepcopy(drafter)
    other.config = dataclasses.replace(drafter.config, sliding_window=None)
    return other


def evaluate(context: StageContext[With[EvaluateConfig]]) -> Metrics:
    """Fidelity on the teacher's held-out answers; acceptance and losslessness in the decode loop, on their prompts."""
    config = context.config.own
    heldout = load_conversations(context.inputs["generate"] / HELDOUT)
    rows = pack(heldout, 512)
    teacher, precision = load_frozen(context.config.model), decode_precision()
    metrics: Metrics = {
        "teacher": fidelity(teacher, teacher, rows),
        "ptq": fidelity(load_frozen(context.inputs["quantize"]), teacher, rows),
        "qad": fidelity(load_frozen(context.inputs["pack"]), teacher, rows),
    }
    del teacher
    target = load_frozen(context.inputs["pack"], precision)
    prompts = [c.prompt_ids for c in heldout][: config.prompts]
    categories = json.loads((context.inputs["prompts"] / CATEGORIES).read_text())[: config.prompts]
    quantized = load_draft(context.inputs["draft_quantize"], precision)
    drafters = {
        "pretrain": load_draft(context.inputs["draft_pretrain"], precision),
        "finetune": load_draft(context.inputs["draft_finetune"], precision),
        "gptq": without_window(quantized),
        "swa": quantized,
    }
    for name, drafter in drafters.items():
        found, _ = measure_acceptance(
            target, drafter.freeze(), prompts, config.max_tokens, Sampling(), context.report, categories
        )
        metrics[name] = found.figures()
    lossless = check_lossless(
        target,
        quantized,
        prompts[: config.lossless_prompts],
        config.max_tokens,
        (Sampling(), Sampling(temperature=config.temperature, seed=context.seed)),
        context.report,
    )
    return metrics | {"lossless": asdict(lossless)}


def kl_recovery(metrics: Metrics) -> float:
    """Share of the KL that quantization cost which distillation won back: 1 - KL_QAD / KL_PTQ."""
    return 1.0 - metrics["qad"]["kl"] / metrics["ptq"]["kl"]


def quality_gates(recipe: Recipe, metrics: Metrics) -> list[Gate]:
    wanted = recipe.gates
    return [
        Gate(name="kl_recovery", measured=kl_recovery(metrics), threshold=wanted.kl_recovery),
        Gate(name="top1", measured=metrics["qad"]["top1"], threshold=wanted.top1),
        Gate(name="accept_length", measured=metrics["swa"]["accept_length"], threshold=wanted.accept_length),
        Gate(
            name="divergences",
            measured=metrics["lossless"]["divergences"] - metrics["lossless"]["near_ties"],
            threshold=wanted.divergences,
            direction="<=",
        ),
    ]


LEDGER = ("baseline", "+ INT4 target", "+ drafter", "+ INT4 drafter", "+ SWA")


def bench(context: StageContext[With[BenchConfig]]) -> Metrics:
    """The ledger: what each step brings, at three length settings and on held-out prompts as they are ("chat")."""
    config = context.config.own
    heldout = load_conversations(context.inputs["generate"] / HELDOUT)
    precision = decode_precision()
    original, target = (load_frozen(folder, precision) for folder in (context.config.model, context.inputs["pack"]))
    windowed = load_draft(context.inputs["draft_quantize"], precision)
    finetuned = load_draft(context.inputs["draft_finetune"], precision)
    drafters = (None, None, finetuned, without_window(windowed), windowed)
    targets = (original, *(target,) * 4)
    variants = {
        name: Variant(model, None if drafter is None else drafter.freeze())
        for name, model, drafter in zip(LEDGER, targets, drafters, strict=True)
    }
    metrics: Metrics = {}
    chat = [c.prompt_ids for c in heldout][: config.chat_prompts]
    settings = {"chat": (chat, config.chat_tokens)}
    for name, (length, new_tokens) in config.settings().items():
        settings[name] = (long_prompts(heldout, length, config.prompts), new_tokens)
    for name, (prompts, new_tokens) in settings.items():
        measured = measure_latency(variants, prompts, new_tokens, config.runs, context.report)
        metrics[name] = {variant: asdict(latency) for variant, latency in measured.items()}
    return metrics


def long_prompts(conversations: list[Conversation], length: int, count: int) -> list[list[int]]:
    """`count` prompts of exactly `length` tokens: whole conversations one after another, the last a question cut
    on its left, so that the answer follows real text."""
    prompts = []
    for number in range(count):
        last = conversations[number].prompt_ids[-length:]
        before: list[int] = []
        other = number + 1
        while len(before) < length - len(last):
            conversation = conversations[other % len(conversations)]
            before = conversation.prompt_ids + conversation.answer_ids + before
            other += 1
        prompts.append((before + last)[-length:])
    return prompts


def speed_gates(recipe: Recipe, metrics: Metrics) -> list[Gate]:
    """Speculative over plain decoding of the same INT4 target, on held-out prompts."""
    gain = metrics["chat"][LEDGER[1]]["total_ms"] / metrics["chat"][LEDGER[-1]]["total_ms"]
    return [Gate(name="speedup", measured=gain, threshold=recipe.gates.speedup)]


def report(context: StageContext[Any]) -> Metrics:
    """report.json and report.html, from the metrics of all stages."""
    recipe: Recipe = context.config
    found = {name: read_artifact(folder).metrics for name, folder in context.inputs.items()}
    quality, speed = found["evaluate"], found["bench"]
    first, last = LEDGER[0], LEDGER[-1]
    accept = {LEDGER[2]: "finetune", LEDGER[3]: "gptq", LEDGER[4]: "swa"}
    gates = [*quality_gates(recipe, quality), *speed_gates(recipe, speed)]
    data: dict[str, Any] = {
        "name": recipe.name,
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"twofold run {recipe.name}",
        "environment": environment(),
        "recipe": plain(recipe, lambda path: path.name),
        "target": {
            "ptq": quality["ptq"],
            "qad": quality["qad"],
            "teacher": {"ppl": quality["teacher"]["ppl"]},
            "kl_recovery": kl_recovery(quality),
        },
        "drafter": {
            name: {"accept_length": quality[name]["accept_length"]} for name in ("pretrain", "finetune", "gptq", "swa")
        },
        "ledger": [
            {
                "name": name,
                "ms_per_token": speed["chat"][name]["ms_per_token"],
                "speedup": speed["chat"][first]["total_ms"] / speed["chat"][name]["total_ms"],
                "accept_length": speed["chat"][name]["accept_length"] if name in accept else None,
            }
            for name in LEDGER
        ],
        "latency": {
            name: {
                "total_ms": speed[name][last]["total_ms"],
                "ttft_ms": speed[name][last]["ttft_ms"],
                "speedup": speed[name][first]["total_ms"] / speed[name][last]["total_ms"],
            }
            for name in ("short", "medium", "long")
        },
        "lossless": quality["lossless"],
        "gates": [
            {
                "name": gate.name,
                "measured": gate.measured,
                "threshold": gate.threshold,
                "passed": gate.passed,
                "stderr": gate.stderr,
            }
            for gate in gates
        ],
        "curve": [{"step": int(entry["step"]), "kl": entry["kl"]} for entry in found["distill"]["curve"]],
        "acceptance": {"positions": quality["swa"]["positions"], "lengths": quality["swa"]["lengths"]},
    }
    build_report(data, context.output)
    return {"kl_recovery": data["target"]["kl_recovery"], "speedup": data["ledger"][-1]["speedup"]}


def environment() -> dict[str, str]:
    """Where the numbers come from."""
    threads = torch.get_num_threads()
    hardware = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {threads} of {os.cpu_count()} cores"
    )
    return {
        "hardware": f"{hardware} ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})",
        "precision": decode_precision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "twofold": __version__,
    }
