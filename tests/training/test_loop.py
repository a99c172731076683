"""A training that was killed and resumed is the one that was not; one that breaks says where."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from twofold.pipeline.checkpoint import Checkpoints
from twofold.training.loop import History, OptimizerConfig, train


class Killed(Exception):  # noqa: N818
    pass


def number(step: int) -> tuple[Tensor]:
    return (torch.tensor(step),)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def run(
    model: nn.Module,
    folder: Path,
    config: OptimizerConfig,
    *,
    kill_at: int | None = None,
    change: Callable[[int, Tensor], Tensor] = lambda step, loss: loss,
    seen: list[int] | None = None,
) -> History:
    """Steps whose data come from their number; `validate` reads the weights."""

    def inputs_at(step: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.tensor(step), torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)

    def loss_of(step: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if step == kill_at:
            raise Killed
        if seen is not None:
            seen.append(int(step))
        return change(int(step), (model(x) - y).square().mean())

    def validate() -> dict[str, float]:
        return {"norm": float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm())}

    parameters = dict(model.named_parameters())
    return train(parameters, inputs_at, loss_of, config, Checkpoints(folder), lambda *_: None, validate)


def config(steps: int = 20, every: int = 10, validate: int = 5) -> OptimizerConfig:
    return OptimizerConfig(
        steps=steps, learning_rate=0.05, weight_decay=0.1, checkpoint_every=every, validate_every=validate
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("training.safetensors", b"half"),
        ("training.safetensors", None),
        ("training.safetensors", save({"0.weight": torch.zeros(3)})),
        ("history.json", b"[{"),
        ("history.json", b"{}"),
        ("history.json", None),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str, content: bytes | None) -> None:
    with pytest.raises(Killed):
        run(network(), tmp_path, config(), kill_at=15)
    file = tmp_path / "step-00000010" / name
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{file} is missing or damaged; delete the folder {file.parent} to begin"):
        run(network(), tmp_path, config())


@pytest.mark.parametrize(("every", "kill_at"), [(10, 10), (10, 15), (5, 19), (4, 9), (7, 3), (5, 10)])
def test_killed_and_resumed_is_bit_equal(tmp_path: Path, every: int, kill_at: int) -> None:
    whole, parts = network(), network()
    wanted = run(whole, tmp_path / "whole", config(every=every))
    with pytest.raises(Killed):
        run(parts, tmp_path / "parts", config(every=every), kill_at=kill_at)
    seen: list[int] = []
    resumed = network()
    assert run(resumed, tmp_path / "parts", config(every=every), seen=seen) == wanted
    assert seen == list(range(kill_at // every * every, 20))
    assert [entry["step"] for entry in wanted] == [0, 5, 10, 15, 20]
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name


def test_one_step_is_adamw_by_hand(tmp_path: Path) -> None:
    """First step: m / sqrt(v) = sign of the gradient, after decay and at the warmed-up rate."""
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    how = OptimizerConfig(steps=10, learning_rate=0.1, warmup=0.4, weight_decay=0.5)
    slope = torch.tensor([0.3, -0.2, 0.1])

    def loss_of() -> Tensor:
        return (parameter * slope).sum()

    def report(done: int, *_: object) -> None:
        if done == 1:
            raise Killed

    with pytest.raises(Killed):
        train({"p": parameter}, lambda step: (), loss_of, how, Checkpoints(tmp_path), report, dict)
    rate = 0.1 / 4
    wanted = torch.tensor([1.0, -2.0, 3.0]) * (1 - rate * 0.5) - rate * slope.sign()
    torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-5, atol=1e-6)


def test_the_rate_warms_up_and_decays() -> None:
    how = OptimizerConfig(steps=100, learning_rate=2.0, warmup=0.1, final=0.25)
    rates = [how.rate(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(2.0 * (0.25 + 0.75 / 2))  # half way down
    assert rates[100] == pytest.approx(0.5)
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert all(rate > 0 for rate in rates)


def test_a_single_step_has_a_rate() -> None:
    assert OptimizerConfig(steps=1, learning_rate=1.0).rate(0) > 0
    with pytest.raises(ValueError, match="steps = 0"):
        OptimizerConfig(steps=0, learning_rate=1.0)


def test_a_gradient_that_is_not_finite_stops_and_is_named(tmp_path: Path) -> None:
    """Only the last layer's bias is poisoned; the parameters and the last checkpoint stay as they were."""
    model, good = network(), network()

    def poison(step: int, loss: Tensor) -> Tensor:
        return loss + (model[2].bias.sum() * math.inf if step == 7 else 0.0)  # type: ignore[operator, union-attr]

    run(good, tmp_path / "good", config(steps=20, every=20), kill_at=None)
    with pytest.raises(ValueError, match=r"step 7: the gradient of 2\.bias is not finite; lower the learning rate"):
        run(model, tmp_path / "bad", config(every=5), change=poison)
    found = Checkpoints(tmp_path / "bad").latest()
    assert found is not None
    assert found[0] == 5
    stopped = network()
    with pytest.raises(Killed):
        run(stopped, tmp_path / "stopped", config(every=5), kill_at=7)
    for name, parameter in stopped.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_the_gradient_is_clipped(tmp_path: Path) -> None:
    """Scaled a thousandfold, a loss whose gradient is clipped anyway makes the same steps."""
    a, b = network(), network()
    how = OptimizerConfig(steps=5, learning_rate=0.05, clip=1e-3)
    run(a, tmp_path / "a", how)
    run(b, tmp_path / "b", how, change=lambda step, loss: 1000 * loss)
    for name, parameter in a.named_parameters():
        torch.testing.assert_close(parameter, b.get_parameter(name), rtol=1e-3, atol=1e-4)


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    model, values = network(), []

    def loss_of(step: Tensor) -> Tensor:
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(int(step)))
        loss = (model(x) - x[:, :3]).square().mean()
        values.append(loss.item())
        return loss

    how = OptimizerConfig(steps=150, learning_rate=0.05)
    train(dict(model.named_parameters()), number, loss_of, how, Checkpoints(tmp_path), lambda *_: None, dict)
    assert sum(values[-10:]) < 0.2 * sum(values[:10])


