"""The engine's speed at a model's shape: random weights, forced acceptance, every step of the ledger in one process.

What is measured is the engine, not a model: weights are random, so no draft would be accepted, and the number accepted
in each cycle is drawn beforehand around a given mean. Everything else is done as it is with a real model.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from torch import Tensor

from twofold.decoding.graphs import CapturedCycle
from twofold.decoding.step import Accept, agreed
from twofold.evaluation.engine_result import (
    LABEL,
    EngineBench,
    Figures,
    Piece,
    Result,
    add,
    find,
    headline,
    pieces,
)
from twofold.evaluation.roofline import check_accept_length, cycle_work, row_names, variants
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.models.shapes import Shape
from twofold.ops.kernels import Kernels
from twofold.ops.sampling import Sampling

CYCLES = 8  # timed together


def accepted_counts(accept_length: float, block_size: int, cycles: int) -> Tensor:
    """num_accepted [cycles] of a drafter whose guesses are right with one probability p, up to block_size - 1; p is
    such that the mean is accept_length - 1. Cycle i takes the quantile frac(i / golden ratio), of which any stretch is
    spread evenly: each answer meets the mean closely, not only all of them.

    ValueError unless 1 <= accept_length <= block_size.
    """
    check_accept_length(accept_length, block_size)
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        mean = sum(p**k for k in range(1, block_size))
        low, high = (p, high) if mean < accept_length - 1 else (low, p)
    below = 1.0 - p ** torch.arange(1, block_size, dtype=torch.float64)  # P(num_accepted < k)
    quantiles = (torch.arange(cycles, dtype=torch.float64) / ((1 + math.sqrt(5)) / 2) + 0.5) % 1
    return torch.bucketize(quantiles, below, right=True)


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


def measure_answers(
    target: CausalLM,
    drafter: Drafter | None,
    accept: Accept,
    setting: tuple[int, int],
    config: EngineBench,
    bandwidth: float,
) -> Figures:
    """A row of the ledger at a setting: a `Timing`, the bytes that a cycle in the middle of the answer moves, their
    rate over a copy's, and the kernels of a cycle."""
    prompt, new_tokens = setting
    captured = CapturedCycle(target, drafter, prompt + new_tokens, Sampling(), accept=accept)
    timing = time_answers(captured, prompt, new_tokens, config.warm_ups, config.runs)
    moved = cycle_work(target, drafter, prompt + new_tokens // 2).num_bytes
    share = moved / (1e-3 * timing.cycle_ms) / bandwidth
    return {**vars(timing), "bytes": int(moved), "share_of_copy": share, "kernels": count_kernels(captured)}


def measure_cycle(
    target: CausalLM, drafter: Drafter | None, accept: Accept, place: tuple[int, int], config: EngineBench
) -> Figures:
    """A single cycle of `batch` sequences after `context` positions."""
    batch, context = place
    size = 1 if drafter is None else drafter.config.block_size
    captured = CapturedCycle(
        target, drafter, context + (CYCLES + 1) * size, Sampling(), batch_size=batch, accept=accept
    )
    milliseconds = time_cycles(captured, context, config.warm_ups, config.runs)
    moved = cycle_work(target, drafter, context, batch).num_bytes
    return {"batch": batch, "context": context, "cycle_ms": milliseconds, "bytes": int(moved)}


def described(piece: Piece, x: Figures) -> str:
    if piece.part == "cycles":
        return f"{piece.row:<16}batch {x['batch']}, context {x['context']:>6}: {x['cycle_ms']:.3f} ms/cycle"
    prompt, new_tokens = piece.at
    kernels = "" if x["kernels"] is None else f" {x['kernels']} kernels"
    return (
        f"{piece.row:<15}{prompt:>6}/{new_tokens:<5}{x['ttft_ms']:>8.2f} ms first "
        f"{x['cycle_ms']:>8.3f} ms/cycle {x['ms_per_token']:>8.3f} ms/token "
        f"{x['total_ms']:>9.1f} ms total {x['bytes'] / 1e9:>6.2f} GB {x['share_of_copy']:>5.0%} of copy{kernels}"
    )


def measure_engine(
    shape: Shape,
    config: EngineBench,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    say: Callable[[str], None],
    *,
    keep: Callable[[Result], None] = lambda _: None,
    earlier: Result | None = None,
    deadline: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """The ledger and, of three rows, the contexts and batches, as `engine_result` describes it.

    After every piece `keep` gets the result so far, which can be gone on with as `earlier`, by another process. A piece
    that would end after `deadline` (seconds of `clock`), if it took as long as the longest before it, is not begun: the
    result then stays incomplete.
    """
    counts = accepted_counts(config.accept_length, shape.drafter.block_size, 4096)
    wanted = pieces(config, row_names(kernels, device))
    result: Result = {"kind": LABEL, "complete": False, "setting": config.setting}
    begun = earlier or {"processes": [], "ledger": [], "cycles": {}}
    result |= {key: copy.deepcopy(begun[key]) for key in ("processes", "ledger", "cycles")}
    missing = [piece for piece in wanted if find(result, piece) is None]
    longest = max((x["seconds"] for piece in wanted if (x := find(result, piece)) is not None), default=0.0)
    bandwidth = copy_bandwidth(device, 1024 if device.type == "cuda" else 64)
    result["processes"].append({"date": datetime.now(UTC).date().isoformat(), "copy_gb_per_s": bandwidth / 1e9})
    say(f"{LABEL}: mean accept length {1 + counts.double().mean():.3f}; a copy moves {bandwidth / 1e9:.0f} GB/s")
    models, row = variants(shape, kernels, device, dtype), ""
    for number, piece in enumerate(missing):
        began = clock()
        if began + longest > deadline:
            left = f"{len(missing) - number} of {len(wanted)} pieces are missing, the longest took {longest:.0f} s"
            say(f"stopped before the time was up: {left}; the same command goes on")
            break
        while row != piece.row:
            row, target, drafter = next(models)
        _freeze(target, drafter)
        accept: Accept = agreed if drafter is None else ForcedAcceptance(counts, device)
        if piece.part == "settings":
            figures = measure_answers(target, drafter, accept, piece.at, config, bandwidth)
        else:
            figures = measure_cycle(target, drafter, accept, piece.at, config)
        seconds = clock() - began
        longest = max(longest, seconds)
        add(result, piece, {**figures, "process": len(result["processes"]), "seconds": seconds})
        result |= {**headline(result), "complete": piece is missing[-1]}
        keep(result)
        say(described(piece, figures))
    return result


def _freeze(target: CausalLM, drafter: Drafter | None) -> None:
    for model in (target, drafter):
        if model is not None and model.norm.frozen is None:
            model.freeze()
