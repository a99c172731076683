"""The decode state is a transaction: after commit(n) it is that of a fresh run over n tokens, for every n."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from tests.models.tiny import HYBRID, PLAIN, build, tokens
from twofold.models.causal_lm import CausalLM
from twofold.models.config import ModelConfig
from twofold.models.state import DecodeState, DeltaState, KeyValueCache
from twofold.ops import delta_window
from twofold.ops.gated_delta import gated_delta, gated_delta_recurrent
from twofold.ops.kernels import Kernels

CONFIGS = {"plain": PLAIN, "hybrid": HYBRID}
KERNELS = {"reference": Kernels.reference(), "cpu": Kernels.cpu()}
PREFIX, NEXT, CONTEXT = 7, 3, 90
each_model = pytest.mark.parametrize("family", CONFIGS)


def model_of(family: str, kernels: str = "reference", dtype: torch.dtype = torch.float32) -> CausalLM:
    return build(CONFIGS[family], KERNELS[kernels], dtype).freeze()


def run(model: CausalLM, token_ids: Tensor, state: DecodeState) -> Tensor:
    hidden, _ = model(token_ids, state=state)
    return model.logits(hidden)


def fresh(model: CausalLM, token_ids: Tensor) -> DecodeState:
    """A state that holds exactly these tokens."""
    state = model.new_state(len(token_ids), CONTEXT)
    run(model, token_ids, state)
    state.commit(token_ids.shape[1])
    return state


def assert_same(state: DecodeState, expected: DecodeState, tolerance: float, row: int = 0, of: int = 0) -> None:
    """Row `row` of `state` is row `of` of `expected`, up to a relative error."""
    length = int(expected.lengths_B[of])
    assert int(state.lengths_B[row]) == length
    for a, b in zip(state.layers, expected.layers, strict=True):
        if isinstance(a, KeyValueCache) and isinstance(b, KeyValueCache):
            pairs = [
                (a.k_BSGD[row, :length], b.k_BSGD[of, :length]),
                (a.v_BSGD[row, :length], b.v_BSGD[of, :length]),
            ]
        else:
            assert isinstance(a, DeltaState)
            assert isinstance(b, DeltaState)
            assert a.window is None
            pairs = [(a.conv_BWC[row], b.conv_BWC[of]), (a.state_BHKV[row], b.state_BHKV[of])]
        for x, y in pairs:
            assert (x - y).norm() <= tolerance * y.norm()


@each_model
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 70])
def test_commit_is_a_fresh_run_for_every_n(family: str, kernels: str, num_tokens: int) -> None:
    model = model_of(family, kernels)
    token_ids = tokens(1, PREFIX + num_tokens)
    following = tokens(1, NEXT, seed=9)
    window = fresh(model, token_ids[:, :PREFIX])
    run(model, token_ids[:, PREFIX:], window)
    for n in range(num_tokens + 1):
        state = deepcopy(window)
        state.commit(n)
        expected = fresh(model, token_ids[:, : PREFIX + n])
        assert_same(state, expected, 1e-5)
        logits, exact = run(model, following, state), run(model, following, expected)
        assert (logits - exact).norm() <= 1e-4 * exact.norm()


@each_model
@pytest.mark.parametrize("num_tokens", [1, 16, 70])
def test_commit_in_float64(family: str, num_tokens: int) -> None:
    model = model_of(family, dtype=torch.float64)
    token_ids = tokens(1, PREFIX + num_tokens)
    window = fresh(model, token_ids[:, :PREFIX])
    run(model, token_ids[:, PREFIX:], window)
    for n in range(num_tokens + 1):
        state = deepcopy(window)
        state.commit(n)
        expected = fresh(model, token_ids[:, : PREFIX + n])
        assert_same(state, expected, 1e-10)
        difference = run(model, tokens(1, 1), state) - run(model, tokens(1, 1), expected)
        assert difference.abs().max() <= 1e-10


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 16, 70])
def test_convolution_state_is_the_last_inputs_bit_for_bit(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded inputs of each layer, and single steps of the recurrence, against what commit(n) keeps."""
    model = model_of("hybrid")
    token_ids = tokens(2, PREFIX + num_tokens)
    window = fresh(model, token_ids[:, :PREFIX])
    before = [layer for layer in deepcopy(window).layers if isinstance(layer, DeltaState)]
    calls: list[tuple[Tensor, ...]] = []

    def record(*inputs: Tensor, **rest: Tensor) -> object:
        calls.append(inputs)
        return gated_delta(*inputs, **rest)

    monkeypatch.setattr(delta_window, "gated_delta", record)
    run(model, token_ids[:, PREFIX:], window)
    opened = [layer for layer in window.layers if isinstance(layer, DeltaState)]
    inputs = [layer.window.inputs_BSC for layer in opened if layer.window is not None]
    for n in range(num_tokens + 1):
        state = deepcopy(window)
        state.commit(n)
        after = [layer for layer in state.layers if isinstance(layer, DeltaState)]
        for kept, old, new, qkvgb in zip(after, before, inputs, calls, strict=True):
            assert torch.equal(new[:, : HYBRID.linear_conv_width - 1], old.conv_BWC)
            assert torch.equal(kept.conv_BWC, new[:, n : n + HYBRID.linear_conv_width - 1])
            if n:
                _, steps = gated_delta_recurrent(*(x.double() for x in qkvgb), old.state_BHKV.double())
                error = kept.state_BHKV.double() - steps[:, n - 1]
                assert error.norm() <= 1e-5 * steps[:, n - 1].norm()
            else:
                assert torch.equal(kept.state_BHKV, old.state_BHKV)


