"""A run's models in memory: in float32 where they are trained or compared, and as the device decodes best where they
answer."""

from pathlib import Path

import torch

from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import load_drafter
from twofold.ops.kernels import Kernels
from twofold.training.precision import Precision, dtype_of


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def decode_precision() -> Precision:
    """bfloat16 on a GPU, whose kernels multiply packed weights in nothing else. On a CPU float32, in which speculative
    decoding says exactly what plain decoding says."""
    return "bfloat16" if device().type == "cuda" else "float32"


def load(folder: Path, precision: Precision = "float32") -> CausalLM:
    return load_target(folder, dtype_of(precision), Kernels.auto(device())).to(device())


def load_frozen(folder: Path, precision: Precision = "float32") -> CausalLM:
    return load(folder, precision).freeze()


def load_draft(folder: Path, precision: Precision = "float32") -> Drafter:
    return load_drafter(folder, dtype_of(precision), Kernels.auto(device())).to(device())
