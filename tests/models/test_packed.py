"""Models with layers of several schemes: what config.json says of them, and that they come back."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.models.test_checkpoint import CONFIGS, each_family, logits_of, pack
from tests.models.tiny import HYBRID, build, tokens
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target, packable_linears, save_target
from twofold.models.packed import install_packed, quantization_config
from twofold.quant.linear import PackedLinear
from twofold.quant.scheme import QuantScheme, to_compressed_tensors

BODY = QuantScheme(group_size=16)
UNEVEN = QuantScheme(group_size=16, symmetric=False)
HEAD = QuantScheme(bits=8, group_size=-1)


def mixed(family: str, body: QuantScheme = BODY, head: QuantScheme = HEAD) -> CausalLM:
    """A whole model packed, the head as well; what stays dense has bfloat16 values."""
    model = build(CONFIGS[family], dtype=torch.bfloat16).float()
    pack(model, packable_linears(model.config), body)
    pack(model, ["lm_head"], head)
    return model


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


@each_family
@pytest.mark.parametrize(
    ("body", "head"),
    [(BODY, HEAD), (UNEVEN, HEAD), (BODY, QuantScheme(bits=8, group_size=16, symmetric=False)), (BODY, BODY)],
    ids=["int8-head", "uneven-body", "uneven-head", "same"],
)
def test_a_packed_head_and_body_come_back(tmp_path: Path, family: str, body: QuantScheme, head: QuantScheme) -> None:
    model = mixed(family, body, head)
    save_target(model, tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), config_of(tmp_path)
    assert config["tie_word_embeddings"] is False  # the head is a matrix of its own
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert "lm_head.weight_packed" in tensors
    assert "lm_head.weight" not in tensors
    groups = [group["targets"] for group in config["quantization_config"]["config_groups"].values()]
    assert groups == ([["Linear"]] if body == head else [["Linear"], ["re:.*lm_head$"]])

    loaded = load_target(tmp_path)
    assert torch.equal(logits_of(loaded), logits_of(model))
    found = {name: layer.scheme for name, layer in loaded.named_modules() if isinstance(layer, PackedLinear)}
    assert found == dict.fromkeys(packable_linears(model.config), body) | {"lm_head": head}
    state, back = model.state_dict(), loaded.state_dict()
    assert state.keys() == back.keys()
    assert all(torch.equal(state[name], back[name]) for name in state)

    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert (theirs(tokens(2, 20)).logits - logits_of(model)).abs().max() <= 1e-4


def test_a_packed_head_is_saved_over_a_source_that_ties(tmp_path: Path) -> None:
    save_target(build(HYBRID), tmp_path / "source")
    assert config_of(tmp_path / "source")["tie_word_embeddings"] is True
    model = mixed("hybrid")
    save_target(model, tmp_path / "a", tmp_path / "source")
    save_target(load_target(tmp_path / "a"), tmp_path / "b", tmp_path / "source")
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert config_of(folder)["tie_word_embeddings"] is False
        assert torch.equal(logits_of(load_target(folder)), logits_of(model))


@pytest.mark.parametrize("scheme", [QuantScheme(group_size=8), UNEVEN, QuantScheme(bits=8, group_size=16)])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("self_attn.q_proj", "self_attn.k_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    ],
)
def test_layers_that_engines_join_have_one_scheme(tmp_path: Path, one: str, other: str, scheme: QuantScheme) -> None:
    model = build(HYBRID)
    names = packable_linears(HYBRID)
    pack(model, [name for name in names if not name.endswith(other)], BODY)
    pack(model, [name for name in names if name.endswith(other)], scheme)
    with pytest.raises(ValueError, match=rf"{one} and layers\.\d\.{other} are packed with different schemes"):
        save_target(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_other_schemes_are_named_as_engines_know_the_layers(tmp_path: Path) -> None:
    """By what they join as well, since "Linear" would take the joined layer first; under any prefix."""
    model = build(HYBRID, dtype=torch.bfloat16).float()
    wide = ["layers.1.mlp.gate_proj", "layers.1.mlp.up_proj", "layers.2.self_attn.o_proj"]
    pack(model, [name for name in packable_linears(HYBRID) if name not in wide], BODY)
    pack(model, wide, HEAD)
    save_target(model, tmp_path)
    groups = config_of(tmp_path)["quantization_config"]["config_groups"]
    targets = groups["group_1"]["targets"]
    assert len(targets) == 2

    def meant(name: str) -> bool:
        return any(re.match(target.removeprefix("re:"), name) for target in targets)

    for prefix in ("", "model.", "language_model.model."):
        for name in (*wide, "layers.1.mlp.gate_up_proj"):
            assert meant(prefix + name)
        for name in ("layers.1.mlp.down_proj", "layers.11.mlp.up_proj", "layers.2.self_attn.q_proj", "lm_head"):
            assert not meant(prefix + name)
    assert torch.equal(logits_of(load_target(tmp_path)), logits_of(model))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 16, bias=False)
        self.inner = nn.ModuleDict({name: nn.Linear(32, 16, bias=False) for name in ("a", "b", "c")})
        self.lm_head = nn.Linear(32, 16, bias=False)


@pytest.mark.parametrize(
    ("targets", "ignore"),
    [
        ([["Linear"], ["re:.*lm_head$"]], []),
        ([["re:.*lm_head$"], ["Linear"]], ["fc"]),
        ([["Linear"], ["inner.a", "re:inner.b"], ["re:inner\\..*"]], ["re:lm_.*"]),
        ([["re:inner\\.[ab]", "fc"], ["re:inner\\..*"], ["inner.b"]], []),  # two expressions mean a
        ([["re:z|inner.*"], ["re:inner.*"]], []),
    ],
)
def test_targets_resolve_as_in_compressed_tensors(targets: list[list[str]], ignore: list[str]) -> None:
    schemes = [QuantScheme(group_size=size) for size in (8, 16, 32)]
    config = to_compressed_tensors(dict(zip(schemes, targets, strict=False)), ignore)
    theirs = Toy()
    apply_quantization_config(theirs, QuantizationConfig.model_validate(copy.deepcopy(config)))
    expected = {
        name: layer.quantization_scheme.weights.group_size
        for name, layer in theirs.named_modules()
        if getattr(layer, "quantization_scheme", None) is not None
    }
    assert len(expected) > 0
    ours = Toy()
    install_packed(ours, {f"{name}.weight_packed": torch.zeros(0) for name in expected}, config, Path("folder"))
    found = {n: layer.scheme.group_size for n, layer in ours.named_modules() if isinstance(layer, PackedLinear)}
    assert found == expected


def test_the_commonest_scheme_is_the_one_of_all_linears() -> None:
    toy = Toy()
    assert quantization_config(toy) is None
    pack(toy, ["inner.a", "inner.b"], BODY)
    pack(toy, ["fc"], HEAD)
    written = quantization_config(toy, ["re:.*head$"], lambda name: f"model.{name}")
    assert written == to_compressed_tensors({BODY: ["Linear"], HEAD: ["re:.*fc$"]}, ["re:.*head$", "model.inner.c"])


def test_a_group_size_that_does_not_divide_names_the_layer() -> None:
    toy = nn.ModuleDict({"down_proj": nn.Linear(4304, 8, bias=False)})
    config = to_compressed_tensors({QuantScheme(group_size=128): ["Linear"]}, [])
    with pytest.raises(ValueError, match="down_proj: group_size 128 does not divide its 4304 inputs"):
        install_packed(toy, {"down_proj.weight_packed": torch.zeros(0)}, config, Path("folder"))
