"""Every set of kernels against the reference functions, at odd sizes."""

import dataclasses

import pytest
import torch

from twofold.ops import draft_attention
from twofold.ops.kernels import Kernels

SETS = [Kernels.reference(), Kernels.cpu()]


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("outputs", "width"), [(1, 1), (7, 13), (33, 64), (96, 70)])
def test_frozen_linear_is_a_product(kernels: Kernels, dtype: torch.dtype, outputs: int, width: int) -> None:
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, width, dtype=dtype)
    linear = kernels.freeze_linear(weight)
    for shape in [(width,), (1, width), (2, 3, width), (16, width), (64, width), (65, width), (200, width)]:
        x = torch.randn(shape, dtype=dtype)
        y = linear(x)
        assert y.dtype == dtype
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(y.double(), expected, atol=1e-4 if dtype == torch.float32 else 1e-12, rtol=0)


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
def test_frozen_linear_takes_inputs_that_are_not_contiguous(kernels: Kernels) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(9, 10), torch.randn(10, 5).T
    torch.testing.assert_close(kernels.freeze_linear(weight)(x), x @ weight.T)


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("num_tokens", [1, 5, 67])
def test_operations_agree_with_the_reference(kernels: Kernels, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    reference = Kernels.reference()
    q, k, v = (torch.randn(2, num_tokens, heads, 8) for heads in (6, 2, 2))
    torch.testing.assert_close(kernels.attention(q, k, v, None, True), reference.attention(q, k, v, None, True))
    q, k, v = (torch.randn(2, num_tokens, heads, 8) for heads in (3, 3, 6))
    g, beta, state = -torch.rand(2, num_tokens, 6), torch.rand(2, num_tokens, 6), torch.randn(2, 6, 8, 8)
    o, window = kernels.gated_delta(q, k, v, g, beta, state_BHKV=state)
    expected, expected_window = reference.gated_delta(q, k, v, g, beta, state_BHKV=state)
    torch.testing.assert_close(o, expected)
    n = torch.tensor([num_tokens // 2, num_tokens])
    torch.testing.assert_close(kernels.commit_delta(window, n), reference.commit_delta(expected_window, n))


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
