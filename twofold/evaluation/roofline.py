"""What a cycle has to move and to compute, from the models' own tensors, and how long a GPU takes for that at least.

A pass over R rows reads every weight once, so at few rows its time is bytes over bandwidth; at many rows it is
operations over the peak. Each kernel in a captured graph costs a launch besides. B sequences, N block tokens.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from twofold.models.causal_lm import CausalLM
from twofold.models.config import FULL
from twofold.models.drafter import Drafter
from twofold.models.drafter_config import DrafterConfig
from twofold.models.random_weights import random_drafter, random_target
from twofold.models.shapes import Shape
from twofold.ops.kernels import Kernels
from twofold.quant.linear import PackedLinear
from twofold.quant.scheme import QuantScheme


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Of the vendor's data sheet: memory GB/s, dense bfloat16 and INT8 tensor peak in T/s (float32 sums)."""

    name: str
    gigabytes_per_s: float
    bf16_tflops: float
    int8_tops: float
    source: str


GPUS = {
    "a10g": Gpu(
        name="A10G",
        gigabytes_per_s=600,
        bf16_tflops=70,
        int8_tops=140,
        source="NVIDIA A10G data sheet (AWS G5): 24 GB GDDR6, 600 GB/s, 70 TF FP16/BF16 tensor, 140 TOPS INT8",
    ),
    "rtx5000ada": Gpu(
        name="RTX 5000 Ada",
        gigabytes_per_s=576,
        bf16_tflops=261.1,
        int8_tops=522.2,
        source="NVIDIA RTX 5000 Ada data sheet: 32 GB GDDR6, 576 GB/s, 1044.4 TF FP8 with sparsity: a quarter in dense "
        "BF16, half in dense INT8",
    ),
    "l4": Gpu(
        name="L4",
        gigabytes_per_s=300,
        bf16_tflops=121,
        int8_tops=242.5,
        source="NVIDIA L4 data sheet: 24 GB GDDR6, 300 GB/s, 242 TF BF16 and 485 TOPS INT8 with sparsity",
    ),
    "rtx4090": Gpu(
        name="RTX 4090",
        gigabytes_per_s=1008,
        bf16_tflops=165.2,
        int8_tops=660.6,
        source="NVIDIA Ada architecture paper: 24 GB GDDR6X, 1008 GB/s, 165.2 TF BF16 with FP32 sums, 660.6 TOPS INT8",
    ),
    "a100": Gpu(
        name="A100 80GB SXM",
        gigabytes_per_s=2039,
        bf16_tflops=312,
        int8_tops=624,
        source="NVIDIA A100 data sheet: 80 GB HBM2e, 2039 GB/s, 312 TF BF16, 624 TOPS INT8",
    ),
    "h100": Gpu(
        name="H100 SXM",
        gigabytes_per_s=3350,
        bf16_tflops=989.4,
        int8_tops=1978.9,
        source="NVIDIA H100 data sheet: 80 GB HBM3, 3350 GB/s, 1979 TF BF16 and 3958 TOPS INT8 with sparsity",
    ),
    "h200": Gpu(
        name="H200 SXM",
        gigabytes_per_s=4800,
        bf16_tflops=989.4,
        int8_tops=1978.9,
        source="NVIDIA H200 data sheet: 141 GB HBM3e, 4800 GB/s, 1979 TF BF16 and 3958 TOPS INT8 with sparsity",
    ),
}

PLAIN = "all INT4, plain"  # the target of the step before, without a drafter
ROWS = ("BF16", "INT4 target", "+ BF16 drafter", "+ INT4 drafter", "+ SWA", "+ INT4 head", PLAIN, "+ W4A8 prefill")

# Assumptions, beside the data sheet's peaks: what is left of them, and what a kernel in a captured graph costs.
BANDWIDTH_SHARE = 4.2 / 4.8  # a copy on an H200, measured
PREFILL_SHARE = 0.6  # of the bfloat16 peak, large products and the attention between them
LAUNCH_US = 1.3  # measured on an H200
KERNELS = {
    "attention": 7,
    "delta": 9,
    "draft": 8,
    "head": 2,
    "pass": 6,
    "accept": 12,
}  # launches, fused as `ops.decode`

PAPER_A10G = {"short": 232.0, "medium": 782.0, "long": 2313.0}  # ms in all, arXiv:2607.04244
PAPER_ACCEPT_LENGTH = 5.03


def find_gpu(name: str) -> Gpu:
    if name not in GPUS:
        raise ValueError(f"there is no data of a GPU {name!r}; GPUs are: {', '.join(GPUS)}")
    return GPUS[name]


