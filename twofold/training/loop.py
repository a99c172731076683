"""A training loop that can be killed at any moment and gives the same numbers.

Step i is a function of (parameters, optimizer state, i): the data of a step come from its number, so what a
checkpoint keeps is all there is. The host makes those of the next step while the device works at this one.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from twofold.training.optimizer import OptimizerConfig, new_optimizer, restore_state, set_rate, state_tensors
from twofold.training.step import Inputs, TrainingStep

Report = Callable[[int, int, str], None]
History = list[dict[str, float]]
T = TypeVar("T")

_STATE, _BEST, _HISTORY = "training.safetensors", "best.safetensors", "history.json"


class Checkpoints(Protocol):
    def latest(self) -> tuple[int, Path] | None: ...

    def save(self, step: int, write: Callable[[Path], object]) -> object: ...


def train(
    parameters: Mapping[str, nn.Parameter],
    inputs_at: Callable[[int], Inputs],
    loss_of: Callable[..., Tensor],
    config: OptimizerConfig,
    checkpoints: Checkpoints,
    report: Report,
    validate: Callable[[], dict[str, float]],
    *,
    multiples: Mapping[str, float] | None = None,
    keep_least: str | None = None,
    blame: Callable[[int], str] | None = None,
) -> History:
    """Minimizes `loss_of(*inputs_at(step))` in place; returns the validations, [{"step": ..., ...}], the last after the
    end. Inputs have the same shapes at every step; they are made on the host, the loss on the device.

    `multiples`: see `new_optimizer`. `keep_least`: a key of the validations; the parameters end as those of the
    validation where it was least, the first of several. `parameters` are in the order of the forward pass.

    ValueError when a loss or a gradient is not finite; nothing is changed by that step, and the last checkpoint
    stays. It names what `blame(step)` says of such a loss, or the parameter where such a gradient began.
    """
    optimizer = new_optimizer(parameters, config, multiples or {})
    history: History = []
    best: dict[str, Tensor] = {}
    done = 0
    if (found := checkpoints.latest()) is not None:
        done, folder = found
        history, best = _restore(folder, parameters, optimizer)

    def look(step: int) -> None:
        entry = {"step": step, **validate()}
        if keep_least is not None and entry[keep_least] < _least(history, keep_least):
            for name, parameter in parameters.items():
                best[name] = parameter.detach().to("cpu", copy=True)
        history.append(entry)

    average = math.nan
    work = TrainingStep(list(parameters.values()), loss_of, optimizer, config.clip, captured=config.captured)
    inputs = inputs_at(done) if done < config.steps else ()
    for step in range(done, config.steps):
        if config.validate_every and step % config.validate_every == 0:
            look(step)
        set_rate(optimizer, config.rate(step))
        work.begin(inputs)
        if step + 1 < config.steps:
            inputs = inputs_at(step + 1)
        loss, norm = work.read()
        if not math.isfinite(loss + norm):
            wrong = _diagnosis(loss, parameters, step, blame)
            raise ValueError(f"step {step}: {wrong}; lower the learning rate, or check the weights")
        work.finish()
        average = loss if math.isnan(average) else 0.95 * average + 0.05 * loss
        report(step + 1, config.steps, f"loss {average:.4f}")
        if (step + 1) % config.checkpoint_every == 0 and step + 1 < config.steps:
            checkpoints.save(step + 1, lambda folder: _store(folder, parameters, optimizer, history, best))
    optimizer.zero_grad(set_to_none=True)
    look(config.steps)
    with torch.no_grad():
        for name, tensor in best.items():
            parameters[name].copy_(tensor)
    return history


def _least(history: History, key: str) -> float:
    return min((entry[key] for entry in history if not math.isnan(entry[key])), default=math.inf)


def _diagnosis(
    loss: float, parameters: Mapping[str, nn.Parameter], step: int, blame: Callable[[int], str] | None
) -> str:
    if not math.isfinite(loss) and blame is not None:
        return f"the loss is not finite, first in {blame(step)}"
    # Gradients flow backward: all that come before the place where one broke are broken with it.
    broken = [n for n, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()]
    if broken and (math.isfinite(loss) or len(broken) < len(parameters)):
        return f"the gradient of {broken[-1]} is not finite"
    return f"the {'norm of the gradient' if math.isfinite(loss) else 'loss'} is not finite"


def _store(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    history: History,
    best: Mapping[str, Tensor],
) -> None:
    tensors = {name: p.detach() for name, p in parameters.items()} | state_tensors(optimizer, parameters)
    save_file({k: v.contiguous() for k, v in tensors.items()}, str(folder / _STATE))
    if best:
        save_file({k: v.contiguous() for k, v in best.items()}, str(folder / _BEST))
    (folder / _HISTORY).write_text(json.dumps(history))


def _restore(
    folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[History, dict[str, Tensor]]:
    def tensors_of(path: Path) -> dict[str, Tensor]:
        found = load_file(path)
        if wrong := [n for n, p in parameters.items() if n not in found or found[n].shape != p.shape]:
            raise ValueError(f"{wrong[0]} is not in it as it was trained")
        return found

    tensors = _read(folder / _STATE, tensors_of)
    history = _read(folder / _HISTORY, _history)
    best = _read(folder / _BEST, tensors_of) if (folder / _BEST).exists() else {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    restore_state(optimizer, parameters, tensors)
    return history, best


def _read(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except (FileNotFoundError, SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} is missing or damaged; delete the folder {path.parent} to begin its stage anew"
        ) from error


def _history(path: Path) -> History:
    found = json.loads(path.read_text())
    if not isinstance(found, list):
        raise ValueError("a history is a list")
    return found
