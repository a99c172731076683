"""A training loop that can be killed at any moment and gives the same numbers.

Step i is a function of (parameters, optimizer state, i): the data of a step come from its number, so what a
checkpoint keeps is all there is.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Report = Callable[[int, int, str], None]
History = list[dict[str, float]]


class Checkpoints(Protocol):
    def latest(self) -> tuple[int, Path] | None: ...

    def save(self, step: int, write: Callable[[Path], object]) -> object: ...


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW; linear warm-up over a share of the steps, then cosine decay to `final` times the peak."""

    steps: int
    learning_rate: float
    warmup: float = 0.05
    final: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    checkpoint_every: int = 50
    validate_every: int = 0  # 0: only at the end

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps = {self.steps}; a training takes at least one")

    def rate(self, step: int) -> float:
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        progress = (step - warm) / max(1, self.steps - warm)
        return self.learning_rate * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress)))


def train(
    parameters: Mapping[str, nn.Parameter],
    loss_at: Callable[[int], Tensor],
    config: OptimizerConfig,
    checkpoints: Checkpoints,
    report: Report,
    validate: Callable[[], dict[str, float]],
) -> History:
    """Minimizes `loss_at(step)` in place; returns the validations, [{"step": ..., ...}], the last after the end.

    RuntimeError that names the first parameter whose gradient is not finite; nothing is changed by that step.
    """
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
    )
    history: History = []
    done = 0
    if (found := checkpoints.latest()) is not None:
        done, folder = found
        history = _restore(folder, parameters, optimizer)
    average = math.nan
    for step in range(done, config.steps):
        if config.validate_every and step % config.validate_every == 0:
            history.append({"step": step, **validate()})
        for group in optimizer.param_groups:
            group["lr"] = config.rate(step)
        loss = loss_at(step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters.values(), config.clip)
        if not torch.isfinite(norm):
            bad = next(
                (n for n, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()),
                "loss",
            )
            raise RuntimeError(f"step {step}: the gradient of {bad} is not finite; lower the learning rate")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        average = value if math.isnan(average) else 0.95 * average + 0.05 * value
        report(step + 1, config.steps, f"loss {average:.4f}")
        if (step + 1) % config.checkpoint_every == 0 and step + 1 < config.steps:
            checkpoints.save(step + 1, lambda folder: _store(folder, parameters, optimizer, history))
    history.append({"step": config.steps, **validate()})
    return history


def _store(
    folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, history: History
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensors[name] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}/{key}"] = value
    save_file({k: v.contiguous() for k, v in tensors.items()}, str(folder / "training.safetensors"))
    (folder / "history.json").write_text(json.dumps(history))


def _restore(folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> History:
    tensors = load_file(str(folder / "training.safetensors"))
    state: dict[Tensor, dict[str, Any]] = {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
            state[parameter] = {
                key.removeprefix(f"{name}/"): value.to(parameter.device) if not key.endswith("/step") else value
                for key, value in tensors.items()
                if key.startswith(f"{name}/")
            }
    optimizer.state.update(state)
    history = json.loads((folder / "history.json").read_text())
    assert isinstance(history, list)
    return history
