"""The speculators format of a drafter's config, and what of either format is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.models.test_drafter import CONFIG
from twofold.models.drafter_config import DrafterConfig
from twofold.models.speculators import from_speculators, to_speculators


@pytest.mark.parametrize("window", [None, 16])
def test_there_and_back(window: int | None) -> None:
    config = replace(CONFIG, sliding_window=window)
    written = to_speculators(config, "../target", "Qwen3_5ForCausalLM")
    assert written["aux_hidden_state_layer_ids"] == [i + 1 for i in config.target_layer_ids]
    assert DrafterConfig.from_hf(from_speculators(written)) == config


def test_a_folder_of_others_does_not_say_how_many_layers_the_target_has() -> None:
    written = to_speculators(CONFIG, "../target", "Qwen3_5ForCausalLM")
    del written["transformer_layer_config"]["num_target_layers"]
    assert DrafterConfig.from_hf(from_speculators(written)) == replace(CONFIG, num_target_layers=None)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(speculators_model_type="eagle3"), "speculators_model_type is 'eagle3'"),
        (lambda c: c.update(sample_from_anchor=True), "sample_from_anchor is true"),
        (lambda c: c.update(draft_vocab_size=32), "draft_vocab_size is 32, vocab_size"),
        (lambda c: c.pop("mask_token_id"), "has no 'mask_token_id'"),
        (lambda c: c.update(aux_hidden_state_layer_ids=[0, 2]), r"target_layer_ids \[-1\] are not layers"),
        (lambda c: c.update(sliding_window_non_causal=False), r"dflash_config\.causal is True; only False"),
    ],
)
def test_speculators_that_do_not_fit_are_named(edit: Callable[[dict[str, Any]], object], message: str) -> None:
    written = to_speculators(CONFIG, "../target", "Qwen3_5ForCausalLM")
    edit(written)
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_hf(from_speculators(written))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(architectures=["DFlash2DraftModel"]), r"architectures is \['DFlash2DraftModel'\]"),
        (lambda c: c.update(layer_types=["full_attention", "sliding_attention"]), "layer_types is"),
        (lambda c: c["dflash_config"].update(use_swa=True), r"dflash_config\.use_swa is True"),
        (lambda c: c["dflash_config"].update(attention_sink_bias=True), r"dflash_config\.attention_sink_bias is True"),
        (lambda c: c.update(attention_bias=True), "attention_bias is True"),
        (lambda c: c.update(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "rope_type is 'yarn'"),
        (lambda c: c.update(is_neox_style=False), "is_neox_style is False"),
        (lambda c: c.update(draft_vocab_size=32), "draft_vocab_size is 32"),
    ],
)
def test_drafters_that_do_not_fit_are_named(edit: Callable[[dict[str, Any]], object], message: str) -> None:
    hf = CONFIG.to_hf()
    edit(hf)
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_hf(hf)
