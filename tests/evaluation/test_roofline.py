"""Bytes and operations are those of the models' own tensors; times follow by hand."""

import pytest
import torch
from torch import nn

from twofold.evaluation import roofline
from twofold.evaluation.roofline import GPUS, Gpu, Work, cycle_work, drafter_work, find_gpu, predict, prefill_work
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.models.drafter_config import DrafterConfig
from twofold.models.random_weights import random_drafter, random_target
from twofold.models.shapes import find_shape
from twofold.models.state import DeltaState
from twofold.ops.kernels import Kernels
from twofold.quant.scheme import QuantScheme

TINY, CPU, BF16 = find_shape("tiny"), torch.device("cpu"), torch.bfloat16
BLOCK, DEPTH = TINY.drafter.block_size, 100


def models(packed: bool, window: int | None = None) -> tuple[CausalLM, Drafter]:
    kernels, schemes = Kernels.reference(), (TINY.scheme, TINY.draft_scheme) if packed else (None, None)
    target = random_target(TINY.target, kernels, CPU, BF16, schemes[0], QuantScheme() if packed else None)
    made = DrafterConfig.for_target(TINY.target, TINY.drafter)
    made = DrafterConfig(**{**vars(made), "sliding_window": window})
    return target, random_drafter(made, kernels, CPU, BF16, schemes[1])


def size(module: nn.Module) -> int:
    tensors = {name: t for name, t in module.state_dict().items() if "shape" not in name}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("window", [None, 32])
def test_bytes_are_the_sum_over_tensors(packed: bool, batch: int, window: int | None) -> None:
    """Weights once, heads once to draft and once to verify, the caches up to the context, states three times."""
    target, drafter = models(packed, window)
    wanted = size(target.layers) + size(target.norm) + 2 * size(target.lm_head) + size(drafter)
    wanted += 2 * batch * BLOCK * target.embed_tokens.weight[0].nbytes
    state = target.new_state(batch, DEPTH + BLOCK)
    for layer in state.layers:
        if isinstance(layer, DeltaState):
            wanted += 3 * (layer.conv_BWC.nbytes + layer.state_BHKV.nbytes)
        else:
            wanted += layer.k_BSGD.nbytes + layer.v_BSGD.nbytes
    seen = DEPTH if window is None else window
    wanted += sum(c.k_BSGD.nbytes + c.v_BSGD.nbytes for c in drafter.new_state(batch, seen + BLOCK).caches)
    assert cycle_work(target, drafter, DEPTH, batch).num_bytes == wanted
    plain = cycle_work(target, None, DEPTH, batch)
    assert plain.num_bytes < wanted - size(drafter) - size(target.lm_head)


def test_operations_of_a_prefill_are_two_a_weight_and_token() -> None:
    """At one token nothing is attended but itself; the head takes one row."""
    target, _ = models(False)
    tokens = 64
    matrices = sum(p.numel() for name, p in target.layers.named_parameters() if p.dim() == 2 and "conv" not in name)
    config = TINY.target
    attended = 4 * tokens * (tokens + 1) / 2 * config.num_heads * config.head_dim
    recurrence = 3 * 3 * 2 * tokens * config.linear_value_dim * config.linear_key_head_dim
    wanted = 2 * tokens * matrices + attended + recurrence + 2 * config.vocab_size * config.hidden_size
    assert prefill_work(target, None, tokens).flops == pytest.approx(wanted)


def test_a_window_bounds_what_a_draft_reads() -> None:
    _, full = models(False)
    _, windowed = models(False, 32)
    assert drafter_work(windowed, BLOCK, 20) == drafter_work(full, BLOCK, 20)
    assert drafter_work(windowed, BLOCK, 5000) == drafter_work(full, BLOCK, 32)


def test_time_is_the_longer_of_both_and_the_launches() -> None:
    gpu = Gpu(name="", gigabytes_per_s=1000, bf16_tflops=100, int8_tops=200, source="")
    moving, computing = Work(2e9, 1e9, 10), Work(1e6, 3e11, 10)
    assert moving.milliseconds(gpu, floor=True) == pytest.approx(2.0)
    assert computing.milliseconds(gpu, floor=True) == pytest.approx(3.0)
    launches = 10 * roofline.LAUNCH_US / 1e3
    assert moving.milliseconds(gpu) == pytest.approx(2.0 / roofline.BANDWIDTH_SHARE + launches)
    assert computing.milliseconds(gpu) == pytest.approx(3.0 / roofline.PREFILL_SHARE + launches)


def test_floors_of_the_4b_shape_are_those_known() -> None:
    """A cycle at 4.2 TB/s: 1.15 ms with a BF16 head, 0.70 ms with an INT4 head; weights alone."""
    shape = find_shape("qwen3.5-4b")
    rows = {row.name: row for row in predict(shape, GPUS["h200"], 64, 2, 5.03)}
    assert rows["+ INT4 drafter"].gigabytes / 4.2 == pytest.approx(1.15, abs=0.05)
    assert rows["+ INT4 head"].gigabytes / 4.2 == pytest.approx(0.70, abs=0.06)
    order = [row.total_ms for row in predict(shape, GPUS["a10g"], 64, 128, 5.03) if row.name != roofline.PLAIN]
    assert order == sorted(order, reverse=True)


def test_an_unknown_gpu_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"no data of a GPU 'b200'; GPUs are: a10g, rtx5000ada, l4"):
        find_gpu("b200")
    assert all(gpu.source for gpu in GPUS.values())
