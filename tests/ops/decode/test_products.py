"""Products with packed weights as a model calls them; the kernels' references stand in for them."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from twofold.evaluation.roofline import variants
from twofold.models.shapes import find_shape
from twofold.ops import fp8
from twofold.ops.decode import linear_cuda, norms, packed_weight, products
from twofold.ops.decode.packed_weight import PackedWeight, pack_bf16
from twofold.ops.integers import dequantize
from twofold.ops.kernels import Kernels
from twofold.ops.linear import Norm, dense_linear
from twofold.ops.norms import rms_norm


@pytest.fixture(autouse=True)
def _references(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed_linear(x: Tensor, weight: PackedWeight, *, overlap: bool, **rest: object) -> Tensor:
        assert x.dim() == 2
        assert len(x) <= products.FEW_ROWS
        return packed_weight.packed_linear(x, weight, **rest)  # type: ignore[arg-type]

    def unpack(weight: PackedWeight, out: Tensor | None = None) -> Tensor:
        made = packed_weight.unpack(weight, torch.float32)
        return made if out is None else out.copy_(made)

    def unpack_e4m3(weight: PackedWeight, row_scale: Tensor, out: Tensor) -> None:
        out.copy_((packed_weight.unpack(weight, torch.float32) / row_scale).to(out.dtype))

    monkeypatch.setattr(linear_cuda, "packed_linear", packed_linear)
    monkeypatch.setattr(linear_cuda, "unpack_e4m3", unpack_e4m3)
    monkeypatch.setattr(linear_cuda, "unpack", unpack)
    monkeypatch.setattr(linear_cuda, "top1", lambda x, weight, overlap: packed_weight.top1(x, weight))
    triton = types.ModuleType("norms_triton")
    triton.rms_norm = lambda x, w, eps, overlap=False: rms_norm(x, w, eps)  # type: ignore[attr-defined]
    triton.silu_mul = norms.silu_mul  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "twofold.ops.decode.norms_triton", triton)


def integers(outputs: int, inputs: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(outputs + bits)
    low = -(1 << bits - 1)
    q = torch.randint(low, -low, (outputs, inputs), dtype=torch.int8)
    scale = (torch.rand(outputs, inputs // 32) / 2**bits).bfloat16()
    return q, scale, None if symmetric else torch.randint(low, -low, scale.shape, dtype=torch.int8)


@pytest.mark.parametrize("rows", [(1,), (2, 5), (3, 70)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
def test_a_packed_product_is_the_dense_one(rows: tuple[int, ...], gated: bool, bits: int, symmetric: bool) -> None:
    q, scale, zero = integers(48, 128, bits, symmetric)
    found = products.freeze_packed(q, scale, zero, bits, gated, torch.bfloat16)
    wanted = dense_linear(dequantize(q, scale, zero, 32, torch.float32), gated)
    assert isinstance(found, products.PackedProduct)
    x, norm = torch.randn(*rows, 128), Norm(torch.rand(128), 1e-5)
    residual = torch.randn(*rows, 24 if gated else 48)
    torch.testing.assert_close(found(x), wanted(x), rtol=1e-4, atol=1e-4)
    if not gated or len(rows) == 1:
        torch.testing.assert_close(found(x, norm, residual), wanted(x, norm, residual), rtol=1e-4, atol=1e-4)
    if not gated:
        assert torch.equal(products.top1(found, x), found(x).argmax(dim=-1))


@pytest.mark.parametrize("rows", [(1, 4), (2, 70)])
def test_a_joined_product_has_both_outputs(rows: tuple[int, int]) -> None:
    q, scale, _ = integers(48, 128, 4, True)
    first = products.freeze_packed(q, scale, None, 4, False, torch.bfloat16)
    dense = torch.randn(16, 128).bfloat16()
    second = products.PackedProduct(pack_bf16(dense), dense.float())
    assert first is not None
    joined = products.join(first, second)
    assert joined is not None
    x, norm = torch.randn(*rows, 128), Norm(torch.rand(128), 1e-5)
    y = joined(x, norm)
    torch.testing.assert_close(y[..., :48], first(x, norm), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(y[..., 48:], rms_norm(x, *norm) @ dense.float().T, rtol=1e-4, atol=1e-4)
    assert products.join(second, first) is None
    assert products.join(first, dense_linear(dense)) is None


def test_what_is_not_served_stays_dense_and_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    q, scale, zero = integers(48, 96, 4, True)
    assert products.freeze_packed(q, scale, zero, 4, False, torch.bfloat16) is None  # 96 is no multiple of 64
    q, scale, zero = integers(48, 128, 8, False)
    for _ in range(2):
        assert products.freeze_packed(q, scale, zero, 8, False, torch.bfloat16) is None
    said = capsys.readouterr().err
    assert "K a multiple of 64" in said
    q, scale, zero = integers(48, 128, 4, True)
    assert products.freeze_packed(q, scale, zero, 4, False, torch.float32) is None
    assert said.count("8 bits with zero points") == 1


@pytest.mark.parametrize("length", [16, 150])
@pytest.mark.parametrize("step", ["INT4 target", "+ INT4 head"])
def test_a_model_on_packed_products(length: int, step: str) -> None:
    """The same weights, frozen to packed products and to dense ones."""

    def freeze_linear(weight: Tensor, gated: bool) -> products.PackedProduct:
        return products.PackedProduct(pack_bf16(weight, gated), weight)

    def freeze_packed(*given: object) -> object:
        return products.freeze_packed(*given[:-1], torch.bfloat16)  # type: ignore[arg-type]

    shape = find_shape("tiny")
    packed = replace(
        Kernels.reference(),
        freeze_linear=freeze_linear,
        freeze_packed=freeze_packed,  # type: ignore[arg-type]
        join=products.join,
        top1=products.top1,
    )
    models = []
    for kernels in (packed, Kernels.reference()):
        torch.manual_seed(0)
        made = next(t for name, t, _ in variants(shape, kernels, torch.device("cpu"), torch.float32) if name == step)
        for p in made.parameters():  # dense ones are rounded to bfloat16 when packed
            p.data.copy_(p.data.bfloat16())
        models.append(made.freeze())
    ours, wanted = models
    assert all(len(layer.linear_attn.inputs.frozen) == 1 for layer in ours.layers if not layer.attends)
    ids = torch.randint(shape.target.vocab_size, (1, length))
    (a, _), (b, _) = (model(ids, state=model.new_state(1, 200)) for model in models)
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert torch.equal(ours.top1(b), wanted.top1(b))


def test_what_products_lack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(products.importlib.util, "find_spec", absent)
    assert "cuda-bindings is not installed" in str(products.why_no_products("cuda"))
    monkeypatch.setattr(products.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "older than compute capability 8.0" in str(products.why_no_products("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert products.why_no_products("cuda") is None


def test_auto_without_products_multiplies_dense_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(products, "why_no_products", lambda _: "nothing to compile with")
    chosen = Kernels.auto("cuda")
    assert chosen.freeze_packed is None
    assert chosen.top1 is Kernels.reference().top1
    assert "nothing to compile with" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["plain", "gated", "with a tail"])
def test_many_rows_go_through_8_bits_on_request(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = types.ModuleType("fp8_triton")
    triton.quantize_rows = lambda x, norm=None: fp8.quantize_rows(x if norm is None else rms_norm(x, *norm))  # type: ignore[attr-defined]
    triton.scaled_product = fp8.scaled_product  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "twofold.ops.fp8_triton", triton)
    monkeypatch.setattr("twofold.ops.fp8_triton", triton, raising=False)
    q, scale, zero = integers(48, 128, 4, False)
    found = products.freeze_packed(q, scale, zero, 4, kind == "gated", torch.bfloat16, fp8=True)
    assert found is not None
    weight = dequantize(q, scale, zero, 32, torch.float32)
    if kind == "with a tail":
        tail = torch.randn(16, 128).bfloat16()
        found = products.join(found, products.PackedProduct(pack_bf16(tail), tail.float()))
        assert found is not None
        weight = torch.cat((weight, tail.float()))
    norm = Norm(torch.rand(128), 1e-5)
    few, many = dense_linear(weight, kind == "gated"), fp8.fp8_linear(weight, kind == "gated")
    for rows, wanted in ((3, few), (200, many)):
        x, residual = torch.randn(rows, 128), torch.randn(rows, 48) if kind == "plain" else None
        torch.testing.assert_close(found(x, norm, residual), wanted(x, norm, residual), rtol=1e-4, atol=1e-4)
