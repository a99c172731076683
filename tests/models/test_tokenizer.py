"""The wrapper around a checkpoint's tokenizer, on the pocket model's."""

from __future__ import annotations

from pathlib import Path

import pytest

import twofold
from twofold.models.tokenizer import Tokenizer

POCKET = Path(twofold.__file__).parent / "assets" / "pocket"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(POCKET)


@pytest.mark.parametrize("text", ["Hello, world.", " two  spaces , and .", "😀 你好", "", "a\r\n\tb\n"])
def test_decode_undoes_encode(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_all(["b", text, ""]) == [tokenizer.encode(each) for each in ("b", text, "")]


def test_no_text_is_encoded_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_all([]) == []


def test_no_special_tokens_are_added_nor_shown(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 8192
    assert min(tokenizer.encode("Hello")) >= 8
    assert tokenizer.decode([2, *tokenizer.encode("Hello"), 0]) == "Hello"


def test_chat_ids_follow_the_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    asked = [1, *tokenizer.encode("user\nHello"), 2, *tokenizer.encode("\n")]
    assert tokenizer.chat_ids(messages, add_generation_prompt=False) == asked
    assert tokenizer.chat_ids(messages) == [*asked, 1, *tokenizer.encode("assistant\n")]


def test_text_parts_are_joined(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert tokenizer.chat_ids([{"role": "user", "content": parts}]) == tokenizer.chat_ids(
        [{"role": "user", "content": "Hello"}]
    )


@pytest.mark.parametrize(
    "content", [None, 3, [{"type": "image_url", "image_url": {"url": "x"}}], ["text"], [{"type": "text"}]]
)
def test_other_content_is_refused(tokenizer: Tokenizer, content: object) -> None:
    with pytest.raises(ValueError, match="message must be"):
        tokenizer.chat_ids([{"role": "user", "content": content}])


def test_a_template_that_refuses_or_is_missing_is_said(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((POCKET / name).read_bytes())
    plain = Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        plain.chat_ids([{"role": "user", "content": "Hello"}])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        Tokenizer.load(tmp_path).chat_ids([{"role": "user", "content": "Hello"}])


def test_missing_and_damaged_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)
