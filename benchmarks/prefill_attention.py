"""Ways to a prefill's causal attention at Qwen3.5-4B's heads: microseconds, and the error against float32.

    python benchmarks/prefill_attention.py --out prefill_attention.json

16 query and 4 key heads of 256; queries end where the keys do. A way that a GPU or a build of PyTorch does not have
says so. Takes less than 20 seconds on an H200.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

HEADS, KEY_HEADS, WIDTH = 16, 4, 256
CASES = ((512, 512), (2048, 2048), (8192, 8192), (2048, 8192))  # queries and keys
CAPACITY = 8448  # keys are the beginning of a cache


def varlen(q: Tensor, k: Tensor, v: Tensor, *, repeat: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if repeat:
        k, v = (x.repeat_interleave(HEADS // KEY_HEADS, dim=2) for x in (k, v))
    ends = [torch.tensor([0, x.shape[1]], dtype=torch.int32, device=q.device) for x in (q, k)]
    sizes = q.shape[1], k.shape[1]
    if repeat:
        o = varlen_attn(q[0].contiguous(), k[0], v[0], *ends, *sizes, window_size=(-1, 0))
        assert isinstance(o, Tensor)
        return o[None]
    o = torch.ops.aten._flash_attention_forward(q[0].contiguous(), k[0], v[0], *ends, *sizes, 0.0, True, False)[0]
    return o[None]


def fixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The flash op without lengths: rows of one size."""
    sizes = q.shape[1], k.shape[1]
    return torch.ops.aten._flash_attention_forward(q, k, v, None, None, *sizes, 0.0, True, False)[0]


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, backend: SDPBackend) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    square = q.shape[2] == k.shape[2]
    mask = None if square else causal_lower_right(q.shape[2], k.shape[2])
    with sdpa_kernel(backend):
        o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=square, enable_gqa=True)
    return o.transpose(1, 2)


def cudnn_with_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    T, S = q.shape[1], k.shape[1]
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def repeated_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, dim=2) for x in (k, v))
    return sdpa(q, k, v, backend=SDPBackend.CUDNN_ATTENTION)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "varlen, keys repeated": lambda q, k, v: varlen(q, k, v, repeat=True),
    "varlen": lambda q, k, v: varlen(q, k, v, repeat=False),
    "flash op": fixed,
    "sdpa flash": lambda q, k, v: sdpa(q, k, v, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa cudnn": lambda q, k, v: sdpa(q, k, v, backend=SDPBackend.CUDNN_ATTENTION),
    "sdpa cudnn, keys repeated": repeated_cudnn,
    "sdpa cudnn, mask in memory": cudnn_with_mask,
}


def exact(q: Tensor, k: Tensor, v: Tensor, rows: int = 64) -> Tensor:
    """The last rows, in float64."""
    q, k, v = q[:, -rows:].double(), k.double(), v.double()
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, dim=2) for x in (k, v))
    score = torch.einsum("bthd,bshd->bhts", q, k) * WIDTH**-0.5
    seen = torch.ones(rows, k.shape[1], dtype=torch.bool, device=q.device).tril(k.shape[1] - rows)
    return torch.einsum("bhts,bshd->bthd", score.masked_fill(~seen, float("-inf")).softmax(-1), v)


def microseconds(run: Callable[[], Tensor], repeats: int = 9) -> float:
    times = []
    for number in range(repeats + 2):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # the host is ahead of the device
        begun.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        if number >= 2:
            times.append(1e3 * begun.elapsed_time(ended))
    return statistics.median(times)


def captured(run: Callable[[], Tensor]) -> bool:
    """Whether it can be part of a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        return False
    graph.replay()
    torch.cuda.synchronize()
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("prefill_attention.py needs a GPU")
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    for queries, keys in CASES:
        projected = torch.randn(1, queries, HEADS * 2, WIDTH, device="cuda", dtype=torch.bfloat16)
        q = projected[:, :, :HEADS].contiguous()
        cache = torch.randn(2, 1, CAPACITY, KEY_HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
        k, v = cache[:, :, :keys]
        wanted = exact(q, k, v)
        for name, way in WAYS.items():
            row: dict[str, Any] = {"way": name, "queries": queries, "keys": keys}
            try:
                run = functools.partial(way, q, k, v)
                with torch.inference_mode():
                    error = (run()[:, -len(wanted[0]) :].double() - wanted).norm() / wanted.norm()
                    row |= {"us": microseconds(run), "error": float(error)}
                    row["captured"] = captured(run)
                print(f"{queries} x {keys}  {name:28} {row['us']:8.0f} us  error {row['error']:.1e}", row["captured"])
            except (RuntimeError, TypeError, AssertionError, ImportError) as lack:
                row["lack"] = str(lack).splitlines()[0] if str(lack) else type(lack).__name__
                print(f"{queries} x {keys}  {name:28} {row['lack'][:100]}")
            results.append(row)
            if given.out is not None:
                given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
