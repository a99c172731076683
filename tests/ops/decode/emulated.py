"""Builds and runs `linear.cu` on the CPU: every thread of a block is a fiber (emulator.h)."""

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from twofold.ops.decode.division import Config, grid, partial_sizes, shared_bytes
from twofold.ops.decode.linear_cuda import Fused, defines, top1_shared_bytes
from twofold.ops.decode.packed_weight import PackedWeight

SOURCE = Path(__file__).parents[3] / "twofold/ops/decode/linear.cu"
COMPILER = shutil.which("g++")

WRAPPER = """
#include "emulator.h"
#include "linear.cu"
extern "C" void run_linear(int grid_x, int grid_y, size_t shared, const Quad* weight, const u32* scales, const u16* x,
                           const u16* norm, const u16* residual, u16* y, float* score, i64* id, const Quad* tail,
                           Sums* partial, int* arrived, float eps, int M, int N, int tail_N, int x_stride, int r_stride,
                           int y_stride) {
  emulator::launch({(unsigned)grid_x, (unsigned)grid_y, 1}, THREADS, shared, [&] {
    packed_linear(weight, scales, x, norm, residual, y, score, id, tail, partial, arrived, eps, M, N, tail_N, x_stride,
                  r_stride, y_stride);
  });
}
extern "C" void run_best(int rows, size_t shared, const float* part_score, const i64* part_id, float* score, i64* id,
                         int parts) {
  emulator::launch({(unsigned)rows, 1, 1}, 256, shared, [&] { best_of_parts(part_score, part_id, score, id, parts); });
}
extern "C" void run_unpack(int blocks, const Quad* weight, const u32* scales, u16* dense, int N, int K) {
  emulator::launch({(unsigned)blocks, 1, 1}, 256, 16, [&] { unpack(weight, scales, dense, N, K); });
}
extern "C" void run_unpack_e4m3(int blocks, const Quad* weight, const u32* scales, const float* row_scale,
                                unsigned char* q, int N, int K) {
  emulator::launch({(unsigned)blocks, 1, 1}, 256, 16, [&] { unpack_e4m3(weight, scales, row_scale, q, N, K); });
}
"""


FLAGS = ["-std=c++17", "-O0", "-w", "-fPIC", "-DEMULATED"]


@functools.cache
def _folder() -> Path:
    """Holds the emulator, compiled once for all variants."""
    folder = Path(tempfile.mkdtemp(prefix="emulated"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copy(Path(__file__).with_name("emulator.h"), folder)
    (folder / "run.cpp").write_text(WRAPPER)
    subprocess.run([COMPILER or "g++", *FLAGS, "-x", "c++-header", "emulator.h"], cwd=folder, check=True)
    return folder


@functools.cache
def _library(options: tuple[str, ...]) -> ctypes.CDLL:
    folder = _folder()
    to = folder / f"{abs(hash(options))}.so"
    command = [COMPILER or "g++", *FLAGS, "-shared", "-I.", f"-I{SOURCE.parent}", *options, "run.cpp", "-o", str(to)]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(to))


def _at(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if x is None else x.data_ptr())


def linear(
    x_MK: Tensor,
    weight: PackedWeight,
    config: Config,
    blocks: int,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_MN: Tensor | None = None,
    tail: PackedWeight | None = None,
    top1: bool = False,
) -> tuple[Tensor, ...]:
    """(y,), or (ids, scores) with `top1`, where `blocks` fit on the device."""
    rows = len(x_MK)
    fused = Fused(norm=norm_K is not None, residual=residual_MN is not None, top1=top1, tail=tail is not None)
    library = _library(defines(weight, config, fused))
    size = grid(weight, config, rows, tail, blocks)
    more = 0 if tail is None else tail.num_outputs
    num_bytes, counters = partial_sizes(weight, config, rows)
    partial, arrived = torch.full((num_bytes // 4,), torch.nan), torch.zeros(counters, dtype=torch.int32)
    y = torch.full((rows, weight.out_features + more), torch.nan, dtype=torch.bfloat16)
    score, ids = torch.full((rows, size[0]), torch.nan), torch.full((rows, size[0]), -1)
    library.run_linear(
        *size, ctypes.c_size_t(shared_bytes(weight, config)), *map(_at, (weight.words, weight.scales, x_MK, norm_K)),
        *map(_at, (residual_MN, y, score, ids, None if tail is None else tail.words, partial, arrived)),
        ctypes.c_float(eps), rows, weight.num_outputs, more, x_MK.stride(0),
        0 if residual_MN is None else residual_MN.stride(0), y.stride(0),
    )  # fmt: skip
    assert not arrived.any()
    if not top1:
        return (y,)
    best, best_id = torch.full((rows,), torch.nan), torch.full((rows,), -1)
    library.run_best(rows, ctypes.c_size_t(top1_shared_bytes()), *map(_at, (score, ids, best, best_id)), size[0])
    return best_id, best


def unpacked(weight: PackedWeight) -> Tensor:
    dense = torch.full((weight.num_outputs, weight.num_inputs), torch.nan, dtype=torch.bfloat16)
    _unpack("run_unpack", weight, dense)
    return dense


def unpacked_e4m3(weight: PackedWeight, row_scale_N1: Tensor) -> Tensor:
    q = torch.full((weight.num_outputs, weight.num_inputs), torch.nan).to(torch.float8_e4m3fn)
    _unpack("run_unpack_e4m3", weight, row_scale_N1, q)
    return q


def _unpack(name: str, weight: PackedWeight, *tensors: Tensor) -> None:
    library = _library(defines(weight, Config(warps=1, tiles=1, row_tiles=1, stages=1), Fused()))
    tiles, steps = weight.words.shape[:2]
    pointers = map(_at, (weight.words, weight.scales, *tensors))
    library[name](-(-tiles * steps // 8), *pointers, weight.num_outputs, weight.num_inputs)
