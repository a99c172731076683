"""Streamed text against the one-shot decode, stop strings against a search in the whole text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers

import twofold
from twofold.decoding.text import TextStream

POCKET = tokenizers.Tokenizer.from_file(str(Path(twofold.__file__).parent / "assets" / "pocket" / "tokenizer.json"))
MIXED = "Hi 😀, 你好世界! café — naïve 👩‍👩‍👧 ok. Ω≈ç\n\n  x = [1, 2]\té 한국어 "


def pocket(ids: Sequence[int]) -> str:
    return POCKET.decode(list(ids))


def byte(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def pushes(ids: Sequence[int], draw: random.Random, most: int) -> list[list[int]]:
    found, start = [], 0
    while start < len(ids):
        size = draw.randint(0, most)
        found.append(list(ids[start : start + size]))
        start += size
    return found


def run(
    decode: Callable[[Sequence[int]], str], stop: tuple[str, ...], parts: list[list[int]]
) -> tuple[str, TextStream]:
    """The streamed text, after checking what holds at every step."""
    stream, text, taken = TextStream(decode, stop), "", 0
    for part in parts:
        text += stream.push(part)
        assert stream.num_tokens >= taken
        taken = stream.num_tokens
    text += stream.flush()
    assert stream.flush() == stream.push([1]) == ""
    return text, stream


def test_every_character_comes_whole_and_as_soon_as_it_is_complete() -> None:
    stream = TextStream(byte)
    given = [stream.push([value]) for value in "a你😀é".encode()]
    assert given == ["a", "", "", "你", "", "", "", "😀", "", "é"]
    assert stream.num_tokens == 10


@pytest.mark.parametrize("seed", range(5))
def test_text_equals_the_one_shot_decode(seed: int) -> None:
    draw = random.Random(seed)
    ids = POCKET.encode(MIXED * 5).ids
    text, stream = run(pocket, (), pushes(ids, draw, 5))
    assert text == MIXED * 5
    assert stream.num_tokens == len(ids)
    assert "\ufffd" not in text


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_equal_the_one_shot_decode(seed: int) -> None:
    draw = random.Random(seed)
    broken = [i for i in range(POCKET.get_vocab_size()) if "\ufffd" in pocket([i])]
    ids = [draw.choice(broken) if draw.random() < 0.7 else draw.randrange(POCKET.get_vocab_size()) for _ in range(400)]
    text, stream = run(pocket, (), pushes(ids, draw, 17))
    assert text == pocket(ids)
    assert stream.num_tokens == len(ids)


@pytest.mark.parametrize("value", [0xE4, 0xF0, 0xBD])
def test_a_long_run_of_broken_bytes_keeps_its_length_and_its_speed(value: int) -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return byte(ids)

    ids = [value] * 5000 + list("你x".encode())
    text, _ = run(decode, (), [ids])
    assert text == "\ufffd" * 5000 + "你x"
    assert longest <= 65


def test_an_incomplete_character_at_the_end_is_given_at_the_end() -> None:
    stream = TextStream(byte)
    assert stream.push(b"a\xf0\x9f") == "a"
    assert stream.flush() == "\ufffd"
    assert stream.num_tokens == 3


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    stream = TextStream(byte, ("STOP",))
    assert [stream.push([value]) for value in b"aSTxSTOPb"] == ["a", "", "", "STx", "", "", "", "", ""]
    assert stream.stopped
    assert stream.num_tokens == 4
    assert stream.push(b"more") == stream.flush() == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    stream = TextStream(byte, ("STOP",))
    assert stream.push(b"aSTO") == "a"
    assert stream.num_tokens == 1
    assert stream.flush() == "STO"
    assert stream.num_tokens == 4
    assert not stream.stopped


def test_the_earliest_start_wins_though_it_is_complete_last() -> None:
    stop = ("abcd", "bc")
    for text, expected in (("xabcdy", "x"), ("xabcey", "xa"), ("xabc", "xa")):
        for size in range(1, 7):
            parts = [list(text.encode()[i : i + size]) for i in range(0, len(text), size)]
            assert run(byte, stop, parts)[0] == expected


def test_a_token_that_the_stop_string_begins_inside_is_taken() -> None:
    table = {0: "ab", 1: "cS", 2: "T", 3: "d"}
    stream = TextStream(lambda ids: "".join(table[i] for i in ids), ("ST",))
    assert stream.push([0, 1, 2, 3]) == "abc"
    assert stream.num_tokens == 2


def test_a_stop_string_of_characters_split_over_tokens() -> None:
    text, stream = run(byte, ("好😀",), [[value] for value in "你好!好😀x".encode()])
    assert text == "你好!"
    assert stream.num_tokens == len("你好!".encode())


@pytest.mark.parametrize("seed", range(300))
def test_stop_strings_against_a_search_in_the_whole_text(seed: int) -> None:
    """Tokens are random pieces over a small alphabet, so that stop strings overlap themselves and others."""
    draw = random.Random(seed)
    alphabet = draw.choice(["ab", "abc", "aé你"])

    def word(least: int, most: int) -> str:
        return "".join(draw.choices(alphabet, k=draw.randint(least, most)))

    table = [word(0, 4).encode() for _ in range(8)] + [bytes([b]) for b in "你é".encode()]
    whole = draw.random() < 0.7  # whole characters only, so that the tokens' borders are plain
    ids = [draw.randrange(8 if whole else len(table)) for _ in range(draw.randint(0, 40))]
    stop = tuple(word(2, 6) for _ in range(draw.randint(1, 4)))

    def decode(ids: Sequence[int]) -> str:
        return b"".join(table[i] for i in ids).decode(errors="replace")

    full = decode(ids)
    start = min((full.find(s) for s in stop if s in full), default=None)
    results = []
    for most in (1, 3, 50):
        text, stream = run(decode, stop, pushes(ids, draw, most))
        assert text == full[:start]
        assert stream.stopped == (start is not None)
        results.append(stream.num_tokens)
    assert len(set(results)) == 1
    if whole:
        taken = [i for i in range(len(ids)) if start is None or len(decode(ids[:i])) < start]
        assert results[0] == len(taken)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        TextStream(byte, ("a", ""))


def test_cost_is_a_few_tokens_decoded_for_a_new_one() -> None:
    decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return pocket(ids)

    ids = POCKET.encode(MIXED * 40).ids
    TextStream(decode, ("never", "}\n")).push(ids)
    assert decoded < 8 * len(ids)  # 2 decodes of 1 to 4 tokens; ever longer ones would make it hundreds
