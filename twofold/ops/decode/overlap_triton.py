"""Programmatic dependent launch for Triton's kernels: the next kernel may start while this one runs, and waits in turn.

A kernel that is launched so must call `in_turn` before it touches memory. Each then begins after all that came before
it has ended, however early it was placed on a multiprocessor. What no kernel in flight writes, weights and the state
that only a commit changes, may be read before: between `let_next_start` and `await_before`.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def await_before(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()


@triton.jit
def in_turn(OVERLAP: tl.constexpr):
    let_next_start(OVERLAP)
    await_before(OVERLAP)


def able(overlap: bool, device: torch.device) -> bool:
    """Whether to, on this device: sm_90 and newer."""
    return overlap and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def options(overlap: bool) -> dict[str, bool]:
    """Of the launch; Triton's interpreter does not know them."""
    return {"launch_pdl": True} if overlap else {}
