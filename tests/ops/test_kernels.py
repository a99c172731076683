"""Every set of kernels against the reference functions, at odd sizes."""

import dataclasses

import pytest
import torch

from twofold.ops import draft_attention, linear
from twofold.ops.attention import attention
from twofold.ops.cache import CachePlace
from twofold.ops.gated_delta import gated_delta_recurrent
from twofold.ops.integers import dequantize
from twofold.ops.kernels import Kernels
from twofold.ops.linear import Norm
from twofold.ops.norms import rms_norm, rotary_table, rotate

SETS = [Kernels.reference(), Kernels.cpu()]


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("outputs", "width"), [(1, 1), (7, 13), (33, 64), (96, 70)])
def test_frozen_linear_is_a_product(kernels: Kernels, dtype: torch.dtype, outputs: int, width: int) -> None:
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, width, dtype=dtype)
    linear = kernels.freeze_linear(weight, False)
    for shape in [(width,), (1, width), (2, 3, width), (16, width), (64, width), (65, width), (200, width)]:
        x = torch.randn(shape, dtype=dtype)
        y = linear(x)
        assert y.dtype == dtype
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(y.double(), expected, atol=1e-4 if dtype == torch.float32 else 1e-12, rtol=0)


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("gated", [False, True])
def test_what_is_fused_into_a_product(kernels: Kernels, gated: bool) -> None:
    """norm before, silu(gate) * up and the residual after."""
    torch.manual_seed(0)
    weight, scale, x = torch.randn(520, 12), torch.rand(12), torch.randn(2, 3, 12)
    linear = kernels.freeze_linear(weight, gated)
    y = (x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * scale) @ weight.T
    wanted = torch.nn.functional.silu(y[..., :260]) * y[..., 260:] if gated else y
    residual = torch.randn(wanted.shape)
    torch.testing.assert_close(linear(x, Norm(scale, 1e-5), residual), wanted + residual, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(linear(x, Norm(scale, 1e-5)), wanted, atol=1e-4, rtol=1e-4)


needs_avx2 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs a processor with AVX2"
)