def stored_bytes(module: nn.Module, apart: Iterable[str] = ()) -> int:
    """Bytes of the tensors that a pass through `module` reads: all but those of the parts named in `apart`, the shapes
    beside packed weights and copies made for other products."""
    skipped = tuple(f"{name}." for name in apart)
    tensors = {name: tensor for name, tensor in module.state_dict().items() if not name.startswith(skipped)}
    return sum(t.numel() * t.element_size() for name, t in tensors.items() if not name.endswith("weight_shape"))


@dataclass(frozen=True)
class Work:
    """Bytes moved, operations (2 a multiply-add), kernels launched."""

    num_bytes: float
    flops: float
    launches: int

    def __add__(self, other: "Work") -> "Work":
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops, self.launches + other.launches)

    def milliseconds(self, gpu: Gpu, *, floor: bool = False, share: float = PREFILL_SHARE) -> float:
        """The longer of both, and the launches; as a `floor` at the data sheet's peaks, launches for nothing."""
        moving = self.num_bytes / (gpu.gigabytes_per_s * 1e9 * (1.0 if floor else BANDWIDTH_SHARE))
        computing = self.flops / (gpu.bf16_tflops * 1e12 * (1.0 if floor else share))
        return 1e3 * max(moving, computing) + (0.0 if floor else 1e-3 * LAUNCH_US * self.launches)


def _numbers(module: nn.Module) -> int:
    """Weights of the linear layers."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | PackedLinear)]
    return sum(layer.out_features * layer.in_features for layer in layers)


def head_work(target: CausalLM, rows: int) -> Work:
    head = target.lm_head
    return Work(stored_bytes(head), 2.0 * rows * _numbers(head), KERNELS["head"])


def target_work(target: CausalLM, num_tokens: int, context: int, batch: int = 1) -> Work:
    """A pass over B x N tokens with `context` positions before each row's, and its commit; without the head.

    Weights and norms once, an embedding a token; keys and values of the context read and of the pass written; the
    recurrent state read by the pass, read and written by the commit, like the convolution's.
    """
    config, rows = target.config, batch * num_tokens
    element = target.embed_tokens.weight.element_size()
    full = sum(kind == FULL for kind in config.layer_types)
    linear = config.num_layers - full
    attended = context + (num_tokens + 1) / 2
    per_position = 2 * config.num_kv_heads * config.head_dim * element
    state = config.linear_value_dim * config.linear_key_head_dim * 4
    conv = max(0, config.linear_conv_width - 1) * (2 * config.linear_key_dim + config.linear_value_dim) * element
    moved = stored_bytes(target, ("embed_tokens", "lm_head")) + rows * config.hidden_size * element
    moved += full * batch * per_position * (context + num_tokens) + linear * batch * 3 * (state + conv)
    flops = 2.0 * rows * _numbers(target.layers)
    flops += full * 4.0 * rows * attended * config.num_heads * config.head_dim
    flops += linear * 3 * 2.0 * rows * config.linear_value_dim * config.linear_key_head_dim
    return Work(moved, flops, full * KERNELS["attention"] + linear * KERNELS["delta"] + KERNELS["pass"])


def drafter_work(drafter: Drafter, num_tokens: int, context: int, batch: int = 1) -> Work:
    """A draft of N tokens a row after `context` positions, inside the window where there is one, and the projection of
    N new ones; without the head."""
    config, rows = drafter.config, batch * num_tokens
    element = drafter.norm.weight.element_size()
    seen = context if config.sliding_window is None else min(context, config.sliding_window)
    per_position = 2 * config.num_kv_heads * config.head_dim * element
    moved = stored_bytes(drafter, ("markov_head", "draft_head")) + rows * config.hidden_size * element
    moved += config.num_layers * batch * per_position * (seen + num_tokens)
    shared = sum(_numbers(p) for name, p in drafter.layers.named_modules() if name.endswith(("k_proj", "v_proj")))
    flops = 2.0 * rows * (_numbers(drafter) + shared)
    flops += config.num_layers * 4.0 * rows * (seen + num_tokens) * config.num_heads * config.head_dim
    return Work(moved, flops, config.num_layers * KERNELS["draft"] + KERNELS["pass"])


def cycle_work(target: CausalLM, drafter: Drafter | None, context: int, batch: int = 1) -> Work:
    """Draft, verify, accept, commit. Without a drafter: one token a row."""
    size = 1 if drafter is None else drafter.config.block_size
    work = target_work(target, size, context, batch) + head_work(target, batch * size)
    work += Work(0, 0, KERNELS["accept"])
    if drafter is None:
        return work
    head = head_work(target, batch * (size - 1))
    if drafter.draft_head is not None:
        own = drafter.draft_head
        head = Work(stored_bytes(own), 2.0 * batch * (size - 1) * _numbers(own), KERNELS["head"])
    return work + drafter_work(drafter, size, context, batch) + head


def prefill_work(target: CausalLM, drafter: Drafter | None, num_tokens: int, batch: int = 1) -> Work:
    work = target_work(target, num_tokens, 0, batch) + head_work(target, batch)
    if drafter is None:
        return work
    taps = 2.0 * batch * num_tokens * _numbers(drafter.fc)
    kv = [p for name, p in drafter.layers.named_modules() if name.endswith(("k_proj", "v_proj"))]
    moved = stored_bytes(drafter.fc) + sum(map(stored_bytes, kv))
    return work + Work(moved, taps + 2.0 * batch * num_tokens * sum(map(_numbers, kv)), 4 * len(drafter.layers))


@dataclass(frozen=True)
class Prediction:
    name: str
    gigabytes: float  # moved in a cycle
    floor_ms: float  # of a cycle, at the data sheet's peaks
    cycle_ms: float
    ms_per_token: float
    ttft_ms: float
    total_ms: float


def row_names(kernels: Kernels, device: torch.device) -> tuple[str, ...]:
    """Of the ledger's steps on a device: GPUs without 8-bit floats lack the last."""
    return ROWS if device.type == "cuda" and kernels.with_fp8_prefill(device) is not None else ROWS[:-1]


