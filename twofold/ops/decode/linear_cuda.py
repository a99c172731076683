"""The GPU's `packed_linear`, `top1`, `unpack` and `unpack_e4m3` (linear.cu; equations and layout in packed_weight.py).

With `overlap` a kernel may start before the one before it has ended (programmatic dependent launch, sm_90 and newer):
it asks for its weights and then waits. Only for weights that no kernel still in flight writes, as in a captured pass.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from twofold.ops.decode.cuda import Kernel, compile_kernels, most_shared
from twofold.ops.decode.division import (
    Config,
    choose,
    grid,
    partial_sizes,
    reads_early,
    shared_bytes,
    streams,
    validate,
)
from twofold.ops.decode.packed_weight import STEP, PackedWeight


@dataclass(frozen=True, kw_only=True)
class Fused:
    norm: bool = False
    residual: bool = False
    top1: bool = False
    tail: bool = False


def defines(weight: PackedWeight, config: Config, fused: Fused) -> tuple[str, ...]:
    values = {
        "BITS": weight.bits,
        "GROUP": weight.group_size,
        "ASYM": weight.asymmetric,
        "GATED": weight.gated,
        "STEPS": weight.num_inputs // STEP,
        "SPLIT": config.split,
        "WARPS": config.warps,
        "R": config.tiles,
        "NT": config.row_tiles,
        "STAGES": config.stages,
        "BLOCKS": config.blocks,
        "STREAM": streams(weight, config),
        "EARLY": reads_early(weight, config),
        "NORM": fused.norm,
        "RESIDUAL": fused.residual,
        "TOP1": fused.top1,
        "TAIL": fused.tail,
    }
    return tuple(f"-D{name}={int(value)}" for name, value in values.items())


def top1_shared_bytes() -> int:
    return 256 * 12


@functools.cache
def _resident(options: tuple[str, ...], device: int, threads: int, shared: int) -> int:
    return _kernels(options, device)["packed_linear"].resident_blocks(threads, shared)


@functools.cache
def _shared_by_blocks(device: int, num_bytes: int, counters: int) -> tuple[Tensor, Tensor]:
    """Partial sums, and zeros that kernels leave as zeros. Kernels on one stream follow each other, also where they
    overlap (they write behind the wait); only one stream of a device may run products at a time."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a product's workspace is made at its first call; call it once before it is captured")
    where = torch.device("cuda", device)
    made = (
        torch.empty(num_bytes, dtype=torch.uint8, device=where),
        torch.zeros(counters, dtype=torch.int32, device=where),
    )
    torch.cuda.synchronize(where)
    return made


@functools.cache
def _kernels(options: tuple[str, ...], device: int) -> dict[str, Kernel]:
    source = Path(__file__).with_name("linear.cu")
    return compile_kernels(source, options, ("packed_linear", "best_of_parts", "unpack", "unpack_e4m3"), device)


def packed_linear(
    x_MK: Tensor,
    weight: PackedWeight,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_MN: Tensor | None = None,
    tail: PackedWeight | None = None,
    out_MN: Tensor | None = None,
    overlap: bool = False,
    config: Config | None = None,
) -> Tensor:
    """[M, N] (N / 2 if gated), bfloat16. x, residual and out may be rows of a wider tensor, on 16 bytes; out may be the
    residual. `tail` is of 16 bits, behind a weight of 4 that is not gated."""
    rows = x_MK.shape[0]
    config = config or choose(weight, rows, tail is not None, most_shared(x_MK.device.index))
    width = weight.out_features + (0 if tail is None else tail.out_features)
    y = x_MK.new_empty(rows, width) if out_MN is None else out_MN
    _check(x_MK, weight, y, residual_MN, norm_K, width)
    assert y.data_ptr() != x_MK.data_ptr(), "other blocks still read x"
    if tail is not None:
        assert (weight.bits, tail.bits) == (4, 16)
        assert tail.num_inputs == weight.num_inputs
        assert not weight.gated
        assert not tail.gated
        assert config.split == 1
    fused = Fused(norm=norm_K is not None, residual=residual_MN is not None, tail=tail is not None)
    blocks = _blocks(x_MK, weight, config, fused, tail)
    _launch(x_MK, weight, config, fused, norm_K, eps, residual_MN, y, None, None, blocks, overlap, tail)
    return y


