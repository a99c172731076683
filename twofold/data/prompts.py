"""Prompts: lines of JSON (UTF-8) with a "prompt", one conversation's user turn each, and optionally a "category"."""

import json
from dataclasses import dataclass
from pathlib import Path

from twofold.models.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """`train` prompts are trained on; `heldout` ones only measured with."""

    train: Path
    heldout: Path
    count: int = 400
    heldout_count: int = 48
    max_tokens: int = 192  # a longer prompt is an error

    def __post_init__(self) -> None:
        if min(self.count, self.heldout_count, self.max_tokens) < 1:
            raise ValueError(
                f"count = {self.count}, heldout_count = {self.heldout_count}, max_tokens = {self.max_tokens}: "
                "each is 1 or more"
            )


@dataclass(frozen=True)
class Prompt:
    """What is asked, and what kind of question it is ("" where the file does not say)."""

    text: str
    category: str = ""


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """The texts of `read_labelled_prompts`."""
    return [prompt.text for prompt in read_labelled_prompts(path, limit)]


def read_labelled_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, in order. ValueError that names file and line for what is not a prompt."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such prompt file; correct the path")
    prompts = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            prompts.append(_prompt(line, f"{path}, line {number}"))
            if len(prompts) == limit:
                break
    if not prompts:
        raise ValueError(f'{path}: holds no prompts; give at least one JSON line with a "prompt"')
    return prompts


def _prompt(line: bytes, where: str) -> Prompt:
    try:
        entry = json.loads(line.decode())
        prompt, category = entry["prompt"], entry.get("category", "")
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not UTF-8; convert the file first, with iconv say") from None
    except UnicodeEncodeError:
        raise ValueError(f"{where}: the prompt has half of a surrogate pair, which is no text; correct it") from None
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f'{where}: not a JSON object with a "prompt"; correct it') from None
    if not isinstance(prompt, str):
        raise ValueError(f'{where}: "prompt" is {json.dumps(prompt)[:50]}, not a string; correct it')
    if not prompt.strip():
        raise ValueError(f"{where}: the prompt is empty; remove the line")
    if not isinstance(category, str):
        raise ValueError(f"{where}: the category is no string; correct it")
    return Prompt(prompt, category)


def tokenize_prompts(prompts: list[str], tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    """Ids of each prompt as a user turn, up to where the assistant begins. ValueError for one that is too long."""
    ids = [tokenizer.chat_ids([{"role": "user", "content": prompt}]) for prompt in prompts]
    for number, prompt in enumerate(ids, 1):
        if len(prompt) > max_tokens:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, more than the {max_tokens} that the context leaves; "
                "shorten or remove it"
            )
    return ids
