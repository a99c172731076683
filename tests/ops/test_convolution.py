"""Causal convolution against a loop, on both sides of its switch between two ways of computing."""

import pytest
import torch
from torch import Tensor

from twofold.ops.convolution import causal_convolution, packed_causal_convolution


def slow_convolution(x_BTC: Tensor, weight_CW: Tensor, documents_BT: Tensor) -> Tensor:
    batch, num_tokens, _ = x_BTC.shape
    width = weight_CW.shape[1]
    y = torch.zeros_like(x_BTC)
    for b in range(batch):
        for t in range(num_tokens):
            for back in range(min(width, t + 1)):
                if documents_BT[b, t - back] == documents_BT[b, t]:
                    y[b, t] += weight_CW[:, width - 1 - back] * x_BTC[b, t - back]
    return y * torch.sigmoid(y)


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("width", [2, 4])
def test_convolution_over_whole_rows(num_tokens: int, width: int) -> None:
    torch.manual_seed(num_tokens)
    x = torch.randn(2, num_tokens, 6, dtype=torch.float64)
    w = torch.randn(6, width, dtype=torch.float64)
    expected = slow_convolution(x, w, torch.zeros(2, num_tokens))
    torch.testing.assert_close(packed_causal_convolution(x, w, None), expected)


@pytest.mark.parametrize("num_new", [1, 16, 17])
def test_convolution_continues_from_earlier_inputs(num_new: int) -> None:
    torch.manual_seed(num_new)
    x = torch.randn(2, 9 + num_new, 6, dtype=torch.float64)
    w = torch.randn(6, 4, dtype=torch.float64)
    expected = slow_convolution(x, w, torch.zeros(2, 9 + num_new))[:, 9:]
    torch.testing.assert_close(causal_convolution(x[:, 9 - 3 :], w), expected)


def test_documents_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 30, 6, dtype=torch.float64)
    w = torch.randn(6, 4, dtype=torch.float64)
    documents = torch.tensor([[1] * 10 + [2] * 1 + [3] * 19])
    y = packed_causal_convolution(x, w, documents)
    torch.testing.assert_close(y, slow_convolution(x, w, documents))
    changed = x.clone()
    changed[:, :11] += 1
    assert torch.equal(packed_causal_convolution(changed, w, documents)[:, 11:], y[:, 11:])


def test_under_autocast_it_is_near() -> None:
    """A convolution is then in bfloat16, the sum at a border of documents in float32."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 20, 6), torch.randn(6, 4)
    documents = (torch.arange(20) > 8).long().expand(2, -1)
    with torch.autocast("cpu", torch.bfloat16):
        got = packed_causal_convolution(x, w, documents)
    torch.testing.assert_close(got.float(), slow_convolution(x, w, documents), rtol=2e-2, atol=5e-2)
