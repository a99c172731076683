"""Packing loses no token, mixes no documents, and batches depend on seed and step alone."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from twofold.data.conversations import Conversation, PackedRows, load_conversations, pack, save_conversations


def conversations(count: int, seed: int = 0, longest: int = 30) -> list[Conversation]:
    """Every token occurs once in all of them."""
    draw, token, made = random.Random(seed), 1, []
    for _ in range(count):
        num_prompt, num_answer = draw.randint(1, longest // 2), draw.randint(0, longest // 2)
        ids = list(range(token, token + num_prompt + num_answer))
        token += len(ids)
        made.append(Conversation(ids[:num_prompt], ids[num_prompt:]))
    return made


def documents(rows: PackedRows) -> list[tuple[list[int], list[bool]]]:
    """Token ids and answer marks of every document, cut where a position is 0."""
    found = []
    for n in range(len(rows)):
        starts = [*(rows.positions_NT[n] == 0).nonzero().flatten().tolist(), rows.token_ids_NT.shape[1]]
        for start, end in pairwise(starts):
            assert rows.positions_NT[n, start:end].tolist() == list(range(end - start))
            used = rows.used_NT[n, start:end]
            assert used.all() or not used.any()
            if used.all():
                found.append((rows.token_ids_NT[n, start:end].tolist(), rows.answer_NT[n, start:end].tolist()))
            else:
                assert not rows.answer_NT[n, start:end].any()
    return found


@pytest.mark.parametrize("length", [30, 33, 64, 200])
def test_every_conversation_is_one_document(length: int) -> None:
    given = conversations(50)
    wanted = [(c.prompt_ids + c.answer_ids, [False] * len(c.prompt_ids) + [True] * len(c.answer_ids)) for c in given]
    assert sorted(documents(pack(given, length))) == sorted(wanted)


def test_long_ones_lose_their_end() -> None:
    given = [Conversation([1, 2, 3], [4, 5, 6, 7]), Conversation([8], [9]), Conversation([10] * 6, [11, 12])]
    rows = pack(given, 5)
    assert sorted(documents(rows)) == [
        ([1, 2, 3, 4, 5], [False] * 3 + [True] * 2),
        ([8, 9], [False, True]),
        ([10] * 5, [False] * 5),
    ]


def test_rows_are_nearly_full() -> None:
    given = conversations(400, seed=3, longest=60)
    rows = pack(given, 256)
    total = sum(len(c.prompt_ids) + len(c.answer_ids) for c in given)
    assert int(rows.used_NT.sum()) == total
    assert len(rows) * 256 < total / 0.93


def test_packing_is_deterministic() -> None:
    a, b = (pack(conversations(40), 64) for _ in range(2))
    assert torch.equal(a.token_ids_NT, b.token_ids_NT)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    given = [*conversations(9), Conversation([5, 6], [])]
    save_conversations(given, tmp_path / "c.safetensors")
    assert load_conversations(tmp_path / "c.safetensors") == given
    save_conversations([], tmp_path / "none.safetensors")
    assert load_conversations(tmp_path / "none.safetensors") == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    for content in (b"half", b"\x02\0\0\0\0\0\0\0{}"):  # the second is whole, and holds nothing
        (tmp_path / "batch.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=rf"^{tmp_path}/batch\.safetensors is damaged \(.*\); delete it and run"):
            load_conversations(tmp_path / "batch.safetensors")


def test_every_row_once_an_epoch() -> None:
    rows = pack(conversations(60), 64).select(torch.arange(12))
    epochs = []
    for epoch in range(4):
        seen = [n for step in range(3) for n in rows.batch(4, 3 * epoch + step, seed=7).tolist()]
        assert sorted(seen) == list(range(12))
        epochs.append(tuple(seen))
    assert len(set(epochs)) == 4


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    rows = pack(conversations(60), 64)
    assert torch.equal(rows.batch(4, 5, seed=7), rows.batch(4, 5, seed=7))
    assert not torch.equal(rows.batch(4, 5, seed=7), rows.batch(4, 5, seed=8))


def test_rows_that_fill_no_batch_are_left_for_another_epoch() -> None:
    rows = pack(conversations(60), 64).select(torch.arange(7))
    left = set()
    for epoch in range(8):
        seen = {n for step in range(2) for n in rows.batch(3, 2 * epoch + step, seed=1).tolist()}
        assert len(seen) == 6
        left |= set(range(7)) - seen
    assert len(left) > 1
    assert sorted(rows.batch(100, 0, seed=1).tolist()) == list(range(7))


def test_joined_rows_are_one_document() -> None:
    rows = pack(conversations(60), 64)
    joined, numbers = rows.joined(3), torch.arange(len(rows))
    assert torch.equal(joined.positions_NT[numbers % 3 == 0], torch.arange(64).expand((len(rows) + 2) // 3, -1))
    assert torch.equal(joined.positions_NT[numbers % 3 != 0], rows.positions_NT[numbers % 3 != 0])
    assert int((rows.positions_NT == 0).sum()) > 2 * len(rows)  # as it was
    for name in ("token_ids_NT", "answer_NT", "used_NT"):
        assert torch.equal(getattr(joined, name), getattr(rows, name))
    assert torch.equal(rows.joined(0).positions_NT, rows.positions_NT)


def test_rows_are_selected_whole() -> None:
    rows, numbers = pack(conversations(60), 64), torch.tensor([5, 0, 3])
    batch = rows.select(numbers)
    for name in ("token_ids_NT", "positions_NT", "answer_NT", "used_NT"):
        assert torch.equal(getattr(batch, name), torch.stack([getattr(rows, name)[n] for n in (5, 0, 3)]))


def test_each_goes_into_the_first_row_that_has_room() -> None:
    told = [Conversation([1] * n, [2]) for n in torch.randint(1, 60, (300,), generator=torch.manual_seed(0)).tolist()]
    rows, free = [], []
    for conversation in sorted(told, key=lambda c: -len(c.prompt_ids)):
        size = len(conversation.prompt_ids) + 1
        row = next((r for r, room in enumerate(free) if room >= size), len(rows))
        if row == len(rows):
            rows.append(0)
            free.append(64)
        rows[row] += 1
        free[row] -= size
    packed = pack(told, 64)
    assert packed.answer_NT.sum(dim=1).tolist() == rows
    assert packed.used_NT.sum(dim=1).tolist() == [64 - room for room in free]
