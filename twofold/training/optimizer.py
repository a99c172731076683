"""AdamW or Muon, their schedule, and their state as plain tensors that a checkpoint can hold."""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from twofold.training.muon import Muon


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Linear warm-up over a share of the steps, then cosine decay to `final` times the peak.

    `method`: AdamW, or Muon for matrices and AdamW for the rest (see `training.muon`), at rates of the same size.
    `states`: AdamW's two moments in float32, or in blocks of 8 bits with a scale each (arXiv:2110.02861; needs
    torchao): 2 bytes a parameter instead of 8. The parameters themselves are what the caller made them. `captured`:
    on a GPU, steps are replayed as CUDA graphs (see `training.step`); on a CPU the same functions over the same fixed
    shapes are called, so the numbers are the same and nothing is gained.
    """

    steps: int
    learning_rate: float
    method: Literal["adamw", "muon"] = "adamw"
    warmup: float = 0.05
    final: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    states: Literal["float32", "8bit"] = "float32"
    checkpoint_every: int = 50
    validate_every: int = 0  # 0: only at the end
    captured: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps = {self.steps}; a training takes at least one")
        if self.checkpoint_every < 1 or self.validate_every < 0:
            raise ValueError(
                f"checkpoint_every = {self.checkpoint_every}, validate_every = {self.validate_every}: every so many "
                "steps; validate_every = 0 is at the end alone"
            )
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate = {self.learning_rate} learns nothing; use a positive number")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas} are not in [0, 1)")
        if not 0 <= self.final <= 1:
            raise ValueError(f"final = {self.final} is a share of the learning rate, in [0, 1]")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay = {self.weight_decay} is negative; 0 is none")
        if not self.clip > 0:
            raise ValueError(f"clip = {self.clip} leaves no gradient; use the largest norm, inf for none")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup = {self.warmup} is a share of the steps, in [0, 1]")
        if self.method == "muon" and self.states == "8bit":
            raise ValueError('optimizer.states = "8bit" is for AdamW; leave it out with method = "muon"')
        if self.captured and self.states == "8bit":
            raise ValueError('optimizer.states = "8bit" is in no CUDA graph; set it to "float32", or captured to false')

    def rate(self, step: int) -> float:
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        progress = (step - warm) / max(1, self.steps - warm)
        return self.learning_rate * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress)))


def new_optimizer(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, multiples: Mapping[str, float]
) -> torch.optim.Optimizer:
    """`multiples`: parameters whose rate is the config's times that; they have no weight decay.

    ValueError for 8 bits without torchao.
    """
    groups: list[dict[str, Any]] = []
    if plain := [p for name, p in parameters.items() if name not in multiples]:
        groups.append({"params": plain, "multiple": 1.0})
    groups += [
        {
            "params": [p for name, p in parameters.items() if multiples.get(name) == multiple],
            "multiple": multiple,
            "weight_decay": 0.0,
        }
        for multiple in sorted(set(multiples.values()))
    ]
    how: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "weight_decay": config.weight_decay}
    if config.states == "8bit":
        optimizer: torch.optim.Optimizer = _torchao("torchao.optim").AdamW8bit(groups, **how)
        return optimizer
    for group in groups:  # a CUDA graph reads the rate of the moment where it stands
        group["lr"] = torch.tensor(config.learning_rate, device=group["params"][0].device)
    if config.method == "muon":
        return Muon(groups, **how)
    on_gpu = all(parameter.is_cuda for parameter in parameters.values())
    return torch.optim.AdamW(groups, fused=on_gpu or None, **how)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:  # in place: a CUDA graph, or torchao's compiled step, keeps what it has seen
        group["lr"].fill_(rate * group["multiple"])


def state_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """PARAMETER/MOMENT -> its tensor; in 8 bits PARAMETER/MOMENT/PART -> codes, scales, code book."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items():
            if hasattr(value, "__tensor_flatten__"):
                parts, _ = value.__tensor_flatten__()
                tensors |= {f"{name}/{key}/{part}": getattr(value, part) for part in parts}
            else:
                tensors[f"{name}/{key}"] = value
    return tensors


def restore_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """The inverse of `state_tensors`, bit for bit."""
    state: dict[Tensor, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            if key.startswith(f"{name}/"):
                moment, _, part = key.removeprefix(f"{name}/").partition("/")
                on_host = moment == "step" and not (isinstance(optimizer, Muon) or optimizer.defaults.get("fused"))
                parts.setdefault(moment, {})[part] = tensor if on_host else tensor.to(parameter.device)
        state[parameter] = {
            moment: found[""] if "" in found else _eight_bit(found, moment, parameter.dtype)
            for moment, found in parts.items()
        }
    optimizer.state.update(state)


def _eight_bit(parts: Mapping[str, Tensor], moment: str, dtype: torch.dtype) -> Tensor:
    make = _torchao("torchao.optim.subclass_8bit").OptimState8bit
    signed = moment == "exp_avg"  # a mean of gradients; the other is one of squares
    state: Tensor = make(parts["codes"], parts["scale"], parts["qmap"], signed, dtype)
    return state


def _torchao(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("torchao"):
            raise
        raise ValueError(
            'optimizer.states = "8bit" needs torchao; install it (pip install torchao) or set it to "float32"'
        ) from None
