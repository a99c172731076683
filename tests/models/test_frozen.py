"""Frozen layers: which become one product, and that the answer stays."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.models.tiny import HYBRID, PLAIN, build, tokens
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import packable_linears
from twofold.models.config import LINEAR, ModelConfig
from twofold.models.layers import Projections
from twofold.ops.integers import dequantize
from twofold.ops.kernels import Kernels
from twofold.ops.linear import Linear, dense_linear
from twofold.quant.linear import PackedLinear, replace_linears
from twofold.quant.rounding import quantize, search_grid
from twofold.quant.scheme import QuantScheme

SCHEME = QuantScheme(group_size=16, symmetric=False)


def packed(config: ModelConfig, kernels: Kernels) -> CausalLM:
    model = build(config, kernels)
    with torch.no_grad():

        def pack(scheme: QuantScheme, _: str, linear: torch.nn.Linear) -> PackedLinear:
            grid = search_grid(linear.weight, scheme)
            return PackedLinear.from_integers(quantize(linear.weight, grid, scheme), grid, scheme)

        replace_linears(model, packable_linears(config), partial(pack, SCHEME))
        replace_linears(model, ["lm_head"], partial(pack, QuantScheme(bits=8, group_size=16)))
    return model


def with_integers(made: list[tuple[int, list[int], bool]], serves: bool = True) -> Kernels:
    """Kernels that multiply with integers, by way of the dense matrix, and note what they were given."""

    def freeze(
        q: Tensor, scale: Tensor, zero: Tensor | None, bits: int, gated: bool, dtype: torch.dtype
    ) -> Linear | None:
        assert (q.dtype, scale.dtype, dtype) == (torch.int8, torch.bfloat16, torch.float32)
        made.append((bits, list(q.shape), gated))
        if not serves:
            return None
        return dense_linear(dequantize(q, scale, zero, q.shape[1] // scale.shape[1], torch.float32), gated)

    return replace(Kernels.reference(), freeze_packed=freeze)


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("config", [HYBRID, PLAIN], ids=["hybrid", "plain"])
def test_packed_layers_reach_the_kernels_as_integers(config: ModelConfig, serves: bool) -> None:
    made: list[tuple[int, list[int], bool]] = []
    model, plain = packed(config, with_integers(made, serves)), packed(config, Kernels.reference())
    wanted, _ = plain(tokens(2, 9))
    model.freeze()
    hidden, _ = model(tokens(2, 9))
    torch.testing.assert_close(hidden, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.logits(hidden), plain.logits(wanted), atol=1e-4, rtol=1e-4)
    assert torch.equal(model.top1(hidden), model.logits(hidden).argmax(dim=-1))
    assert (4, [2 * config.intermediate_size, config.hidden_size], True) in made  # gate and up as one, gated
    assert (8, [config.vocab_size, config.hidden_size], False) in made
    parts = [len(x.frozen) for m in model.modules() for x in vars(m).values() if isinstance(x, Projections)]
    apart = sum(kind == LINEAR for kind in config.layer_types)  # dense a and b beside packed q, k, v and z
    assert sum(parts) == len(parts) + (apart if serves else 0)
    qkvz = 2 * config.linear_key_dim + 2 * config.linear_value_dim
    assert made.count((4, [qkvz, config.hidden_size], False)) == sum(t != "full_attention" for t in config.layer_types)


def test_products_apart_are_joined_where_that_can_be() -> None:
    """Gated DeltaNet's packed and dense projections become one, outputs in their order."""
    made: list[tuple[int, list[int], bool]] = []
    joined = 0

    def join(first: Linear, second: Linear) -> Linear:
        nonlocal joined
        joined += 1
        return lambda x, norm=None, residual=None: torch.cat((first(x, norm), second(x, norm)), dim=-1)

    model = packed(HYBRID, replace(with_integers(made), join=join))
    plain = packed(HYBRID, Kernels.reference())
    torch.testing.assert_close(model.freeze()(tokens(2, 9))[0], plain(tokens(2, 9))[0], atol=1e-5, rtol=1e-5)
    assert joined == sum(kind == LINEAR for kind in HYBRID.layer_types)


def test_frozen_and_not_are_the_same_model() -> None:
    for config in (HYBRID, PLAIN):
        for kernels in (Kernels.reference(), Kernels.cpu()):
            model = build(config, kernels)
            wanted, _ = model(tokens(2, 9))
            torch.testing.assert_close(model.freeze()(tokens(2, 9))[0], wanted, atol=1e-5, rtol=1e-5)
