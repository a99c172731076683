"""Endings, text, ids, logprobs and usage agree, and are the same with and without a drafter."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate, cycle, repeat
from typing import cast

import pytest
import torch

from tests import pocket
from tests.decoding import oracle
from twofold.decoding import engine as engine_module
from twofold.decoding.engine import Delta, Engine, Request
from twofold.decoding.step import Cycle
from twofold.ops.sampling import Sampling

BLOCK = pocket.SHAPE.block_size
LENGTH = 40
SAMPLED = Sampling(temperature=0.8, seed=5)


def engine(*, drafter: bool, max_context: int | None = None) -> Engine:
    made = pocket.untrained_drafter() if drafter else None
    return Engine(pocket.target(), made, pocket.tokenizer(), model_name="pocket", max_context=max_context)


def asked() -> tuple[int, ...]:
    return pocket.prompts(1)[0]


@cache
def answer(sampling: Sampling = Sampling()) -> tuple[int, ...]:
    return tuple(oracle.plain(pocket.target(), asked(), LENGTH, sampling))


@pytest.fixture(params=["plain", "wrong", "mixed", "right"])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Without a drafter, and with drafters of known quality on the sampled answer."""
    right: dict[str, Iterator[int]] = {"wrong": repeat(0), "mixed": cycle([2, 0, 5, 7, 1]), "right": repeat(BLOCK - 1)}
    if request.param != "plain":
        oracle.install(monkeypatch, asked(), list(answer(SAMPLED)), right[request.param])
    return engine(drafter=request.param != "plain")


def ask(**options: object) -> Request:
    chosen = {"sampling": SAMPLED, "max_tokens": LENGTH, "ignore_eos": True, "logprobs": True, **options}
    return Request(prompt_ids=asked(), **chosen)  # type: ignore[arg-type]


def gather(deltas: Iterator[Delta]) -> tuple[str, list[int], list[float], Delta]:
    got = list(deltas)
    assert [d.finish_reason is None for d in got] == [True] * (len(got) - 1) + [False]
    assert all(len(d.logprobs) in (0, len(d.token_ids)) for d in got)
    ids = [token for d in got for token in d.token_ids]
    return "".join(d.text for d in got), ids, [x for d in got for x in d.logprobs], got[-1]


def test_all_of_an_answer(served: Engine) -> None:
    text, ids, logprobs, last = gather(served.generate(ask()))
    assert tuple(ids) == answer(SAMPLED)
    assert text == pocket.tokenizer().decode(ids)
    assert last.finish_reason == "length"
    assert last.prompt_tokens == len(asked())
    assert last.accept_length == pytest.approx((LENGTH - 1) / last.cycles)
    with torch.no_grad():
        hidden, _ = pocket.target()(torch.tensor([[*asked(), *ids]]))
        forced = pocket.target().logits(hidden)[0, len(asked()) - 1 : -1].log_softmax(dim=-1)
    wanted = forced.gather(1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), wanted, rtol=1e-4, atol=1e-4)


def test_without_logprobs_there_are_none(served: Engine) -> None:
    _, ids, logprobs, _ = gather(served.generate(ask(logprobs=False)))
    assert tuple(ids) == answer(SAMPLED)
    assert logprobs == []


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_max_tokens_is_exact(served: Engine, count: int) -> None:
    text, ids, logprobs, last = gather(served.generate(ask(max_tokens=count)))
    assert tuple(ids) == answer(SAMPLED)[:count]
    assert len(logprobs) == count
    assert text == pocket.tokenizer().decode(ids)
    assert last.finish_reason == "length"


@pytest.mark.parametrize("room", [1, BLOCK - 1, BLOCK])
def test_the_end_of_the_context_ends_cleanly(room: int, served: Engine) -> None:
    small = Engine(served.target, served.drafter, served.tokenizer, model_name="small", max_context=len(asked()) + room)
    _, ids, _, last = gather(small.generate(ask()))
    assert tuple(ids) == answer(SAMPLED)[:room]
    assert last.finish_reason == "length"


def spans() -> list[tuple[int, int, str]]:
    """Stop strings from inside token a to inside token b: (a, b, text)."""
    decode, ids = pocket.tokenizer().decode, answer(SAMPLED)
    ends = list(accumulate(len(decode([token])) for token in ids))
    text = decode(ids)
    assert ends[-1] == len(text)  # this answer has no character over two tokens
    found = []
    for a, b in ((2, 3), (6, 9), (11, 11), (20, 27)):
        start, end = ends[a - 1] + 1, ends[b] - 1 if b > a else ends[b]
        stop = text[start:end]
        if stop and text.find(stop) == start:
            found.append((a, b, stop))
    return found


def test_a_stop_string_ends_text_ids_and_logprobs_alike(served: Engine) -> None:
    decode, whole = pocket.tokenizer().decode, pocket.tokenizer().decode(answer(SAMPLED))
    assert len(spans()) >= 3
    for a, _, stop in spans():
        text, ids, logprobs, last = gather(served.generate(ask(stop=("never there", stop))))
        assert text == whole[: whole.index(stop)]
        assert tuple(ids) == answer(SAMPLED)[: a + 1]  # the token in which the stop string begins has text before it
        assert decode(ids).startswith(text)
        assert len(logprobs) == len(ids)
        assert last.finish_reason == "stop"


def test_the_beginning_of_a_stop_string_is_given_in_the_end(served: Engine) -> None:
    whole = pocket.tokenizer().decode(answer(SAMPLED))
    text, ids, _, last = gather(served.generate(ask(stop=(whole[-3:] + "\0",))))
    assert text == whole
    assert tuple(ids) == answer(SAMPLED)
    assert last.finish_reason == "length"


