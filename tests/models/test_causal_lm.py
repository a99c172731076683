"""Taps, and packed documents that do not see each other."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.tiny import HYBRID, PLAIN, VOCABULARY, build, tokens
from twofold.models import causal_lm
from twofold.models.causal_lm import Layer
from twofold.models.config import ModelConfig
from twofold.ops.kernels import Kernels

both_models = pytest.mark.parametrize("config", [PLAIN, HYBRID], ids=["plain", "hybrid"])


class Constant(nn.Module):
    """A layer whose output is its own number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x_BTD: Tensor, place: object, state: object) -> Tensor:
        return torch.full_like(x_BTD, float(self.number))


def test_tap_i_is_the_output_of_layer_i() -> None:
    model = build(PLAIN)
    model.config = ModelConfig(**{**vars(PLAIN), "layer_types": PLAIN.layer_types * 3})
    model.layers = nn.ModuleList(Constant(i) for i in range(6))
    _, taps = model(tokens(2, 3), taps=(1, 5))
    assert [tap.unique().tolist() for tap in taps] == [[1.0], [5.0]]
    _, taps = model(tokens(2, 3), taps=(5, 0, 5))  # in the order asked for
    assert [tap.unique().tolist() for tap in taps] == [[5.0], [0.0], [5.0]]
    for wrong in (6, -1):
        with pytest.raises(ValueError, match=rf"taps \[{wrong}\] are not layers of a model with 6 layers"):
            model(tokens(1, 1), taps=(1, wrong))


@both_models
def test_taps_change_nothing_and_are_the_same_with_a_state(config: ModelConfig) -> None:
    model = build(config).freeze()
    token_ids = tokens(2, 20)
    plain, none = model(token_ids)
    hidden, taps = model(token_ids, taps=range(config.num_layers))
    assert none == []
    assert torch.equal(plain, hidden)
    state = model.new_state(2, 20)
    _, cached = model(token_ids, state=state, taps=range(config.num_layers))
    for a, b in zip(taps, cached, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    torch.testing.assert_close(model.norm(taps[-1]), hidden)


def packed_positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


LENGTHS = [[5, 20], [1, 70, 3, 66], [64, 64], [30, 100, 2]]


@both_models
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_packed_documents_equal_separate_ones(
    config: ModelConfig, lengths: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    model = build(config, dtype=dtype).freeze()
    token_ids = tokens(1, sum(lengths))
    hidden, taps = model(token_ids, packed_positions(lengths), taps=(0, 1))
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        alone, alone_taps = model(token_ids[:, own], taps=(0, 1))
        assert (hidden[:, own] - alone).norm() <= tolerance * alone.norm()
        for tap, alone_tap in zip(taps, alone_taps, strict=True):
            assert (tap[:, own] - alone_tap).norm() <= tolerance * alone_tap.norm()
        start += length


@both_models
@pytest.mark.parametrize("kernels", [Kernels.reference(), Kernels.cpu()], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_document_leaks_nothing_into_the_next(config: ModelConfig, kernels: Kernels, lengths: list[int]) -> None:
    model = build(config, kernels).freeze()
    token_ids, first = tokens(1, sum(lengths)), lengths[0]
    changed = token_ids.clone()
    changed[:, :first] = (changed[:, :first] + 1) % VOCABULARY
    positions = packed_positions(lengths)
    hidden, other = model(token_ids, positions)[0], model(changed, positions)[0]
    assert not torch.equal(hidden[:, :first], other[:, :first])
    assert torch.equal(hidden[:, first:], other[:, first:])
    # the same row without positions is one document, and sees what changed
    assert not torch.equal(model(token_ids)[0][:, first:], model(changed)[0][:, first:])


@both_models
def test_later_tokens_do_not_change_earlier_ones(config: ModelConfig) -> None:
    model = build(config).freeze()
    token_ids = tokens(1, 80)
    changed = token_ids.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % VOCABULARY
    assert torch.equal(model(token_ids)[0][:, :40], model(changed)[0][:, :40])


@both_models
def test_gradient_of_a_packed_loss_is_the_sum_over_documents(config: ModelConfig) -> None:
    model = build(config, dtype=torch.float64)
    lengths = [3, 67, 10]
    token_ids, weight = tokens(1, 80), torch.randn(1, 80, VOCABULARY, dtype=torch.float64)
    (model.logits(model(token_ids, packed_positions(lengths))[0]) * weight).sum().backward()
    packed = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    for ids, w in zip(token_ids.split(lengths, dim=1), weight.split(lengths, dim=1), strict=True):
        (model.logits(model(ids)[0]) * w).sum().backward()
    for name, parameter in model.named_parameters():
        gradient, both = parameter.grad, packed[name]
        assert gradient is not None
        assert both is not None
        assert gradient.abs().max() > 0, name
        assert (both - gradient).norm() <= 1e-8 * gradient.norm(), name


@both_models
def test_checkpointed_activations_change_no_bit(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states, taps and gradients; each layer is computed twice."""
    results, calls = [], []
    forward = Layer.forward

    def counted(self: Layer, *args: Any) -> Tensor:
        calls.append(self)
        return forward(self, *args)

    monkeypatch.setattr(Layer, "forward", counted)
    for checkpointing in (False, True):
        model = build(config)
        model.checkpointing = checkpointing
        calls.clear()
        hidden, taps = model(tokens(2, 80), torch.arange(80).remainder(33).expand(2, -1), taps=(1, 0))
        (hidden.square().sum() + taps[0].sin().sum() + taps[1].cos().sum()).backward()
        assert len(calls) == config.num_layers * (1 + checkpointing)
        results.append([hidden, *taps, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) > 3 + config.num_layers
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_passes_without_gradients_are_not_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_lm, "checkpoint", None)
    model = build(HYBRID)
    model.checkpointing = True
    with torch.no_grad():
        model(tokens(1, 4))
    state = model.new_state(1, 8)
    model(tokens(1, 4), state=state)
