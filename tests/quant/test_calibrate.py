"""GPTQ over a whole drafter, group by group."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tests.training.test_draft import BLOCK, MASK, packed, pair
from twofold.models.draft_quantization import packable_groups
from twofold.models.drafter import Drafter
from twofold.quant.calibrate import gptq_in_order
from twofold.quant.gptq import GptqReport, Hessian
from twofold.quant.linear import FakeQuantLinear, PackedLinear, replace_linears
from twofold.quant.rounding import search_grid
from twofold.quant.scheme import QuantScheme
from twofold.training.blocks import draft_logits, make_blocks, sample_anchors

SCHEME = QuantScheme(group_size=16)


def run(drafter: Drafter) -> Tensor:
    rows, (target, _) = packed(), pair()
    blocks = make_blocks(rows, sample_anchors(rows, 12, 0), BLOCK, MASK)
    return draft_logits(drafter, target, rows, blocks)


def quantized(drafter: Drafter, scheme: QuantScheme = SCHEME) -> tuple[Drafter, dict[str, GptqReport], list[str]]:
    made, notes = copy.deepcopy(drafter), []
    reports = gptq_in_order(
        made, packable_groups(made.config), lambda: run(made), scheme, 0.01, lambda *note: notes.append(str(note))
    )
    return made, reports, notes


def rounded(drafter: Drafter) -> Drafter:
    made = copy.deepcopy(drafter)

    def pack(_: str, linear: torch.nn.Linear) -> PackedLinear:
        grid = search_grid(linear.weight.detach(), SCHEME)
        return PackedLinear.from_fake(FakeQuantLinear.from_linear(linear, grid, SCHEME))

    replace_linears(made, [name for group in packable_groups(made.config) for name in group], pack)
    return made


@torch.no_grad()
def test_better_than_rounding_to_nearest() -> None:
    _, drafter = pair()
    wanted = run(drafter)
    made, reports, notes = quantized(drafter)
    names = [name for group in packable_groups(drafter.config) for name in group]
    assert list(reports) == names
    assert not any(report.rounded_to_nearest for report in reports.values())
    assert all(isinstance(made.get_submodule(name), PackedLinear) for name in names)
    assert len(notes) == len(packable_groups(drafter.config))
    assert (run(made) - wanted).norm() < 0.9 * (run(rounded(drafter)) - wanted).norm()


@torch.no_grad()
def test_a_group_sees_what_the_quantized_groups_before_it_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hessian of the last layer is that of its inputs in the network whose other layers are quantized."""
    _, drafter = pair()
    hessians: list[Tensor] = []
    matrix = Hessian.matrix
    monkeypatch.setattr(Hessian, "matrix", lambda self: hessians.append(matrix(self)) or hessians[-1])
    made, reports, _ = quantized(drafter)
    inputs: list[Tensor] = []
    last = made.get_submodule(list(reports)[-1])
    last.register_forward_pre_hook(lambda _, given: inputs.append(given[0].flatten(0, -2)))
    run(made)
    (x,) = inputs
    torch.testing.assert_close(hessians[-1], 2 / len(x) * x.T @ x, rtol=1e-4, atol=1e-5)


def test_a_group_size_that_does_not_divide_fails_before_any_work() -> None:
    _, drafter = pair()
    ran: list[int] = []
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj: group_size 32 does not divide its 48 inputs"):
        gptq_in_order(
            drafter,
            packable_groups(drafter.config),
            lambda: ran.append(1),
            QuantScheme(group_size=32),
            0.01,
            lambda *_: None,
        )
    assert ran == []
    assert not any(isinstance(layer, PackedLinear) for layer in drafter.modules())
