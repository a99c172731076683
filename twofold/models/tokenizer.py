"""The tokenizer of a checkpoint: text <-> ids, conversations -> ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer:
    """A checkpoint's own tokenizer and chat template.

    Which ids end a text is the model's business (config.json, generation_config.json), not asked here.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads the tokenizer's files in `folder`, nothing from the network and no code from the folder.

        Raises ValueError if files are missing or damaged.
        """
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise ValueError(f"{folder} holds no tokenizer; copy tokenizer.json and its config there")
        from transformers import AutoTokenizer  # takes seconds

        try:
            return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
        except Exception as error:  # the library's errors on damaged files are of many types, also plain ones
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"the tokenizer in {folder} cannot be read ({reason}); copy it anew") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids with a text; a model's vocabulary may be padded beyond it."""
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; no special tokens are added, those spelled out in the text become their ids."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, on all cores."""
        return (
            [list(ids) for ids in self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]] if texts else []
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens; bytes that are not UTF-8 become U+FFFD."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation by the checkpoint's chat template.

        A message is {"role": str, "content": str or [{"type": "text", "text": str}, ...]}. Raises
        ValueError for other content, and if there is no template or it refuses the conversation.
        """
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise ValueError("this model has no chat template; send plain text to /v1/completions")
        flat = [{**message, "content": _flat(message.get("content"))} for message in messages]
        try:
            ids = self._tokenizer.apply_chat_template(
                flat, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
            )
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        return list(ids)


def _flat(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("the content of a message must be a text or a list of text parts")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError('a part of a message must be {"type": "text", "text": ...}; no other is known')
    return "".join(part["text"] for part in content)
