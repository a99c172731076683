"""Packing against compressed-tensors, dequantization against exact arithmetic."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from twofold.ops.integers import dequantize, limits, pack_integers, unpack_integers

both_widths = pytest.mark.parametrize("bits", [4, 8])


def _integers(rows: int, num_inputs: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + num_inputs)
    low, high = limits(bits)
    return torch.randint(low, high + 1, (rows, num_inputs), generator=generator, dtype=torch.int8)


def test_lowest_bits_come_first() -> None:
    q = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1], [0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.int8)
    words = pack_integers(q, 4)
    assert words.tolist() == [[0x76543210], [0xFEDCBA98 - 2**32]]
    assert torch.equal(unpack_integers(words, 8, 4), q)
    q = torch.tensor([[-128, -127, -1, 0], [1, 2, 126, 127]], dtype=torch.int8)
    words = pack_integers(q, 8)
    assert words.tolist() == [[0x807F0100 - 2**32], [0xFFFE8281 - 2**32]]
    assert torch.equal(unpack_integers(words, 4, 8), q)


@both_widths
@pytest.mark.parametrize("num_inputs", [1, 3, 4, 7, 8, 9, 31, 32, 33, 40, 128, 130])
@pytest.mark.parametrize("rows", [1, 5])
def test_words_are_those_of_compressed_tensors(rows: int, num_inputs: int, bits: int) -> None:
    q = _integers(rows, num_inputs, bits)
    words = pack_integers(q, bits)
    assert words.dtype == torch.int32
    assert torch.equal(words, pack_to_int32(q, num_bits=bits))
    assert torch.equal(unpack_integers(words, num_inputs, bits), q)
    assert torch.equal(unpack_from_int32(words, bits, q.shape), q)


@pytest.mark.parametrize("value", [-9, 8])
def test_values_off_the_grid_are_refused(value: int) -> None:
    q = torch.full((1, 8), value, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"4 bits hold values in \[-8, 7\]"):
        pack_integers(q, 4)
    assert torch.equal(unpack_integers(pack_integers(q, 8), 8, 8), q)


def test_wrong_dtype_or_width_is_refused() -> None:
    with pytest.raises(ValueError, match="int8"):
        pack_integers(torch.zeros(2, 8), 4)
    with pytest.raises(ValueError, match="int32"):
        unpack_integers(torch.zeros(2, 1), 8, 4)
    with pytest.raises(ValueError, match="17 values of 4 bits need 3 words"):
        unpack_integers(torch.zeros(2, 2, dtype=torch.int32), 17, 4)
    with pytest.raises(ValueError, match="17 values of 8 bits need 5 words"):
        unpack_integers(torch.zeros(2, 3, dtype=torch.int32), 17, 8)


@both_widths
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [4, 24])
@pytest.mark.parametrize("size", [1.0, 1e-5])  # 1e-5 is below the normal numbers of float16
def test_dequantized_is_the_exact_product_rounded_once(
    dtype: torch.dtype, group_size: int, size: float, symmetric: bool, bits: int
) -> None:
    q = _integers(6, 24, bits)
    generator = torch.Generator().manual_seed(1)
    scale = (size * torch.rand(6, 24 // group_size, generator=generator)).to(torch.bfloat16)
    zero = None if symmetric else _integers(6, 24 // group_size, bits)
    offset = 0 if zero is None else zero.double().repeat_interleave(group_size, dim=1)
    exact = (q.double() - offset) * scale.double().repeat_interleave(group_size, dim=1)
    assert torch.equal(dequantize(q, scale, zero, group_size, dtype), exact.to(dtype))
