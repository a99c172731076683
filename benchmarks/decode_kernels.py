"""Every decode kernel at Qwen3.5-4B's shape on one GPU, for 1 and 16 rows: microseconds, the floor by bytes, cuBLAS.

    python benchmarks/decode_kernels.py --out benchmarks/results/decode_kernels.json

Each time is that of a launch inside a captured CUDA graph, which goes through copies of the weights (or states, or
caches) of 200 MB and more, so that they come from memory and not from the L2 cache; median of 9 replays. `floor` is the
bytes that must be read and written over 4.2 TB/s. `error` is relative, against float32. For products `us` has the
division of work that `choose` gives, `overlapped` the same with programmatic dependent launch, `in_l2` that over the
same weights again and again, and `best` the fastest of those tried.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import twofold
from twofold.ops.decode import attention, attention_triton, delta, delta_triton, linear_cuda, norms_triton
from twofold.ops.decode.cuda import most_shared
from twofold.ops.decode.delta import WindowFactors
from twofold.ops.decode.division import Config, choose, shared_bytes
from twofold.ops.decode.linear_cuda import Fused
from twofold.ops.decode.packed_weight import PackedWeight, packed_linear
from twofold.ops.norms import rotary_table

BANDWIDTH = 4.2e12  # bytes/s of a copy on an H200
COLD = 200e6

# name: (outputs, inputs, bits, group, norm, gated, residual, times in a pass of the target)
PRODUCTS: dict[str, tuple[int, int, int, int, bool, bool, bool, int]] = {
    "gdn qkv z": (12288, 2560, 4, 32, True, False, False, 24),
    "gdn qkv z, a b": (12288, 2560, 4, 32, True, False, False, 0),
    "gdn a b": (64, 2560, 16, 0, True, False, False, 24),
    "out": (2560, 4096, 4, 32, False, False, True, 32),
    "gate up": (18432, 2560, 4, 32, True, True, False, 32),
    "down": (2560, 9216, 4, 32, False, False, True, 32),
    "attention q g k v": (10240, 2560, 4, 32, True, False, False, 8),
    "gate up bf16": (18432, 2560, 16, 0, True, True, False, 0),
    "drafter q k v": (6144, 2560, 4, 128, True, False, False, 0),
    "drafter gate up": (19456, 2560, 4, 128, True, True, False, 0),
    "drafter down": (2560, 9728, 4, 128, False, False, True, 0),
    "drafter fc": (2560, 12800, 4, 128, False, False, False, 0),
    "drafter context k v": (10240, 2560, 4, 128, True, False, False, 0),
}
TAILS = {"gdn qkv z, a b": 64}  # outputs of 16 bits in the same launch
HEADS = {"head int4": (4, 128), "head int8": (8, 128), "head bf16": (16, 0)}
# (warps, tiles, stages, blocks on a multiprocessor, slices of K); for long K the last ones
CONFIGS = ((8, 1, 5, 2, 1), (8, 1, 10, 2, 1), (8, 2, 5, 2, 1), (8, 2, 10, 1, 1), (8, 1, 5, 3, 1), (8, 3, 5, 1, 1),
           (8, 3, 8, 1, 1), (10, 1, 8, 1, 1), (10, 2, 4, 2, 1), (10, 2, 8, 1, 1), (16, 1, 6, 1, 1), (20, 1, 4, 1, 1),
           (20, 1, 8, 1, 1), (20, 2, 4, 1, 1))  # fmt: skip
LONG = ((8, 1, 4, 1, 4), (8, 1, 8, 2, 4), (8, 1, 4, 2, 8), (8, 1, 8, 1, 8), (8, 2, 4, 2, 8), (8, 2, 4, 1, 4),
        (16, 1, 4, 1, 4), (16, 1, 6, 1, 2), (16, 1, 3, 1, 3), (16, 1, 8, 1, 1), (16, 2, 4, 1, 4))  # fmt: skip


def divisions(weight: PackedWeight, chosen: Config, whole: bool) -> list[Config]:
    found = []
    for warps, tiles, stages, blocks, split in CONFIGS if whole or weight.num_inputs < 4096 else LONG:
        config = Config(warps=warps, tiles=tiles, row_tiles=chosen.row_tiles, stages=stages, blocks=blocks, split=split)
        if shared_bytes(weight, config) * blocks <= 220 * 1024:
            found.append(config)
    return found


def microseconds(calls: list[Callable[[], Any]], least: int = 24) -> float:
    """Of one call, in a graph that holds them all, several times over where they are few."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = -(-least // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for i in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / (rounds * len(calls))


