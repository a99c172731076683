"""Hugging Face folders: what is written loads in transformers and here; what is wrong is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.models.tiny import HYBRID, PLAIN, build, tokens
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import hf_config, load_target, packable_linears, save_target
from twofold.models.config import ModelConfig
from twofold.quant.linear import FakeQuantLinear, PackedLinear, replace_linears
from twofold.quant.rounding import minmax_grid, quantize
from twofold.quant.scheme import QuantScheme


def variant(config: ModelConfig, **changes: Any) -> ModelConfig:
    return ModelConfig(**{**vars(config), **changes})


CONFIGS = {
    "hybrid": HYBRID,
    "llama": variant(PLAIN, attention_bias=True),
    "qwen3": variant(PLAIN, qk_norm=True, tie_embeddings=True, num_kv_heads=1),
}
each_family = pytest.mark.parametrize("family", CONFIGS)
SCHEME = QuantScheme(group_size=16)


def pack(model: nn.Module, names: list[str], scheme: QuantScheme = SCHEME) -> None:
    def packed(name: str, linear: nn.Linear) -> nn.Module:
        grid = minmax_grid(linear.weight, scheme)
        return PackedLinear.from_integers(quantize(linear.weight, grid, scheme), grid, scheme, linear.bias)

    replace_linears(model, names, packed)


def saved(folder: Path, config: ModelConfig = HYBRID, packed: bool = False) -> Path:
    model = build(config)
    if packed:
        pack(model, packable_linears(config))
    save_target(model, folder)
    return folder


def logits_of(model: CausalLM) -> Tensor:
    with torch.no_grad():
        return model.logits(model(tokens(2, 20))[0])


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path) -> None:
    """Splits the weights of a folder in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name].clone() for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def test_what_is_quantized_and_what_is_not() -> None:
    names = packable_linears(HYBRID)
    linears = {name for name, layer in build(HYBRID).named_modules() if isinstance(layer, nn.Linear)}
    left = linears - set(names)
    assert set(names) <= linears
    assert left == {"lm_head", *(f"layers.{i}.linear_attn.in_proj_{x}" for i in (0, 1, 3) for x in "ab")}
    assert len(names) == 4 * 3 + 3 * 3 + 4
    assert len(packable_linears(PLAIN)) == 2 * 7


@each_family
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_transformers_reads_what_is_saved(tmp_path: Path, family: str, packed: bool) -> None:
    folder = saved(tmp_path / "model", CONFIGS[family], packed)
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = load_target(folder)
    with torch.no_grad():
        expected = theirs(tokens(2, 20)).logits
    assert expected.std() >= 0.5
    assert (logits_of(ours) - expected).abs().max() <= 1e-4
    assert ours.config == CONFIGS[family]
    if not packed:
        keys = set(theirs.state_dict()) - ({"lm_head.weight"} if ours.config.tie_embeddings else set())
        assert set(load_file(folder / "model.safetensors")) == keys


@each_family
def test_packed_layers_come_back_bit_for_bit(tmp_path: Path, family: str) -> None:
    model = build(CONFIGS[family])
    pack(model, packable_linears(model.config))
    save_target(model, tmp_path)
    loaded = load_target(tmp_path)
    for name in packable_linears(model.config):
        layer, original = loaded.get_submodule(name), model.get_submodule(name)
        assert isinstance(layer, PackedLinear)
        assert layer.scheme == SCHEME
        for key, tensor in original.state_dict().items():
            same = tensor if key != "bias" else tensor.bfloat16().float()
            assert torch.equal(layer.state_dict()[key], same), f"{name}.{key}"
    assert (logits_of(loaded.freeze()) - logits_of(load_target(tmp_path))).abs().max() <= 1e-4


def test_some_layers_packed_and_the_others_dense(tmp_path: Path) -> None:
    model = build(HYBRID)
    mlps = [name for name in packable_linears(HYBRID) if ".mlp." in name]
    pack(model, mlps, QuantScheme(group_size=-1))
    save_target(model, tmp_path)
    loaded = load_target(tmp_path)
    assert [name for name, layer in loaded.named_modules() if isinstance(layer, PackedLinear)] == mlps
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert (logits_of(loaded) - theirs(tokens(2, 20)).logits).abs().max() <= 1e-4


def test_dense_weights_are_bfloat16_and_come_back_exactly(tmp_path: Path) -> None:
    model = build(HYBRID, dtype=torch.bfloat16)
    save_target(model, tmp_path / "a")
    save_target(load_target(tmp_path / "a", torch.bfloat16), tmp_path / "b")
    for folder in ("a", "b"):
        tensors = load_file(tmp_path / folder / "model.safetensors")
        for name, tensor in model.state_dict().items():
            if name != "lm_head.weight":
                assert torch.equal(tensors[f"model.{name}"], tensor)
    assert not list(tmp_path.rglob("*.writing"))


