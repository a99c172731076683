"""What `make interop` counts as agreement, without vLLM: answers made up from our own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import pocket
from twofold.decoding.step import decode
from twofold.export.folders import Exported
from twofold.ops.sampling import Sampling

PROMPT = list(pocket.prompts(1)[0])


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "interop" / "compare.py"
    spec = importlib.util.spec_from_file_location("interop_compare", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def answered(script: ModuleType) -> tuple[list[int], list[list[int]]]:
    """Our tokens, and at each the ids from the best score down."""
    stop_ids, greedy = frozenset(pocket.target().config.eos_token_ids), Sampling(temperature=0.0)
    cycles = list(decode(pocket.target(), None, tuple(PROMPT), script.TOKENS, greedy, stop_ids))
    ranked = [cycle.logits[0].argsort(descending=True).tolist() for cycle in cycles]
    return [cycle.token_ids[0] for cycle in cycles], ranked


def judged(
    script: ModuleType, tokens: list[int], log: str = "", drafter: bool = False, drafts: int = 0
) -> tuple[int, int, list[str]]:
    exported = Exported(target=pocket.FOLDER, drafter=pocket.FOLDER / "drafter" if drafter else None, command="")
    answer = {"tokens": [tokens], "drafts": drafts, "stand_ins": []}
    result = script.compare("made up", exported, [PROMPT], answer, log)
    return result.equal, result.near_ties, result.misses


def test_equal_tokens_agree(script: ModuleType, answered: tuple[list[int], list[list[int]]]) -> None:
    assert judged(script, answered[0]) == (1, 0, [])


def test_a_clear_difference_and_a_near_tie(
    script: ModuleType, answered: tuple[list[int], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, ranked = answered
    second, third = ([*tokens[:3], ranked[3][rank]] for rank in (1, 2))
    monkeypatch.setattr(script, "NEAR_TIE", 1e9)  # then only the rank decides
    assert judged(script, second) == (0, 1, [])
    assert judged(script, third)[2][0].startswith("prompt 0, token 3: rank 3, gap ")
    monkeypatch.setattr(script, "NEAR_TIE", 0.0)  # and now only the gap
    assert judged(script, second)[2][0].startswith("prompt 0, token 3: rank 2, gap ")


def test_an_answer_cut_short_is_a_miss(script: ModuleType, answered: tuple[list[int], list[list[int]]]) -> None:
    tokens = answered[0]
    assert judged(script, tokens[:-1])[2] == [f"prompt 0: {len(tokens) - 1} tokens, ours {len(tokens)}"]


@pytest.mark.parametrize("line", ["WARNING Skip loading weight fc.weight_packed", "parameter fc not initialized from"])
def test_a_complaint_in_the_log_is_a_miss(
    script: ModuleType, answered: tuple[list[int], list[list[int]]], line: str
) -> None:
    assert judged(script, answered[0], f"INFO fine\n{line}\n")[2] == [f"log: {line}"]


def test_an_accept_length_off_by_more_than_a_tenth_is_a_miss(
    script: ModuleType, answered: tuple[list[int], list[list[int]]]
) -> None:
    tokens, greedy = answered[0], Sampling(temperature=0.0)
    stop_ids = frozenset(pocket.target().config.eos_token_ids)
    made = decode(pocket.target(), pocket.trained_drafter(), tuple(PROMPT), script.TOKENS, greedy, stop_ids)
    cycles = len(list(made)) - 1
    assert judged(script, tokens, drafter=True, drafts=cycles)[2] == []
    (miss,) = judged(script, tokens, drafter=True, drafts=2 * cycles)[2]
    assert miss.startswith("accept length ")