def copies(count_bytes: float) -> int:
    return max(2, min(96, int(COLD / count_bytes) + 1))


def random_weight(outputs: int, inputs: int, bits: int, group: int, gated: bool) -> PackedWeight:
    """Any bits are a weight; scales are made so that results stay near 1."""
    shape = outputs // 16, inputs // 64, bits // 4, 32, 4
    if bits == 16:
        words = (torch.randn(*shape, 2, device="cuda") * inputs**-0.5).bfloat16().view(torch.int32).flatten(-2)
        scales = None
    else:
        words = torch.randint(-(2**31), 2**31 - 1, shape, device="cuda", dtype=torch.int32)
        parts = outputs // 16, inputs // max(group, 64), 8, 2 if group == 32 else 1
        scale = (torch.rand(*parts, 2, device="cuda") + 0.5) * inputs**-0.5 / (4.6 if bits == 4 else 74)
        scales = scale.bfloat16().view(torch.int32).flatten(-2)
    return PackedWeight(
        words=words,
        scales=scales,
        bits=bits,
        group_size=group,
        asymmetric=False,
        num_outputs=outputs,
        num_inputs=inputs,
        gated=gated,
    )


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def products(rows: int, sweep: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (outputs, inputs, bits, group, normed, gated, added, _) in PRODUCTS.items():
        first = random_weight(outputs, inputs, bits, group, gated)
        weights = [first] + [random_weight(outputs, inputs, bits, group, gated) for _ in range(copies(first.num_bytes))]
        x = torch.randn(rows, inputs, device="cuda").bfloat16()
        norm = torch.rand(inputs, device="cuda").bfloat16() if normed else None
        residual = torch.randn(rows, first.out_features, device="cuda").bfloat16() if added else None
        extra: dict[str, Any] = {"norm_K": norm, "eps": 1e-6, "residual_MN": residual}
        if name in TAILS:
            extra["tail"] = random_weight(TAILS[name], inputs, 16, 0, False)
        fused = Fused(norm=normed, residual=added, tail=name in TAILS)

        product = partial(linear_cuda.packed_linear, x, **extra)

        def times(config: Config, overlap: bool, weights: list = weights, product: Callable = product) -> float:
            return microseconds([partial(product, weight=w, config=config, overlap=overlap) for w in weights])

        whole = name in TAILS
        chosen = choose(first, rows, whole, most_shared(0))
        tried = divisions(first, chosen, whole) if sweep else []
        compile_all(first, [chosen, *tried], fused)
        expected = packed_linear(x, first, **extra)
        dense = torch.randn(outputs, inputs, device="cuda").bfloat16()
        others = [dense] + [dense.clone() for _ in range(copies(2.0 * outputs * inputs))]
        results[name] = {
            "us": times(chosen, False),
            "overlapped": times(chosen, True),
            "in_l2": times(chosen, True, weights[:1]),
            "floor": first.num_bytes / BANDWIDTH * 1e6,
            "cublas_bf16": microseconds([partial(F.linear, x, w) for w in others]),
            "error": relative(linear_cuda.packed_linear(x, first, **extra), expected),
            "chosen": asdict(chosen),
        }
        if tried:
            all_times = [(times(config, True), config) for config in tried]
            best = min(all_times, key=lambda pair: pair[0])
            results[name] |= {"best": best[0], "best_config": asdict(best[1]), "tried": named(all_times)}
    for key in ("us", "overlapped", "in_l2", "floor", "cublas_bf16", *(["best"] if sweep else [])):
        results.setdefault("sum of a target pass", {})[key] = sum(
            PRODUCTS[name][-1] * result[key] for name, result in results.items() if name in PRODUCTS
        )
    return results


def named(found: list[tuple[float, Config]]) -> dict[str, float]:
    """Microseconds by warps, tiles, stages, blocks and slices of K."""
    return {f"{c.warps} {c.tiles} {c.stages} {c.blocks} {c.split}": us for us, c in found}


def compile_all(weight: PackedWeight, configs: list[Config], fused: Fused) -> None:
    """NVRTC runs beside itself."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda c: linear_cuda._kernels(linear_cuda.defines(weight, c, fused), 0), configs))


def heads(rows: int, sweep: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    x = torch.randn(rows, 2560, device="cuda").bfloat16()
    for name, (bits, group) in HEADS.items():
        weight = random_weight(248_320, 2560, bits, group, False)
        chosen = choose(weight, rows, True, most_shared(0))
        tried = divisions(weight, chosen, True) if sweep else []
        compile_all(weight, [chosen, *tried], Fused(top1=True))
        dense = linear_cuda.unpack(weight)
        scores = F.linear(x, dense).float()
        ids, best = linear_cuda.top1(x, weight)
        results[name] = {
            "us": microseconds([partial(linear_cuda.top1, x, weight)]),
            "overlapped": microseconds([partial(linear_cuda.top1, x, weight, overlap=True)]),
            "floor": weight.num_bytes / BANDWIDTH * 1e6,
            "cublas_bf16": microseconds([lambda dense=dense: F.linear(x, dense).argmax(-1)]),
            "error": relative(best, scores.max(-1).values),
            "same_ids": float((ids == scores.argmax(-1)).float().mean()),
            "chosen": asdict(chosen),
        }
        if tried:
            calls = [(microseconds([partial(linear_cuda.top1, x, weight, config=c, overlap=True)]), c) for c in tried]
            fastest = min(calls, key=lambda pair: pair[0])
            results[name] |= {"best": fastest[0], "best_config": asdict(fastest[1]), "tried": named(calls)}
    return results


def deltas(tokens: int) -> dict[str, Any]:
    key_heads, value_heads, width = 16, 32, 128
    channels = 2 * key_heads * width + value_heads * width
    states = torch.randn(96, 1, value_heads, width, width, device="cuda") * 0.1
    fused = torch.randn(1, tokens, channels + value_heads * (width + 2), device="cuda").bfloat16()
    x, z, b, a = fused.split((channels, value_heads * width, value_heads, value_heads), dim=-1)
    conv, weight = torch.randn(1, 3, channels, device="cuda").bfloat16(), torch.randn(channels, 4, device="cuda")
    small = torch.rand(2, value_heads, device="cuda").unbind()
    gate = {"z_BTHV": z.unflatten(-1, (value_heads, -1)), "norm_V": torch.rand(width, device="cuda"), "eps": 1e-6}
    inputs = (x, conv, weight.bfloat16(), a, b, *small)
    expected, _ = delta.delta_window(*(y.float() for y in (*inputs, states[0])))
    o, factors = delta_triton.delta_window(*inputs, states[0])
    state_bytes = states[0].numel() * 4
    floor = state_bytes / BANDWIDTH * 1e6

    def apart(state: Tensor) -> None:
        o, _ = delta_triton.delta_window(*inputs, state)
        norms_triton.gated_rms_norm(o, gate["z_BTHV"], gate["norm_V"], 1e-6)

    many = WindowFactors(*(torch.stack([y] * 24) for y in factors))
    n = torch.tensor([tokens], device="cuda")
    convs, xs = torch.stack([conv] * 24), torch.stack([x] * 24)
    return {
        "delta window, norm fused": {
            "us": microseconds([partial(delta_triton.delta_window, *inputs, s, **gate) for s in states]),
            "floor": floor,
            "error": relative(o, expected),
        },
        "delta window, then norm": {"us": microseconds([partial(apart, s) for s in states]), "floor": floor},
        **{
            name: {  # by columns of a program and warps
                f"{columns} x {warps}": microseconds(
                    [
                        partial(delta_triton.delta_window, *inputs, s, division=(columns, warps), overlap=overlap)
                        for s in states
                    ]
                )
                for columns, warps in ((16, 1), (16, 2), (16, 4), (32, 2), (32, 4), (32, 8), (64, 4), (64, 8))
            }
            for name, overlap in (("delta window", False), ("delta window, overlapped", True))
        },
        "commit of a layer": {
            "us": microseconds([partial(delta_triton.commit_delta_, s, factors, n) for s in states]),
            "floor": 2 * floor,
        },
        "commit of 24 layers": {
            "us": microseconds(
                [partial(delta_triton.commit_delta_, s, many, n) for s in states.unflatten(0, (4, 24)).unbind()]
            ),
            "floor": 48 * floor,
        },
        "convolution commit of 24 layers": {
            "us": microseconds([partial(delta_triton.commit_convolution_, convs, xs, n)]),
        },
    }


def attentions(tokens: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    cases = (
        ("attention 2K", 16, 4, 256, 2048, None, True),
        ("attention 8K", 16, 4, 256, 8192, None, True),
        ("attention 32K", 16, 4, 256, 32_768, None, True),
        ("draft attention 2K", 32, 8, 128, 2048, None, False),
        ("draft attention 8K, window 1024", 32, 8, 128, 8192, 1024, False),
    )
    for name, query_heads, key_heads, width, length, window, causal in cases:
        if not causal and tokens == 1:
            continue
        q = torch.randn(1, tokens, query_heads, width, device="cuda").bfloat16()
        keys = min(length, window or length)
        size = 2 * keys * key_heads * width * 2
        shape = copies(size) if length <= 8192 else 3, 2, 1, length + 64, key_heads, width
        caches = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        lengths = torch.tensor([length], device="cuda")
        rule = {"causal": causal, "window": window}
        call = partial(attention_triton.decode_attention, **rule)
        expected = attention.decode_attention(q.float(), *caches[0].float(), lengths, **rule)
        results[name] = {
            "us": microseconds([partial(call, q, *cache, lengths) for cache in caches]),
            "floor": size / BANDWIDTH * 1e6,
            "error": relative(call(q, *caches[0], lengths), expected),
        }
        for splits in (16, 33, 66):
            calls = [partial(call, q, *cache, lengths, splits=splits) for cache in caches]
            results[name][f"splits {splits}"] = microseconds(calls)
        calls = [partial(call, q, *cache, lengths, combine=8) for cache in caches]
        results[name]["combined 8 by 8"] = microseconds(calls)
    fused = torch.randn(1, tokens, 10_240, device="cuda").bfloat16()
    q, k, v = fused.split((8192, 1024, 1024), dim=-1)
    q = q.unflatten(-1, (16, -1)).chunk(2, dim=-1)[0]
    norm = torch.rand(256, device="cuda").bfloat16()
    table = rotary_table(torch.arange(4096, device="cuda"), 64, 1e7)
    place = (torch.tensor([2048], device="cuda"), *torch.zeros(2, 1, 4096, 4, 256, device="cuda").bfloat16())
    arguments = (q, k.unflatten(-1, (4, -1)), v.unflatten(-1, (4, -1)), norm, norm, 1e-6, *table, *place)
    results["store keys"] = {"us": microseconds([partial(attention_triton.store_keys, *arguments)])}
    return results


def small(rows: int) -> dict[str, Any]:
    x, w = torch.randn(rows, 2560, device="cuda").bfloat16(), torch.rand(2560, device="cuda").bfloat16()
    both = torch.randn(rows, 18_432, device="cuda").bfloat16()
    calls = {
        "rms norm": partial(norms_triton.rms_norm, x, w, 1e-6),
        "add, rms norm": partial(norms_triton.add_rms_norm, x, x, w, 1e-6),
        "silu mul": partial(norms_triton.silu_mul, both),
    }
    return {name: {"us": microseconds([call])} for name, call in calls.items()}


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="above 16: products alone")
    parser.add_argument("--no-sweep", action="store_true", help="only the division of work that is chosen")
    args = parser.parse_args()
    torch.manual_seed(0)
    began = time.time()
    result: dict[str, Any] = {
        "command": " ".join(
            ["python benchmarks/decode_kernels.py --rows", *map(str, args.rows)] + ["--no-sweep"] * args.no_sweep
        ),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "environment": {
            "hardware": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "twofold": twofold.__version__,
        },
        "bandwidth": BANDWIDTH,
    }
    for rows in args.rows:
        kinds: dict[str, Callable[[], dict[str, Any]]] = {
            "products": partial(products, rows, not args.no_sweep),
            "heads": partial(heads, rows, not args.no_sweep),
            "delta": partial(deltas, rows),
            "attention": partial(attentions, rows),
            "small": partial(small, rows),
        }
        if rows > delta_triton.TOKENS:
            kinds = {kind: kinds[kind] for kind in ("products", "heads")}
        for kind, measure in kinds.items():
            found = measure()
            torch.cuda.empty_cache()
            result.setdefault(f"{rows} rows", {})[kind] = found
            for name, numbers in found.items():
                shown = {
                    key: round(x, 4 if key == "error" else 1) for key, x in numbers.items() if isinstance(x, float)
                }
                print(rows, name, shown, *numbers.get("best_config", {}).values(), flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")  # what there is, should the time end
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
