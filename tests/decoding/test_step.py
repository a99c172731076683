"""Speculative decoding is plain decoding, token for token, however good the draft."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle as forever
from itertools import repeat

import pytest
import torch
from torch import Tensor

from tests import pocket
from tests.decoding import oracle
from tests.models.test_drafter import SHAPE
from tests.models.tiny import HYBRID, PLAIN, build, perturb, tokens
from twofold.decoding import step
from twofold.decoding.step import Cycle, Rows, decode, decode_cycle, new_rows, prefill, prefill_filled
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter, DraftState
from twofold.models.drafter_config import DrafterConfig
from twofold.models.state import DecodeState, KeyValueCache
from twofold.ops.cache import CachePlace
from twofold.ops.sampling import Sampling

BLOCK = SHAPE.block_size
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=1.2, top_k=20, seed=2),
    Sampling(temperature=1.0, top_p=0.8, seed=3),
    Sampling(temperature=1.0, min_p=0.1, seed=4),
    Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.02, seed=5),
]


def tiny(config: object = HYBRID, window: int | None = None, block: int = BLOCK) -> tuple[CausalLM, Drafter]:
    target = build(config).requires_grad_(False)  # type: ignore[arg-type]
    layers = tuple(range(0, target.config.num_layers, 2))
    made = DrafterConfig.for_target(target.config, replace(SHAPE, target_layer_ids=layers, block_size=block))
    drafter = Drafter.initialized(replace(made, sliding_window=window), 1)
    perturb(drafter, 2)
    return target, drafter.requires_grad_(False)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(tokens(1, length, seed)[0].tolist())


def prefilled(
    target: CausalLM, drafter: Drafter | None, asked: tuple[int, ...], max_length: int, sampling: Sampling = Sampling()
) -> tuple[Rows, Tensor]:
    rows = new_rows(target, drafter, 1, max_length, sampling.seed)
    return rows, prefill(target, drafter, rows, torch.tensor([asked]), sampling)


def ids(cycles: list[Cycle]) -> list[int]:
    return [token for cycle in cycles for token in cycle.token_ids]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_plain_decoding_is_teacher_forcing(sampling: Sampling) -> None:
    """Each token is what the whole-sequence forward pass gives for its position."""
    target, _ = tiny()
    asked = prompt(9)
    answer = oracle.plain(target, asked, 20, sampling)
    with torch.no_grad():
        logits = target.logits(target(torch.tensor([[*asked, *answer]]))[0])[:, len(asked) - 1 : -1]
    positions = torch.arange(len(asked), len(asked) + 20)[None]
    assert step.choose(logits, positions, sampling)[0].tolist() == answer


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_speculative_is_plain_on_the_trained_model(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pocket.target(), pocket.untrained_drafter()
    for number, asked in enumerate(pocket.prompts(2)):
        wanted = oracle.plain(target, asked, 48, sampling)
        oracle.install(monkeypatch, asked, wanted, forever([number, 3, 0, 7, 1, 5, 2, 6, 4]))
        cycles = list(decode(target, drafter, asked, 48, sampling))
        assert ids(cycles) == wanted
        assert {c.num_accepted for c in cycles[1:-1]} > {0, 3, 7, 1}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculative_is_plain_with_a_random_drafter(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=9)
    for asked in pocket.prompts(2):
        wanted = oracle.plain(pocket.target(), asked, 32, sampling)
        assert ids(list(decode(pocket.target(), pocket.untrained_drafter(), asked, 32, sampling))) == wanted


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLINGS[-1]], ids=["greedy", "sampled"])
def test_speculative_is_plain_with_the_trained_drafter(sampling: Sampling) -> None:
    accepted = 0
    for asked in pocket.prompts(2):
        wanted = oracle.plain(pocket.target(), asked, 48, sampling)
        cycles = list(decode(pocket.target(), pocket.trained_drafter(), asked, 48, sampling))
        assert ids(cycles) == wanted
        accepted += sum(c.num_accepted for c in cycles)
    assert accepted > 20


@pytest.mark.parametrize("config", [HYBRID, PLAIN], ids=["hybrid", "plain"])
@pytest.mark.parametrize("window", [None, 6])
def test_speculative_is_plain_on_tiny_models(config: object, window: int | None) -> None:
    target, drafter = tiny(config, window)
    for seed, sampling in enumerate(SAMPLINGS[:3]):
        asked = prompt(5 + seed, seed)
        wanted = oracle.plain(target, asked, 30, sampling)
        assert ids(list(decode(target, drafter, asked, 30, sampling))) == wanted


@pytest.mark.parametrize("right", range(BLOCK))
def test_accepted_is_the_run_of_right_guesses(right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = tiny()
    asked, sampling = prompt(7), Sampling(temperature=0.9, seed=3)
    wanted = oracle.plain(target, asked, 33, sampling)
    oracle.install(monkeypatch, asked, wanted, repeat(right))
    cycles = list(decode(target, drafter, asked, 33, sampling))
    assert ids(cycles) == wanted
    whole = 32 // (right + 1)
    assert [c.num_accepted for c in cycles[: whole + 1]] == [0] + [right] * whole
    assert [len(c.token_ids) for c in cycles[1 : whole + 1]] == [right + 1] * whole
    assert all(c.logits is not None and len(c.token_ids) == len(c.logits) for c in cycles)


@pytest.mark.parametrize("right", [0, BLOCK - 1])
@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_max_tokens_is_exact(right: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = tiny()
    wanted = oracle.plain(target, prompt(6), 2 * BLOCK)
    oracle.install(monkeypatch, prompt(6), wanted, repeat(right))
    assert ids(list(decode(target, drafter, prompt(6), count, Sampling()))) == wanted[:count]


@pytest.mark.parametrize("ending", range(1, 2 * BLOCK))
def test_a_stop_id_inside_an_accepted_block_ends_there(ending: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = tiny()
    sampling = Sampling(temperature=1.5, seed=ending)
    wanted = oracle.plain(target, prompt(6), 24, sampling)
    other = next(token for token in range(97) if token not in wanted)
    oracle.install(monkeypatch, prompt(6), wanted, repeat(BLOCK - 1))
    stop_ids = frozenset((other, wanted[ending]))  # several; one occurs
    first = wanted.index(wanted[ending])
    assert ids(list(decode(target, drafter, prompt(6), 24, sampling, stop_ids))) == wanted[: first + 1]
    assert ids(list(decode(target, None, prompt(6), 24, sampling, stop_ids))) == wanted[: first + 1]


def test_positions_after_a_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt 100, anchor at 100, 3 accepted: anchor at 104, new features 100..103, next block 104..119."""
    target, drafter = tiny(block=16)
    asked = prompt(100)
    rows, first = prefilled(target, drafter, asked, 160)
    assert rows.draft_state is not None
    assert (rows.state.lengths_B.tolist(), rows.draft_state.lengths_B.tolist()) == ([100], [100])
    assert rows.anchors_B.tolist() == first[0].argmax(dim=-1).tolist()

    features: list[list[int]] = []
    blocks: list[list[int]] = []
    ahead = DraftState.ahead

    def recorded(self: DraftState, num_tokens: int, *, causal: bool = True, window: int | None = None) -> CachePlace:
        place = ahead(self, num_tokens, causal=causal, window=window)
        (features if causal else blocks).append(place.positions_BT[0].tolist())
        return place

    monkeypatch.setattr(DraftState, "ahead", recorded)
    wanted = oracle.plain(target, asked, 40)
    with monkeypatch.context() as patch:
        oracle.install(patch, asked, wanted, repeat(3))
        decode_cycle(target, drafter, rows, Sampling(), 16)
    assert rows.emitted_BN[0, :5].tolist() == [4, *wanted[1:5]]
    assert rows.anchors_B.tolist() == [wanted[4]]
    assert rows.state.lengths_B.tolist() == rows.draft_state.lengths_B.tolist() == [104]
    assert features == [list(range(100, 116))]  # of which 100..103 are context: it ends at the length
    decode_cycle(target, drafter, rows, Sampling(), 16)
    assert blocks == [list(range(104, 120))]


