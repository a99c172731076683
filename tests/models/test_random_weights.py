"""Random models have the layers, the sizes and about the spread of real ones."""

import pytest
import torch

from twofold.models import checkpoint, draft_quantization
from twofold.models.config import ModelConfig
from twofold.models.drafter_config import DrafterConfig
from twofold.models.random_weights import random_drafter, random_target
from twofold.models.shapes import SHAPES, find_shape
from twofold.ops.kernels import Kernels
from twofold.quant.linear import PackedLinear
from twofold.quant.scheme import QuantScheme

TINY, CPU = find_shape("tiny"), torch.device("cpu")
CONFIG: ModelConfig = TINY.target


def test_packed_layers_are_the_packable_ones_and_of_the_same_spread() -> None:
    torch.manual_seed(0)
    model = random_target(CONFIG, Kernels.reference(), CPU, torch.float32, TINY.scheme, QuantScheme(bits=8))
    packed = {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}
    assert set(packed) == {*checkpoint.packable_linears(CONFIG), "lm_head"}
    for layer in packed.values():
        spread = float(layer.dense_weight(torch.float32).std()) * layer.in_features**0.5
        assert spread == pytest.approx(1.0, rel=0.05)
        assert layer.weight_scale.dtype == torch.bfloat16
    hidden, _ = model.freeze()(torch.randint(CONFIG.vocab_size, (2, 20)))
    assert hidden.isfinite().all()
    assert hidden.square().mean() == pytest.approx(1.0, rel=0.01)  # the last norm does nothing but normalize


def test_a_tied_head_stays_tied() -> None:
    model = random_target(CONFIG, Kernels.reference(), CPU, torch.float32)
    assert model.lm_head.weight is model.embed_tokens.weight


def test_a_drafter() -> None:
    config = DrafterConfig.for_target(CONFIG, TINY.drafter)
    made = random_drafter(config, Kernels.reference(), CPU, torch.float32, TINY.draft_scheme)
    packed = {name for name, layer in made.named_modules() if isinstance(layer, PackedLinear)}
    assert packed == set(draft_quantization.packable_linears(config))
    assert (made.norm.weight == 1).all()


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_sizes_without_memory(name: str) -> None:
    shape = find_shape(name)
    model = random_target(shape.target, Kernels.reference(), torch.device("meta"), torch.bfloat16, shape.scheme)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_the_4b_shape_has_the_weights_that_are_known() -> None:
    """8.41 GB read in a BF16 step, 3.29 GB in an INT4 step, of which the head is 1.27 GB."""
    shape, meta = find_shape("qwen3.5-4b"), torch.device("meta")

    def read(scheme: QuantScheme | None) -> float:
        model = random_target(shape.target, Kernels.reference(), meta, torch.bfloat16, scheme)
        tensors = {id(t): t for name, t in model.state_dict(keep_vars=True).items()}
        return sum(t.numel() * t.element_size() for t in tensors.values()) / 1e9

    assert read(None) == pytest.approx(8.41, abs=0.01)
    assert read(shape.scheme) == pytest.approx(3.29, abs=0.01)


def test_an_unknown_shape_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"no shape 'qwen'; shapes are: qwen3.5-4b, tiny"):
        find_shape("qwen")
