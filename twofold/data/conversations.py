"""Conversations as token ids: stored, and packed into rows for training. N rows, T tokens a row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class Conversation:
    prompt_ids: list[int]
    answer_ids: list[int]


def save_conversations(conversations: Sequence[Conversation], path: Path) -> None:
    tokens = [token for c in conversations for token in (*c.prompt_ids, *c.answer_ids)]
    sizes = [[len(c.prompt_ids), len(c.answer_ids)] for c in conversations]
    save_file(
        {
            "tokens": torch.tensor(tokens, dtype=torch.int32),
            "sizes": torch.tensor(sizes, dtype=torch.int32).reshape(-1, 2),
        },
        str(path),
    )


def load_conversations(path: Path) -> list[Conversation]:
    """ValueError for a file that is none of `save_conversations`."""
    try:
        tensors = load_file(str(path))
        tokens, sizes = tensors["tokens"].tolist(), tensors["sizes"].tolist()
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and run the recipe again") from error
    start, conversations = 0, []
    for num_prompt, num_answer in sizes:
        middle, end = start + num_prompt, start + num_prompt + num_answer
        conversations.append(Conversation(tokens[start:middle], tokens[middle:end]))
        start = end
    return conversations


@dataclass(frozen=True)
class PackedRows:
    """Conversations laid end to end: a position of 0 starts one. `answer` marks the answer's tokens, `used` those
    of any conversation; a row's unused end is one more document, of token 0.
    """

    token_ids_NT: Tensor
    positions_NT: Tensor
    answer_NT: Tensor
    used_NT: Tensor

    def __len__(self) -> int:
        return len(self.token_ids_NT)

    def select(self, rows: Tensor) -> "PackedRows":
        """The given rows, as a batch."""
        parts = (self.token_ids_NT, self.positions_NT, self.answer_NT, self.used_NT)
        return PackedRows(*(x[rows] for x in parts))

    def joined(self, every: int) -> "PackedRows":
        """Every so many rows (0: none) as one document each, conversation after conversation: contexts as long as a row
        where conversations are short."""
        positions_NT = self.positions_NT.clone()
        if every:
            positions_NT[::every] = torch.arange(positions_NT.shape[1], device=positions_NT.device)
        return replace(self, positions_NT=positions_NT)

    def to(self, device: torch.device) -> "PackedRows":
        parts = (self.token_ids_NT, self.positions_NT, self.answer_NT, self.used_NT)
        return PackedRows(*(x.to(device) for x in parts))

    def batch(self, size: int, step: int, seed: int) -> Tensor:
        """Numbers of the rows of a training step: every row once an epoch, in an order of (seed, epoch) alone."""
        size = min(size, len(self))
        per_epoch = len(self) // size
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step // per_epoch)
        order = torch.randperm(len(self), generator=generator)
        first = step % per_epoch * size
        return order[first : first + size]


def pack(conversations: Sequence[Conversation], length: int) -> PackedRows:
    """Each conversation whole in one row where it fits, its end cut off where it is longer than a row.

    First fit over the conversations from long to short, so that rows are nearly full.
    """
    order = sorted(range(len(conversations)), key=lambda i: -_size(conversations[i]))
    rows = _first_fit([min(_size(conversations[i]), length) for i in order], length)
    rows = [[order[i] for i in row] for row in rows]
    token_ids = torch.zeros(len(rows), length, dtype=torch.long)
    positions = torch.arange(length).repeat(len(rows), 1)
    answer = torch.zeros(len(rows), length, dtype=torch.bool)
    used = torch.zeros(len(rows), length, dtype=torch.bool)
    for n, members in enumerate(rows):
        at = 0
        for i in members:
            ids = (conversations[i].prompt_ids + conversations[i].answer_ids)[:length]
            token_ids[n, at : at + len(ids)] = torch.tensor(ids)
            positions[n, at : at + len(ids)] = torch.arange(len(ids))
            answer[n, at + len(conversations[i].prompt_ids) : at + len(ids)] = True
            at += len(ids)
        used[n, :at] = True
        positions[n, at:] = torch.arange(length - at)
    return PackedRows(token_ids, positions, answer, used)


def _first_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """What each row holds, every size in the first row that has room, by a tree of the most room below each node."""
    leaves = 1 << max(0, len(sizes) - 1).bit_length()
    most = [length] * (2 * leaves)
    rows: list[list[int]] = []
    for i, size in enumerate(sizes):
        node = 1
        while node < leaves:
            node = 2 * node if most[2 * node] >= size else 2 * node + 1
        row = node - leaves
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        most[node] -= size
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
    return rows


def _size(conversation: Conversation) -> int:
    return len(conversation.prompt_ids) + len(conversation.answer_ids)
