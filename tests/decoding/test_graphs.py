"""A captured cycle is the eager one: the same tokens from the same buffers, with nothing read by the host.

On a GPU a graph is captured and replayed; elsewhere the same function runs over the same buffers.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate, repeat

import pytest
import torch
from torch import Tensor

from tests import pocket
from tests.decoding import oracle
from tests.decoding.test_step import BLOCK, SAMPLINGS, ids, prompt, tiny
from tests.models.tiny import HYBRID, PLAIN
from twofold.decoding.graphs import CapturedCycle
from twofold.decoding.step import Cycle, Rows, decode, decode_cycle, new_rows, prefill, prefill_filled
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.models.markov_head import MarkovHead
from twofold.models.state import DeltaState, KeyValueCache
from twofold.ops.sampling import Sampling

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)


@cache
def pair(device: str, config: str = "hybrid", window: int | None = None) -> tuple[CausalLM, Drafter]:
    target, drafter = tiny(HYBRID if config == "hybrid" else PLAIN, window)
    return target.to(device).freeze(), drafter.to(device).freeze()


def tensors(rows: Rows) -> list[Tensor]:
    found = [rows.anchors_B, rows.seeds_B, rows.emitted_BN, rows.state.lengths_B, *rows.state.rotary]
    caches: list[object] = list(rows.state.layers)
    if rows.draft_state is not None:
        found += [rows.draft_state.lengths_B, *rows.draft_state.rotary]
        caches += rows.draft_state.caches
    for layer in caches:
        if isinstance(layer, KeyValueCache):
            found += [layer.k_BSGD, layer.v_BSGD]
        else:
            assert isinstance(layer, DeltaState)
            found += [layer.conv_BWC, layer.state_BHKV]
    return found


def accepted(cycles: list[Cycle], count: int, drafter: Drafter | None) -> list[int]:
    """num_accepted of the cycles that had a whole block to fill; `decode` shortens those after."""
    block = 1 if drafter is None else drafter.config.block_size
    starts = [0, *accumulate(len(c.token_ids) for c in cycles)]
    return [c.num_accepted for c, start in zip(cycles, starts, strict=False) if count - start >= block]


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[-1]], ids=["greedy", "sampled", "filtered"])
def test_it_is_decode_on_the_trained_model(speculative: bool, sampling: Sampling) -> None:
    """One capture serves prompts of different lengths, one after the other."""
    target, drafter = pocket.target(), pocket.trained_drafter() if speculative else None
    captured = CapturedCycle(target, drafter, 256, sampling)
    places = [tensor.data_ptr() for tensor in tensors(captured.rows)]
    for number, asked in enumerate(pocket.prompts(3)):
        seeded = replace(sampling, seed=sampling.seed + number)
        wanted = list(decode(target, drafter, asked, 40, seeded))
        got = list(captured.decode(asked, 40, seeded.seed))
        assert ids(got) == ids(wanted)
        assert accepted(got, 40, drafter) == accepted(wanted, 40, drafter)
    assert [tensor.data_ptr() for tensor in tensors(captured.rows)] == places


@each_device
@pytest.mark.parametrize("config", ["hybrid", "plain"])
@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=range(3))
def test_it_is_decode_on_tiny_models(device: str, config: str, sampling: Sampling) -> None:
    target, drafter = pair(device, config)
    for chosen in (None, drafter):
        captured = CapturedCycle(target, chosen, 64, sampling)
        for seed in range(3):
            asked = prompt(5 + seed, seed)
            wanted = decode(target, chosen, asked, 30, replace(sampling, seed=seed))
            assert ids(list(captured.decode(asked, 30, seed))) == ids(list(wanted))


@each_device
def test_a_filled_up_prefill_leaves_what_the_prompt_alone_does(device: str) -> None:
    """Prompts of one size follow each other, a shorter one a longer one: the second is captured, the rest replayed."""
    target, drafter = pair(device)
    plain = target.kernels
    wanted = [ids(list(decode(target, drafter, prompt(n, n), 20, Sampling()))) for n in (16, 3, 9, 20, 40, 41)]
    target.kernels = replace(plain, prefill_sizes=(16, 40))
    try:
        captured = CapturedCycle(target, drafter, 64, Sampling())
        for _ in range(2):
            got = [ids(list(captured.decode(prompt(n, n), 20, 0))) for n in (16, 3, 9, 20, 40, 41)]
            assert got == wanted
    finally:
        target.kernels = plain
    assert sorted(captured._prefills) == [16, 40]


@each_device
@pytest.mark.parametrize("length", [5, 6, 7, 24])
def test_a_window_accepts_as_much_at_its_borders(device: str, length: int) -> None:
    """Contexts of W - 1, W, W + 1 and 4 W positions."""
    window = 6
    target, drafter = pair(device, "hybrid", window)
    asked = prompt(length)
    wanted = list(decode(target, drafter, asked, 40, Sampling()))
    got = list(CapturedCycle(target, drafter, 80, Sampling()).decode(asked, 40, 0))
    assert ids(got) == ids(wanted)
    assert accepted(got, 40, drafter) == accepted(wanted, 40, drafter)


@each_device
@pytest.mark.parametrize("speculative", [False, True])
def test_rows_of_a_batch_are_rows_alone(device: str, speculative: bool) -> None:
    target, drafter = pair(device)
    chosen, sampling = drafter if speculative else None, Sampling(temperature=0.9, seed=4)
    prompts = [prompt(9, seed) for seed in range(3)]
    captured = CapturedCycle(target, chosen, 60, sampling, batch_size=3)
    answers = [[token] for token in captured.start(torch.tensor(prompts, device=device), 4).tolist()]
    for _ in range(12):
        captured.launch()
        for answer, more in zip(answers, captured.read(), strict=True):
            answer += more
    for asked, answer in zip(prompts, answers, strict=True):
        count = min(len(answer), 40)
        assert answer[:count] == ids(list(decode(target, chosen, asked, count, sampling)))


@pytest.mark.parametrize("count", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("right", [0, BLOCK - 1])
def test_max_tokens_is_exact(count: int, right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = tiny()
    wanted = oracle.plain(target, prompt(6), 6 * BLOCK)
    oracle.install(monkeypatch, prompt(6), wanted, repeat(right))
    assert ids(list(CapturedCycle(target, drafter, 40, Sampling()).decode(prompt(6), count, 0))) == wanted[:count]


@pytest.mark.parametrize("ending", range(1, 2 * BLOCK))
def test_what_comes_after_a_stop_is_dropped(ending: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = tiny()
    sampling = Sampling(temperature=1.5, seed=ending)
    wanted = oracle.plain(target, prompt(6), 60, sampling)
    stop_ids = frozenset((wanted[ending],))
    first = wanted.index(wanted[ending])
    for chosen in (None, drafter):
        oracle.install(monkeypatch, prompt(6), wanted, repeat(BLOCK - 1))
        captured = CapturedCycle(target, chosen, 60, sampling)
        for _ in range(2):  # what was in flight at the stop leaves nothing behind
            assert ids(list(captured.decode(prompt(6), 24, ending, stop_ids))) == wanted[: first + 1]


@pytest.mark.parametrize("config", [HYBRID, PLAIN], ids=["hybrid", "plain"])
@pytest.mark.parametrize("kind", ["plain", "drafter", "window", "markov"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_a_cycle_runs_without_any_data(config: object, kind: str, sampling: Sampling) -> None:
    """On tensors that have shapes and no numbers: whatever the host would read raises."""
    target, drafter = tiny(config, 6 if kind == "window" else None)
    if kind == "markov":
        drafter.markov_head = MarkovHead(target.config.vocab_size, 3)
    target, drafter = copy.deepcopy(target).to("meta"), copy.deepcopy(drafter).to("meta")
    chosen = None if kind == "plain" else drafter
    rows = new_rows(target, chosen, 2, 80)
    for _ in range(2):
        rows.know(60, exact=False)
        decode_cycle(target, chosen, rows, sampling, 1 if chosen is None else BLOCK, scores=False)
    rows.know(0, exact=True)
    counts_B = torch.empty(2, dtype=torch.long, device="meta")
    prefill_filled(target, chosen, rows, counts_B[:, None].expand(-1, 24), counts_B, sampling)
    assert rows.emitted_BN.is_meta
    with pytest.raises((RuntimeError, NotImplementedError)):  # the check can fail
        rows.emitted_BN.tolist()


def test_nothing_grows_over_many_cycles() -> None:
    target, drafter = pair("cpu")
    captured = CapturedCycle(target, drafter, 700, Sampling())
    answer = captured.decode(prompt(6), 600, 0)

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    def after(cycles: int) -> int:
        for _ in range(cycles):
            next(answer)
        return alive()

    first = after(5)
    assert after(100) == first


def test_it_says_when_it_is_too_small() -> None:
    target, drafter = pair("cpu")
    captured = CapturedCycle(target, drafter, 20, Sampling())
    with pytest.raises(ValueError, match=r"12 \+ 9 tokens exceed a capacity of 20; capture a larger cycle"):
        captured.decode(prompt(12), 9, 0)
    assert len(ids(list(captured.decode(prompt(12), 8, 0)))) == 8


def test_the_host_reads_a_cycle_while_the_next_is_under_way() -> None:
    target, drafter = pair("cpu")
    captured = CapturedCycle(target, drafter, 60, Sampling())
    events: list[str] = []
    launch, read = captured.launch, captured.read
    captured.launch = lambda: (events.append("launch"), launch())[1]  # type: ignore[method-assign, func-returns-value]
    captured.read = lambda: (events.append("read"), read())[1]  # type: ignore[method-assign]
    answer: Iterator[object] = captured.decode(prompt(6), 40, 0)
    next(answer)
    assert events == []
    next(answer)
    next(answer)
    assert events == ["launch", "launch", "read", "launch", "read"]


def test_prefill_takes_rows_of_one_length_together() -> None:
    target, drafter = pair("cpu")
    rows = new_rows(target, drafter, 2, 40)
    prompts = [prompt(9, 1), prompt(9, 2)]
    prefill(target, drafter, rows, torch.tensor(prompts), Sampling())
    assert rows.anchors_B.tolist() == [oracle.plain(target, asked, 1)[0] for asked in prompts]