def test_tied_head_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = load_target(folder)
    assert model.lm_head.weight is model.embed_tokens.weight
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits_of(load_target(folder)), logits_of(model))
    edit_tensors(folder, lambda t: t["lm_head.weight"].mul_(2))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the embedding"):
        load_target(folder)


def test_end_of_sequence_ids_are_the_union_of_both_files(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    edit_json(source / "config.json", lambda c: c.update(eos_token_id=5))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5], "top_k": 20}))
    model = load_target(source)
    assert model.config.eos_token_ids == (5, 7)
    save_target(model, tmp_path / "copy", source)
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "copy" / file).read_text())["eos_token_id"] == [5, 7]
    assert json.loads((tmp_path / "copy" / "generation_config.json").read_text())["top_k"] == 20


def test_source_gives_config_and_tokenizer(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", packed=True)
    edit_json(source / "config.json", lambda c: c.update(initializer_range=0.125))
    for file in ("tokenizer.json", "chat_template.jinja", "notes.txt"):
        (source / file).write_text(file)
    model = build(HYBRID)
    save_target(model, tmp_path / "copy", source, {"twofold": {"stage": "distill"}})
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config["initializer_range"] == 0.125
    assert config["twofold"] == {"stage": "distill"}
    assert "quantization_config" not in config  # that described the source
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert (tmp_path / "copy" / "tokenizer.json").read_text() == "tokenizer.json"
    save_target(model, source, source)  # in place
    assert (source / "tokenizer.json").read_text() == "tokenizer.json"


def test_config_that_describes_another_model_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", variant(HYBRID, intermediate_size=64))
    with pytest.raises(ValueError, match=r"does not describe this model \(intermediate_size differ\)"):
        save_target(build(HYBRID), tmp_path / "copy", source)
    assert not (tmp_path / "copy").exists()
    save_target(build(HYBRID), tmp_path / "copy", source, {"intermediate_size": 48})
    assert load_target(tmp_path / "copy").config == HYBRID


def test_shards(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    expected = logits_of(load_target(folder))
    shard(folder)
    assert torch.equal(logits_of(load_target(folder)), expected)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"the shard b\.safetensors, named in .*, is missing"):
        load_target(folder)


def test_multimodal_folder_gives_its_language_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "source")
    expected = logits_of(load_target(folder))
    text = json.loads((folder / "config.json").read_text())
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": {"depth": 1},
    }
    (folder / "config.json").write_text(json.dumps(whole))

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        for unused in ("mtp.fc.weight", "model.visual.pos_embed.weight", "visual.merger.weight"):
            tensors[unused] = torch.zeros(2, 2)
        tensors["model.language_model.rotary_emb.inv_freq"] = torch.zeros(2)

    edit_tensors(folder, rename)
    model = load_target(folder)
    assert torch.equal(logits_of(model), expected)
    # written again, it is a text model
    save_target(model, tmp_path / "copy", folder)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.float32)
    assert type(theirs).__name__ == "Qwen3_5ForCausalLM"
    with torch.no_grad():
        assert (theirs(tokens(2, 20)).logits - expected).abs().max() <= 1e-4


@each_family
def test_config_written_is_config_read(family: str) -> None:
    config = variant(CONFIGS[family], eos_token_ids=())
    assert ModelConfig.from_hf(hf_config(config)) == config


def test_no_folder_no_config_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no model folder .*absent"):
        load_target(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"there is no config\.json in"):
        load_target(tmp_path)
    folder = saved(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        load_target(folder)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "linear_num_value_heads", "rms_norm_eps"])
