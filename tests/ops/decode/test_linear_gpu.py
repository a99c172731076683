"""The CUDA C++ kernel on a GPU: by its reference at the shapes of Qwen3.5-4B and at odd ones, in a captured graph, and
with the start of each kernel before the end of the last."""

import pytest
import torch

from tests.ops.decode.test_packed_weight import KINDS, random_weight, relative
from twofold.ops import fp8
from twofold.ops.decode import cuda, linear_cuda
from twofold.ops.decode.division import Config, shared_bytes
from twofold.ops.decode.packed_weight import PackedWeight, pack_bf16, pack_w4, packed_linear, top1, unpack
from twofold.ops.integers import dequantize

pytestmark = pytest.mark.gpu


def on_gpu(kind: str, outputs: int, inputs: int, group: int = 32, gated: bool = False) -> PackedWeight:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return random_weight(kind, outputs, inputs, group, gated)[0]


def rows_of(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, device="cuda").bfloat16()


@pytest.mark.parametrize(
    ("kind", "outputs", "inputs", "group"),
    [(kind, 12288, 2560, 32) for kind in KINDS] + [("w4", 2560, 9216, 128), ("asymmetric", 40, 192, 64)],
)
def test_product(kind: str, outputs: int, inputs: int, group: int) -> None:
    weight = on_gpu(kind, outputs, inputs, group)
    dense = unpack(weight, torch.float32)
    for rows in (1, 2, 8, 9, 16, 17, 33, 64):
        x = rows_of(rows, inputs)
        y = linear_cuda.packed_linear(x, weight)
        assert relative(y, x.double() @ dense.double().T) < 0.003


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "gated"), [(12288, False), (1000, False), (992, True)])
def test_unpack(kind: str, outputs: int, gated: bool) -> None:
    weight = on_gpu(kind, outputs, 384, 32, gated)
    assert torch.equal(linear_cuda.unpack(weight), unpack(weight))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "gated"), [(12288, False), (1000, False), (992, True)])
def test_unpack_to_8_bit_floats(kind: str, outputs: int, gated: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs sm_89")
    weight = on_gpu(kind, outputs, 384, 32, gated)
    wanted, scale_N1 = fp8.quantize_rows(unpack(weight))
    found = torch.empty_like(wanted)
    linear_cuda.unpack_e4m3(weight, scale_N1, found)
    off = (found.view(torch.uint8).int() - wanted.view(torch.uint8).int()).abs()
    assert int(off.max()) <= 1
    assert float((off > 0).float().mean()) < 0.01


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 50])
def test_fused(rows: int, gated: bool) -> None:
    weight = on_gpu("w4", 18432, 2560, gated=gated)
    x, norm = rows_of(rows, 2560) * 3, torch.rand(2560, device="cuda").bfloat16()
    residual = rows_of(rows, weight.out_features)
    expected = packed_linear(x.float(), weight, norm_K=norm.float(), eps=1e-6, residual_MN=residual.float())
    y = linear_cuda.packed_linear(x, weight, norm_K=norm, eps=1e-6, residual_MN=residual)
    assert relative(y, expected) < 0.006
    out = linear_cuda.packed_linear(x, weight, norm_K=norm, eps=1e-6, residual_MN=residual, out_MN=residual)
    assert out is residual
    assert torch.equal(out, y)


@pytest.mark.parametrize("rows", [1, 16, 50])
def test_tail(rows: int) -> None:
    weight, tail = on_gpu("w4", 12288, 2560), on_gpu("bf16", 64, 2560)
    x, norm = rows_of(rows, 2560), torch.rand(2560, device="cuda").bfloat16()
    y = linear_cuda.packed_linear(x, weight, norm_K=norm, eps=1e-6, tail=tail)
    expected = packed_linear(x.float(), weight, norm_K=norm.float(), eps=1e-6, tail=tail)
    assert relative(y[:, :12288], expected[:, :12288]) < 0.006
    assert relative(y[:, 12288:], expected[:, 12288:]) < 0.006


