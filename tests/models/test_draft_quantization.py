"""Every method packs every layer; AWQ's scales change nothing; what is trained is what is packed."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.test_drafter import CONFIG, drafter
from tests.models.test_drafter_checkpoint import outputs
from tests.training.test_draft import pair, periodic
from twofold.models import draft_quantization as module
from twofold.models.draft_quantization import (
    DraftQuantizeConfig,
    fake_quantize_drafter,
    packable_linears,
    quantize_drafter,
)
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import load_drafter, save_drafter
from twofold.pipeline.checkpoint import Checkpoints
from twofold.quant import calibrate
from twofold.quant.linear import FakeQuantLinear, PackedLinear, pack_linears
from twofold.quant.rounding import quantize, search_grid
from twofold.quant.scheme import QuantScheme
from twofold.training.blocks import calibration_drafts
from twofold.training.draft import DraftConfig, train_drafter
from twofold.training.optimizer import OptimizerConfig

SCHEME = QuantScheme(group_size=16)


def quiet(*_: object) -> None:
    pass


def uneven(made: Drafter) -> Drafter:
    """With a few channels much larger than the others, wherever something makes inputs."""
    size = torch.randn(4096, generator=torch.Generator().manual_seed(9)).mul(1.2).exp()
    with torch.no_grad():
        for name, layer in made.named_modules():
            if name.endswith(("v_proj", "up_proj")):
                layer.weight.mul_(size[: len(layer.weight), None])  # type: ignore[operator, union-attr, index, arg-type]
            elif name.endswith(("layernorm", "hidden_norm")):
                layer.weight.mul_(size[:32]).copy_(layer.weight.bfloat16())  # type: ignore[operator, union-attr]
    return made


def calibrated(made: Drafter, method: str) -> list[module.LayerReport]:
    run = calibration_drafts(made, pair()[0], periodic(), 12, 0)
    return quantize_drafter(made, run, DraftQuantizeConfig(method=method, group_size=16), quiet)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
def test_every_method_packs_every_layer(method: str) -> None:
    made = drafter()
    wanted = outputs(made)
    reports = calibrated(made, method)
    assert [layer.name for layer in reports] == packable_linears(CONFIG)
    assert all(isinstance(made.get_submodule(layer.name), PackedLinear) for layer in reports)
    assert all(0 < layer.output_error < 0.1 and 0 < layer.weight_error < 0.2 for layer in reports)
    assert float((outputs(made) - wanted).norm() / wanted.norm()) < 0.5


def test_rounding_to_nearest_is_the_searched_grid() -> None:
    made, before = drafter(), drafter()
    calibrated(made, "rtn")
    for name in packable_linears(CONFIG):
        weight = before.get_submodule(name).weight
        packed = made.get_submodule(name)
        grid = search_grid(weight.detach(), SCHEME)  # type: ignore[arg-type, operator, union-attr]
        wanted = FakeQuantLinear(weight, grid, SCHEME).dense_weight(torch.float32)  # type: ignore[arg-type]
        assert torch.equal(packed.dense_weight(torch.float32), wanted)  # type: ignore[operator]


def test_scales_alone_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folded everywhere, on grids too fine to matter, the drafter computes what it did."""
    made = uneven(drafter())
    wanted = outputs(made)
    chosen: list[int] = []
    monkeypatch.setattr(module, "choose_scale", lambda *_: chosen.append(1) or 15)
    run = calibration_drafts(made, pair()[0], periodic(), 12, 0)
    names = packable_linears(CONFIG)
    inputs = calibrate.observe(made, names, run, lambda linear: module.InputStatistics(linear.weight))
    hessians = {name: found.hessian() for name, found in inputs.items()}
    before = {name: made.get_submodule(name).weight.clone() for name in names}  # type: ignore[union-attr, operator]
    with torch.no_grad():
        alphas = module._smooth(made, inputs, hessians, SCHEME)
    assert len(chosen) == 1 + 3 * CONFIG.num_layers
    assert alphas.keys() == set(names) - {"fc"}
    assert all(not torch.equal(made.get_submodule(n).weight, before[n]) for n in alphas)  # type: ignore[arg-type]
    torch.testing.assert_close(outputs(made), wanted, rtol=1e-4, atol=1e-4)
    again = calibrate.observe(made, names, run, lambda linear: module.InputStatistics(linear.weight))
    for name in names:
        h = again[name].hessian()
        assert float((h - hessians[name]).norm() / h.norm()) < 1e-3, name


def test_scales_help_where_channels_differ() -> None:
    errors = {}
    for method in ("rtn", "awq", "gptq"):
        made = uneven(drafter())
        wanted = outputs(made)
        calibrated(made, method)
        errors[method] = float((outputs(made) - wanted).norm() / wanted.norm())
    assert errors["awq"] < errors["rtn"]
    assert errors["gptq"] < errors["rtn"]


