"""Packing against the plain dequantization, and the CUDA C++ kernel, run on the CPU, against the plain product."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.ops.decode import emulated
from twofold.ops import fp8
from twofold.ops.decode.division import Config, choose, streams, validate
from twofold.ops.decode.packed_weight import (
    PackedWeight,
    pack_bf16,
    pack_w4,
    pack_w8,
    packed_linear,
    top1,
    unpack,
)
from twofold.ops.integers import dequantize

needs_compiler = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")


def random_weight(
    kind: str, outputs: int, inputs: int, group: int = 32, gated: bool = False
) -> tuple[PackedWeight, torch.Tensor]:
    """Packed, and as the matrix that it stands for."""
    if kind == "bf16":  # has no group
        w = torch.randn(outputs, inputs).bfloat16()
        return pack_bf16(w, gated), w.float()
    scale = (torch.rand(outputs, inputs // group) * 0.1 + 0.01).bfloat16()
    if kind == "w8":
        q = torch.randint(-128, 128, (outputs, inputs)).to(torch.int8)
        return pack_w8(q, scale, group, gated), dequantize(q, scale, None, group, torch.float32)
    q = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
    zero = torch.randint(-8, 8, scale.shape, dtype=torch.int8) if kind == "asymmetric" else None
    return pack_w4(q, scale, zero, group, gated), dequantize(q, scale, zero, group, torch.float32)


KINDS = ["w4", "asymmetric", "w8", "bf16"]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [32, 64, 128, 384])
@pytest.mark.parametrize(("outputs", "gated"), [(40, False), (48, True)])
def test_unpack_inverts_pack(kind: str, group: int, outputs: int, gated: bool) -> None:
    torch.manual_seed(0)
    weight, dense = random_weight(kind, outputs, 384, group, gated)
    assert torch.equal(unpack(weight, torch.float32), dense)
    assert torch.equal(unpack(weight), dense.bfloat16())


@pytest.mark.parametrize(
    ("outputs", "inputs", "group", "match"),
    [(40, 96, 32, "multiple of 64"), (36, 128, 32, "N of 8"), (40, 128, 48, "group size 48"), (40, 128, 16, "size 16")],
)
def test_sizes_that_do_not_fit(outputs: int, inputs: int, group: int, match: str) -> None:
    q = torch.zeros(outputs, inputs, dtype=torch.int8)
    with pytest.raises(ValueError, match=match):
        pack_w4(q, torch.ones(outputs, max(1, inputs // group)).bfloat16(), None, group)


def test_values_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\[-8, 7\]"):
        pack_w4(torch.full((16, 64), 8, dtype=torch.int8), torch.ones(16, 1).bfloat16(), None, 64)
    with pytest.raises(ValueError, match="bfloat16"):
        pack_w4(torch.zeros(16, 64, dtype=torch.int8), torch.ones(16, 1), None, 64)


def test_plain_product_is_the_formula() -> None:
    torch.manual_seed(0)
    weight, dense = random_weight("w4", 48, 128, gated=True)
    x, norm, residual = torch.randn(3, 128), torch.rand(128), torch.randn(3, 24)
    unit = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm
    gate, up = unit @ dense[:24].T, unit @ dense[24:].T
    y = packed_linear(x, weight, norm_K=norm, eps=1e-5, residual_MN=residual)
    torch.testing.assert_close(y, gate * gate.sigmoid() * up + residual)


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "group", "gated"),
    [("w4", 32, False), ("asymmetric", 128, True), ("asymmetric", 32, False), ("w8", 384, True), ("bf16", 0, True)],
)
def test_kernel_unpacks(kind: str, group: int, gated: bool) -> None:
    torch.manual_seed(0)
    weight, dense = random_weight(kind, 48 if gated else 40, 384, group, gated)
    assert torch.equal(emulated.unpacked(weight), dense.bfloat16())


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "group", "gated"),
    [("w4", 32, False), ("w4", 128, True), ("asymmetric", 64, True), ("w8", 384, False), ("bf16", 0, True)],
)
def test_kernel_unpacks_to_8_bit_floats(kind: str, group: int, gated: bool) -> None:
    torch.manual_seed(0)
    weight, dense = random_weight(kind, 48 if gated else 40, 384, group, gated)
    wanted, scale_N1 = fp8.quantize_rows(dense.bfloat16())
    found = emulated.unpacked_e4m3(weight, scale_N1)
    codes = [q.view(torch.uint8).int() for q in (found, wanted)]
    assert int((codes[0] - codes[1]).abs().max()) <= 1  # a product with 1 / scale is no quotient: ties may differ
    assert float((codes[0] != codes[1]).float().mean()) < 0.01


FEW = Config(warps=2, tiles=1, row_tiles=1, stages=2)
PAIRS = Config(warps=4, tiles=2, row_tiles=2, stages=3)
MANY = Config(warps=3, tiles=2, row_tiles=4, stages=4)
SLICES = Config(warps=2, tiles=2, row_tiles=2, stages=4, split=3)
IDLE = Config(warps=8, tiles=1, row_tiles=2, stages=1)  # warps without work


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "rows", "group", "config", "blocks"),
    [
        ("w4", 1, 32, FEW, 99),
        ("w4", 13, 64, PAIRS, 99),
        ("w4", 37, 128, MANY, 2),  # two passes of rows, blocks that have several tiles
        ("w4", 16, 384, IDLE, 2),
        ("asymmetric", 13, 32, PAIRS, 2),
        ("asymmetric", 16, 128, IDLE, 99),
        ("w8", 13, 32, PAIRS, 2),
        ("w8", 5, 384, FEW, 99),
        ("bf16", 13, 0, PAIRS, 2),
        ("w4", 13, 32, SLICES, 6),
        ("asymmetric", 21, 64, SLICES, 99),
        ("w8", 3, 384, SLICES, 1),
        ("bf16", 13, 0, SLICES, 2),
    ],
)
def test_kernel_multiplies(kind: str, rows: int, group: int, config: Config, blocks: int) -> None:
    torch.manual_seed(0)
    weight, dense = random_weight(kind, 72, 384, group)
    x = torch.randn(rows, 400).bfloat16()[:, :384]  # rows need not be dense
    (y,) = emulated.linear(x, weight, config, blocks)
    assert relative(y, x.float() @ dense.T) < 0.003  # the rounding of the result


@needs_compiler
@pytest.mark.parametrize(("rows", "gated"), [(1, True), (16, False), (21, True)])
def test_kernel_with_everything_fused(rows: int, gated: bool) -> None:
    torch.manual_seed(0)
    weight, _ = random_weight("w4", 80, 256, gated=gated)
    x, norm = (torch.randn(rows, 256) * 3).bfloat16(), torch.rand(256).bfloat16()
    residual = torch.randn(rows, 96).bfloat16()[:, : weight.out_features]
    config = Config(warps=2, tiles=2, row_tiles=1 if rows == 1 else 2 if rows <= 16 else 4, stages=2)
    extra = {"norm_K": norm, "eps": 1e-3, "residual_MN": residual}
    (y,) = emulated.linear(x, weight, config, 2, **extra)
    expected = packed_linear(x.float(), weight, norm_K=norm, eps=1e-3, residual_MN=residual)
    assert relative(y, expected) < 0.006  # x * norm is rounded too


@needs_compiler
@pytest.mark.parametrize(("rows", "blocks", "config"), [(13, 99, PAIRS), (1, 1, FEW), (16, 2, IDLE)])
def test_kernel_with_a_tail(rows: int, blocks: int, config: Config) -> None:
    torch.manual_seed(0)
    weight, _ = random_weight("w4", 88, 256)
    tail, _ = random_weight("bf16", 56, 256)
    x, norm = torch.randn(rows, 256).bfloat16(), torch.rand(256).bfloat16()
    (y,) = emulated.linear(x, weight, config, blocks, norm_K=norm, eps=1e-3, tail=tail)
    expected = packed_linear(x.float(), weight, norm_K=norm, eps=1e-3, tail=tail)
    assert y.shape == (rows, 144)
    assert relative(y[:, :88], expected[:, :88]) < 0.006
    assert relative(y[:, 88:], expected[:, 88:]) < 0.006


@needs_compiler
@pytest.mark.parametrize("split", [1, 2])
def test_rows_do_not_depend_on_their_neighbours(split: int) -> None:
    torch.manual_seed(0)
    weight, _ = random_weight("w4", 64, 768)
    x = torch.randn(16, 768).bfloat16()
    one = Config(warps=4, tiles=2, row_tiles=1, stages=3, split=split)
    (many,) = emulated.linear(x, weight, Config(warps=4, tiles=1, row_tiles=2, stages=2, split=split), 9)
    four = Config(warps=4, tiles=1, row_tiles=4, stages=1, blocks=8, split=split)  # reads x again for every tile
    assert streams(weight, replace(four, blocks=16))
    assert torch.equal(emulated.linear(x, weight, replace(four, blocks=16), 2)[0], many)
    assert all(torch.equal(emulated.linear(x[i : i + 1], weight, one, 9)[0][0], many[i]) for i in (0, 7, 8, 15))


@needs_compiler
def test_slices_of_k_with_a_norm() -> None:
    torch.manual_seed(0)
    weight, _ = random_weight("w4", 96, 384, gated=True)
    x, norm = torch.randn(13, 384).bfloat16(), torch.rand(384).bfloat16()
    (y,) = emulated.linear(x, weight, SLICES, 3, norm_K=norm, eps=1e-3)
    assert relative(y, packed_linear(x.float(), weight, norm_K=norm, eps=1e-3)) < 0.006


@needs_compiler
@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("config", [replace(PAIRS, tiles=3), SLICES, replace(SLICES, tiles=3)])
def test_blocks_whose_last_group_is_not_full(config: Config, blocks: int) -> None:
    """One to nine tiles: a block ends with all, some or one of the tiles that it takes at once, or has none."""
    torch.manual_seed(0)
    x, norm = torch.randn(13, 384).bfloat16(), torch.rand(384).bfloat16()
    for tiles in range(1, 10):
        weight, _ = random_weight("w4", tiles * 16 - 8, 384)
        (y,) = emulated.linear(x, weight, config, blocks * config.split, norm_K=norm, eps=1e-3)
        assert relative(y, packed_linear(x.float(), weight, norm_K=norm, eps=1e-3)) < 0.006


def test_divisions_that_no_multiprocessor_holds() -> None:
    weight, _ = random_weight("w4", 64, 4096)
    good = choose(weight, 16)
    validate(weight, good, 99 * 1024)
    with pytest.raises(ValueError, match="use fewer stages"):
        validate(weight, replace(good, stages=200), 227 * 1024)
    with pytest.raises(ValueError, match="use fewer blocks"):
        validate(weight, replace(good, blocks=65), 227 * 1024)
    with pytest.raises(ValueError, match="at most 32 warps"):
        validate(weight, replace(good, warps=33), 227 * 1024)


@needs_compiler
@pytest.mark.parametrize(("kind", "blocks"), [("w4", 1), ("w4", 99), ("w8", 2), ("bf16", 2)])
def test_kernel_top1(kind: str, blocks: int) -> None:
    torch.manual_seed(0)
    weight, dense = random_weight(kind, 200, 128, 64)
    x = torch.randn(11, 128).bfloat16()
    ids, scores = emulated.linear(x, weight, Config(warps=2, tiles=2, row_tiles=2, stages=2), blocks, top1=True)
    expected = x.float() @ dense.T
    assert torch.equal(ids, expected.argmax(-1))
    torch.testing.assert_close(scores, expected.max(-1).values, rtol=1e-4, atol=1e-3)


@needs_compiler
def test_top1_takes_the_first_of_equals() -> None:
    torch.manual_seed(0)
    q = torch.randint(-8, 8, (8, 128), dtype=torch.int8).repeat(24, 1)  # every row 24 times
    weight = pack_w4(q, torch.ones(192, 2).bfloat16(), None, 64)
    x = torch.randn(9, 128).bfloat16()
    ids, scores = emulated.linear(x, weight, Config(warps=2, tiles=2, row_tiles=2, stages=2), 2, top1=True)
    expected_ids, expected = top1(x.float(), weight)
    assert torch.equal(ids, expected_ids)
    assert int(ids.max()) < 8
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-3)


def test_plain_top1_takes_the_first_of_equals() -> None:
    weight = pack_bf16(F.one_hot(torch.arange(64) % 8, 64).bfloat16())
    ids, scores = top1(torch.eye(64)[:9], weight)
    assert ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert scores.tolist() == [1.0] * 8 + [0.0]