@needs_avx2
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("group_size", [32, 64])
def test_four_bits_are_multiplied_as_they_are_on_a_cpu(gated: bool, group_size: int) -> None:
    torch.manual_seed(0)
    q = torch.randint(-8, 8, (96, 128), dtype=torch.int8)
    scale = (torch.rand(96, 128 // group_size) / 16).bfloat16()
    found = linear.cpu_packed(q, scale, None, 4, gated, torch.bfloat16)
    assert found is not None
    exact = dequantize(q, scale, None, group_size, torch.float64)
    for shape in [(128,), (1, 128), (2, 2, 128), (5, 128), (3, 4, 128)]:
        x = torch.randn(shape).bfloat16()
        y = x.double() @ exact.T
        wanted = torch.nn.functional.silu(y[..., :48]) * y[..., 48:] if gated else y
        assert found(x).dtype == torch.bfloat16
        error = (found(x).double() - wanted).norm() / wanted.norm()
        assert error < (0.008 if gated else 0.004)  # roundings to 8 bits: of weights and result, gated once more


@needs_avx2
def test_what_a_cpu_does_not_multiply_in_four_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    q, scale, zero = torch.zeros(96, 128, dtype=torch.int8), torch.ones(96, 4).bfloat16(), torch.zeros(96, 4)
    assert linear.cpu_packed(q, scale, None, 4, False, torch.bfloat16) is not None
    assert linear.cpu_packed(q, scale, None, 4, False, torch.float32) is None
    assert linear.cpu_packed(q, scale, None, 8, False, torch.bfloat16) is None
    assert linear.cpu_packed(q, scale, zero, 4, False, torch.bfloat16) is None
    assert linear.cpu_packed(q[:90], scale[:90], None, 4, False, torch.bfloat16) is None
    assert linear.cpu_packed(q, torch.ones(96, 8).bfloat16(), None, 4, False, torch.bfloat16) is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert linear.cpu_packed(q, scale, None, 4, False, torch.bfloat16) is None


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
def test_top1_is_the_lowest_of_the_best(kernels: Kernels) -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 8)
    weight[[40, 7, 20]] = weight[0] + 9  # equal, and best for an x of their kind
    x = torch.stack((weight[7], -weight[7], torch.randn(8)))[None]
    best = kernels.top1(kernels.freeze_linear(weight, False), x)
    assert best.shape == (1, 3)
    assert best[0, 0] == 7
    assert best[0].tolist() == (x @ weight.T).argmax(dim=-1)[0].tolist()


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
def test_frozen_linear_takes_inputs_that_are_not_contiguous(kernels: Kernels) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(9, 10), torch.randn(10, 5).T
    torch.testing.assert_close(kernels.freeze_linear(weight, False)(x), x @ weight.T)


ROTARY = rotary_table(torch.arange(90), 4, 10_000.0)


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("num_tokens", [1, 5, 67])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_attention_over_a_cache_is_attention_over_the_rows_own_keys(
    kernels: Kernels, num_tokens: int, causal: bool, gated: bool
) -> None:
    torch.manual_seed(num_tokens)
    lengths, capacity = [0, 13], 90
    q = torch.randn(2, num_tokens, 6, 8)
    k, v = torch.randn(2, capacity, 2, 8), torch.randn(2, capacity, 2, 8)
    gate = torch.randn(q.shape) if gated else None
    for num_keys in (13 + num_tokens, capacity):  # what lies past a row's tokens must not matter
        place = CachePlace(torch.tensor(lengths), num_tokens, num_keys, False, ROTARY, causal)
        o = kernels.cache_attention(q, k, v, place, gate)
        for row, length in enumerate(lengths):
            own = slice(0, length + num_tokens)
            visible = torch.ones(num_tokens, length + num_tokens, dtype=torch.bool)
            visible = visible.tril(length) if causal else visible
            wanted = attention(q[row : row + 1], k[row : row + 1, own], v[row : row + 1, own], visible[None])
            wanted = wanted if gate is None else wanted * gate[row : row + 1].sigmoid()
            torch.testing.assert_close(o[row : row + 1], wanted)
    for length in (0, 13):
        lengths_B, num_keys = torch.tensor([length] * 2), length + num_tokens
        exact = CachePlace(lengths_B, num_tokens, num_keys, True, ROTARY, causal)
        same = CachePlace(lengths_B, num_tokens, capacity, False, ROTARY, causal)
        torch.testing.assert_close(kernels.cache_attention(q, k, v, exact), kernels.cache_attention(q, k, v, same))


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("window", [5, 6, 12, 13, 14, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_over_a_cache_by_brute_force(kernels: Kernels, window: int, causal: bool) -> None:
    """Pass of 5 at L: token t sees positions j > L + t - W, up to its own or up to the end of the pass."""
    torch.manual_seed(0)
    lengths, capacity, block = [0, 3, 13], 30, 5
    q = torch.randn(3, block, 6, 8)
    k, v = torch.randn(3, capacity, 2, 8), torch.randn(3, capacity, 2, 8)
    for num_keys in (13 + block, capacity):
        o = kernels.cache_attention(
            q, k, v, CachePlace(torch.tensor(lengths), block, num_keys, False, ROTARY, causal, window)
        )
        for row, length in enumerate(lengths):
            for t in range(block):
                seen = slice(max(0, length + t - window + 1), length + (t + 1 if causal else block))
                keys, values = (x[row, seen].repeat_interleave(3, dim=1) for x in (k, v))
                weight = (torch.einsum("hd,shd->hs", q[row, t], keys) / 8**0.5).softmax(dim=-1)
                torch.testing.assert_close(o[row, t], torch.einsum("hs,shd->hd", weight, values), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("normed", [True, False])
def test_keys_are_stored_normed_and_rotated_at_their_positions(kernels: Kernels, normed: bool) -> None:
    torch.manual_seed(0)
    lengths, capacity, num_tokens = [0, 13], 30, 5
    q, k, v = (torch.randn(2, num_tokens, heads, 8) for heads in (6, 2, 2))
    old_k, old_v = torch.randn(2, capacity, 2, 8), torch.randn(2, capacity, 2, 8)
    norms = [Norm(torch.rand(8), 1e-5) if normed else None for _ in range(2)]
    place = CachePlace(torch.tensor(lengths), num_tokens, 18, False, ROTARY)
    new_k, new_v = old_k.clone(), old_v.clone()
    turned = kernels.store_keys(q, k, v, *norms, place, new_k, new_v)
    assert turned is not None
    assert kernels.store_keys(None, k, v, None, norms[1], place, old_k.clone(), old_v.clone()) is None
    for row, length in enumerate(lengths):
        own = torch.arange(length, length + num_tokens)
        cos, sin = (x[own][None] for x in ROTARY)
        for x, norm, got in ((q, norms[0], turned[row]), (k, norms[1], new_k[row, own])):
            y = x[row] if norm is None else rms_norm(x[row], *norm)
            torch.testing.assert_close(got, rotate(y[None], cos, sin)[0])
        assert torch.equal(new_v[row, own], v[row])
        others = torch.ones(capacity, dtype=torch.bool).index_fill(0, own, False)
        assert torch.equal(new_k[row, others], old_k[row, others])
        assert torch.equal(new_v[row, others], old_v[row, others])


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("num_tokens", [1, 5, 67])
def test_a_delta_pass_is_the_recurrence_and_commits_in_place(kernels: Kernels, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    batch, heads, width, conv_width = 2, 6, 8, 4
    channels = (3 + 3 + heads) * width
    qkv, a, b = (torch.randn(batch, num_tokens, n) for n in (channels, heads, heads))
    weight, A_log, dt_bias = torch.randn(channels, conv_width), torch.randn(heads), torch.randn(heads)
    conv, state = torch.randn(batch, conv_width - 1, channels), torch.randn(batch, heads, width, width)
    inputs = torch.cat((conv, qkv), dim=1)
    for n in {0, 1, num_tokens // 2, num_tokens}:
        mine, kept = conv.clone(), state.clone()
        o, window = kernels.delta_pass(qkv, a, b, weight, A_log, dt_bias, mine, kept)
        assert torch.equal(mine, conv)
        assert torch.equal(kept, state)
        mixed = sum(inputs[:, w : w + num_tokens] * weight[:, w] for w in range(conv_width))
        q, k, v = torch.nn.functional.silu(mixed).split((3 * width, 3 * width, heads * width), dim=-1)
        g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
        split = (x.unflatten(-1, (-1, width)) for x in (q, k, v))
        wanted, states = gated_delta_recurrent(*split, g, b.sigmoid(), state)
        torch.testing.assert_close(o, wanted, atol=1e-4, rtol=1e-4)
        places = (mine.data_ptr(), kept.data_ptr())
        kernels.delta_commit([window], torch.tensor([n, num_tokens]), mine[None], kept[None])
        assert (mine.data_ptr(), kept.data_ptr()) == places
        for row, count in enumerate([n, num_tokens]):
            after = states[row, count - 1] if count else state[row]
            torch.testing.assert_close(kept[row], after, atol=1e-4, rtol=1e-4)
            assert torch.equal(mine[row], inputs[row, count : count + conv_width - 1])


def test_kernels_are_chosen_once_and_do_not_change() -> None:
    assert Kernels.auto("cpu").name == "cpu"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Kernels.reference().name = "other"  # type: ignore[misc]


def test_without_flex_attention_auto_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draft_attention, "why_no_flex", lambda: "there is no compiler here")
    for _ in range(2):
        assert Kernels.auto("cuda").draft_attention is draft_attention.draft_attention
    assert capsys.readouterr().err.count("there is no compiler here") == 1
    monkeypatch.setattr(draft_attention, "why_no_flex", lambda: None)
    assert Kernels.auto("cuda").draft_attention is draft_attention.flex_draft_attention


def test_what_flex_attention_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_attention.importlib.util, "find_spec", lambda _: None)
    assert draft_attention.why_no_flex() == "triton is not installed"
    monkeypatch.setattr(draft_attention.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(draft_attention.shutil, "which", lambda _: None)
    assert draft_attention.why_no_flex() == "there is no C compiler (triton needs one)"
    monkeypatch.setattr(draft_attention.shutil, "which", lambda name: "/bin/cc" if name == "gcc" else None)
    assert draft_attention.why_no_flex() is None
