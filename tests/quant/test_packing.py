import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from twofold.ops.int4 import dequantize
from twofold.quant.packing import pack_state, unpack_state
from twofold.quant.rounding import quantize, search_scale
from twofold.quant.scheme import QuantScheme


def _packed(group_size: int, num_inputs: int = 64) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    scheme = QuantScheme(group_size=group_size)
    weight = torch.randn(6, num_inputs, generator=torch.Generator().manual_seed(0))
    scale = search_scale(weight, scheme)
    q = quantize(weight, scale, scheme)
    return weight, q, scale, pack_state("a.b", q, scale, weight.shape)


@pytest.mark.parametrize(("group_size", "num_inputs"), [(32, 64), (8, 64), (-1, 64), (-1, 37)])
def test_compressed_tensors_decompresses_to_our_weights(group_size: int, num_inputs: int) -> None:
    weight, q, scale, state = _packed(group_size, num_inputs)
    args = QuantizationArgs(num_bits=4, symmetric=True, group_size=group_size)
    theirs = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    local = {key.removeprefix("a.b."): tensor for key, tensor in state.items()}
    group = num_inputs if group_size == -1 else group_size
    dense = compressor.decompress(local, theirs)["weight"]
    assert dense.dtype == torch.bfloat16
    assert torch.equal(dense, dequantize(q, scale, group, torch.bfloat16))
    compressed = compressor.compress({"weight": weight, "weight_scale": scale}, theirs)
    assert set(compressed) == set(local)
    assert all(torch.equal(compressed[key], local[key]) for key in local)
    assert all(compressed[key].dtype == local[key].dtype for key in local)


@pytest.mark.parametrize("group_size", [8, -1])
def test_round_trip(group_size: int) -> None:
    _, q, scale, state = _packed(group_size)
    assert {key: tensor.dtype for key, tensor in state.items()} == {
        "a.b.weight_packed": torch.int32,
        "a.b.weight_scale": torch.bfloat16,
        "a.b.weight_shape": torch.int64,
    }
    back_q, back_scale = unpack_state(state, "a.b")
    assert torch.equal(back_q, q)
    assert torch.equal(back_scale, scale)


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_shape"])
def test_a_missing_tensor_is_named(part: str) -> None:
    state = _packed(32)[3]
    del state[f"a.b.{part}"]
    with pytest.raises(ValueError, match=rf"a\.b\.{part}"):
        unpack_state(state, "a.b")


@pytest.mark.parametrize(
    ("part", "tensor"),
    [
        ("weight_packed", torch.zeros(6, 7, dtype=torch.int32)),
        ("weight_packed", torch.zeros(6, 8, dtype=torch.int64)),
        ("weight_scale", torch.ones(6, 3)),
        ("weight_scale", torch.ones(5, 2)),
        ("weight_shape", torch.tensor([6])),
        ("weight_zero_point", torch.zeros(1, 2, dtype=torch.int32)),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(part: str, tensor: torch.Tensor) -> None:
    state = {**_packed(32)[3], f"a.b.{part}": tensor}
    with pytest.raises(ValueError, match=rf"a\.b\.{part}"):
        unpack_state(state, "a.b")


def test_integers_of_another_shape_are_refused() -> None:
    _, q, scale, _ = _packed(32)
    with pytest.raises(ValueError, match=r"a\.b"):
        pack_state("a.b", q, scale, (6, 32))
