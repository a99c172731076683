"""Where Triton's kernels are tested: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

import importlib.util
import os

import torch

from tests.ops.decode import interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
if INTERPRETED:
    interpreter.mend()


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