def test_fallbacks_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    from twofold.quant import gptq

    monkeypatch.setattr(gptq, "_inverse_factor", lambda hessian, damping: (None, 1.0))
    run_of = lambda made: calibration_drafts(made, pair()[0], periodic(), 12, 0)  # noqa: E731
    made = drafter()
    with pytest.raises(ValueError, match="fell back to round-to-nearest for 15 of 15 layers, fc first"):
        quantize_drafter(made, run_of(made), DraftQuantizeConfig(group_size=16), quiet)
    made = drafter()
    reports = quantize_drafter(made, run_of(made), DraftQuantizeConfig(group_size=16, max_fallbacks=1.0), quiet)
    assert all(layer.fallback for layer in reports)


def test_a_dead_input_gives_finite_weights() -> None:
    """A channel that is always zero, and two that are always equal."""
    made = drafter()
    with torch.no_grad():
        for layer in made.layers:
            layer.input_layernorm.weight[3] = 0  # type: ignore[union-attr, index, operator]
            layer.mlp.up_proj.weight[4] = 0  # type: ignore[union-attr, index, operator]
            layer.mlp.up_proj.weight[6] = layer.mlp.up_proj.weight[5]  # type: ignore[union-attr, index, operator]
            layer.mlp.gate_proj.weight[6] = layer.mlp.gate_proj.weight[5]  # type: ignore[union-attr, index, operator]
    for method in ("awq", "gptq"):
        copied = copy.deepcopy(made)
        reports = calibrated(copied, method)
        assert not any(layer.fallback for layer in reports)
        assert outputs(copied).isfinite().all()


def test_packed_twice_is_refused() -> None:
    made = drafter()
    calibrated(made, "rtn")
    with pytest.raises(ValueError, match='fc is quantized already; set the method to "trained"'):
        calibrated(made, "gptq")
    with pytest.raises(ValueError, match="fc is quantized already"):
        fake_quantize_drafter(made, SCHEME)


@pytest.mark.parametrize("learned", [False, True])
def test_what_is_trained_is_what_is_packed(learned: bool, tmp_path: Path) -> None:
    """Bit for bit, also after a folder; frozen scales stay, learned ones move."""
    target, made = pair()
    start = copy.deepcopy(made)
    seen: list[Tensor] = []

    def validate() -> dict[str, float]:
        with torch.no_grad():
            seen.append(outputs(made))
        return {}

    config = DraftConfig(
        optimizer=OptimizerConfig(steps=6, learning_rate=3e-3),
        batch_rows=4,
        anchors=12,
        quantize=SCHEME,
        scales="learned" if learned else "frozen",
        scale_learning_rate=1e-3 if learned else None,
    )
    train_drafter(made, target, periodic(), config, 0, Checkpoints(tmp_path / "c"), quiet, validate)
    layers = {name: made.get_submodule(name) for name in packable_linears(made.config)}
    assert all(isinstance(layer, PackedLinear) for layer in layers.values())
    assert torch.equal(outputs(made), seen[-1])
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.bfloat16())
    save_drafter(made, tmp_path / "drafter")
    assert torch.equal(outputs(load_drafter(tmp_path / "drafter")), outputs(made))
    moved = False
    for name, layer in layers.items():
        grid = search_grid(start.get_submodule(name).weight.detach(), SCHEME)  # type: ignore[arg-type, operator, union-attr]
        moved |= not torch.equal(layer.weight_scale, grid.scale_NG)  # type: ignore[arg-type]
    assert moved == learned
    q = quantize(start.fc.weight.detach(), search_grid(start.fc.weight.detach(), SCHEME), SCHEME)
    fake = FakeQuantLinear(start.fc.weight, search_grid(start.fc.weight.detach(), SCHEME), SCHEME)
    assert not torch.equal(PackedLinear.from_integers(q, fake.grid, SCHEME).weight_packed, layers["fc"].weight_packed)  # type: ignore[arg-type]


def test_packing_is_the_fake_quantized_drafter() -> None:
    made = drafter()
    fake_quantize_drafter(made, SCHEME)
    before = outputs(made)
    assert len(pack_linears(made, torch.float32)) == len(packable_linears(CONFIG))
    assert torch.equal(outputs(made), before)


def test_a_width_that_groups_do_not_divide_fails_first() -> None:
    made = Drafter.initialized(replace(CONFIG, intermediate_size=40), 0)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj: group_size 16 does not divide its 40 inputs"):
        fake_quantize_drafter(made, SCHEME)
    assert isinstance(made.fc, torch.nn.Linear)
