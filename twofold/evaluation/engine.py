"""The engine's speed at a model's shape: random weights, forced acceptance, every step of the ledger in one process.

What is measured is the engine, not a model: weights are random, so no draft would be accepted, and the number accepted
in each cycle is drawn beforehand around a given mean. Everything else is done as it is with a real model.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twofold.decoding.graphs import CapturedCycle
from twofold.decoding.step import Accept, agreed
from twofold.evaluation.roofline import cycle_work, variants
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.models.shapes import Shape
from twofold.ops.kernels import Kernels
from twofold.ops.sampling import Sampling

LABEL = "random weights, forced acceptance"
LOSSLESS = "+ INT4 head"  # the last row whose answers are the INT4 target's; its figures are the result's
CONTEXT = 2048  # of the cycles at several batch sizes
CYCLES = 8  # timed together


@dataclass(frozen=True, kw_only=True)
class EngineBench:
    """Settings are (prompt tokens, new tokens), one sequence; `contexts` and `batches` are for single cycles."""

    accept_length: float
    settings: tuple[tuple[int, int], ...] = ((64, 128), (2048, 256), (8192, 256))
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = ()
    warm_ups: int = 5
    runs: int = 50

    def __post_init__(self) -> None:
        if not self.settings or min(min(pair) for pair in self.settings) < 2:
            raise ValueError("a setting is PROMPT/NEW, both at least 2 tokens")
        if min((*self.batches, *self.contexts, self.runs)) < 1 or self.warm_ups < 0:
            raise ValueError("batches, contexts and runs are at least 1")


def accepted_counts(accept_length: float, block_size: int, cycles: int, seed: int = 0) -> Tensor:
    """num_accepted [cycles] of a drafter whose guesses are right with one probability p, up to block_size - 1; p is
    such that the mean is accept_length - 1. Drawn at evenly spread quantiles and shuffled: the mean is met closely.

    ValueError unless 1 <= accept_length <= block_size.
    """
    if not 1 <= accept_length <= block_size:
        raise ValueError(f"a block of {block_size} gains 1 to {block_size} tokens a cycle, not {accept_length}")
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        mean = sum(p**k for k in range(1, block_size))
        low, high = (p, high) if mean < accept_length - 1 else (low, p)
    below = 1.0 - p ** torch.arange(1, block_size, dtype=torch.float64)  # P(num_accepted < k)
    quantiles = (torch.arange(cycles, dtype=torch.float64) + 0.5) / cycles
    counts = torch.bucketize(quantiles, below, right=True)
    return counts[torch.randperm(cycles, generator=torch.Generator().manual_seed(seed))]


class ForcedAcceptance:
    """In place of comparing: the next of the counts, the same for all rows, all of it on the device."""

    def __init__(self, counts: Tensor, device: torch.device) -> None:
        self.counts = counts.to(device)
        self.cycle = torch.zeros(1, dtype=torch.long, device=device)

    def __call__(self, block_BN: Tensor, chosen_BN: Tensor) -> Tensor:
        count = self.counts[self.cycle]
        self.cycle.add_(1).remainder_(len(self.counts))
        return count.expand(len(block_BN))


def copy_bandwidth(device: torch.device, megabytes: int) -> float:
    """Bytes/s read and written by a copy of one buffer to another, the best of ten."""
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    best = float("inf")
    for _ in range(11):
        _wait(device)
        began = time.perf_counter()
        for _ in range(4):
            to.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 4 * 2 * source.numel() / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_kernels(captured: CapturedCycle) -> int | None:
    """Kernels of one replayed cycle, as the profiler sees them; None where there is no GPU."""
    if captured.target.device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    captured.rows.reset(0)  # answers may have left no room
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        captured.launch()
        captured.read()
        torch.cuda.synchronize()
    copies = ("Memcpy", "Memset")
    return sum(
        e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith(copies) for e in profiler.events()
    )


@dataclass(frozen=True)
class Timing:
    """Medians in milliseconds; a cycle is what was left of the total after the first token, shared by the cycles."""

    ttft_ms: float
    total_ms: float
    cycle_ms: float
    ms_per_token: float
    accept_length: float


def time_answers(captured: CapturedCycle, prompt: int, new_tokens: int, warm_ups: int, runs: int) -> Timing:
    """Whole answers of `new_tokens` to a prompt of random tokens, the warm-ups not counted."""
    device, rows = captured.target.device, len(captured.rows.anchors_B)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(captured.target.config.vocab_size, (rows, prompt), generator=generator).to(device)
    first, total, each, gained = [], [], [], []
    for number in range(warm_ups + runs):
        _wait(device)
        began = time.perf_counter()
        captured.start(prompts, 0).tolist()
        started = time.perf_counter()
        done, cycles = 1, 0
        captured.launch()
        while done < new_tokens:
            captured.launch()
            done += len(captured.read()[0])
            cycles += 1
        ended = time.perf_counter()
        if number >= warm_ups:
            first.append(started - began)
            total.append(ended - began)
            each.append((ended - started) / cycles)
            gained.append((done - 1) / cycles)
    rest = statistics.median(t - f for t, f in zip(total, first, strict=True))
    return Timing(
        ttft_ms=1e3 * statistics.median(first),
        total_ms=1e3 * statistics.median(total),
        cycle_ms=1e3 * statistics.median(each),
        ms_per_token=1e3 * rest / (new_tokens - 1),
        accept_length=statistics.mean(gained),
    )


def time_cycles(captured: CapturedCycle, context: int, warm_ups: int, runs: int) -> float:
    """Milliseconds of a cycle, the median over runs of `CYCLES`, with caches that hold `context` positions of zeros."""
    device = captured.target.device
    times = []
    for number in range(warm_ups + runs):
        captured.rows.reset(0)
        for state in (captured.rows.state, captured.rows.draft_state):
            if state is not None:
                state.lengths_B.fill_(context)
        _wait(device)
        began = time.perf_counter()
        captured.launch()
        for _ in range(CYCLES - 1):
            captured.launch()
            captured.read()
        captured.read()
        if number >= warm_ups:
            times.append((time.perf_counter() - began) / CYCLES)
    return 1e3 * statistics.median(times)


def measure_engine(
    shape: Shape,
    config: EngineBench,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The ledger and, of three rows, the contexts and batches; figures as JSON has them."""
    counts = accepted_counts(config.accept_length, shape.drafter.block_size, 4096)
    bandwidth = copy_bandwidth(device, 1024 if device.type == "cuda" else 64)
    middle = setting_name(sorted(config.settings)[len(config.settings) // 2])
    say(f"{LABEL}: mean accept length {1 + counts.double().mean():.3f}; a copy moves {bandwidth / 1e9:.0f} GB/s")
    ledger: list[dict[str, Any]] = []
    others: dict[str, Any] = {}
    for name, target, drafter in variants(shape, kernels, device, dtype):
        _freeze(target, drafter)

        accept: Accept = agreed if drafter is None else ForcedAcceptance(counts, device)
        captured = partial(CapturedCycle, target, drafter, sampling=Sampling(), accept=accept)
        row: dict[str, Any] = {"name": name, "settings": {}}
        for prompt, new_tokens in config.settings:
            cycle = captured(prompt + new_tokens)
            timing = time_answers(cycle, prompt, new_tokens, config.warm_ups, config.runs)
            moved = cycle_work(target, drafter, prompt + new_tokens // 2).num_bytes
            share = moved / (1e-3 * timing.cycle_ms) / bandwidth
            figures = {**vars(timing), "bytes": int(moved), "share_of_copy": share, "kernels": count_kernels(cycle)}
            row["settings"][setting_name((prompt, new_tokens))] = figures
            kernels_seen = "" if figures["kernels"] is None else f" {figures['kernels']} kernels"
            say(
                f"{name:<15}{prompt:>6}/{new_tokens:<5}{timing.ttft_ms:>8.2f} ms first "
                f"{timing.cycle_ms:>8.3f} ms/cycle {timing.ms_per_token:>8.3f} ms/token "
                f"{timing.total_ms:>9.1f} ms total {moved / 1e9:>6.2f} GB {share:>5.0%} of copy{kernels_seen}"
            )
            del cycle
        ledger.append({**row, **row["settings"][middle]})
        key = {"BF16": "bf16", "INT4 target": "int4", LOSSLESS: "speculative"}.get(name)
        if key is not None and (config.contexts or config.batches != (1,)):
            others[key] = _single_cycles(captured, target, drafter, config, key, say)
    named = {row["name"]: row for row in ledger}
    plain, int4, last = ledger[0], ledger[1], named[LOSSLESS]
    return {
        "kind": LABEL,
        "accept_length": config.accept_length,
        "runs": config.runs,
        "warm_ups": config.warm_ups,
        "copy_gb_per_s": bandwidth / 1e9,
        "setting": middle,
        "bf16_ms_per_token": plain["ms_per_token"],
        "int4_ms_per_token": int4["ms_per_token"],
        "cycle_ms": last["cycle_ms"],
        "ttft_ms": {name: figures["ttft_ms"] for name, figures in last["settings"].items()},
        "total_ms": {name: figures["total_ms"] for name, figures in last["settings"].items()},
        "ledger": ledger,
        "cycles": others,
    }


def _single_cycles(
    captured: Callable[..., CapturedCycle],
    target: CausalLM,
    drafter: Drafter | None,
    config: EngineBench,
    name: str,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """One cycle at every context with one sequence, and at every batch with `CONTEXT` positions."""
    found = []
    size = 1 if drafter is None else drafter.config.block_size
    places = [(1, context) for context in config.contexts] + [(batch, CONTEXT) for batch in config.batches]
    for batch, context in places:
        cycle = captured(context + (CYCLES + 1) * size, batch_size=batch)
        milliseconds = time_cycles(cycle, context, config.warm_ups, config.runs)
        work = cycle_work(target, drafter, context, batch)
        found.append({"batch": batch, "context": context, "cycle_ms": milliseconds, "bytes": int(work.num_bytes)})
        say(f"{name:<16}batch {batch}, context {context:>6}: {milliseconds:.3f} ms/cycle")
        del cycle
    return found


def _freeze(target: CausalLM, drafter: Drafter | None) -> None:
    for model in (target, drafter):
        if model is not None and model.norm.frozen is None:
            model.freeze()


def setting_name(setting: tuple[int, int]) -> str:
    prompt, new_tokens = setting
    return {(64, 128): "short", (2048, 256): "medium", (8192, 256): "long"}.get(setting, f"{prompt}/{new_tokens}")
