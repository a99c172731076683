"""What stands in for parts of vLLM 0.32.0 that are missing or wrong on a CPU, each put in only where a probe says so.

- W4A16: vLLM's product for packed INT4 weights is built for AVX-512 alone. Ours multiplies in float32 by
  (q - zero) * scale, from the parameters as vLLM has loaded and joined them; registered as vLLM's own kernels are.
- Keys of the drafter's context: vLLM normalizes all layers' in one call of `rms_norm` with one row of weights a layer;
  its CPU kernel reads the first row only, so that every layer has layer 0's k_norm (on XPU: vllm-xpu-kernels#573,
  vllm#56431). Ours is one call a layer.
"""

from __future__ import annotations

import os

import torch
import vllm.model_executor.kernels.linear as linear
from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types


class PortableWNA16LinearKernel(linear.MPLinearKernel):
    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: linear.MPLinearLayerConfig) -> tuple[bool, str | None]:
        fits = c.weight_type in (scalar_types.uint4b8, scalar_types.uint4)
        return fits, None if fits else f"{c.weight_type} is not INT4"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        packed, scale_NG, zero_packed = self._get_weight_params(layer)
        q_NK = unpack_quantized_values_into_int32(packed, self.config.weight_type, packed.packed_dim)
        zero_NG = torch.full_like(scale_NG, 8, dtype=torch.int32)
        if self.config.zero_points:
            zero_NG = unpack_quantized_values_into_int32(zero_packed, self.config.weight_type, zero_packed.packed_dim)
        length = q_NK.shape[1] // scale_NG.shape[1]
        zero_NK, scale_NK = (t.repeat_interleave(length, dim=1) for t in (zero_NG, scale_NG.float()))
        layer.dense_NK = (q_NK - zero_NK) * scale_NK

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.nn.functional.linear(x.float(), layer.dense_NK)
        return (y if bias is None else y + bias.float()).to(x.dtype)


def _normalize_context_k(self: DFlashQwen3Model, all_k: torch.Tensor) -> torch.Tensor:
    normalized = torch.empty_like(all_k)
    for out, k, weight in zip(normalized, all_k, self._k_norm_weights, strict=True):
        ops.rms_norm(out, k.contiguous(), weight, self._rms_norm_eps)
    return normalized


def _first_row_only() -> bool:
    """Whether `rms_norm` with weights [[1...], [2...]] gives both rows the first's."""
    x = torch.ones(2, 1, 1, 64, dtype=torch.bfloat16)
    weight = torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16).expand(2, 64).contiguous()
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, 1e-6)
    return bool((out[1] < 1.5).all())


def put_in() -> list[str]:
    """Puts in what is needed on this machine; returns its names."""
    current_platform.import_kernels()
    found = []
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        os.environ["VLLM_DISABLED_KERNELS"] = "CPUWNA16LinearKernel"
        linear.register_linear_kernel(PortableWNA16LinearKernel, PlatformEnum.CPU, "mp")
        found.append("W4A16 product")
    if _first_row_only():
        DFlashQwen3Model._normalize_context_k = _normalize_context_k
        found.append("context k_norm")
    return found
