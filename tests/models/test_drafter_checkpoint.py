"""Drafter folders, dense and packed; a wrong tensor is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_drafter import CONFIG, blocks, drafter, taps
from twofold.models.draft_quantization import packable_groups
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import load_drafter, save_drafter
from twofold.quant.linear import FakeQuantLinear, PackedLinear, replace_linears
from twofold.quant.rounding import search_grid
from twofold.quant.scheme import QuantScheme


def bfloat(made: Drafter) -> Drafter:
    """With weights that bfloat16 holds."""
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.bfloat16())
    return made


def packed(made: Drafter, scheme: QuantScheme = QuantScheme(group_size=16)) -> Drafter:
    def pack(_: str, linear: torch.nn.Linear) -> PackedLinear:
        grid = search_grid(linear.weight.detach(), scheme)
        return PackedLinear.from_fake(FakeQuantLinear.from_linear(linear, grid, scheme))

    replace_linears(made, [name for group in packable_groups(made.config) for name in group], pack)
    return made


@torch.no_grad()
def outputs(made: Drafter) -> torch.Tensor:
    state = made.new_state(1, 64)
    made.extend(state, taps(), 20)
    return made.draft(state, blocks(1))


@pytest.mark.parametrize("make", [bfloat, lambda made: packed(bfloat(made))], ids=["dense", "packed"])
@pytest.mark.parametrize("window", [None, 6])
def test_what_is_saved_is_loaded(tmp_path: Path, make: type, window: int | None) -> None:
    made = make(drafter(window))
    save_drafter(made, tmp_path)
    loaded = load_drafter(tmp_path)
    assert loaded.config == made.config
    state, stored = made.state_dict(), loaded.state_dict()
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name]) for name in state)
    assert torch.equal(outputs(made), outputs(loaded))


def test_names_are_those_of_the_format(tmp_path: Path) -> None:
    save_drafter(drafter(), tmp_path)
    attention = [f"self_attn.{name}_proj" for name in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer = [*attention, *mlp, "input_layernorm", "post_attention_layernorm"]
    names = ["fc", "hidden_norm", "norm"] + [f"layers.{i}.{name}" for i in range(2) for name in layer]
    assert load_file(tmp_path / "model.safetensors").keys() == {f"{name}.weight" for name in names}


def test_packed_layers_are_said_in_the_config(tmp_path: Path) -> None:
    save_drafter(packed(drafter()), tmp_path)
    quantization = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert quantization["format"] == "pack-quantized"
    assert quantization["ignore"] == []
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {"fc.weight_packed", "fc.weight_scale", "fc.weight_shape"} <= names


@pytest.mark.parametrize("scheme", [QuantScheme(group_size=16, symmetric=False), QuantScheme(bits=8, group_size=-1)])
def test_other_schemes_come_back(tmp_path: Path, scheme: QuantScheme) -> None:
    made = packed(bfloat(drafter()), scheme)
    save_drafter(made, tmp_path)
    loaded = load_drafter(tmp_path)
    assert {layer.scheme for layer in loaded.modules() if isinstance(layer, PackedLinear)} == {scheme}
    assert torch.equal(outputs(made), outputs(loaded))


def test_every_linear_layer_is_in_one_group() -> None:
    linears = {name for name, layer in drafter().named_modules() if isinstance(layer, torch.nn.Linear)}
    grouped = [name for group in packable_groups(CONFIG) for name in group]
    assert sorted(grouped) == sorted(linears)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_drafter(drafter(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["layers.1.self_attn.k_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor layers\.1\.self_attn\.k_norm\.weight"):
        load_drafter(tmp_path)


def test_a_renamed_tensor_is_named(tmp_path: Path) -> None:
    save_drafter(drafter(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.fc.weight"] = tensors["fc.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected tensor model\.fc\.weight"):
        load_drafter(tmp_path)
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor fc\.weight"):
        load_drafter(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    save_drafter(drafter(), tmp_path)
    other = replace(CONFIG, target_layer_ids=(0, 1, 2))
    (tmp_path / "config.json").write_text(json.dumps(other.to_hf()))
    with pytest.raises(ValueError, match=r"fc\.weight has shape \[32, 64\], where config.json needs \[32, 96\]"):
        load_drafter(tmp_path)


def test_packed_weights_without_their_config_are_an_error(tmp_path: Path) -> None:
    save_drafter(packed(drafter()), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    with pytest.raises(ValueError, match=r"is packed, but config\.json has no quantization_config"):
        load_drafter(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no model folder"):
        load_drafter(tmp_path / "nowhere")