def test_a_loss_that_is_not_finite_stops_and_is_blamed(tmp_path: Path) -> None:
    """The checkpoint before it stays, and so do the parameters."""
    model, asked = network(), []

    def loss_of(step: Tensor) -> Tensor:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(int(step)))
        return model(x * (math.nan if step == 7 else 1.0)).square().mean()

    def blame(step: int) -> str:
        asked.append((step, [p.detach().clone() for p in model.parameters()]))
        return "layers.3"

    checkpoints = Checkpoints(tmp_path)
    message = r"step 7: the loss is not finite, first in layers\.3; lower the learning rate, or check the weights"
    parameters = dict(model.named_parameters())
    with pytest.raises(ValueError, match=message):
        train(parameters, number, loss_of, config(every=5), checkpoints, lambda *_: None, dict, blame=blame)
    assert [step for step, _ in asked] == [7]
    assert all(torch.equal(a, b) for a, b in zip(asked[0][1], model.parameters(), strict=True))
    found = checkpoints.latest()
    assert found is not None
    assert found[0] == 5


def test_a_broken_gradient_is_named_where_it_began(tmp_path: Path) -> None:
    """The square root's slope at 0 breaks layer 2's output; all before it break with it, the last layer does not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

    def loss_of() -> Tensor:
        x = model[1](model[0](torch.ones(1, 4)))
        return model[2]((x - x.detach()).sqrt()).sum()

    parameters = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"step 0: the gradient of 1\.bias is not finite"):
        train(parameters, lambda step: (), loss_of, config(), Checkpoints(tmp_path), lambda *_: None, dict)
    assert model[2].weight.grad is not None
    assert model[2].weight.grad.isfinite().all()


class Valley:
    """A weight that walks one way; the validations follow a list."""

    def __init__(self, folder: Path, kl: list[float], kill_at: int | None = None) -> None:
        self.weight = nn.Parameter(torch.zeros(2))
        self.seen: dict[float, Tensor] = {}
        self.kl, self.folder, self.kill_at = kl, folder, kill_at
        self.at = 0

    def loss_of(self, step: Tensor) -> Tensor:
        if step == self.kill_at:
            raise Killed
        self.at = int(step) + 1
        return self.weight.sum()

    def run(self) -> History:
        how = OptimizerConfig(steps=20, learning_rate=0.1, checkpoint_every=3, validate_every=5)

        def validate() -> dict[str, float]:
            kl = self.kl[self.at // 5]
            self.seen[kl] = self.weight.detach().clone()
            return {"kl": kl}

        return train(
            {"weight": self.weight},
            number,
            self.loss_of,
            how,
            Checkpoints(self.folder),
            lambda *_: None,
            validate,
            keep_least="kl",
        )


@pytest.mark.parametrize(
    ("kl", "least"),
    [
        ([0.5, 0.2, 0.3, 0.4, 0.6], 0.2),
        ([0.1, 0.2, 0.3, 0.4, 0.6], 0.1),  # before the first step: the rounded model itself
        ([0.5, 0.4, 0.3, 0.2, 0.1], 0.1),
        ([math.nan, 0.4, 0.3, math.nan, 0.5], 0.3),
    ],
)
@pytest.mark.parametrize("kill_at", [4, 8, 11, 19])
def test_the_best_is_kept_also_over_a_kill(tmp_path: Path, kl: list[float], least: float, kill_at: int) -> None:
    whole = Valley(tmp_path / "whole", kl)
    history = whole.run()
    assert [entry["step"] for entry in history] == [0, 5, 10, 15, 20]
    assert torch.equal(whole.weight, whole.seen[least])
    assert len({tuple(weight.tolist()) for weight in whole.seen.values()}) == len(whole.seen)
    with pytest.raises(Killed):
        Valley(tmp_path / "parts", kl, kill_at).run()
    resumed = Valley(tmp_path / "parts", kl)
    resumed.at = kill_at // 3 * 3
    assert str(resumed.run()) == str(history)  # nan is not nan
    assert torch.equal(resumed.weight, whole.weight)


def test_the_first_of_equals_is_the_best(tmp_path: Path) -> None:
    valley = Valley(tmp_path, [0.5, 0.2, 0.2, 0.2, 0.6])
    start = valley.weight.detach().clone()
    valley.run()
    assert start[0] > valley.weight[0] > valley.seen[0.2][0]  # `seen` holds the last of the three