@pytest.mark.parametrize("kind", ["w4", "w8", "bf16"])
@pytest.mark.parametrize("outputs", [248_320, 1000])
def test_top1(kind: str, outputs: int) -> None:
    weight = on_gpu(kind, outputs, 256, 64)
    for rows in (1, 16, 40):
        x = rows_of(rows, 256)
        ids, scores = linear_cuda.top1(x, weight)
        expected = x.double() @ unpack(weight, torch.float32).double().T
        best = expected.max(dim=-1).values
        torch.testing.assert_close(scores.double(), best, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(expected.gather(1, ids[:, None])[:, 0], best, rtol=1e-4, atol=1e-3)  # near-ties
        assert (ids == expected.argmax(dim=-1)).float().mean() > 0.9


def test_top1_takes_the_first_of_equals() -> None:
    q = torch.randint(-8, 8, (16, 256), dtype=torch.int8, device="cuda").repeat(2000, 1)
    weight = pack_w4(q, torch.ones(32_000, 4, device="cuda").bfloat16(), None, 64)
    x = rows_of(16, 256)
    ids, _ = linear_cuda.top1(x, weight)
    assert torch.equal(ids, top1(x.float(), weight)[0])
    assert int(ids.max()) < 16


def test_a_row_is_the_same_bits_whatever_stands_beside_it() -> None:
    weight = on_gpu("w4", 2560, 4096)
    x = rows_of(16, 4096)
    many = linear_cuda.packed_linear(x, weight)
    assert all(torch.equal(linear_cuda.packed_linear(x[i : i + 1], weight)[0], many[i]) for i in range(16))


@pytest.mark.parametrize("warps", [1, 10, 16])
@pytest.mark.parametrize("tiles", [1, 4])
def test_every_division_of_the_work(warps: int, tiles: int) -> None:
    weight = on_gpu("w4", 2576, 2560, 128)  # an odd number of tiles
    x = rows_of(13, 2560)
    expected = x.double() @ unpack(weight, torch.float32).double().T
    most = cuda.most_shared(0)
    for stages, blocks, split in ((1, 1, 1), (3, 1, 2), (2, 2, 3)):
        config = Config(warps=warps, tiles=tiles, row_tiles=2, stages=stages, blocks=blocks, split=split)
        if shared_bytes(weight, config) > most:
            with pytest.raises(ValueError, match="use fewer stages"):
                linear_cuda.packed_linear(x, weight, config=config)
        else:
            assert relative(linear_cuda.packed_linear(x, weight, config=config), expected) < 0.003


def test_slices_of_k_come_together_in_every_run() -> None:
    weight = on_gpu("w4", 2560, 9216)
    residual = rows_of(16, 2560)
    x = rows_of(16, 9216)
    first = linear_cuda.packed_linear(x, weight, residual_MN=residual)
    expected = x.double() @ unpack(weight, torch.float32).double().T + residual.double()
    assert relative(first, expected) < 0.003
    assert all(
        torch.equal(linear_cuda.packed_linear(x, weight, residual_MN=residual, overlap=True), first) for _ in range(200)
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_captured_chain(overlap: bool) -> None:
    """A graph of dependent products, replayed with new inputs, equals the same kernels one by one."""
    weights = [on_gpu("w4", 2560, 2560) for _ in range(6)]
    norm = torch.rand(2560, device="cuda").bfloat16()
    x = rows_of(16, 2560)

    kept, emptied = torch.empty_like(x), torch.empty_like(x)

    def chain(overlap: bool) -> torch.Tensor:
        h = x
        for weight in weights:
            h = linear_cuda.packed_linear(h, weight, norm_K=norm, eps=1e-6, residual_MN=h, overlap=overlap)
            kept.copy_(h)  # what stands between may be a copy or a fill, which are no kernels
            h = linear_cuda.packed_linear(kept, weight, norm_K=norm, eps=1e-6, overlap=overlap)
            emptied.zero_()
        return h

    chain(overlap)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(overlap)
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert torch.equal(y, chain(False))


def test_refuses_what_it_cannot_read() -> None:
    weight = on_gpu("w4", 64, 128)
    with pytest.raises(ValueError, match="x must be bfloat16"):
        linear_cuda.packed_linear(torch.randn(2, 128, device="cuda"), weight)
    with pytest.raises(ValueError, match="16 bytes"):
        linear_cuda.packed_linear(rows_of(2, 132)[:, 4:], weight)


def test_packing_on_the_gpu_is_packing_on_the_cpu() -> None:
    torch.manual_seed(0)
    q, scale = torch.randint(-8, 8, (64, 128), dtype=torch.int8), (torch.rand(64, 4) + 0.1).bfloat16()
    here, there = pack_w4(q, scale, None, 32), pack_w4(q.cuda(), scale.cuda(), None, 32)
    assert torch.equal(here.words, there.words.cpu())
    assert torch.equal(unpack(there).cpu(), dequantize(q, scale, None, 32, torch.bfloat16))
    w = torch.randn(64, 128).bfloat16()
    assert torch.equal(linear_cuda.unpack(pack_bf16(w.cuda())).cpu(), w)
