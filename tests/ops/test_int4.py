"""Packing against compressed-tensors, dequantization against exact arithmetic."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from twofold.ops.int4 import dequantize, pack_int4, unpack_int4


def _integers(rows: int, num_inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + num_inputs)
    return torch.randint(-8, 8, (rows, num_inputs), generator=generator, dtype=torch.int8)


def test_lowest_nibble_comes_first() -> None:
    q = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1], [0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.int8)
    words = pack_int4(q)
    assert words.tolist() == [[0x76543210], [0xFEDCBA98 - 2**32]]
    assert torch.equal(unpack_int4(words, 8), q)


@pytest.mark.parametrize("num_inputs", [1, 7, 8, 9, 31, 32, 33, 40, 128, 130])
@pytest.mark.parametrize("rows", [1, 5])
def test_words_are_those_of_compressed_tensors(rows: int, num_inputs: int) -> None:
    q = _integers(rows, num_inputs)
    words = pack_int4(q)
    assert words.dtype == torch.int32
    assert torch.equal(words, pack_to_int32(q, num_bits=4))
    assert torch.equal(unpack_int4(words, num_inputs), q)
    assert torch.equal(unpack_from_int32(words, 4, q.shape), q)


@pytest.mark.parametrize("value", [-9, 8])
def test_values_off_the_grid_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match=r"\[-8, 7\]"):
        pack_int4(torch.full((1, 8), value, dtype=torch.int8))


def test_wrong_dtype_or_width_is_refused() -> None:
    with pytest.raises(ValueError, match="int8"):
        pack_int4(torch.zeros(2, 8))
    with pytest.raises(ValueError, match="int32"):
        unpack_int4(torch.zeros(2, 1), 8)
    with pytest.raises(ValueError, match="17 inputs need 3 words"):
        unpack_int4(torch.zeros(2, 2, dtype=torch.int32), 17)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [4, 24])
@pytest.mark.parametrize("size", [1.0, 1e-5])  # 1e-5 is below the normal numbers of float16
def test_dequantized_is_the_exact_product_rounded_once(dtype: torch.dtype, group_size: int, size: float) -> None:
    q = _integers(6, 24)
    generator = torch.Generator().manual_seed(1)
    scale = (size * torch.rand(6, 24 // group_size, generator=generator)).to(torch.bfloat16)
    exact = q.double() * scale.double().repeat_interleave(group_size, dim=1)
    assert torch.equal(dequantize(q, scale, group_size, dtype), exact.to(dtype))
