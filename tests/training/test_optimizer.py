"""The optimizer's groups, its 8-bit states, and their way through a checkpoint."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from twofold.pipeline.checkpoint import Checkpoints
from twofold.training.loop import train
from twofold.training.optimizer import OptimizerConfig, new_optimizer, restore_state, set_rate, state_tensors

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def config(**options: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"steps": 10, "learning_rate": 0.1, "warmup": 0.4} | options)


def test_a_parameter_may_have_a_rate_of_its_own(tmp_path: Path) -> None:
    """A first step of AdamW is rate * sign of the gradient; weight decay is for the others alone."""
    start = torch.tensor([1.0, -2.0, 3.0])
    parameters = {name: nn.Parameter(start.clone()) for name in ("weight", "scale", "other")}
    slope = torch.tensor([0.3, -0.2, 0.1])

    class StopError(Exception):
        pass

    def report(*_: object) -> None:
        raise StopError

    def loss_of() -> Tensor:
        return sum(((p * slope).sum() for p in parameters.values()), torch.zeros(()))

    multiples = {"scale": 0.25, "other": 2.0}
    with pytest.raises(StopError):
        train(
            parameters,
            lambda step: (),
            loss_of,
            config(weight_decay=0.5),
            Checkpoints(tmp_path),
            report,
            dict,
            multiples=multiples,
        )
    rate = 0.1 / 4
    wanted = {
        "weight": start * (1 - rate * 0.5) - rate * slope.sign(),
        "scale": start - 0.25 * rate * slope.sign(),
        "other": start - 2 * rate * slope.sign(),
    }
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), wanted[name], rtol=1e-5, atol=1e-6)


def test_without_torchao_8_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *_: object) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r'"8bit" needs torchao; install it \(pip install torchao\) or set it to'):
        new_optimizer({"p": nn.Parameter(torch.zeros(3))}, config(states="8bit"), {})


def test_float32_needs_no_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def guarded(name: str, *rest: Any) -> Any:
        assert not name.startswith("torchao")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", guarded)
    new_optimizer({"p": nn.Parameter(torch.zeros(3))}, config(), {})


@pytest.mark.parametrize("method", ["adamw", "muon"])
def test_rates_change_where_they_stand(method: str) -> None:
    """What reads a rate's tensor, as a CUDA graph does, reads the schedule, and of each group its own."""
    parameters = {name: nn.Parameter(torch.zeros(3)) for name in ("weight", "scale")}
    how = config(method=method)
    optimizer = new_optimizer(parameters, how, {"scale": 0.25})
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(how.steps):
        set_rate(optimizer, how.rate(step))
        assert [float(rate) for rate in rates] == pytest.approx([how.rate(step), 0.25 * how.rate(step)], rel=1e-6)
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))


@needs_torchao
def test_8_bit_states_survive_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    """Small parameters keep float32 states, as the paper has it; large ones take a byte a moment."""

    def parameters() -> dict[str, nn.Parameter]:
        draw = torch.Generator().manual_seed(0)
        return {n: nn.Parameter(torch.randn(s, generator=draw)) for n, s in (("large", (64, 128)), ("small", (5,)))}

    def step(optimizer: torch.optim.Optimizer, found: dict[str, nn.Parameter], number: int) -> None:
        draw = torch.Generator().manual_seed(100 + number)
        for parameter in found.values():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        set_rate(optimizer, 0.01 * (number + 1))
        optimizer.step()

    whole, parts, resumed = parameters(), parameters(), parameters()
    optimizer = new_optimizer(whole, config(states="8bit"), {})
    for number in range(4):
        step(optimizer, whole, number)

    optimizer = new_optimizer(parts, config(states="8bit"), {})
    for number in range(2):
        step(optimizer, parts, number)
    tensors = state_tensors(optimizer, parts)
    assert tensors["large/exp_avg/codes"].dtype == torch.uint8
    assert tensors["small/exp_avg"].dtype == torch.float32
    save_file(tensors, tmp_path / "state.safetensors")

    optimizer = new_optimizer(resumed, config(states="8bit"), {})
    restore_state(optimizer, resumed, load_file(tmp_path / "state.safetensors"))
    with torch.no_grad():
        for name, parameter in parts.items():
            resumed[name].copy_(parameter)
    for number in range(2, 4):
        step(optimizer, resumed, number)
    for name, parameter in whole.items():
        assert torch.equal(parameter, resumed[name]), name
    again = state_tensors(optimizer, resumed)
    assert again.keys() == tensors.keys()


@needs_torchao
def test_8_bits_follow_32(tmp_path: Path) -> None:
    """On a quadratic both reach the minimum."""
    target = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    ends = []
    for states in ("float32", "8bit"):
        parameter = nn.Parameter(torch.zeros(32, 128))
        how = config(steps=60, states=states)

        def loss_of(parameter: nn.Parameter = parameter) -> Tensor:
            return (parameter - target).square().mean()

        train({"p": parameter}, lambda step: (), loss_of, how, Checkpoints(tmp_path / states), lambda *_: None, dict)
        ends.append(float((parameter.detach() - target).square().mean()))
    assert max(ends) < 0.05  # from 1
    assert ends[0] != ends[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "at least one"),
        ({"clip": 0.0}, "leaves no gradient"),
        ({"checkpoint_every": 0}, "every so many steps"),
        ({"validate_every": -1}, "every so many steps"),
        ({"warmup": 3.0}, "share of the steps"),
    ],
)
def test_what_would_train_nothing_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**wrong)
