"""Every kernel compiles for sm_80, sm_86 and sm_90, at the shapes of Qwen3.5-4B and its drafter, without a GPU, and
asks for no more shared memory than a block may have."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.decode.on_device import INTERPRETED
from twofold.ops.decode import linear_cuda
from twofold.ops.decode.cuda import compile_to_cubin
from twofold.ops.decode.division import choose, validate
from twofold.ops.decode.linear_cuda import Fused, defines
from twofold.ops.decode.packed_weight import PackedWeight

SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
needs_triton = pytest.mark.skipif(
    INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs Triton's compiler"
)
BF16, FLOAT, INT = "*bf16", "*fp32", "*i64"


def compile_triton(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], capability: int, **options: int
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constants = {**constants, "OVERLAP": capability >= 90}
    floats = {"eps", "scale", "offset"}
    signature = {
        name: pointers.get(name, "constexpr" if name in constants else "fp32" if name in floats else "i32")
        for name in kernel.arg_names
    }
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (i,): aligned for i, name in enumerate(kernel.arg_names) if signature[name] not in ("constexpr", "fp32")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= SHARED[capability]
    assert ("griddepcontrol.wait" in compiled.asm["ptx"]) == constants["OVERLAP"]


@needs_triton
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "tokens"), [(16, 4, 256, 16), (16, 4, 256, 1), (32, 8, 128, 16), (9, 3, 64, 16)]
)
def test_attention(heads: int, key_heads: int, width: int, tokens: int, capability: int) -> None:
    import triton

    from twofold.ops.decode import attention_triton as kernels

    block_m = min(64, max(16, triton.next_power_of_2(tokens * heads // key_heads)))
    keys, stages = kernels._blocks(width, 2, divmod(capability, 10))
    draft = heads == 32
    window = 1024 if draft else 0
    sizes = {"T": tokens, "H": heads, "D": width, "WINDOW": window, "BLOCK_N": keys, "CHUNK": kernels.LEAST}
    pointers = {"q_ptr": BF16, "k_ptr": BF16, "v_ptr": BF16, "lengths_ptr": INT, "o_ptr": FLOAT, "log_ptr": FLOAT}
    constants = {**sizes, "G": key_heads, "CAUSAL": not draft, "BLOCK_M": block_m, "PRECISION": "tf32"}
    warps = 4 if block_m <= 32 else 8
    compile_triton(kernels._split_kernel, pointers, constants, capability, num_warps=warps, num_stages=stages)
    pointers = {"o_ptr": FLOAT, "log_ptr": FLOAT, "lengths_ptr": INT, "gate_ptr": BF16, "out_ptr": BF16}
    compile_triton(kernels._combine_kernel, pointers, {**sizes, "SPLITS": 64, "STEP": 32}, capability, num_warps=4)
    names = ("q_ptr", "k_ptr", "v_ptr", "q_norm_ptr", "k_norm_ptr", "new_q_ptr", "keys_ptr", "values_ptr")
    pointers = dict.fromkeys(names, BF16) | {"cos_ptr": FLOAT, "sin_ptr": FLOAT, "lengths_ptr": INT}
    constants = {"T": tokens, "H": heads, "D": width, "R": width // 4}
    compile_triton(kernels._store_kernel, pointers, constants, capability, num_warps=2)
    for name in ("q_ptr", "q_norm_ptr", "new_q_ptr"):  # a context has no queries
        pointers.pop(name)
        constants |= {name: None, "H": 0}
    compile_triton(kernels._store_kernel, pointers, constants, capability, num_warps=2)


@needs_triton
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("gated", [True, False])
def test_delta(gated: bool, capability: int) -> None:
    from twofold.ops.decode import delta_triton as kernels

    sizes = {"T": 16, "H": 32, "G": 16, "K": 128, "V": 128, "TOKENS": 16}
    inputs = ("x_ptr", "conv_ptr", "weight_ptr", "a_ptr", "b_ptr", "a_log_ptr", "dt_ptr", "o_ptr", "copy_ptr")
    factors = {"state_ptr": FLOAT, "k_ptr": FLOAT, "u_ptr": FLOAT, "decay_ptr": FLOAT}
    gate: dict[str, Any] = dict.fromkeys(("z_ptr", "norm_ptr"), BF16 if gated else None)
    pointers = {**dict.fromkeys(inputs, BF16), **factors, **(gate if gated else {})}
    columns = 128 if gated else 32
    constants = {**sizes, "W": 4, "COLUMNS": columns, "READ": "tf32", "weight_c": 1, **({} if gated else gate)}
    compile_triton(kernels._window_kernel, pointers, constants, capability, num_warps=8)
    compile_triton(kernels._token_kernel, pointers, {**constants, "T": 1}, capability, num_warps=8 if gated else 4)
    pointers = {**factors, "n_ptr": INT}
    compile_triton(kernels._commit_kernel, pointers, {**sizes, "COLUMNS": 64}, capability, num_warps=4)
    pointers, constants = {"conv_ptr": BF16, "x_ptr": BF16, "n_ptr": INT}, {"KEPT": 3, "BLOCK": 1024}
    compile_triton(kernels._commit_convolution_kernel, pointers, constants, capability, num_warps=4)


@needs_triton
@pytest.mark.parametrize("capability", SHARED)
def test_norms(capability: int) -> None:
    from twofold.ops.decode import norms_triton as kernels

    for added, gated in ((False, False), (True, False), (True, True)):
        names = (
            ("x_ptr", "weight_ptr", "y_ptr") + (("other_ptr",) if added else ()) + (("h_ptr",) if added > gated else ())
        )
        constants: dict[str, Any] = {"D": 2560, "GATED": gated, "BLOCK": 4096}
        constants |= {name: None for name in ("other_ptr", "h_ptr") if name not in names}
        compile_triton(kernels._norm_kernel, dict.fromkeys(names, BF16), constants, capability, num_warps=8)
    names = ("x_ptr", "gate_ptr", "weight_ptr", "y_ptr")
    constants = {"D": 128, "BLOCK": 128, "HEADS": 32}
    compile_triton(kernels._heads_kernel, dict.fromkeys(names, BF16), constants, capability, num_warps=4)
    compile_triton(kernels._silu_mul_kernel, {"x_ptr": BF16, "y_ptr": BF16}, {"BLOCK": 1024}, capability, num_warps=4)


def weight(bits: int, group: int, outputs: int, inputs: int, gated: bool = False) -> PackedWeight:
    """Of a shape, without numbers."""
    scales = None
    if bits < 16:
        parts = outputs // 16, inputs // max(group, 64), 8, 2 if group == 32 else 1
        scales = torch.empty(parts, dtype=torch.int32, device="meta")
    return PackedWeight(
        words=torch.empty(outputs // 16, inputs // 64, bits // 4, 32, 4, dtype=torch.int32, device="meta"),
        scales=scales,
        bits=bits,
        group_size=group,
        asymmetric=False,
        num_outputs=outputs,
        num_inputs=inputs,
        gated=gated,
    )


def nvrtc() -> bool:
    try:
        return bool(importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion())
    except (ImportError, RuntimeError):
        return False


@pytest.mark.skipif(not nvrtc(), reason="needs cuda-bindings and NVRTC")
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("packed", "fused"),
    [
        (weight(4, 32, 12288, 2560), Fused(norm=True)),
        (weight(4, 32, 12288, 2560), Fused(norm=True, tail=True)),
        (weight(4, 128, 19456, 2560, gated=True), Fused(norm=True)),
        (weight(4, 32, 2560, 9216), Fused(residual=True)),
        (weight(4, 128, 2560, 9728), Fused(residual=True)),
        (weight(4, 128, 248_320, 2560), Fused(top1=True)),
        (weight(8, 128, 248_320, 2560), Fused(top1=True)),
        (weight(16, 0, 64, 2560), Fused(norm=True)),
    ],
)
def test_linear(packed: PackedWeight, fused: Fused, capability: int) -> None:
    """By the compiler of a run: NVRTC refuses some of what nvcc takes."""
    source = Path(linear_cuda.__file__).with_name("linear.cu")
    whole = fused.top1 or fused.tail
    for rows in (1, 16, 64):
        config = choose(packed, rows, whole, SHARED[capability])
        validate(packed, config, SHARED[capability])
        if rows == 16:
            assert compile_to_cubin(source, defines(packed, config, fused), f"sm_{capability}")[:4] == b"\x7fELF"


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("outputs", [64, 2560, 12_288, 248_320])
@pytest.mark.parametrize("inputs", [64, 576, 2560, 4096, 9216, 9728, 12_800])
@pytest.mark.parametrize("whole", [False, True])
def test_every_shape_has_a_division_and_its_sums_one_order(bits: int, outputs: int, inputs: int, whole: bool) -> None:
    """Warps and slices of K are the same for any number of rows, on any GPU."""
    packed = weight(bits, 0 if bits == 16 else 64, outputs, inputs)
    orders = set()
    for most in SHARED.values():
        for rows in (1, 8, 9, 16, 17, 64):
            config = choose(packed, rows, whole, most)
            validate(packed, config, most)
            orders.add((config.warps, config.split))
    assert len(orders) == 1