@pytest.mark.parametrize("at", [0, 3, 12])
def test_an_eos_id_ends_the_answer(served: Engine, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    token = answer(SAMPLED)[at]
    config = replace(served.target.config, eos_token_ids=(0, token, 2))
    monkeypatch.setattr(served.target, "config", config)
    first = answer(SAMPLED).index(token)
    text, ids, logprobs, last = gather(served.generate(ask(ignore_eos=False)))
    assert tuple(ids) == answer(SAMPLED)[: first + 1]
    assert text == pocket.tokenizer().decode(ids[:-1])
    assert len(logprobs) == len(ids)
    assert last.finish_reason == "stop"


def test_closing_the_iterator_leaves_the_engine_usable(served: Engine) -> None:
    for _ in range(5):
        deltas = cast("Generator[Delta, None, None]", served.generate(ask()))
        next(deltas)
        deltas.close()
    _, ids, _, _ = gather(served.generate(ask()))
    assert tuple(ids) == answer(SAMPLED)


def scripted(monkeypatch: pytest.MonkeyPatch, ids: list[int], width: int) -> None:
    """The engine's decode loop yields these tokens, `width` at a time."""

    def decode(*_: object) -> Iterator[Cycle]:
        for start in range(0, len(ids), width):
            part = ids[start : start + width]
            yield Cycle(part, torch.zeros(len(part), 8192), len(part) - 1)

    monkeypatch.setattr(engine_module, "decode", decode)


@pytest.mark.parametrize("width", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("stop", "kept"),
    [((), "Café 你好 🎉 naïve"), (("🎉",), "Café 你好 "), (("好", "é"), "Caf"), ((" naïvely",), "Café 你好 🎉 naïve")],
)
def test_characters_are_whole(width: int, stop: tuple[str, ...], kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = pocket.tokenizer().encode("Café 你好 🎉 naïve")
    assert len(ids) > 8
    scripted(monkeypatch, ids, width)
    request = ask(stop=stop, max_tokens=len(ids))
    deltas = list(engine(drafter=False).generate(request))
    assert "".join(d.text for d in deltas) == kept
    assert all("�" not in d.text for d in deltas)
    taken = [token for d in deltas for token in d.token_ids]
    assert taken == ids[: len(taken)]
    assert pocket.tokenizer().decode(taken).startswith(kept)
    assert sum(len(d.logprobs) for d in deltas) == len(taken)


def test_a_character_cut_by_the_end_is_a_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = pocket.tokenizer().encode("a🎉")[:-1]
    scripted(monkeypatch, ids, 1)
    text, taken, _, _ = gather(engine(drafter=False).generate(ask(max_tokens=len(ids))))
    assert text == pocket.tokenizer().decode(ids)
    assert text.endswith("�")
    assert taken == ids


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(prompt_ids=()), "the prompt is empty; send at least one token"),
        (Request(prompt_ids=(5,) * 64), "the prompt has 64 tokens and leaves no room .* context of 64; shorten it"),
        (Request(prompt_ids=(5,), max_tokens=0), "max_tokens is 0; it must be at least 1"),
        (Request(prompt_ids=(5,), stop=("",)), "a stop string must not be empty"),
    ],
)
def test_a_bad_request_is_one_line(request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        engine(drafter=True, max_context=64).generate(request_)  # at once, not at the first token
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("drafter", [False, True])
def test_captured_cycles_give_the_same_answers(drafter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several requests, their samplings and lengths mixed, and one that its reader left."""
    monkeypatch.setattr(engine_module, "LEAST_CAPACITY", 64)
    made = pocket.trained_drafter() if drafter else None
    called, replayed = (
        Engine(pocket.target(), made, pocket.tokenizer(), model_name="pocket", capture=capture)
        for capture in (False, True)
    )
    prompts = pocket.prompts(3)
    requests = [
        Request(prompt_ids=prompts[0], max_tokens=30),
        Request(prompt_ids=prompts[1], max_tokens=20, sampling=SAMPLED),
        Request(prompt_ids=prompts[2], max_tokens=25, sampling=replace(SAMPLED, seed=9), stop=("e",)),
        Request(prompt_ids=prompts[0], max_tokens=12, ignore_eos=True, logprobs=True),
        Request(prompt_ids=prompts[1], max_tokens=60, ignore_eos=True),  # more than the first capacity
        Request(prompt_ids=prompts[2], max_tokens=9),
    ]
    for request in requests:
        left = replayed.generate(requests[0])
        next(left)
        deltas = [list(one.generate(request)) for one in (called, replayed)]
        for part in ("text", "token_ids", "logprobs"):
            wanted, got = ([x for delta in given for x in getattr(delta, part)] for given in deltas)
            assert got == wanted
        wanted_end, got_end = (given[-1] for given in deltas)
        assert got_end.finish_reason == wanted_end.finish_reason
        assert got_end.prompt_tokens == wanted_end.prompt_tokens


def test_few_graphs_are_kept() -> None:
    made = Engine(pocket.target(), None, pocket.tokenizer(), model_name="pocket", capture=True)
    for seed in range(8):
        sampling = Sampling(temperature=0.5 + seed % 6 / 10, seed=seed)
        list(made.generate(Request(prompt_ids=asked(), max_tokens=3, sampling=sampling)))
    assert len(made._captured) == 4
    assert len({id(held.rows) for held in made._captured.values()}) == 1