def top1(
    x_MK: Tensor,
    weight: PackedWeight,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    overlap: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids [M] int64, scores [M] float32), without the scores of all outputs ever being in memory."""
    assert not weight.gated
    rows = x_MK.shape[0]
    config = config or choose(weight, rows, True, most_shared(x_MK.device.index))
    assert config.split == 1
    _check(x_MK, weight, None, None, norm_K, 0)
    fused = Fused(norm=norm_K is not None, top1=True)
    kernels = _kernels(defines(weight, config, fused), x_MK.device.index)
    grid_size = _blocks(x_MK, weight, config, fused, None)
    blocks = grid_size[0]
    part_score = x_MK.new_empty(rows, blocks, dtype=torch.float32)
    part_id = x_MK.new_empty(rows, blocks, dtype=torch.int64)
    _launch(x_MK, weight, config, fused, norm_K, eps, None, None, part_score, part_id, grid_size, overlap)
    scores, ids = x_MK.new_empty(rows, dtype=torch.float32), x_MK.new_empty(rows, dtype=torch.int64)
    best = kernels["best_of_parts"]
    best((rows, 1), 256, top1_shared_bytes(), (part_score, part_id, scores, ids, blocks), overlap)
    return ids, scores


def unpack(weight: PackedWeight, out_NK: Tensor | None = None) -> Tensor:
    """w [N, K] in bfloat16, for products of many rows by a dense matrix."""
    sizes = weight.num_outputs, weight.num_inputs
    dense = weight.words.new_empty(sizes, dtype=torch.bfloat16) if out_NK is None else out_NK
    assert dense.shape == sizes
    assert dense.is_contiguous()
    assert dense.dtype == torch.bfloat16
    _unpack("unpack", weight, dense)
    return dense


def unpack_e4m3(weight: PackedWeight, row_scale_N1: Tensor, out_NK: Tensor) -> None:
    """e4m3(w / row_scale) into `out`, w as `unpack` gives it; see `fp8`. From sm_89 on."""
    assert out_NK.shape == (weight.num_outputs, weight.num_inputs)
    assert out_NK.is_contiguous()
    assert out_NK.dtype == torch.float8_e4m3fn
    assert row_scale_N1.dtype == torch.float32
    assert row_scale_N1.is_contiguous()
    _unpack("unpack_e4m3", weight, row_scale_N1, out_NK)


def _unpack(name: str, weight: PackedWeight, *tensors: Tensor) -> None:
    options = defines(weight, Config(warps=1, tiles=1, row_tiles=1, stages=1), Fused())
    tiles, steps = weight.words.shape[:2]
    arguments = weight.words, weight.scales, *tensors, weight.num_outputs, weight.num_inputs
    _kernels(options, weight.words.device.index)[name]((-(-tiles * steps // 8), 1), 256, 0, arguments, False)


def _blocks(
    x_MK: Tensor, weight: PackedWeight, config: Config, fused: Fused, tail: PackedWeight | None
) -> tuple[int, int]:
    device = x_MK.device.index
    shared = shared_bytes(weight, config)
    validate(weight, config, most_shared(device))
    resident = _resident(defines(weight, config, fused), device, config.warps * 32, shared)
    places = min(resident, config.blocks * torch.cuda.get_device_properties(device).multi_processor_count)
    return grid(weight, config, x_MK.shape[0], tail, places)


def _launch(
    x_MK: Tensor,
    weight: PackedWeight,
    config: Config,
    fused: Fused,
    norm_K: Tensor | None,
    eps: float,
    residual_MN: Tensor | None,
    y_MN: Tensor | None,
    part_score: Tensor | None,
    part_id: Tensor | None,
    blocks: tuple[int, int],
    overlap: bool,
    tail: PackedWeight | None = None,
) -> None:
    kernel = _kernels(defines(weight, config, fused), x_MK.device.index)["packed_linear"]
    rows = x_MK.shape[0]
    num_bytes, counters = partial_sizes(weight, config, rows)
    shared_by_blocks: tuple[Tensor | None, Tensor | None] = (None, None)
    if counters:  # sizes rounded up, so that there are few
        sizes_up = 1 << (num_bytes - 1).bit_length(), 1 << (counters - 1).bit_length()
        shared_by_blocks = _shared_by_blocks(x_MK.device.index, *sizes_up)
    more, more_outputs = (None, 0) if tail is None else (tail.words, tail.num_outputs)
    tensors = weight.words, weight.scales, x_MK, norm_K, residual_MN, y_MN, part_score, part_id, more, *shared_by_blocks
    sizes = rows, weight.num_outputs, more_outputs
    strides = x_MK.stride(0), *(0 if x is None else x.stride(0) for x in (residual_MN, y_MN))
    shared = shared_bytes(weight, config)
    kernel(blocks, config.warps * 32, shared, (*tensors, float(eps), *sizes, *strides), overlap)


def _check(
    x_MK: Tensor,
    weight: PackedWeight,
    y_MN: Tensor | None,
    residual_MN: Tensor | None,
    norm_K: Tensor | None,
    width: int,
) -> None:
    assert x_MK.dim() == 2, f"x is {list(x_MK.shape)}"
    assert x_MK.shape[1] == weight.num_inputs, f"x is {list(x_MK.shape)}"
    for name, tensor in (("x", x_MK), ("y", y_MN), ("residual", residual_MN), ("norm", norm_K)):
        if tensor is None:
            continue
        rows_fit = tensor.dim() == 1 or len(tensor) == 1 or tensor.stride(0) % 8 == 0
        if tensor.dtype != torch.bfloat16 or tensor.stride(-1) != 1 or not rows_fit or tensor.data_ptr() % 16:
            raise ValueError(
                f"{name} must be bfloat16 rows on 16 bytes, got {tensor.dtype} of strides {tensor.stride()}"
            )
    for tensor in (y_MN, residual_MN):
        assert tensor is None or tensor.shape == (x_MK.shape[0], width)
    assert norm_K is None or norm_K.shape == (weight.num_inputs,)
