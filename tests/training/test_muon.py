"""Muon against its definition, PyTorch's own (which orthogonalizes in bfloat16), and AdamW for what is no matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from twofold.training.muon import MOMENTUM, orthogonalized
from twofold.training.optimizer import OptimizerConfig, new_optimizer, restore_state, set_rate, state_tensors

SHAPES = {"tall": (48, 20), "also tall": (48, 20), "wide": (12, 64), "square": (24, 24), "vector": (24,), "number": ()}


def config(**options: object) -> OptimizerConfig:
    return OptimizerConfig(**{"steps": 10, "learning_rate": 0.02, "method": "muon"} | options)  # type: ignore[arg-type]


def parameters() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()}


def set_gradients(found: dict[str, nn.Parameter], number: int) -> None:
    draw = torch.Generator().manual_seed(100 + number)
    for parameter in found.values():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


@pytest.mark.parametrize("shape", [(1, 48, 20), (3, 12, 64), (2, 24, 24)])
def test_a_matrix_keeps_its_directions_and_loses_its_sizes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    found = orthogonalized(x)
    sizes = (u.mT @ found @ v.mT).diagonal(dim1=-2, dim2=-1)
    assert sizes.min() > 0.65
    assert sizes.max() < 1.25
    torch.testing.assert_close(found, u @ torch.diag_embed(sizes) @ v, rtol=0, atol=1e-9)


def test_matrices_of_a_shape_together_are_each_alone() -> None:
    x = torch.randn(4, 10, 30, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([orthogonalized(x[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(orthogonalized(x), alone, rtol=0, atol=1e-5)


def test_steps_are_pytorchs_up_to_its_bfloat16() -> None:
    ours, theirs = parameters(), parameters()
    optimizer = new_optimizer(ours, config(weight_decay=0.1), {})
    matrices = [p for p in theirs.values() if p.dim() == 2]
    options = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    wanted = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in theirs.values() if p.dim() != 2], **options),  # type: ignore[arg-type]
    ]
    start = parameters()
    for number in range(4):
        for found in (ours, theirs):
            set_gradients(found, number)
        rate = 0.02 / (number + 1)
        set_rate(optimizer, rate)
        optimizer.step()
        for each in wanted:
            each.param_groups[0]["lr"] = rate
            each.step()
    for name, parameter in ours.items():
        moved, expected = parameter - start[name], theirs[name] - start[name]
        tolerance = 0.02 if parameter.dim() == 2 else 1e-5
        assert (moved - expected).norm() <= tolerance * expected.norm(), name
        assert expected.norm() > 0.03


def test_a_rate_of_its_own_and_no_weight_decay() -> None:
    plain, slow = parameters(), parameters()
    for found, multiples in ((plain, {}), (slow, {"wide": 0.25})):
        set_gradients(found, 0)
        optimizer = new_optimizer(found, config(), multiples)
        set_rate(optimizer, 0.01)
        optimizer.step()
    start = parameters()
    for name in SHAPES:
        share = 0.25 if name == "wide" else 1.0
        torch.testing.assert_close(slow[name] - start[name], share * (plain[name] - start[name]), rtol=1e-4, atol=1e-6)


def test_it_resumes_bit_for_bit() -> None:
    whole, resumed = parameters(), parameters()
    optimizer = new_optimizer(whole, config(), {})
    for number in range(4):
        if number == 2:
            kept = {name: tensor.clone() for name, tensor in state_tensors(optimizer, whole).items()}
            with torch.no_grad():
                for name, parameter in whole.items():
                    resumed[name].copy_(parameter)
        set_gradients(whole, number)
        optimizer.step()
    optimizer = new_optimizer(resumed, config(), {})
    restore_state(optimizer, resumed, kept)
    for number in range(2, 4):
        set_gradients(resumed, number)
        optimizer.step()
    for name, parameter in whole.items():
        assert torch.equal(parameter, resumed[name]), name
    assert {name for name in kept if name.startswith("wide")} == {"wide/momentum"}


def test_8_bits_are_adamws() -> None:
    with pytest.raises(ValueError, match='"8bit" is for AdamW; leave it out'):
        config(states="8bit")
