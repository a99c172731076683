"""Norms and gating: Triton's kernels by the references."""

import pytest
import torch

from tests.ops.decode.on_device import DEVICE, DTYPES, tolerance
from twofold.ops import norms as plain
from twofold.ops.decode import norms


def test_references() -> None:
    torch.manual_seed(0)
    x, r, w = torch.randn(3, 6), torch.randn(3, 6), torch.rand(6)
    h, y = norms.add_rms_norm(x, r, w, 1e-6)
    assert torch.equal(h, x + r)
    torch.testing.assert_close(y, h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w)
    torch.testing.assert_close(norms.silu_mul(x), x[:, :3] * x[:, :3].sigmoid() * x[:, 3:])


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 2560), (5, 96), (3, 24)])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    from twofold.ops.decode import norms_triton

    torch.manual_seed(0)
    wide = torch.randn(rows, 3 * width, device=DEVICE, dtype=dtype)
    x, r, w = wide[:, :width], wide[:, width : 2 * width], torch.rand(width, device=DEVICE, dtype=dtype)
    close = tolerance(dtype)
    torch.testing.assert_close(norms_triton.rms_norm(x, w, 1e-6), plain.rms_norm(x, w, 1e-6), **close)
    torch.testing.assert_close(norms_triton.rms_norm(x, w, 1e-6, 1.0), plain.rms_norm(x, w, 1e-6, 1.0), **close)
    torch.testing.assert_close(norms_triton.add_rms_norm(x, r, w, 1e-6), norms.add_rms_norm(x, r, w, 1e-6), **close)
    both = wide[:, : 2 * width]
    torch.testing.assert_close(norms_triton.silu_mul(both), norms.silu_mul(both), **close)


@pytest.mark.gpu
def test_a_prefill_of_many_prompts_has_more_rows_than_a_grid_is_high() -> None:
    from twofold.ops.decode import norms_triton

    x = torch.randn(70_000, 16, device=DEVICE, dtype=torch.bfloat16)
    torch.testing.assert_close(norms_triton.silu_mul(x), norms.silu_mul(x), **tolerance(x.dtype))
    w = torch.ones(16, device=DEVICE, dtype=x.dtype)
    torch.testing.assert_close(norms_triton.rms_norm(x, w, 1e-6), plain.rms_norm(x, w, 1e-6), **tolerance(x.dtype))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norm_of_heads(dtype: torch.dtype) -> None:
    from twofold.ops.decode import norms_triton

    torch.manual_seed(0)
    o = torch.randn(2, 3, 4, 32, device=DEVICE, dtype=dtype)
    z = torch.randn(2, 3, 200, device=DEVICE, dtype=dtype)[..., 8:136].unflatten(-1, (4, 32))
    w = torch.rand(32, device=DEVICE, dtype=dtype)
    expected = plain.gated_rms_norm(o, z, w, 1e-6)
    torch.testing.assert_close(norms_triton.gated_rms_norm(o, z, w, 1e-6), expected, **tolerance(dtype))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(4, 32), (5, 24), (48, 128)])
def test_gated_norm_of_many_heads(heads: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a prefill, where a program has several."""
    from twofold.ops.decode import norms_triton

    monkeypatch.setattr(norms_triton, "MANY_HEADS", 0)
    torch.manual_seed(0)
    o = torch.randn(1, 3, heads, width, device=DEVICE, dtype=dtype)
    z = torch.randn(1, 3, 8 + heads * width, device=DEVICE, dtype=dtype)[..., 8:].unflatten(-1, (heads, width))
    w = torch.rand(width, device=DEVICE, dtype=dtype)
    expected = plain.gated_rms_norm(o, z, w, 1e-6)
    torch.testing.assert_close(norms_triton.gated_rms_norm(o, z, w, 1e-6), expected, **tolerance(dtype))