def keys(cache: KeyValueCache, length: int) -> tuple[Tensor, Tensor]:
    return cache.k_BSGD[:, :length], cache.v_BSGD[:, :length]


def assert_equal_states(ours: DecodeState, fresh: DecodeState) -> None:
    length = int(fresh.lengths_B[0])
    assert ours.lengths_B.tolist() == [length]
    for a, b in zip(ours.layers, fresh.layers, strict=True):
        if isinstance(a, KeyValueCache):
            assert isinstance(b, KeyValueCache)
            pairs = zip(keys(a, length), keys(b, length), strict=True)
        else:
            assert not isinstance(b, KeyValueCache)
            pairs = zip((a.conv_BWC, a.state_BHKV), (b.conv_BWC, b.state_BHKV), strict=True)
        for x, y in pairs:
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def assert_equal_contexts(ours: DraftState, fresh: DraftState) -> None:
    length = int(fresh.lengths_B[0])
    assert ours.lengths_B.tolist() == [length]
    for a, b in zip(ours.caches, fresh.caches, strict=True):
        for x, y in zip(keys(a, length), keys(b, length), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("right", range(BLOCK))
def test_after_a_rejection_the_state_is_that_of_a_fresh_run(right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = tiny()
    asked = prompt(11)
    wanted = oracle.plain(target, asked, 30)
    oracle.install(monkeypatch, asked, wanted, repeat(right))
    rows, _ = prefilled(target, drafter, asked, 60)
    for cycles in range(1, 4):
        decode_cycle(target, drafter, rows, Sampling(), BLOCK)
        done = (*asked, *wanted[: cycles * (right + 1)])
        fresh, _ = prefilled(target, drafter, done, 60)
        assert rows.anchors_B.tolist() == fresh.anchors_B.tolist() == [wanted[cycles * (right + 1)]]
        assert_equal_states(rows.state, fresh.state)
        assert rows.draft_state is not None
        assert fresh.draft_state is not None
        assert_equal_contexts(rows.draft_state, fresh.draft_state)


def test_a_long_prompt_goes_in_chunks() -> None:
    target, drafter = tiny()
    whole, first = prefilled(target, drafter, prompt(37), 60)
    target.kernels = replace(target.kernels, prefill_chunk=8)
    parts, other = prefilled(target, drafter, prompt(37), 60)
    assert torch.equal(whole.anchors_B, parts.anchors_B)
    torch.testing.assert_close(first, other, rtol=1e-4, atol=1e-4)
    assert_equal_states(parts.state, whole.state)
    assert parts.draft_state is not None
    assert whole.draft_state is not None
    assert_equal_contexts(parts.draft_state, whole.draft_state)


@pytest.mark.parametrize("config", [HYBRID, PLAIN], ids=["hybrid", "plain"])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40])
def test_what_fills_up_a_prompt_was_never_there(config: object, length: int) -> None:
    target, drafter = tiny(config)
    whole, first = prefilled(target, drafter, prompt(length), 60)
    target.kernels = replace(target.kernels, prefill_sizes=(16, 64))
    rows, other = prefilled(target, drafter, prompt(length), 60)
    assert torch.equal(whole.anchors_B, rows.anchors_B)
    torch.testing.assert_close(first, other, rtol=1e-4, atol=1e-4)
    assert_equal_states(rows.state, whole.state)
    assert rows.draft_state is not None
    assert whole.draft_state is not None
    assert_equal_contexts(rows.draft_state, whole.draft_state)
    for lengths in (rows.state, rows.draft_state):
        assert (lengths.bound, lengths.exact) == (length, True)


