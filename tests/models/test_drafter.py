"""The drafter sees its context and its block, nothing else; decoding and training compute the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.tiny import HYBRID, VOCABULARY, build, perturb, tokens
from twofold.models.drafter import Drafter, DraftLayer, DraftState
from twofold.models.drafter_config import DrafterConfig, DraftShape
from twofold.ops.cache import CachePlace
from twofold.ops.documents import document_ids

SHAPE = DraftShape(
    num_layers=2,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    block_size=4,
    mask_token_id=VOCABULARY - 1,
    target_layer_ids=(0, 2),
)
CONFIG = DrafterConfig.for_target(HYBRID, SHAPE)
LENGTH = 24


def drafter(window: int | None = None) -> Drafter:
    made = Drafter.initialized(replace(CONFIG, sliding_window=window), seed=1)
    perturb(made, 2)
    return made


def taps(batch: int = 1, length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(batch, length, 32, generator=generator) for _ in CONFIG.target_layer_ids]


def blocks(number: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, number * CONFIG.block_size, 32, generator=torch.Generator().manual_seed(6))


def trained_path(made: Drafter, given: list[Tensor], x: Tensor, positions: Tensor, anchors: Tensor) -> Tensor:
    """Hidden states of the blocks at `anchors` (indices in the row) as training computes them."""
    offset = torch.arange(CONFIG.block_size)
    block_positions = (positions.gather(1, anchors)[..., None] + offset).flatten(1)
    mask = made.training_mask(document_ids(positions), anchors)
    return made(x, block_positions, made.contexts(given, positions), mask)


def decoded_path(made: Drafter, given: list[Tensor], x: Tensor) -> Tensor:
    """Hidden states of one block after a context of all `given` taps, as decoding computes them."""
    state = made.new_state(len(x), 64)
    made.extend(state, given, given[0].shape[1])
    return made.draft(state, x)


def test_shapes() -> None:
    made, positions = drafter(), torch.arange(LENGTH).expand(2, -1)
    hidden = trained_path(made, taps(2), blocks(3, 2), positions, torch.tensor([[2, 9, 15], [0, 1, 23]]))
    assert hidden.shape == (2, 12, 32)
    assert made.contexts(taps(2), positions)[0][0].shape == (2, LENGTH, 2, 16)
    names = {name.split(".")[0] for name, _ in made.named_parameters()}
    assert names == {"fc", "hidden_norm", "layers", "norm"}  # neither embedding nor head


def test_initialization_is_seeded() -> None:
    a, b, c = (Drafter.initialized(CONFIG, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["fc.weight"], c["fc.weight"])
    assert abs(a["fc.weight"].std() - 64**-0.5) < 0.01  # 64 inputs
    assert torch.equal(a["norm.weight"], torch.ones(32))


@pytest.mark.parametrize("window", [None, 7])
def test_config_round_trip(window: int | None) -> None:
    config = replace(CONFIG, sliding_window=window)
    hf = config.to_hf()
    assert DrafterConfig.from_hf(hf) == config
    assert hf["dflash_config"]["causal"] is False
    assert hf["layer_types"] == ["full_attention" if window is None else "sliding_attention"] * 2


def test_a_window_that_no_layer_uses_is_none() -> None:
    hf = CONFIG.to_hf() | {"sliding_window": 4096}
    assert DrafterConfig.from_hf(hf).sliding_window is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": VOCABULARY}, f"mask_token_id {VOCABULARY} is no row of an embedding of {VOCABULARY}"),
        ({"mask_token_id": -1}, "mask_token_id -1"),
        ({"target_layer_ids": (1, 4)}, r"target_layer_ids \[4\] are not layers of a target with 4"),
        ({"target_layer_ids": (-1,)}, r"target_layer_ids \[-1\]"),
        ({"sliding_window": 3}, "sliding_window 3 is smaller than a block of 4"),
        ({"block_size": 1}, "block_size 1 drafts nothing"),
    ],
)
def test_a_bad_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


@pytest.mark.parametrize("key", ["dflash_config", "block_size", "num_target_layers"])
def test_a_missing_key_is_named(key: str) -> None:
    hf = CONFIG.to_hf()
    del hf[key]
    with pytest.raises(ValueError, match=f"no '{key}'; it is not a DFlash drafter"):
        DrafterConfig.from_hf(hf)


def test_the_mask_token_has_no_default() -> None:
    hf = CONFIG.to_hf()
    del hf["dflash_config"]["mask_token_id"]
    with pytest.raises(ValueError, match="mask_token_id"):
        DrafterConfig.from_hf(hf)


@pytest.mark.parametrize("window", [None, 4, 6])
def test_training_mask_by_brute_force(window: int | None) -> None:
    lengths, block = [9, 8, 7], CONFIG.block_size
    document = [n for n, length in enumerate(lengths) for _ in range(length)]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    anchors = [0, 3, 8, 9, 14, 23]
    mask = drafter(window).training_mask(document_ids(positions), torch.tensor([anchors])).dense[0]
    assert mask.shape == (len(anchors) * block, LENGTH + len(anchors) * block)
    for a, anchor in enumerate(anchors):
        for k in range(block):
            row = mask[a * block + k]
            for key in range(LENGTH):
                near = window is None or anchor + k - key < window
                assert row[key] == (key < anchor and document[key] == document[anchor] and near)
            for other in range(len(anchors) * block):
                assert row[LENGTH + other] == (other // block == a)


@pytest.mark.parametrize("window", [None, 5])
def test_no_feature_from_the_anchor_on_reaches_a_block(window: int | None) -> None:
    made = drafter(window)
    given = [tap.requires_grad_() for tap in taps()]
    positions = torch.cat((torch.arange(10), torch.arange(14)))[None]
    anchors = torch.tensor([[4, 8, 17]])
    hidden = trained_path(made, given, blocks(3), positions, anchors).unflatten(1, (3, -1))
    for a, (first, anchor) in enumerate(((0, 4), (0, 8), (10, 17))):
        gradients = torch.autograd.grad(hidden[0, a].square().sum(), given, retain_graph=True)
        for gradient in gradients:
            seen = gradient[0].abs().sum(dim=-1) > 0
            begin = first if window is None else max(first, anchor - window + 1)
            assert seen.nonzero().flatten().tolist() == list(range(begin, anchor))


@pytest.mark.parametrize("window", [None, 4, 6])
@pytest.mark.parametrize("anchor", [0, 1, 3, 4, 5, 6, 7, 12, 23])
def test_decoding_computes_what_training_does(window: int | None, anchor: int) -> None:
    made, given, x = drafter(window), taps(), blocks(1)
    with torch.no_grad():
        wanted = trained_path(made, given, x, torch.arange(LENGTH)[None], torch.tensor([[anchor]]))
        got = decoded_path(made, [tap[:, :anchor] for tap in given], x)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    with torch.no_grad():  # and once frozen
        frozen = decoded_path(made.freeze(), [tap[:, :anchor] for tap in given], x)
    torch.testing.assert_close(frozen, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_rows_of_different_lengths(window: int | None) -> None:
    made, given, x = drafter(window), taps(3), blocks(1, 3)
    lengths = torch.tensor([2, 11, 7])
    state = made.new_state(3, 64)
    with torch.no_grad():
        made.extend(state, given, lengths)
        got = made.draft(state, x)
        for row, length in enumerate(lengths.tolist()):
            alone = [tap[row : row + 1, :length] for tap in given]
            torch.testing.assert_close(got[row], decoded_path(made, alone, x[row : row + 1])[0], rtol=1e-5, atol=1e-5)


def assert_same(a: DraftState, b: DraftState, tolerance: float = 0.0) -> None:
    assert torch.equal(a.lengths_B, b.lengths_B)
    length = int(a.lengths_B.max())
    for x, y in zip(a.caches, b.caches, strict=True):
        for ours, theirs in ((x.k_BSGD, y.k_BSGD), (x.v_BSGD, y.v_BSGD)):
            ours, theirs = ours[:, :length], theirs[:, :length]
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_extend_takes_the_first_n_of_a_window() -> None:
    made, given = drafter(), taps()
    for n in range(CONFIG.block_size + 1):
        part, exactly, counted = (made.new_state(1, 64) for _ in range(3))
        for state in (part, exactly, counted):
            made.extend(state, [tap[:, :9] for tap in given], 9)
        window = [tap[:, 9:13] for tap in given]
        made.extend(part, window, n)
        made.extend(counted, window, torch.tensor([n]))
        if n:
            made.extend(exactly, [tap[:, :n] for tap in window], n)
        assert part.lengths_B.tolist() == [9 + n]
        assert_same(part, exactly)
        assert_same(part, counted, tolerance=1e-5)  # products over 4 rows and over n round differently


@torch.no_grad()
def test_what_was_rejected_does_not_come_back() -> None:
    made, given, x = drafter(), taps(), blocks(1)
    state = made.new_state(1, 64)
    made.extend(state, given, torch.tensor([8]))  # writes all, keeps 8
    made.extend(state, [tap[:, 8:12] + 1 for tap in given], 4)
    changed = [torch.cat((tap[:, :8], tap[:, 8:12] + 1), dim=1) for tap in given]
    torch.testing.assert_close(made.draft(state, x), decoded_path(made, changed, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [3, 4, 5, 6, 20])
def test_the_window_counts_context_pairs(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """W = 5, block of 4 at L: position L + k sees the context positions above L + k - 5."""
    made, masks = drafter(5), []
    draft = DraftLayer.draft

    def recorded(self: DraftLayer, x: Tensor, place: CachePlace, cache: Any) -> Tensor:
        masks.append(place.dense)
        return draft(self, x, place, cache)

    monkeypatch.setattr(DraftLayer, "draft", recorded)
    with torch.no_grad():
        decoded_path(made, [tap[:, :length] for tap in taps()], blocks(1))
    wanted = [sum(1 for key in range(length) if key > length + k - 5) for k in range(4)]
    assert masks[0] is not None
    assert masks[0][0].sum(dim=-1).tolist() == [count + 4 for count in wanted]  # and the block
    assert masks[0][0, :, -4:].all()


def test_the_feature_is_the_norm_of_all_taps() -> None:
    """c = hidden_norm(fc([tap_1; tap_2])); its keys and values are the layer's own projections."""
    made, positions = drafter(), torch.arange(LENGTH)[None]
    given = taps()
    joined = torch.cat(given, dim=-1) @ made.fc.weight.T
    feature = joined / (joined.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * made.hidden_norm.weight
    for layer, (_, v) in zip(made.layers, made.contexts(given, positions), strict=True):
        wanted = feature @ layer.self_attn.v_proj.weight.T  # type: ignore[union-attr, operator]
        torch.testing.assert_close(v.flatten(-2), wanted, rtol=1e-5, atol=1e-5)


def test_it_reads_the_taps_of_its_target() -> None:
    """A tap is the output after the layer: fed with the real target, a later token changes no earlier block."""
    target, made = build(HYBRID), drafter()
    ids = tokens(1, LENGTH)
    changed = ids.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % VOCABULARY
    anchors, positions = torch.tensor([[5, 10, 14]]), torch.arange(LENGTH)[None]
    outs = []
    with torch.no_grad():
        for given in (ids, changed):
            _, tapped = target(given, positions, taps=CONFIG.target_layer_ids)
            outs.append(trained_path(made, tapped, blocks(3), positions, anchors)[0].unflatten(0, (3, -1)))
    assert torch.equal(outs[0][:2], outs[1][:2])  # context ends before 10
    assert not torch.equal(outs[0][2], outs[1][2])
