"""Linear layers with quantized weights: one that trains through the rounding, one that is packed.

N output features, K input features, G groups of g inputs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twofold.ops.int4 import QMAX, QMIN, dequantize, pack_int4, packed_width, unpack_int4
from twofold.quant.rounding import quantize, stored_scale
from twofold.quant.scheme import QuantScheme


class _StraightThrough(torch.autograd.Function):
    """Q(W) forward; backward passes the gradient as it is, or only where W was not clipped."""

    @staticmethod
    def forward(
        ctx: Any, weight_NK: Tensor, scale_NG: Tensor, group: int, dtype: torch.dtype, clip_gradient: bool
    ) -> Tensor:
        step = scale_NG.to(weight_NK.dtype).unsqueeze(-1)
        q_NGg = (weight_NK.unflatten(1, (-1, group)) / step).round_()
        if clip_gradient:
            ctx.save_for_backward(((q_NGg >= QMIN) & (q_NGg <= QMAX)).flatten(1))
        ctx.clip_gradient, ctx.weight_dtype = clip_gradient, weight_NK.dtype
        return q_NGg.clamp_(QMIN, QMAX).mul_(step).flatten(1).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad_NK = grads[0].to(ctx.weight_dtype)
        if ctx.clip_gradient:
            grad_NK = grad_NK * ctx.saved_tensors[0]
        return grad_NK, None, None, None, None


class FakeQuantLinear(nn.Module):
    """y = Q(W) x + b with Q(W) = scale * clamp(round(W / scale), -8, 7); W trains, the scales are frozen.

    Straight-through estimator: dL/dW = dL/dQ(W). With `clip_gradient` it is zero where round(W / scale) lies
    outside [-8, 7]; without it, as in quantization-aware distillation (arXiv:2607.04244), clipped weights
    keep their gradient and may come back. W is float32 (or float64); Q(W) is rounded to the dtype of x.
    """

    scale: Tensor

    def __init__(
        self,
        weight_NK: Tensor,
        scale_NG: Tensor,
        scheme: QuantScheme,
        bias_N: Tensor | None = None,
        clip_gradient: bool = False,
    ) -> None:
        super().__init__()
        scheme.validate("weight", weight_NK.shape)
        self.out_features, self.in_features = weight_NK.shape
        if tuple(scale_NG.shape) != (self.out_features, scheme.num_groups(self.in_features)):
            raise ValueError(f"scales {list(scale_NG.shape)} do not fit a weight {list(weight_NK.shape)}")
        self.scheme = scheme
        self.clip_gradient = clip_gradient
        master = torch.promote_types(weight_NK.dtype, torch.float32)
        self.weight = nn.Parameter(weight_NK.detach().to(master, copy=True))
        self.bias = None if bias_N is None else nn.Parameter(bias_N.detach().clone())
        self.register_buffer("scale", stored_scale(scale_NG.detach()).clone())

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, scale_NG: Tensor, scheme: QuantScheme, clip_gradient: bool = False
    ) -> "FakeQuantLinear":
        """Take over the weight and bias of `linear` as master copies."""
        return cls(linear.weight, scale_NG, scheme, linear.bias, clip_gradient)

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """Q(W) in `dtype`, [N, K], differentiable in W by the straight-through estimator."""
        group = self.scheme.group_length(self.in_features)
        return _StraightThrough.apply(self.weight, self.scale, group, dtype, self.clip_gradient)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dense_weight(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, group_size={self.scheme.group_size}"


class PackedLinear(nn.Module):
    """y = (scale * q) x + b from packed INT4; bit-equal to F.linear with the dequantized weight in x's dtype.

    The state dict has the names of the checkpoint format: weight_packed, weight_scale, weight_shape. Without
    `cache_dtype` the weight is dequantized at every call: least memory. With it, a dense copy in that dtype
    is kept (outside the state dict) and x must have it: on a CPU, a dense GEMM wins at several rows.
    """

    weight_packed: Tensor
    weight_scale: Tensor
    weight_shape: Tensor
    weight_dense: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: QuantScheme,
        bias: bool = False,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        scheme.validate("weight", (out_features, in_features))
        self.in_features, self.out_features = in_features, out_features
        self.scheme = scheme
        self.cache_dtype = cache_dtype
        words = torch.zeros(out_features, packed_width(in_features), dtype=torch.int32)
        scale = torch.ones(out_features, scheme.num_groups(in_features), dtype=torch.bfloat16)
        self.register_buffer("weight_packed", words)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("weight_shape", torch.tensor([out_features, in_features]))
        self.register_buffer("weight_dense", None, persistent=False)
        self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias else None
        self.register_load_state_dict_post_hook(lambda module, _: module._fill_cache())

    @classmethod
    def from_integers(
        cls,
        q_NK: Tensor,
        scale_NG: Tensor,
        scheme: QuantScheme,
        bias_N: Tensor | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> "PackedLinear":
        """Pack q int8 [N, K] with scales [N, G]; ValueError unless the scales fit and are bfloat16 values."""
        rows, num_inputs = q_NK.shape
        packed = cls(num_inputs, rows, scheme, cache_dtype=cache_dtype)
        if scale_NG.shape != packed.weight_scale.shape:
            raise ValueError(f"scales {list(scale_NG.shape)} do not fit a weight {list(q_NK.shape)}")
        packed.weight_packed = pack_int4(q_NK)
        packed.weight_scale = stored_scale(scale_NG.detach()).clone()
        packed.weight_shape = packed.weight_shape.to(q_NK.device)
        if bias_N is not None:
            packed.bias = nn.Parameter(bias_N.detach().clone(), requires_grad=False)
        packed._fill_cache()
        return packed

    @classmethod
    def from_fake(cls, fake: FakeQuantLinear, cache_dtype: torch.dtype | None = None) -> "PackedLinear":
        """The layer that `fake` was trained to be: the same weights, bit for bit."""
        q_NK = quantize(fake.weight, fake.scale, fake.scheme)
        return cls.from_integers(q_NK, fake.scale, fake.scheme, fake.bias, cache_dtype)

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """scale * q in `dtype`, [N, K]."""
        q_NK = unpack_int4(self.weight_packed, self.in_features)
        return dequantize(q_NK, self.weight_scale, self.scheme.group_length(self.in_features), dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.cache_dtype is None:
            return F.linear(x, self.dense_weight(x.dtype), self.bias)
        assert self.weight_dense is not None, "load a state dict or use from_integers before the first call"
        if x.dtype != self.weight_dense.dtype:
            raise ValueError(f"packed for {self.weight_dense.dtype} but called with {x.dtype}; set cache_dtype to it")
        return F.linear(x, self.weight_dense, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, group_size={self.scheme.group_size}"

    def _fill_cache(self) -> None:
        if self.cache_dtype is not None:
            self.weight_dense = self.dense_weight(self.cache_dtype)


def replace_linears(module: nn.Module, names: Iterable[str], make: Callable[[str, nn.Linear], nn.Module]) -> None:
    """Put `make(name, linear)` in the place of each nn.Linear of `module` that `names` lists by dotted name.

    Raises ValueError for a name that is not there or is no nn.Linear, before anything is replaced.
    """
    wanted = list(dict.fromkeys(names))
    found = dict(module.named_modules(remove_duplicate=False))
    linears: dict[str, nn.Linear] = {}
    for name in wanted:
        layer = found.get(name) if name else None
        if layer is None:
            raise ValueError(f"the model has no layer named {name!r}")
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{name} is a {type(layer).__name__}, not a Linear; leave it out")
        linears[name] = layer
    for name, linear in linears.items():
        _set_submodule(module, name, make(name, linear))


def pack_linears(module: nn.Module, cache_dtype: torch.dtype | None = None) -> list[str]:
    """Replace every FakeQuantLinear inside `module` by its PackedLinear; returns their names."""
    fakes = {name: layer for name, layer in module.named_modules() if isinstance(layer, FakeQuantLinear)}
    for name, fake in fakes.items():
        _set_submodule(module, name, PackedLinear.from_fake(fake, cache_dtype))
    return list(fakes)


def _set_submodule(module: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, layer)