@each_model
@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_commit_numbers_of_their_own(family: str, kernels: str) -> None:
    model = model_of(family, kernels)
    token_ids, following = tokens(3, PREFIX + 16), tokens(3, NEXT, seed=9)
    state = fresh(model, token_ids[:, :PREFIX])
    run(model, token_ids[:, PREFIX:], state)
    counts = [0, 16, 5]
    state.commit(torch.tensor(counts))
    assert state.lengths_B.tolist() == [PREFIX, PREFIX + 16, PREFIX + 5]
    # and once more, from places that differ
    kept = deepcopy(state)
    logits = run(model, following, state)
    state.commit(torch.tensor([2, 0, 3]))
    for row, (count, more) in enumerate(zip(counts, [2, 0, 3], strict=True)):
        alone = fresh(model, token_ids[row : row + 1, : PREFIX + count])
        assert_same(kept, alone, 1e-5, row)
        expected = run(model, following[row : row + 1], alone)
        assert (logits[row] - expected[0]).abs().max() <= 1e-4
        alone.commit(more)
        assert_same(state, alone, 1e-5, row)


@each_model
def test_what_is_not_committed_was_never_there(family: str) -> None:
    model = model_of(family)
    token_ids = tokens(2, PREFIX)
    state, untouched = fresh(model, token_ids), fresh(model, token_ids)
    expected = run(model, tokens(2, NEXT, seed=1), untouched)
    run(model, tokens(2, 16, seed=5), state)  # discarded
    run(model, tokens(2, 2, seed=6), state)  # discarded too
    assert torch.equal(run(model, tokens(2, NEXT, seed=1), state), expected)
    state.commit(NEXT)
    untouched.commit(NEXT)
    assert_same(state, untouched, 0.0)


@each_model
def test_select_keeps_rows_in_the_order_given(family: str) -> None:
    model = model_of(family)
    token_ids = tokens(3, PREFIX + 5)
    state = fresh(model, token_ids[:, :PREFIX])
    run(model, token_ids[:, PREFIX:], state)
    state.commit(torch.tensor([1, 2, 5]))
    whole = deepcopy(state)
    state.select(torch.tensor([2, 0]))
    assert state.lengths_B.tolist() == [PREFIX + 5, PREFIX + 1]
    assert_same(state, whole, 0.0, row=0, of=2)
    assert_same(state, whole, 0.0, row=1, of=0)
    following = tokens(3, NEXT, seed=9)
    logits, expected = run(model, following[[2, 0]], state), run(model, following, whole)
    torch.testing.assert_close(logits, expected[[2, 0]], atol=1e-5, rtol=0)


@each_model
def test_context_ends_where_it_was_said_to(family: str) -> None:
    model = model_of(family)
    state = model.new_state(1, 10)
    run(model, tokens(1, 9), state)
    state.commit(9)
    with pytest.raises(ValueError, match=r"9 \+ 2 positions exceed the context of 10"):
        run(model, tokens(1, 2), state)
    logits = run(model, tokens(1, 1, seed=3), state)  # the last place is usable, and the refusal changed nothing
    state.commit(1)
    whole, _ = model(torch.cat((tokens(1, 9), tokens(1, 1, seed=3)), dim=1))
    torch.testing.assert_close(logits[:, -1], model.logits(whole)[:, -1], atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="larger context"):
        run(model, tokens(1, 1), state)


@pytest.mark.parametrize("n", [-1, 4])
def test_commit_past_the_window_is_a_mistake(n: int) -> None:
    model = model_of("plain")
    state = model.new_state(1, 10)
    run(model, tokens(1, 3), state)
    with pytest.raises(AssertionError):
        state.commit(n)


def test_recurrent_state_stays_float32_in_a_bfloat16_model() -> None:
    config: ModelConfig = HYBRID
    state = build(config, dtype=torch.bfloat16).new_state(2, 10)
    dtypes = {type(layer).__name__: layer for layer in state.layers}
    delta, cache = dtypes["DeltaState"], dtypes["KeyValueCache"]
    assert isinstance(delta, DeltaState)
    assert isinstance(cache, KeyValueCache)
    assert delta.state_BHKV.dtype == torch.float32
    assert delta.conv_BWC.dtype == cache.k_BSGD.dtype == torch.bfloat16
