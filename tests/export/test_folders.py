"""Exported folders: complete, the same tensors, read by transformers and compressed-tensors, or refused by name."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

from tests import pocket
from tests.models.test_checkpoint import pack
from tests.models.test_drafter import SHAPE
from tests.models.test_drafter_checkpoint import packed
from tests.models.tiny import HYBRID, build, tokens
from twofold.export.card import Card
from twofold.export.check import check_drafter, check_target
from twofold.export.engines import ENGINES, find_engine
from twofold.export.folders import Exported, export, serve_command
from twofold.models.checkpoint import load_target, packable_linears, save_target
from twofold.models.draft_head import DraftHeadConfig, make_draft_head
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import check_fits, load_drafter, save_drafter
from twofold.models.drafter_config import DrafterConfig
from twofold.models.folder import TOKENIZER_FILES
from twofold.quant.scheme import QuantScheme

CARD = Card(name="tiny", base_model="base", recipe={"name": "tiny"})
SCHEME = QuantScheme(group_size=16)
DRAFTING = sorted(name for name, engine in ENGINES.items() if engine.drafter is not None)


@pytest.fixture
def artifacts(tmp_path: Path) -> tuple[Path, Path]:
    """A packed target with a tokenizer and two ends, and its packed, windowed drafter."""
    config = replace(HYBRID, eos_token_ids=(1, 2))
    model = build(config)
    pack(model, packable_linears(config), SCHEME)
    save_target(model, tmp_path / "pack")
    for name in TOKENIZER_FILES:
        if (pocket.FOLDER / name).exists():
            shutil.copyfile(pocket.FOLDER / name, tmp_path / "pack" / name)
    drafter = Drafter.initialized(replace(DrafterConfig.for_target(config, SHAPE), sliding_window=8), 0)
    save_drafter(packed(drafter, SCHEME), tmp_path / "draft")
    return tmp_path / "pack", tmp_path / "draft"


def made(artifacts: tuple[Path, Path], engine: str) -> Exported:
    return export(*artifacts, artifacts[0].parent / "out", find_engine(engine), CARD)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_folders_are_complete(artifacts: tuple[Path, Path], engine: str) -> None:
    exported = made(artifacts, engine)
    names = {path.name for path in exported.target.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    for name in ("config.json", "generation_config.json"):
        assert json.loads((exported.target / name).read_text())["eos_token_id"] == [1, 2]
    card = (exported.target / "README.md").read_text()
    assert "base_model: base" in card
    assert exported.command in card
    assert str(exported.target) in exported.command
    assert (exported.drafter is None) == (ENGINES[engine].drafter is None)
    if exported.drafter is not None:
        assert str(exported.drafter) in exported.command
        assert exported.command in (exported.drafter / "README.md").read_text()
    assert [path.name for path in artifacts[0].parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_a_shell_reads_the_command_as_it_is_meant(engine: str) -> None:
    """Paths with what shells and JSON give a meaning to."""
    folder = Path('my models/it\'s "{new}" $x')
    words = shlex.split(serve_command(ENGINES[engine], folder, 8, 512))
    assert str(folder / "target") in words
    if "--speculative-config" in words:
        config = json.loads(words[words.index("--speculative-config") + 1])
        assert config == {"method": "dflash", "model": str(folder / "drafter"), "num_speculative_tokens": 7}
    elif ENGINES[engine].drafter is not None:
        assert str(folder / "drafter") in words
    assert serve_command(ENGINES[engine], Path("out"), None, 512) == " ".join(ENGINES[engine].serve).format(
        target="out/target", context=512
    )


def test_the_state_is_float32_outright(artifacts: tuple[Path, Path]) -> None:
    config = json.loads((made(artifacts, "vllm").target / "config.json").read_text())
    assert config["mamba_ssm_dtype"] == "float32"


def test_transformers_agrees_on_logits(artifacts: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    exported = made(artifacts, "transformers")
    theirs = AutoModelForCausalLM.from_pretrained(exported.target, dtype=torch.float32, local_files_only=True)
    ours, ids = load_target(exported.target), tokens(2, 24)
    with torch.no_grad():
        hidden, _ = ours(ids)
        difference = ours.logits(hidden) - theirs(ids).logits
    assert difference.abs().max() < 1e-3


@pytest.mark.parametrize("engine", DRAFTING)
def test_a_drafter_comes_back(artifacts: tuple[Path, Path], engine: str) -> None:
    drafter = made(artifacts, engine).drafter
    assert drafter is not None
    given, loaded = load_drafter(artifacts[1]), load_drafter(drafter)
    assert loaded.config == given.config
    expected = given.state_dict()
    dense = [name for name in ENGINES[engine].dense if f"{name}.weight_packed" in expected]
    for name, tensor in loaded.state_dict().items():
        if name.removesuffix(".weight") in dense:
            tensor, wanted = tensor, given.get_submodule(name.removesuffix(".weight")).dense_weight(torch.bfloat16)
            assert torch.equal(tensor.bfloat16(), wanted)
        else:
            assert torch.equal(tensor, expected[name])
    check_fits(drafter, load_target(artifacts[0]))


def test_sglang_gets_a_dense_fc_and_a_pattern_that_ignores_it(artifacts: tuple[Path, Path]) -> None:
    drafter = made(artifacts, "sglang").drafter
    assert drafter is not None
    assert "fc.weight" in load_file(drafter / "model.safetensors")
    assert json.loads((drafter / "config.json").read_text())["quantization_config"]["ignore"] == ["re:.*fc$"]


def test_a_head_for_drafting_stays_behind_and_a_markov_head_is_refused(artifacts: tuple[Path, Path]) -> None:
    target, folder = load_target(artifacts[0]), artifacts[1]
    drafter = load_drafter(folder)
    drafter.draft_head = make_draft_head(
        DraftHeadConfig(bits=8, group_size=16), target.lm_head, torch.zeros(target.config.vocab_size)
    )
    save_drafter(drafter, folder)
    exported = made(artifacts, "vllm").drafter
    assert exported is not None
    assert [path.name for path in exported.glob("*.safetensors")] == ["model.safetensors"]
    assert "draft_head" not in json.loads((exported / "config.json").read_text())
    config = replace(drafter.config, markov_rank=4)
    save_drafter(packed(Drafter.initialized(config, 0), SCHEME), folder)
    with pytest.raises(ValueError, match="no engine knows a drafter's Markov head"):
        export(*artifacts, folder.parent / "second", ENGINES["vllm"], CARD)


def test_a_window_says_that_it_is_not_causal(artifacts: tuple[Path, Path]) -> None:
    drafter = made(artifacts, "vllm").drafter
    assert drafter is not None
    config = json.loads((drafter / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert config["sliding_window"] == 8
    assert config["dflash_config"]["causal"] is False


def test_speculators_counts_layers_from_one_and_brings_embedding_and_head(artifacts: tuple[Path, Path]) -> None:
    exported = made(artifacts, "speculators")
    assert exported.drafter is not None
    config = json.loads((exported.drafter / "config.json").read_text())
    assert config["architectures"] == ["DFlashSpeculator"]
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    embedding = load_target(exported.target).embed_tokens.weight.bfloat16()
    tensors = load_file(exported.drafter / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], embedding)
    assert torch.equal(tensors["lm_head.weight"], embedding)


@pytest.mark.parametrize("engine", DRAFTING)
def test_compressed_tensors_reads_the_configs(artifacts: tuple[Path, Path], engine: str) -> None:
    exported = made(artifacts, engine)
    for folder in (exported.target, exported.drafter):
        assert folder is not None
        quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert QuantizationConfig.model_validate(quantization).config_groups["group_0"].weights.num_bits == 4


def test_a_drafter_of_its_own_embedding_is_refused(artifacts: tuple[Path, Path]) -> None:
    drafter = made(artifacts, "speculators").drafter
    assert drafter is not None
    edit(drafter, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match=r"its lm_head\.weight is not the target's"):
        check_fits(drafter, load_target(artifacts[0]))


PACKED = "layers.0.mlp.up_proj.weight_packed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, p: t.pop(p + PACKED), rf"{PACKED}|layers\.0\.mlp\.up_proj is dense in the weights"),
        (lambda t, p: t.update({p + "layers.0.other.weight": t.pop(p + "norm.weight")}), r"norm\.weight"),
        (lambda t, p: t[p + PACKED].add_(1), rf"{PACKED} differs from what it was made from"),
        (lambda t, p: t[p + "norm.weight"].add_(1), r"norm\.weight differs from what it was made from"),
    ],
)
def test_what_does_not_hold_the_same_is_named(
    artifacts: tuple[Path, Path], change: Callable[[dict[str, torch.Tensor], str], object], message: str
) -> None:
    exported = made(artifacts, "vllm")
    assert exported.drafter is not None
    edit(exported.target, lambda t: change(t, "model."))
    edit(exported.drafter, lambda t: change(t, ""))
    with pytest.raises(ValueError, match=message):
        check_target(exported.target, artifacts[0])
    with pytest.raises(ValueError, match=message):
        check_drafter(exported.drafter, artifacts[1], ENGINES["vllm"])


def test_a_window_called_causal_is_refused(artifacts: tuple[Path, Path]) -> None:
    drafter = made(artifacts, "vllm").drafter
    assert drafter is not None
    config = json.loads((drafter / "config.json").read_text())
    del config["dflash_config"]["causal"]
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"dflash_config\.causal is True; only False is supported"):
        load_drafter(drafter)


def test_an_end_lost_from_one_file_is_refused(artifacts: tuple[Path, Path]) -> None:
    exported = made(artifacts, "vllm")
    (exported.target / "generation_config.json").write_text('{"eos_token_id": 1}')
    with pytest.raises(ValueError, match=r"eos_token_id is 1, the model ends with \[1, 2\]"):
        check_target(exported.target, artifacts[0])


def test_a_drafter_of_another_target_is_refused_and_nothing_written(artifacts: tuple[Path, Path]) -> None:
    other = Drafter.initialized(DrafterConfig.for_target(replace(HYBRID, hidden_size=64), SHAPE), 0)
    save_drafter(other, artifacts[1])
    with pytest.raises(ValueError, match="its hidden_size is 64, the target's 32"):
        made(artifacts, "vllm")
    assert sorted(path.name for path in artifacts[0].parent.iterdir()) == ["draft", "pack"]


def test_a_destination_that_is_there_is_kept(artifacts: tuple[Path, Path]) -> None:
    made(artifacts, "vllm")
    with pytest.raises(ValueError, match="is there already"):
        made(artifacts, "vllm")


def test_no_tokenizer(artifacts: tuple[Path, Path]) -> None:
    (artifacts[0] / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        made(artifacts, "vllm")


def test_an_unknown_engine_lists_the_known() -> None:
    with pytest.raises(ValueError, match="choose one of: vllm, sglang, transformers, speculators"):
        find_engine("llama")
