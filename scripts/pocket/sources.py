"""What the pocket model learns from. All of it is permissively licensed:

  self, seed   prompts and answers written by SmolLM2-135M-Instruct (output of an Apache-2.0 model);
               the `seed` prompts are the self-instruct seed tasks (Apache-2.0)
  gsm8k_train  prompts from the GSM8K training split (MIT), answers by SmolLM2-135M-Instruct
  stdlib       source of the Python 3.11 standard library (PSF-2.0)
  function     short conversations about functions of that library and their docstrings (PSF-2.0)
  docs         reStructuredText sources of the Python 3.11 documentation (PSF-2.0, its examples 0BSD); on
               Debian, `apt-get download python3.11-doc` and `dpkg -x` give them in usr/share/doc/python3.11

A prompt (or file) whose SHA-256 is a multiple of 50 is held out of training.
"""

import argparse
import ast
import hashlib
import json
import lzma
import re
import sysconfig
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("self", "seed", "gsm8k_train", "function", "stdlib", "docs")
HELDOUT_EVERY = 50
CHUNK_CHARS = 6000
# Tables, generated code, and data that would teach nothing but their own bytes.
SKIPPED_FOLDERS = {
    *("site-packages", "test", "tests", "idle_test"),
    *("pydoc_data", "encodings", "__phello__", "turtledemo"),
}
SKIPPED_DOCS = {"changelog.rst.txt", "license.rst.txt", "contents.rst.txt", "copyright.rst.txt"}


@dataclass(frozen=True, kw_only=True)
class Turn:
    source: str
    key: str  # decides the split
    prompt: str
    answer: str
    finished: bool


@dataclass(frozen=True, kw_only=True)
class Text:
    source: str
    key: str
    text: str


def is_heldout(key: str) -> bool:
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % HELDOUT_EVERY == 0


def repetition(text: str) -> float:
    """Bytes over deflated bytes: about 2 for prose of this length, above 4 for an answer stuck in a loop."""
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw, 9))


def ends_in_loop(answer: str) -> bool:
    """The last sentences repeat each other: a small model that learns from these hardly ever ends its own."""
    return len(answer) >= 200 and repetition(answer[-400:]) > 3.0


def chat_turns(paths: Sequence[Path]) -> Iterator[Turn]:
    """Conversations worth learning from: no loops, no empty answers, no talk of being another model."""
    for path in paths:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                prompt, answer = row["prompt"].strip(), row["answer"].strip()
                finished = row["finish"] == "stop"
                if len(prompt) < 4 or not answer or "�" in prompt + answer:
                    continue
                if re.search(r"SmolLM|Hugging ?Face", prompt + answer, re.IGNORECASE):
                    continue
                if repetition(answer) > (5.0 if finished else 4.0):
                    continue
                yield Turn(source=row["source"], key=prompt, prompt=prompt, answer=answer, finished=finished)


def chunks(text: str) -> Iterator[str]:
    """Cut a long text where a blank line is followed by one that starts at the margin."""
    piece = ""
    for block in re.split(r"(?<=\n)\n+(?=\S)", text):
        if piece and len(piece) + len(block) > CHUNK_CHARS:
            yield piece
            piece = ""
        piece += ("\n" if piece else "") + block
    if piece.strip():
        yield piece


def stdlib_files(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if SKIPPED_FOLDERS.isdisjoint(name.parts) and not name.parts[0].startswith("config-"):
            try:
                yield str(name), path.read_text(encoding="utf-8").expandtabs(8)
            except UnicodeDecodeError:  # a few files declare another encoding; they are not worth a decoder
                continue


def stdlib_texts(folder: Path) -> Iterator[Text]:
    for name, text in stdlib_files(folder):
        for piece in chunks(text):
            if len(piece) > 200 and repetition(piece) < 6:
                yield Text(source="stdlib", key=name, text=piece)


def docs_texts(folder: Path) -> Iterator[Text]:
    """Documentation with the markup that only Sphinx reads taken out."""
    for path in sorted(folder.rglob("*.rst.txt")):
        if path.name in SKIPPED_DOCS:
            continue
        text = path.read_text(encoding="utf-8").expandtabs(8)
        text = re.sub(r"(?m)^( *)\.\. index::.*\n(?:\1 +.*\n|[ \t]*\n)*", "", text)
        text = re.sub(r"(?m)^ *\.\. (?:_.*:|XXX.*|\w+author::.*|highlight.*|currentmodule.*)\n+", "", text)
        text = re.sub(r":[a-zA-Z:-]+:`[~!]?([^`<]+?)(?:\s*<[^`>]*>)?`", r"`\1`", text)
        for piece in chunks(re.sub(r"\n{3,}", "\n\n", text)):
            if len(piece) > 200 and repetition(piece) < 6:
                yield Text(source="docs", key=str(path.relative_to(folder)), text=piece)


def function_turns(folder: Path) -> Iterator[Turn]:
    """Functions with a docstring, as "write this" and "explain this" conversations."""
    for name, text in stdlib_files(folder):
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
            summary = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").strip()
            if not (4 <= len(lines) <= 40 and 15 <= len(summary) <= 200 and summary[0].isupper()):
                continue
            code = f"```python\n{textwrap.dedent(chr(10).join(lines))}\n```"
            call = f"`{node.name}({ast.unparse(node.args)})`"
            ask = (
                f"Write a Python function `{node.name}` for this task: {summary}",
                f"Write a Python function {call}. {summary}",
                f"How would you implement {call} in Python? {summary}",
                f"Can you write {call} in Python? This is its docstring: {summary}",
            )[len(code) % 4]
            yield Turn(source="function", key=name, prompt=ask, answer=code, finished=True)
            if len(code) % 3 == 0:
                ask = ("What does this function do?", "Explain this Python code.")[len(summary) % 2]
                bare = code.replace(ast.get_docstring(node, clean=False) or "", "...")
                yield Turn(
                    source="function",
                    key=name,
                    prompt=f"{ask}\n\n{bare}",
                    answer=f"The function `{node.name}` does this: {summary}",
                    finished=True,
                )


def parse_args(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--chat", type=Path, nargs="+", required=True, help="conversations, *.jsonl.xz")
    parser.add_argument("--docs", type=Path, required=True, help="Python's documentation, *.rst.txt")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")), help="*.py")
    parser.add_argument("--assets", type=Path, default=Path("twofold/assets/pocket"))
    parser.add_argument("--out", type=Path, default=Path(".cache/pocket"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()
