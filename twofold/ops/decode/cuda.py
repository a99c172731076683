"""CUDA C++ compiled at run time by NVRTC and launched on PyTorch's current stream, also while it is captured."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Argument = Tensor | int | float | None


def compile_to_cubin(source: Path, options: Sequence[str], arch: str) -> bytes:
    """Machine code for e.g. "sm_90"; needs no GPU. RuntimeError with the compiler's log."""
    nvrtc = _bindings().nvrtc
    program = _checked(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], []))
    flags = [f"--gpu-architecture={arch}", "--std=c++17", "--device-as-default-execution-space", *options]
    error, *_ = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    if int(error):
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{source.name} does not compile for {arch}: {log.decode()}")
    cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return cubin


class Kernel:
    """One function of a compiled source: `kernel(grid, threads, shared, arguments, overlap)`.

    Tensors are passed as pointers (None as null), int as 32 bits, float as float32. `overlap`: programmatic dependent
    launch.
    """

    def __init__(self, function: Any, device: int) -> None:
        self.function = function
        self.device = device
        self.shared = 0

    def __call__(
        self, grid: tuple[int, int], threads: int, shared: int, arguments: Sequence[Argument], overlap: bool
    ) -> None:
        driver = _bindings().driver
        self._allow(shared)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = torch.cuda.current_stream(self.device).cuda_stream
        if overlap and torch.cuda.get_device_capability(self.device) >= (9, 0):
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values, types = zip(*map(_argument, arguments), strict=True)
        _checked(driver.cuLaunchKernelEx(config, self.function, (values, types), 0))

    def resident_blocks(self, threads: int, shared: int) -> int:
        """How many blocks the whole device holds at once."""
        driver = _bindings().driver
        self._allow(shared)
        each = _checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, threads, shared))
        return int(each) * torch.cuda.get_device_properties(self.device).multi_processor_count

    def _allow(self, shared: int) -> None:
        if shared > max(self.shared, 48 * 1024):
            driver = _bindings().driver
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self.function, attribute, shared))
            self.shared = shared


@functools.cache
def most_shared(device: int) -> int:
    """Bytes of shared memory that a block can have at most."""
    driver = _bindings().driver
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return int(_checked(driver.cuDeviceGetAttribute(attribute, _checked(driver.cuDeviceGet(device)))))


def compile_kernels(source: Path, options: Sequence[str], names: Sequence[str], device: int) -> dict[str, Kernel]:
    """The named functions of `source` on a device; some tenths of a second, so callers keep them."""
    driver = _bindings().driver
    with torch.cuda.device(device):
        torch.cuda.init()
        context = _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(device))))
        _checked(driver.cuCtxSetCurrent(context))  # PyTorch's, in a thread that made no CUDA call yet too
        major, minor = torch.cuda.get_device_capability(device)
        module = _checked(driver.cuModuleLoadData(compile_to_cubin(source, options, f"sm_{major}{minor}")))
        return {name: Kernel(_checked(driver.cuModuleGetFunction(module, name.encode())), device) for name in names}


def _bindings() -> Any:
    try:
        import cuda.bindings.driver
        import cuda.bindings.nvrtc
    except ImportError:
        raise ValueError("the GPU's kernels need cuda-bindings; pip install 'twofold[gpu]'") from None
    return cuda.bindings


def _checked(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA: {error}")
    return values[0] if len(values) == 1 else values


def _argument(value: Argument) -> tuple[int | float, Any]:
    if value is None:
        return 0, ctypes.c_void_p
    if isinstance(value, Tensor):
        return value.data_ptr(), ctypes.c_void_p
    return (value, ctypes.c_int) if isinstance(value, int) else (value, ctypes.c_float)
