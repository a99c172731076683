"""A batched answer is the answer that its prompt gets alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.models.tiny import HYBRID, PLAIN, build, tokens
from twofold.data import generate as generate_module
from twofold.data.generate import GenerateConfig, generate
from twofold.decoding.step import decode
from twofold.models.causal_lm import CausalLM
from twofold.models.config import ModelConfig
from twofold.ops.sampling import Sampling

PROMPTS = [tokens(1, length, seed)[0].tolist() for seed, length in enumerate((7, 3, 12, 3, 1, 9, 20, 5, 5, 14))]
EOS = tuple(range(6))  # of 97: answers end at many lengths, and batches shrink


def model(config: ModelConfig = HYBRID) -> CausalLM:
    return build(replace(config, eos_token_ids=EOS)).requires_grad_(False)


def alone(target: CausalLM, number: int, config: GenerateConfig, seed: int) -> list[int]:
    sampling = Sampling(temperature=config.temperature, min_p=config.min_p, seed=seed + number)
    cycles = decode(target, None, tuple(PROMPTS[number]), config.max_new_tokens, sampling, frozenset(EOS))
    return [token for cycle in cycles for token in cycle.token_ids]


@pytest.mark.parametrize("config", [HYBRID, PLAIN], ids=["hybrid", "plain"])
@pytest.mark.parametrize(
    "how",
    [
        GenerateConfig(temperature=0.0, max_new_tokens=40, batch_size=10),
        GenerateConfig(temperature=0.9, max_new_tokens=40, batch_size=10),
        GenerateConfig(temperature=1.2, min_p=0.05, max_new_tokens=33, batch_size=4),
    ],
    ids=["greedy", "sampled", "min_p"],
)
def test_batched_answers_are_those_of_decoding_one_at_a_time(config: ModelConfig, how: GenerateConfig) -> None:
    target = model(config)
    reports: list[tuple[int, int]] = []
    answered = generate(target, PROMPTS, how, 100, lambda done, total, _: reports.append((done, total)))
    assert [c.prompt_ids for c in answered] == PROMPTS
    assert [c.answer_ids for c in answered] == [alone(target, i, how, 100) for i in range(len(PROMPTS))]
    if how.temperature:  # the case is what it should be: some end early, some late
        sizes = sorted(len(c.answer_ids) for c in answered)
        assert sizes[2] < 16 < sizes[-1]
    assert reports[-1] == (10, 10)


def test_answers_end_with_eos_or_at_the_limit() -> None:
    how = GenerateConfig(temperature=1.0, max_new_tokens=24, batch_size=3)
    for conversation in generate(model(), PROMPTS, how, 5, lambda *_: None):
        *before, last = conversation.answer_ids
        assert not set(before) & set(EOS)
        assert last in EOS or len(conversation.answer_ids) == 24


@pytest.mark.parametrize("count", [1, 2, 16, 17])
def test_the_limit_is_exact(count: int) -> None:
    how = GenerateConfig(temperature=0.0, max_new_tokens=count)
    target = build(replace(HYBRID, eos_token_ids=())).requires_grad_(False)
    answered = generate(target, PROMPTS[:3], how, 0, lambda *_: None)
    assert [len(c.answer_ids) for c in answered] == [count] * 3


def test_an_answer_does_not_depend_on_the_others() -> None:
    how, target = GenerateConfig(temperature=1.0, max_new_tokens=20), model()
    whole = generate(target, PROMPTS, how, 3, lambda *_: None)
    assert generate(target, PROMPTS[:4], how, 3, lambda *_: None) == whole[:4]
    assert generate(target, PROMPTS[:4], how, 4, lambda *_: None) != whole[:4]


def test_what_was_interrupted_goes_on_behind_the_last_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = GenerateConfig(temperature=0.9, max_new_tokens=20, batch_size=3)
    wanted = generate(model(), PROMPTS, how, 7, lambda *_: None)

    def stop(done: int, *_: object) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model(), PROMPTS, how, 7, stop, tmp_path)
    answered = []
    answer = generate_module._answer
    monkeypatch.setattr(generate_module, "_answer", lambda *given: answered.extend(given[0]) or answer(*given))
    assert generate(model(), PROMPTS, how, 7, lambda *_: None, tmp_path) == wanted
    assert sorted(map(len, answered)) == sorted(map(len, PROMPTS))[6:]
