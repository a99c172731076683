"""The verify window and its commit: the law commit(n) = a run over n tokens, and Triton's kernels by the reference."""

import pytest
import torch
from torch import Tensor

from tests.ops.decode.on_device import DEVICE, DTYPES, tolerance
from twofold.ops import delta_window
from twofold.ops.decode import delta, served
from twofold.ops.decode.delta import WindowFactors

BATCH, HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH, CONV = 2, 4, 2, 16, 32, 4
CHANNELS = 2 * KEY_HEADS * WIDTH + HEADS * VALUE_WIDTH


def window(tokens: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, conv, weight, a, b, A_log, dt_bias, state; x, b and a are parts of one tensor."""
    torch.manual_seed(0)
    fused = torch.randn(BATCH, tokens, CHANNELS + 2 * HEADS, dtype=dtype)
    x, b, a = fused.to(device).split((CHANNELS, HEADS, HEADS), dim=-1)
    conv, weight = torch.randn(BATCH, CONV - 1, CHANNELS, dtype=dtype), torch.randn(CHANNELS, CONV, dtype=dtype)
    rest = [torch.rand(HEADS), torch.randn(HEADS), torch.randn(BATCH, HEADS, WIDTH, VALUE_WIDTH)]
    conv, weight, A_log, dt_bias, state = (t.to(device) for t in (conv, weight, *rest))
    weight = weight.T.contiguous().T if tokens > 1 else weight  # as `freeze` lays it out, or as a model has it
    return [x, conv, weight, a, b, A_log, dt_bias, state]


def test_commit_of_the_reference_is_a_run_over_n_tokens() -> None:
    x, conv, weight, a, b, *rest, state = (t.double() for t in window(5, torch.float32, "cpu"))
    _, factors = delta.delta_window(x, conv, weight, a, b, *rest, state)
    for n in range(6):
        n_B = torch.tensor([n, 5 - n])
        found, kept = state.clone(), conv.clone()
        assert delta.commit_delta_(found, factors, n_B) is found
        delta.commit_convolution_(kept, x, n_B)
        for row, count in enumerate(n_B.tolist()):
            expected, inputs = state[row : row + 1], torch.cat((conv, x), dim=1)[row : row + 1]
            for t in range(count):  # token by token
                one = (y[row : row + 1, t : t + 1] for y in (a, b))
                step = inputs[:, t + 3 : t + 4], inputs[:, t : t + 3], weight
                _, one_factor = delta.delta_window(*step, *one, *rest, expected)
                expected = delta.commit_delta_(expected.clone(), one_factor, torch.tensor([1]))
            torch.testing.assert_close(found[row], expected[0])
            assert torch.equal(kept[row], inputs[0, count : count + 3])


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
@pytest.mark.parametrize("gated", [False, True])
def test_window(tokens: int, gated: bool, dtype: torch.dtype) -> None:
    from twofold.ops.decode import delta_triton

    inputs = window(tokens, dtype, DEVICE)
    inputs[3][:, 0] = 25  # softplus is the identity there
    extra: dict[str, Tensor | float] = {}
    if gated:
        z = torch.randn(BATCH, tokens, HEADS * VALUE_WIDTH + 8, device=DEVICE, dtype=dtype)[..., 8:]
        norm = torch.rand(VALUE_WIDTH, device=DEVICE, dtype=dtype)
        extra = {"z_BTHV": z.unflatten(-1, (HEADS, -1)), "norm_V": norm, "eps": 1e-6}
    wide = [t.float() for t in inputs]
    wide_extra = {name: x.float() if isinstance(x, Tensor) else x for name, x in extra.items()}
    expected, expected_factors = delta.delta_window(*wide, **wide_extra)
    copy = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
    o, factors = delta_triton.delta_window(*inputs, copy_BTC=copy, **extra)
    assert torch.equal(copy, inputs[0])
    torch.testing.assert_close(o.float(), expected, **tolerance(dtype))
    near = 1e-3 if dtype == torch.float32 else 1e-2  # one tf32 product for each
    torch.testing.assert_close(tuple(factors), tuple(expected_factors), rtol=near, atol=near)
    assert torch.equal(inputs[-1], wide[-1])


@pytest.mark.triton
@pytest.mark.parametrize("tokens", [1, 16])
def test_window_in_other_divisions(tokens: int) -> None:
    from twofold.ops.decode import delta_triton

    inputs = window(tokens, torch.float32, DEVICE)
    expected, expected_factors = delta.delta_window(*inputs)
    for division in ((16, 2), (64, 8)):  # the second is wider than a head
        o, factors = delta_triton.delta_window(*inputs, division=division)
        torch.testing.assert_close(o, expected, **tolerance(torch.float32))
        torch.testing.assert_close(tuple(factors), tuple(expected_factors), rtol=1e-3, atol=1e-3)


@pytest.mark.triton
def test_window_of_equal_keys_without_decay() -> None:
    """The hardest system: all below the diagonal near 1."""
    from twofold.ops.decode import delta_triton

    inputs = window(16, torch.float32, DEVICE)
    inputs[0][:] = inputs[0][:, :1].clone()
    inputs[1][:] = inputs[0][:, :1]
    inputs[3][:], inputs[4][:] = -30, 10
    expected, expected_factors = delta.delta_window(*(t.double() for t in inputs))
    o, factors = delta_triton.delta_window(*inputs)
    torch.testing.assert_close(o.double(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(factors.u_BHTV.double(), expected_factors.u_BHTV, rtol=1e-3, atol=1e-3)


@pytest.mark.triton
@pytest.mark.parametrize("layers", [0, 3])
def test_commit_of_every_n(layers: int) -> None:
    from twofold.ops.decode import delta_triton

    torch.manual_seed(0)
    front = (layers, BATCH) if layers else (BATCH,)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*front, *shape, device=DEVICE)

    for tokens in (1, 16):
        decay = -torch.rand(*front, HEADS, tokens, device=DEVICE).cumsum(-1)
        factors = WindowFactors(randn(KEY_HEADS, tokens, WIDTH), randn(HEADS, tokens, VALUE_WIDTH), decay)
        state, conv, x = randn(HEADS, WIDTH, VALUE_WIDTH), randn(3, 1100), randn(tokens, 1108)[..., :1100]
        for n in range(tokens + 1):
            n_B = torch.tensor([n, tokens - n], device=DEVICE)
            expected, found = state.clone(), state.clone()
            delta.commit_delta_(expected, factors, n_B)
            assert delta_triton.commit_delta_(found, factors, n_B) is found
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            kept, expected = conv.clone(), conv.clone()
            delta_triton.commit_convolution_(kept, x, n_B)
            assert torch.equal(kept, delta.commit_convolution_(expected, x, n_B))


@pytest.mark.triton
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_layers_with_slots_are_committed_as_without(tokens: int) -> None:
    """In the memory that the state keeps, also where a longer or shorter pass was before."""
    held: dict[str, Tensor] = {}
    layers = [window(tokens, torch.float32, DEVICE) for _ in range(3)]
    for inputs in layers:
        inputs[0] = torch.randn_like(inputs[0])
    n_B = torch.tensor([tokens, tokens // 2], device=DEVICE)
    after = []
    for slots in ([None] * 3, [delta_window.Slot(layer, 3, held) for layer in range(3)]):
        conv, state = (torch.stack([inputs[i] for inputs in layers]) for i in (1, -1))
        windows = []
        for length in (16, 1, tokens):  # the first two are discarded
            longer = [window(length, torch.float32, DEVICE) if length != tokens else inputs for inputs in layers]
            windows = [
                served.delta_pass(x, a, b, weight, A_log, dt_bias, conv[layer], state[layer], None, slot)[1]
                for layer, ((x, _, weight, a, b, A_log, dt_bias, _), slot) in enumerate(zip(longer, slots, strict=True))
            ]
        served.delta_commit(windows, n_B, conv, state)
        after.append((conv, state))
    assert all(torch.equal(a, b) for a, b in zip(*after, strict=True))
    assert len(held) == 4
