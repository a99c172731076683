"""Causal convolution against a loop, on both sides of its switch between two ways of computing."""

import pytest
import torch
from torch import Tensor

from twofold.ops.convolution import causal_convolution


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


@pytest.mark.parametrize("num_new", [1, 16, 17])
def test_convolution_continues_from_earlier_inputs(num_new: int) -> None:
    torch.manual_seed(num_new)
    x = torch.randn(2, 9 + num_new, 6, dtype=torch.float64)
    w = torch.randn(6, 4, dtype=torch.float64)
    expected = slow_convolution(x, w, torch.zeros(2, 9 + num_new))[:, 9:]
    torch.testing.assert_close(causal_convolution(x[:, 9 - 3 :], w), expected)
