"""Where the time to the first token goes: kernels of a prefill grouped by name, and what the host takes to launch them.

    python benchmarks/prefill_profile.py --out prefill_profile.json

For BF16 and INT4 targets of a shape (random weights), and an INT4 one with FP8 products, at each prompt length: the
median of several prefills, the time in which the host sends one off, and of one profiled prefill every kernel's calls
and microseconds. Takes about a minute on an H200.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from twofold.decoding.graphs import CapturedCycle
from twofold.evaluation.roofline import variants
from twofold.models.causal_lm import CausalLM
from twofold.models.random_weights import random_target
from twofold.models.shapes import Shape, find_shape
from twofold.ops.kernels import Kernels
from twofold.ops.sampling import Sampling

VARIANTS = ("BF16", "INT4 target")
SHOWN = 20


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def times(captured: CapturedCycle, prompts_BT: Tensor, runs: int) -> dict[str, float]:
    """Medians in milliseconds, after three prefills that compile and capture."""
    device = prompts_BT.device
    first, host = [], []
    for number in range(runs + 3):
        wait(device)
        began = time.perf_counter()
        tokens = captured.start(prompts_BT, 0)
        sent = time.perf_counter()
        tokens.tolist()
        if number >= 3:
            first.append(time.perf_counter() - began)
            host.append(sent - began)
    return {"ttft_ms": 1e3 * statistics.median(first), "host_ms": 1e3 * statistics.median(host)}


def kernels_of(captured: CapturedCycle, prompts_BT: Tensor) -> list[dict[str, Any]]:
    """Calls and microseconds by name, the longest in all first; none where there is no GPU."""
    if prompts_BT.device.type != "cuda":
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        captured.start(prompts_BT, 0)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.time_range.elapsed_us())
    rows = [{"name": name, "calls": len(us), "us": sum(us)} for name, us in found.items()]
    return sorted(rows, key=lambda row: -row["us"])


def targets(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, CausalLM]]:
    kernels = Kernels.auto(device)
    for name, target, _ in variants(shape, kernels, device, dtype):
        if name not in VARIANTS:
            break  # the ledger begins with these two
        yield name, target
    if device.type == "cuda" and (eight_bits := kernels.with_fp8_prefill(device)) is not None:
        yield "INT4 target, FP8 products", random_target(shape.target, eight_bits, device, dtype, shape.scheme)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-4b")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 2048, 8192])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    results: list[dict[str, Any]] = []
    for name, target in targets(find_shape(given.shape), device, dtype):
        target.freeze()
        for length in given.prompts:
            captured = CapturedCycle(target, None, length + 16, Sampling())
            prompts_BT = torch.randint(target.config.vocab_size, (1, length), device=device)
            row = {"variant": name, "prompt": length, **times(captured, prompts_BT, given.runs)}
            kernels = kernels_of(captured, prompts_BT)
            on_device = sum(kernel["us"] for kernel in kernels) / 1e3
            print(
                f"{name}, {length}: {row['ttft_ms']:.2f} ms to the first token, host {row['host_ms']:.2f} ms, ", end=""
            )
            print(f"{on_device:.2f} ms in {sum(kernel['calls'] for kernel in kernels)} kernels")
            for kernel in kernels[:SHOWN]:
                print(f"  {kernel['us']:>10.0f} us {kernel['calls']:>5} x  {kernel['name'][:90]}")
            results.append({**row, "device_ms": on_device, "kernels": kernels})
            del captured
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