def test_filled_rows_have_prompts_of_their_own_lengths() -> None:
    target, drafter = tiny()
    rows = new_rows(target, drafter, 3, 60)
    counts = [3, 16, 9]
    filled = torch.tensor([prompt(16, seed) for seed in range(3)])
    prefill_filled(target, drafter, rows, filled, torch.tensor(counts), Sampling())
    assert rows.state.lengths_B.tolist() == counts
    assert rows.anchors_B.tolist() == [oracle.plain(target, prompt(16, i)[:n], 1)[0] for i, n in enumerate(counts)]


def test_guesses_at_a_temperature_share_the_targets_noise() -> None:
    """A drafter whose scores are the target's own guesses every sampled token."""
    target, drafter = tiny()
    asked, sampling = prompt(8), Sampling(temperature=1.3, top_k=30, seed=6)
    wanted = oracle.plain(target, asked, 5, sampling)
    rows, _ = prefilled(target, drafter, asked, 40, sampling)
    with torch.no_grad():
        hidden, _ = target(torch.tensor([[*asked, *wanted]]))

    def perfect(state: DraftState, block: Tensor) -> Tensor:
        # guess k of a block is scored by what the target has after token k - 1
        return torch.cat((hidden[:, :1], hidden[:, len(asked) : len(asked) + block.shape[1] - 1]), dim=1)

    drafter.draft = perfect  # type: ignore[method-assign]
    assert step.draft(target, drafter, rows, sampling, BLOCK)[0].tolist() == wanted[:BLOCK]


@pytest.mark.parametrize("right", [0, 2, BLOCK - 1])
def test_logits_are_the_teacher_forced_ones(right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = tiny()
    asked, sampling = prompt(9), Sampling(temperature=1.0, seed=2)
    wanted = oracle.plain(target, asked, 30, sampling)
    oracle.install(monkeypatch, asked, wanted, repeat(right))
    cycles = list(decode(target, drafter, asked, 30, sampling))
    got = torch.cat([c.logits[: len(c.token_ids)] for c in cycles if c.logits is not None])
    with torch.no_grad():
        forced = target.logits(target(torch.tensor([[*asked, *wanted]]))[0])[0, len(asked) - 1 : -1]
    torch.testing.assert_close(got, forced, rtol=1e-4, atol=1e-4)
