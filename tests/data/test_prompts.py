"""Prompt files: what is wrong is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import pocket
from twofold.data.prompts import Prompt, read_labelled_prompts, read_prompts, tokenize_prompts


def write(folder: Path, text: str) -> Path:
    """A byte that is no UTF-8 stands as its surrogate."""
    file = folder / "prompts.jsonl"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    return file


def test_prompts_in_order_without_empty_lines(tmp_path: Path) -> None:
    file = write(tmp_path, '{"prompt": "one"}\n\n{"prompt": "zwei ü", "id": 7}\n  \n{"prompt": "three"}')
    assert read_prompts(file) == ["one", "zwei ü", "three"]
    assert read_prompts(file, limit=2) == ["one", "zwei ü"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", 'line 3: not a JSON object with a "prompt"; correct it'),
        ('{"text": "x"}', "line 3: not a JSON object"),
        ('["prompt"]', "line 3: not a JSON object"),
        ('"prompt"', "line 3: not a JSON object"),
        ("7", "line 3: not a JSON object"),
        ('{"prompt": "  "}', "line 3: the prompt is empty; remove the line"),
        ('{"prompt": ["x"]}', 'line 3: "prompt" is \\["x"\\], not a string; correct it'),
        ('{"prompt": 5}', 'line 3: "prompt" is 5, not a string; correct it'),
        ('{"prompt": "caf\udce9"}', "line 3: not UTF-8; convert the file first"),
        (r'{"prompt": "\ud83d"}', "line 3: the prompt has half of a surrogate pair"),
        ("[" * 100_000, "line 3: not a JSON object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path, '{"prompt": "one"}\n\n' + line + '\n{"prompt": "two"}\n')
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(file)
    assert str(file) in str(caught.value)
    assert read_prompts(file, limit=1) == ["one"]


def test_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no prompts; give at least one JSON line"):
        read_prompts(write(tmp_path, "\n"))
    with pytest.raises(ValueError, match="there is no such prompt file"):
        read_prompts(tmp_path / "nowhere.jsonl")


def test_ids_are_those_of_a_user_turn() -> None:
    tokenizer = pocket.tokenizer()
    (ids,) = tokenize_prompts(["Hello there"], tokenizer, 64)
    assert ids == tokenizer.encode("<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n")


def test_a_prompt_that_is_too_long_is_named() -> None:
    tokenizer = pocket.tokenizer()
    length = len(tokenize_prompts(["one two three"], tokenizer, 64)[0])
    tokenize_prompts(["one two three"], tokenizer, length)
    with pytest.raises(ValueError, match=f"prompt 2 has {length} tokens, more than the {length - 1} "):
        tokenize_prompts(["one", "one two three"], tokenizer, length - 1)


def test_a_category_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "category": "qa"}\n{"prompt": "b"}\n')
    assert read_labelled_prompts(file) == [Prompt("a", "qa"), Prompt("b", "")]
    file.write_text('{"prompt": "a", "category": 3}\n')
    with pytest.raises(ValueError, match="line 1: the category is no string"):
        read_labelled_prompts(file)