def variants(
    shape: Shape, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, CausalLM, Drafter | None]]:
    """The ledger's steps, each made when it is asked for, with random weights; on the meta device, sizes alone."""
    config = shape.target
    yield "BF16", random_target(config, kernels, device, dtype), None
    target = random_target(config, kernels, device, dtype, shape.scheme)
    yield "INT4 target", target, None
    draft_config = DrafterConfig.for_target(config, shape.drafter)
    yield "+ BF16 drafter", target, random_drafter(draft_config, kernels, device, dtype)
    yield "+ INT4 drafter", target, random_drafter(draft_config, kernels, device, dtype, shape.draft_scheme)
    windowed = replace(draft_config, sliding_window=shape.window)
    drafter = random_drafter(windowed, kernels, device, dtype, shape.draft_scheme)
    yield "+ SWA", target, drafter
    target = random_target(config, kernels, device, dtype, shape.scheme, QuantScheme(group_size=32))
    yield "+ INT4 head", target, drafter
    yield PLAIN, target, None
    eight_bits = kernels.with_fp8_prefill(device) if device.type == "cuda" else None
    if eight_bits is not None:
        del target
        yield (
            "+ W4A8 prefill",
            random_target(config, eight_bits, device, dtype, shape.scheme, QuantScheme(group_size=32)),
            drafter,
        )


def check_accept_length(accept_length: float, block_size: int) -> None:
    if not 1 <= accept_length <= block_size:
        raise ValueError(f"a block of {block_size} gains 1 to {block_size} tokens a cycle, not {accept_length}")


def predict(shape: Shape, gpu: Gpu, prompt: int, new_tokens: int, accept_length: float) -> list[Prediction]:
    """One row for each step of the ledger, one sequence; a cycle at the mean context of the answer."""
    check_accept_length(accept_length, shape.drafter.block_size)
    found = []
    for name, target, drafter in variants(shape, Kernels.reference(), torch.device("meta"), torch.bfloat16):
        work = cycle_work(target, drafter, prompt + new_tokens // 2)
        cycle_ms = work.milliseconds(gpu)
        per_token = cycle_ms / (1.0 if drafter is None else accept_length)
        first = prefill_work(target, drafter, prompt).milliseconds(gpu)
        found.append(
            Prediction(
                name=name,
                gigabytes=work.num_bytes / 1e9,
                floor_ms=work.milliseconds(gpu, floor=True),
                cycle_ms=cycle_ms,
                ms_per_token=per_token,
                ttft_ms=first,
                total_ms=first + (new_tokens - 1) * per_token,
            )
        )
    return found


def against(predicted: Iterable[Prediction], measured: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Prediction over measurement, less 1, of cycle, first token and total, for the steps that were measured.

    `measured` has the figures of each step by its name, as `engine.measure_engine` makes them.
    """
    found = []
    for row in predicted:
        if row.name in measured:
            figures = measured[row.name]
            errors = {key: getattr(row, key) / figures[key] - 1.0 for key in ("cycle_ms", "ttft_ms", "total_ms")}
            found.append({"name": row.name, **errors})
    return found