def test_key_missing_from_the_config_is_named(tmp_path: Path, key: str) -> None:
    folder = saved(tmp_path)
    edit_json(folder / "config.json", lambda c: c.pop(key))
    with pytest.raises(ValueError, match=rf"config\.json has no '{key}'"):
        load_target(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json is not valid JSON"),
        ("[1]", r"config\.json holds a list, not a JSON object"),
        ('{"model_type": "mamba"}', r"config\.json: model_type 'mamba' is not supported"),
    ],
)
def test_config_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    folder = saved(tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_target(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, 20_000])
def test_truncated_weights_are_named(tmp_path: Path, kept: int) -> None:
    folder = saved(tmp_path)
    content = (folder / "model.safetensors").read_bytes()
    assert len(content) > 20_000
    (folder / "model.safetensors").write_bytes(content[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_target(folder)


NORM = "model.layers.1.post_attention_layernorm.weight"
Q = "model.layers.2.self_attn.q_proj"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(NORM), r"has no tensor layers\.1\.post_attention_layernorm\.weight"),
        (
            lambda t: t.update({"model.layers.9.extra.weight": torch.zeros(1)}),
            r"unexpected tensor layers\.9\.extra\.weight",
        ),
        (
            lambda t: t.update({NORM: torch.zeros(31)}),
            r"layers\.1\.post_attention_layernorm\.weight has shape \[31\], where config\.json needs \[32\]",
        ),
        (
            lambda t: t.update({NORM: torch.zeros(32, dtype=torch.int8)}),
            r"layers\.1\.post_attention_layernorm\.weight is torch\.int8",
        ),
        (
            lambda t: t.update({NORM.replace("model.", "model.language_model."): torch.zeros(32)}),
            r"holds layers\.1\.post_attention_layernorm\.weight twice",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, edit: Callable[..., object], message: str) -> None:
    folder = saved(tmp_path)
    edit_tensors(folder, edit)
    with pytest.raises(ValueError, match=message):
        load_target(folder)


def make_dense(tensors: dict[str, Tensor]) -> None:
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        tensors.pop(f"{Q}.{part}")
    tensors[f"{Q}.weight"] = torch.zeros(128, 32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (make_dense, r"layers\.2\.self_attn\.q_proj is dense in the weights, but .* it is packed"),
        (lambda t: t.pop(f"{Q}.weight_scale"), r"has no tensor layers\.2\.self_attn\.q_proj\.weight_scale"),
        (
            lambda t: t.update({f"{Q}.weight_scale": torch.ones(128, 4)}),
            r"q_proj\.weight_scale has shape \[128, 4\], where config\.json needs \[128, 2\]",
        ),
        (
            lambda t: t.update({f"{Q}.weight_scale": torch.full((128, 2), 1.001)}),
            r"q_proj\.weight_scale: scales are not bfloat16 values",
        ),
        (
            lambda t: t.update({f"{Q}.weight_shape": torch.tensor([128, 31])}),
            r"q_proj\.weight_shape says \[128, 31\], where config\.json needs \[128, 32\]",
        ),
        (
            lambda t: t.update({f"{Q}.weight_zero_point": torch.zeros(16, 2, dtype=torch.int32)}),
            r"unexpected tensor layers\.2\.self_attn\.q_proj\.weight_zero_point",
        ),
    ],
)
def test_packed_tensors_that_do_not_fit_are_named(tmp_path: Path, edit: Callable[..., object], message: str) -> None:
    folder = saved(tmp_path, packed=True)
    edit_tensors(folder, edit)
    with pytest.raises(ValueError, match=message):
        load_target(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda c: c.pop("quantization_config"),
            r"layers\.0\.linear_attn\.in_proj_qkv is packed, but config",
        ),
        (
            lambda c: c["quantization_config"]["ignore"].append("re:.*q_proj$"),
            r"layers\.2\.self_attn\.q_proj is packed in the weights, but .* it is dense",
        ),
        (
            lambda c: c["quantization_config"]["ignore"].remove("lm_head"),
            r"has no tensor lm_head\.weight_packed, although by .* that layer is packed",
        ),
        (
            lambda c: c["quantization_config"].update(quant_method="fp8"),
            r"config\.json: quantization_config: quant_method is 'fp8'; only 'compressed-tensors'",
        ),
        (
            lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=5),
            r"layers\.0\.linear_attn\.in_proj_qkv: group_size 5 does not divide its 32 inputs",
        ),
    ],
)
def test_quantization_config_and_weights_must_agree(tmp_path: Path, edit: Callable[..., object], message: str) -> None:
    folder = saved(tmp_path, packed=True)
    edit_json(folder / "config.json", edit)
    with pytest.raises(ValueError, match=message):
        load_target(folder)


def test_targets_may_list_names_and_expressions(tmp_path: Path) -> None:
    folder = saved(tmp_path, packed=True)

    def by_name(config: dict[str, Any]) -> None:
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["targets"] = [r"re:.*mlp\.", r"re:.*\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$"]
        group["targets"] += [f"model.layers.2.self_attn.{x}_proj" for x in "qkvo"]
        config["quantization_config"]["ignore"] = []

    expected = logits_of(load_target(folder))
    edit_json(folder / "config.json", by_name)
    assert torch.equal(logits_of(load_target(folder)), expected)


def test_layers_still_in_training_are_not_saved(tmp_path: Path) -> None:
    model = build(HYBRID)
    name = packable_linears(HYBRID)[0]
    replace_linears(
        model,
        [name],
        lambda _, linear: FakeQuantLinear.from_linear(linear, minmax_grid(linear.weight, SCHEME), SCHEME),
    )
    with pytest.raises(ValueError, match=rf"{name} is still in training; call pack_linears"):
        save_target(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("left_out", ["self_attn.k_proj", "mlp.up_proj", "linear_attn.in_proj_z"])
def test_layers_that_engines_join_are_packed_together(tmp_path: Path, left_out: str) -> None:
    model = build(HYBRID)
    pack(model, [name for name in packable_linears(HYBRID) if not name.endswith(left_out)])
    with pytest.raises(ValueError, match=rf"{left_out} is not; engines join them"):
        save_target(model, tmp_path)
