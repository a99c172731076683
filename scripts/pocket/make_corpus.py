"""Training data of the pocket model: conversations, and Python's own source and documentation.

    python scripts/pocket/make_corpus.py --chat CHAT/smollm2_chat_*.jsonl.xz --docs DOCS/html/_sources

Run `make_tokenizer.py` with the same arguments first. `sources.py` says what is read and under which
licences. The result depends on the inputs and on `--seed` alone.

`train.npz` and `heldout.npz` hold, with N tokens in M documents:
  tokens        uint16 [N]         all documents, one after the other, in shuffled order
  starts        int64 [M]          where each document starts
  answer        uint8 [ceil(N/8)]  `np.unpackbits(answer, count=N)` marks the tokens that the assistant
                                   writes, its closing <|im_end|> among them
  source        uint8 [M]          index into `source_names`
A conversation ends with `<|im_end|>` and a newline unless its last answer was cut off at the length limit; a
text ends with `<|endoftext|>`. A prompt (or file) whose SHA-256 is a multiple of 50 is held out.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from sources import (
    SOURCES,
    Turn,
    chat_turns,
    docs_texts,
    ends_in_loop,
    function_turns,
    is_heldout,
    parse_args,
    stdlib_texts,
)
from tokenizers import Tokenizer

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer clearly and briefly.",
    "You are a friendly teacher who explains things step by step.",
    "You are an expert programmer.",
    "You are a creative writer.",
)


@dataclass(kw_only=True)
class Split:
    tokens: list[np.ndarray] = field(default_factory=list)
    answer: list[np.ndarray] = field(default_factory=list)
    source: list[int] = field(default_factory=list)


def group_turns(turns: Sequence[Turn], rng: np.random.Generator) -> Iterator[list[Turn]]:
    """Mostly single turns; one document in seven has two or three, so that the model knows dialogues too."""
    group: list[Turn] = []
    wanted = 1
    for index in rng.permutation(len(turns)):
        if not group:
            wanted = int(rng.choice((1, 2, 3), p=(0.86, 0.10, 0.04)))
        group.append(turns[index])
        if len(group) >= wanted or not turns[index].finished:
            yield group
            group = []
    if group:
        yield group


def render_turns(group: Sequence[Turn], system: str | None) -> list[tuple[str, bool]]:
    """The chat template's text in segments, each with whether the assistant writes it."""
    segments = [(f"<|im_start|>system\n{system}<|im_end|>\n", False)] if system else []
    for turn in group:
        segments.append((f"<|im_start|>user\n{turn.prompt}<|im_end|>\n<|im_start|>assistant\n", False))
        segments.append((turn.answer + ("<|im_end|>" if turn.finished else ""), True))
        if turn.finished:
            segments.append(("\n", False))
    return segments


def add_documents(split: Split, documents: Sequence[tuple[str, list[tuple[str, bool]]]], tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode_batch([text for _, segments in documents for text, _ in segments])
    parts = iter(encoded)
    for source, segments in documents:
        ids = [(next(parts).ids, is_answer) for _, is_answer in segments]
        split.tokens.append(np.array([i for part, _ in ids for i in part], dtype=np.uint16))
        split.answer.append(np.array([flag for part, flag in ids for _ in part], dtype=bool))
        split.source.append(SOURCES.index(source))


def write_split(split: Split, path: Path, rng: np.random.Generator) -> None:
    order = rng.permutation(len(split.tokens))
    lengths = np.array([len(split.tokens[i]) for i in order])
    np.savez_compressed(
        path,
        tokens=np.concatenate([split.tokens[i] for i in order]),
        starts=np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64),
        answer=np.packbits(np.concatenate([split.answer[i] for i in order])),
        source=np.array([split.source[i] for i in order], dtype=np.uint8),
        source_names=np.array(SOURCES),
    )


def print_statistics(name: str, split: Split, num_bytes: int) -> None:
    num_tokens = sum(map(len, split.tokens))
    num_answer = sum(int(mask.sum()) for mask in split.answer)
    print(f"{name}: {len(split.tokens)} documents, {num_tokens} tokens, {num_answer} of them in answers")
    print(f"  {num_bytes / num_tokens:.2f} bytes per token")
    for index, source in enumerate(SOURCES):
        counts = [len(t) for t, s in zip(split.tokens, split.source, strict=True) if s == index]
        total = sum(counts)
        print(f"  {source:12} {len(counts):6} documents {total:9} tokens {total / num_tokens:6.1%}")


def write_prompts(prompts: Sequence[str], path: Path) -> None:
    lines = (json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)
    path.write_text("".join(lines), encoding="utf-8")


def pick_prompts(turns: Sequence[Turn], count: int, max_bytes: int, rng: np.random.Generator) -> list[str]:
    """A varied choice of the model's own prompts: only a few may begin with the same three words."""
    most = 4 + count // 100
    openings: Counter[str] = Counter()
    chosen: list[str] = []
    size = 0
    for index in rng.permutation(len(turns)):
        prompt = turns[index].prompt
        opening = " ".join(prompt.lower().split()[:3])
        if turns[index].source != "self" or not 20 <= len(prompt) <= 400 or openings[opening] >= most:
            continue
        openings[opening] += 1
        size += len(json.dumps({"prompt": prompt}, ensure_ascii=False).encode()) + 1
        chosen.append(prompt)
        if len(chosen) == count:
            break
    if len(chosen) < count or size > max_bytes:
        raise ValueError(f"{len(chosen)} of {count} prompts found, {size} bytes: give more --chat files")
    return chosen


def main() -> None:
    args = parse_args("Build the pocket model's training data")
    rng = np.random.default_rng(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(args.assets / "tokenizer.json"))
    chat = [turn for turn in chat_turns(args.chat) if not ends_in_loop(turn.answer)]
    functions = list(function_turns(args.stdlib))
    texts = [*stdlib_texts(args.stdlib), *docs_texts(args.docs)]
    for name, heldout in (("train", False), ("heldout", True)):
        split = Split()
        own = [turn for turn in chat if is_heldout(turn.key) == heldout]
        groups = list(group_turns(own, rng))
        groups += [[turn] for turn in functions if is_heldout(turn.key) == heldout]
        documents = []
        for group in groups:
            system = str(rng.choice(SYSTEM_PROMPTS)) if rng.random() < 0.05 else None
            documents.append((group[-1].source, render_turns(group, system)))
        documents += [
            (text.source, [(text.text + "<|endoftext|>", False)]) for text in texts if is_heldout(text.key) == heldout
        ]
        add_documents(split, documents, tokenizer)
        write_split(split, args.out / f"{name}.npz", rng)
        write_prompts([turn.prompt for turn in own], args.out / f"{name}_prompts.jsonl")
        shipped, count = ("heldout_prompts", 200) if heldout else ("prompts", 1500)
        write_prompts(pick_prompts(own, count, 300_000, rng), args.assets / f"{shipped}.jsonl")
        print_statistics(name, split, sum(len(t.encode()) for _, segments in documents for t, _ in segments))


if __name__ == "__main__":
    main()
