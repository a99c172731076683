"""Packed INT4 weights as checkpoint tensors: NAME.weight_packed, NAME.weight_scale, NAME.weight_shape."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from twofold.ops.int4 import pack_int4, packed_width, unpack_int4
from twofold.quant.rounding import stored_scale


def pack_state(name: str, q_NK: Tensor, scale_NG: Tensor, shape: Sequence[int]) -> dict[str, Tensor]:
    """The three tensors of layer `name` in the compressed-tensors `pack-quantized` format.

    weight_packed int32 [N, ceil(K / 8)], weight_scale bfloat16 [N, G], weight_shape int64 [2] = (N, K).
    Raises ValueError when q does not have `shape` or the scales are not bfloat16 values.
    """
    if tuple(q_NK.shape) != tuple(shape):
        raise ValueError(f"{name}: integers of shape {list(q_NK.shape)} for a weight of shape {list(shape)}")
    return {
        f"{name}.weight_packed": pack_int4(q_NK),
        f"{name}.weight_scale": stored_scale(scale_NG).contiguous(),
        f"{name}.weight_shape": torch.tensor(list(shape), dtype=torch.int64),
    }


def unpack_state(tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Inverse of `pack_state`: (q int8 [N, K], scale [N, G]) of layer `name`.

    Raises ValueError that names the tensor which is missing or does not fit the others.
    """
    packed, scale, shape = (
        _take(tensors, f"{name}.{part}") for part in ("weight_packed", "weight_scale", "weight_shape")
    )
    if f"{name}.weight_zero_point" in tensors:
        raise ValueError(f"{name}.weight_zero_point: asymmetric quantization is not supported")
    if shape.numel() != 2:
        raise ValueError(f"{name}.weight_shape holds {shape.tolist()}, not (out, in)")
    rows, num_inputs = (int(size) for size in shape)
    if packed.dtype != torch.int32 or tuple(packed.shape) != (rows, packed_width(num_inputs)):
        raise ValueError(
            f"{name}.weight_packed is {packed.dtype} {list(packed.shape)}, "
            f"a weight of shape {[rows, num_inputs]} needs int32 {[rows, packed_width(num_inputs)]}"
        )
    if scale.dim() != 2 or scale.shape[0] != rows or scale.shape[1] < 1 or num_inputs % scale.shape[1]:
        raise ValueError(
            f"{name}.weight_scale of shape {list(scale.shape)} does not fit a weight of {[rows, num_inputs]}"
        )
    return unpack_int4(packed, num_inputs), scale


def _take(tensors: Mapping[str, Tensor], key: str) -> Tensor:
    if key not in tensors:
        raise ValueError(f"the checkpoint has no tensor {key}; a shard may be missing")
    return tensors[key]
