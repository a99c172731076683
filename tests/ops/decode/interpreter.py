"""bfloat16 in Triton's interpreter, which keeps it as bits: its casts cut off where a GPU rounds to nearest even, its
dot multiplies the bits as integers, and what rounds up to the next power of 2 loses the carry."""

from typing import Any

import numpy as np
import torch


def _wide(bits: np.ndarray) -> np.ndarray:
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _narrow(numbers: np.ndarray) -> np.ndarray:
    rounded = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16)


def mend() -> None:
    """bfloat16 casts that round to nearest even, and a dot of its numbers with float32 sums."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert_float(x: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if (source, target) == (tl.bfloat16, tl.float32):
            return _wide(x).view(np.uint32)
        if (source, target) == (tl.float32, tl.bfloat16):
            return _narrow(x)
        return convert(x, source, target, mode)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            interpreter.TensorHandle(_wide(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        )
        return dot(self, a, b, *rest)

    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot
