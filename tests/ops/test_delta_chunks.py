"""A prefill's pass of Gated DeltaNet against the specification, a commit of every kind against a run over n tokens."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.decode.on_device import DEVICE, DTYPES, INTERPRETED
from twofold.ops import delta_window
from twofold.ops.gated_delta import gated_delta_recurrent

CONV = 4
SHAPES = [(2, 4, 16, 32), (1, 2, 32, 16), (3, 3, 16, 16)]  # key heads, value heads, widths


def inputs(tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """qkv, a, b, weight, A_log, dt_bias, conv, state of two rows; qkv, b and a are parts of one tensor."""
    torch.manual_seed(tokens)
    key_heads, heads, width, value_width = shape
    channels = 2 * key_heads * width + heads * value_width
    fused = torch.randn(2, tokens, channels + 2 * heads).to(dtype)
    x, b, a = fused.to(DEVICE).split((channels, heads, heads), dim=-1)
    weight, conv = torch.randn(channels, CONV), torch.randn(2, CONV - 1, channels)
    rest = weight.to(dtype), torch.rand(heads), torch.randn(heads), conv.to(dtype)
    return [x, a, b, *(t.to(DEVICE) for t in (*rest, torch.randn(2, heads, width, value_width)))]


def specification(given: list[Tensor], n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Over the first n tokens, token by token in float64: o, the last inputs, the state."""
    x, a, b, weight, A_log, dt_bias, conv, state = (t.cpu().double() for t in given)
    x, a, b = x[:, :n], a[:, :n], b[:, :n]
    _, heads, width, value_width = state.shape
    key_dim = (x.shape[-1] - heads * value_width) // 2
    together = torch.cat((conv, x), dim=1)
    if n == 0:
        return x.new_empty(2, 0, heads, value_width), together, state
    mixed = delta_window.causal_convolution(together, weight)
    q, k, v = mixed.split((key_dim, key_dim, heads * value_width), dim=-1)
    o, states = gated_delta_recurrent(
        q.unflatten(-1, (-1, width)),
        k.unflatten(-1, (-1, width)),
        v.unflatten(-1, (heads, -1)),
        *delta_window.decay_and_strength(a, b, A_log, dt_bias),
        state,
    )
    return o, together[:, n:], states[:, -1]


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (found.cpu().double() - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error < (1e-4 if dtype == torch.float32 else 0.01), float(error)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "shape"),
    [(n, SHAPES[i]) for n, i in ((1, 0), (3, 2), (31, 1), (63, 0), (64, 2), (65, 1), (128, 1), (129, 2), (150, 0))],
)
def test_a_pass_is_the_recurrence(tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    from twofold.ops.delta_chunks_triton import delta_chunks

    given = inputs(tokens, shape, dtype)
    before = [t.clone() for t in given]
    o, conv, state = delta_chunks(*given)
    expected, last, after = specification(given, tokens)
    near(o, expected, dtype)
    near(state, after, dtype)
    assert torch.equal(conv.cpu().double(), last)
    for t, was in zip(given, before, strict=True):
        assert torch.equal(t, was)


@pytest.mark.triton
@pytest.mark.parametrize("n", [0, 1, 2, 32, 36])
def test_what_is_not_kept_was_never_there(n: int) -> None:
    """Each row keeps tokens of its own; what comes behind them may be anything."""
    from twofold.ops.delta_chunks_triton import delta_chunks

    given = inputs(100, SHAPES[0], torch.float32)
    keep = [n, 100 - n]
    for row, count in enumerate(keep):
        given[0][row, count:] = 1e4
    o, conv, state = delta_chunks(*given, keep_B=torch.tensor(keep, device=DEVICE))
    assert bool(o.isfinite().all())
    for row, count in enumerate(keep):
        expected, last, after = specification(given, count)
        near(o[row, :count], expected[row], torch.float32)
        near(state[row], after[row], torch.float32)
        assert torch.equal(conv[row].cpu().double(), last[row])


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_keys_without_decay(dtype: torch.dtype) -> None:
    """The hardest system: all below the diagonal near 1."""
    from twofold.ops.delta_chunks_triton import delta_chunks

    given = inputs(128, SHAPES[0], dtype)
    given[0][:] = given[0][:, :1].clone()
    given[6][:] = given[0][:, :1]
    given[1][:], given[2][:] = -30, 10
    o, _, state = delta_chunks(*given)
    expected, _, after = specification(given, 128)
    near(o, expected, dtype)
    near(state, after, dtype)


@pytest.mark.skipif(INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")
@pytest.mark.parametrize(
    ("capability", "dtype", "shared"), [(80, "bf16", 163), (86, "bf16", 99), (86, "fp32", 99), (90, "bf16", 227)]
)
def test_it_compiles_at_the_shape_of_qwen(capability: int, dtype: str, shared: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from twofold.ops import delta_chunks_triton as kernels

    float32 = {f"{name}_ptr" for name in ("decay", "beta", "systems", "inverses", "state", "after")}
    precision = "tf32" if dtype == "bf16" else "tf32x3"
    sizes = {"H": 32, "G": 16, "K": 128, "V": 128, "PRECISION": precision}
    launches: list[tuple[Any, dict[str, Any], dict[str, int]]] = [
        (kernels._convolution_kernel, {"K": 128, "W": 4}, {"num_warps": 4}),
        (kernels._systems_kernel, {name: sizes[name] for name in ("H", "G", "K", "PRECISION")}, {"num_warps": 4}),
        (kernels._inverse_kernel, {"SIZE": 32}, {"num_warps": 1}),
        (kernels._factors_kernel, sizes, {"num_warps": 2}),
        (
            kernels._states_kernel,
            {**sizes, "L": 64, "COLUMNS": 32},
            {"num_warps": 4, "num_stages": 3 if dtype == "bf16" else 1},
        ),
        (kernels._outputs_kernel, {**sizes, "L": 64, "COLUMNS": 64}, {"num_warps": 4}),
    ]
    for kernel, constants, options in launches:
        signature = {}
        for name in kernel.arg_names:
            kind = "*i64" if name == "keep_ptr" else "*fp32" if name in float32 else f"*{dtype}"
            signature[name] = "constexpr" if name in constants else kind if name.endswith("_ptr") else "i32"
        if kernel is kernels._convolution_kernel:
            signature["after_ptr"] = f"*{dtype}"
        aligned = [["tt.divisibility", 16]]
        attributes = {(i,): aligned for i, name in enumerate(signature) if name.endswith("_ptr") or name == "channels"}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.metadata.shared <= shared * 1024
