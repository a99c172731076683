"""Linear layers with quantized weights: one that trains through the rounding, one that is packed.

N output features, K input features, G groups of g inputs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twofold.ops.integers import dequantize, pack_integers, packed_width, unpack_integers
from twofold.ops.rounding import inside_grid, round_to_grid, scale_gradient
from twofold.quant.rounding import SMALLEST_SCALE, Grid, quantize, stored_grid, stored_scale
from twofold.quant.scheme import QuantScheme


def _stored_in_training(scale_NG: Tensor) -> Tensor:
    """A scale as a checkpoint will hold it; frozen ones are so already."""
    return scale_NG.to(torch.bfloat16).clamp_min(SMALLEST_SCALE)


class _RoundThrough(torch.autograd.Function):
    """Q(W) forward; backward the gradients that `FakeQuantLinear` states, of W and of a scale that asks for one."""

    @staticmethod
    def forward(
        ctx: Any,
        weight_NK: Tensor,
        scale_NG: Tensor,
        zero_NG: Tensor | None,
        scheme: QuantScheme,
        dtype: torch.dtype,
        clip_gradient: bool,
    ) -> Tensor:
        ctx.scheme, ctx.clip_gradient, ctx.weight_dtype = scheme, clip_gradient, weight_NK.dtype
        if clip_gradient or ctx.needs_input_grad[1]:
            # Inputs only, so that this takes no memory; the steps are computed again.
            ctx.save_for_backward(weight_NK, scale_NG, zero_NG)
        return round_to_grid(weight_NK, _stored_in_training(scale_NG), zero_NG, scheme.qmin, scheme.qmax, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        grad_NK, grad_scale = grads[0].to(ctx.weight_dtype), None
        if ctx.clip_gradient or ctx.needs_input_grad[1]:
            weight_NK, scale_NG, zero_NG = ctx.saved_tensors
            grid = weight_NK, _stored_in_training(scale_NG), zero_NG, ctx.scheme.qmin, ctx.scheme.qmax
            if ctx.needs_input_grad[1]:
                grad_scale = scale_gradient(*grid, grads[0]).to(scale_NG.dtype)
            if ctx.clip_gradient:
                grad_NK = grad_NK * inside_grid(*grid)
        return grad_NK, grad_scale, None, None, None, None


class FakeQuantLinear(nn.Module):
    """y = Q(W) x + b with Q(W) = (q - zero) * s, q = clamp(round(W / s + zero), qmin, qmax); W trains.

    Straight-through estimator: dL/dW = dL/dQ(W). With `clip_gradient` it is zero where W is clipped, that is where
    round(W / s + zero) lies outside [qmin, qmax]; without it, as in quantization-aware distillation
    (arXiv:2607.04244), clipped weights keep their gradient and may come back. W is float32 (or float64); Q(W) is
    rounded to the dtype of x. Zero points never train.

    Frozen scales (the default) are the buffer `scale`, bfloat16, and never change. With `learn_scale`, `scale` is a
    float32 parameter, s its rounding to bfloat16 and no less than the smallest normal number; that rounding has
    gradient 1, and s the gradient of LSQ (arXiv:1902.08153), summed over the group without LSQ's rescaling by
    1 / sqrt(g * qmax): give scales a learning rate of their own.

        dL/ds[n, j] = sum_{k in group j} dL/dQ[n, k] * (q - zero - W[n, k] / s   where not clipped,
                                                        q - zero                 where clipped)
    """

    scale: Tensor
    zero: Tensor | None

    def __init__(
        self,
        weight_NK: Tensor,
        grid: Grid,
        scheme: QuantScheme,
        bias_N: Tensor | None = None,
        *,
        clip_gradient: bool = False,
        learn_scale: bool = False,
    ) -> None:
        super().__init__()
        scale_NG, zero_NG = stored_grid(grid, weight_NK.shape, scheme)
        self.out_features, self.in_features = weight_NK.shape
        self.scheme = scheme
        self.clip_gradient, self.learn_scale = clip_gradient, learn_scale
        master = torch.promote_types(weight_NK.dtype, torch.float32)
        self.weight = nn.Parameter(weight_NK.detach().to(master, copy=True))
        self.bias = None if bias_N is None else nn.Parameter(bias_N.detach().clone())
        if learn_scale:
            self.scale = nn.Parameter(scale_NG.to(torch.float32))
        else:
            self.register_buffer("scale", scale_NG.detach().clone())
        self.register_buffer("zero", None if zero_NG is None else zero_NG.clone())

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        grid: Grid,
        scheme: QuantScheme,
        *,
        clip_gradient: bool = False,
        learn_scale: bool = False,
    ) -> "FakeQuantLinear":
        """Take over the weight and bias of `linear` as master copies."""
        return cls(linear.weight, grid, scheme, linear.bias, clip_gradient=clip_gradient, learn_scale=learn_scale)

    @property
    def grid(self) -> Grid:
        """The grid in use, as it is stored."""
        scale_NG = self.scale.detach()
        return Grid(_stored_in_training(scale_NG) if self.learn_scale else stored_scale(scale_NG), self.zero)

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """Q(W) in `dtype`, [N, K], differentiable in W and in learned scales by the straight-through estimator."""
        return _RoundThrough.apply(self.weight, self.scale, self.zero, self.scheme, dtype, self.clip_gradient)

    def forward(self, x: Tensor) -> Tensor:
        cast = torch.is_autocast_enabled(x.device.type)  # rounded to what the product takes, not cast once more
        dtype = torch.get_autocast_dtype(x.device.type) if cast else x.dtype
        return F.linear(x, self.dense_weight(dtype), self.bias)

    def extra_repr(self) -> str:
        return _describe(self.in_features, self.out_features, self.scheme)


class PackedLinear(nn.Module):
    """y = ((q - zero) * scale) x + b, packed; bit-equal to F.linear with the dequantized weight in x's dtype.

    The state dict has the names of the checkpoint format: weight_packed int32 [N, ceil(K * bits / 32)], weight_scale
    bfloat16 [N, G], weight_shape int64 [2] = (N, K), and when asymmetric weight_zero_point int32
    [ceil(N * bits / 32), G], whose words hold the zero points of outputs that follow each other. Without
    `cache_dtype` the weight is dequantized at every call: least memory. With it, a dense copy in that dtype is kept
    (outside the state dict) and x must have it: on a CPU, a dense GEMM wins at several rows.
    """

    weight_packed: Tensor
    weight_scale: Tensor
    weight_shape: Tensor
    weight_zero_point: Tensor | None
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
        words = torch.zeros(out_features, packed_width(in_features, scheme.bits), dtype=torch.int32)
        scale = torch.ones(out_features, scheme.num_groups(in_features), dtype=torch.bfloat16)
        zero_point = None
        if not scheme.symmetric:
            zero_point = torch.zeros(packed_width(out_features, scheme.bits), scale.shape[1], dtype=torch.int32)
        self.register_buffer("weight_packed", words)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("weight_shape", torch.tensor([out_features, in_features]))
        self.register_buffer("weight_zero_point", zero_point)
        self.register_buffer("weight_dense", None, persistent=False)
        self.bias = nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias else None
        self.register_load_state_dict_post_hook(lambda module, _: module._fill_cache())

    @classmethod
    def from_integers(
        cls,
        q_NK: Tensor,
        grid: Grid,
        scheme: QuantScheme,
        bias_N: Tensor | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> "PackedLinear":
        """Pack q int8 [N, K] on its grid; ValueError unless integers and grid fit `scheme` and can be stored."""
        scale_NG, zero_NG = stored_grid(grid, q_NK.shape, scheme)
        rows, num_inputs = q_NK.shape
        packed = cls(num_inputs, rows, scheme, cache_dtype=cache_dtype)
        packed.weight_packed = pack_integers(q_NK, scheme.bits)
        packed.weight_scale = scale_NG.detach().clone()
        packed.weight_shape = packed.weight_shape.to(q_NK.device)
        if zero_NG is not None:
            packed.weight_zero_point = pack_integers(zero_NG.T, scheme.bits).T.contiguous()
        if bias_N is not None:
            packed.bias = nn.Parameter(bias_N.detach().clone(), requires_grad=False)
        packed._fill_cache()
        return packed

    @classmethod
    def from_fake(cls, fake: FakeQuantLinear, cache_dtype: torch.dtype | None = None) -> "PackedLinear":
        """The layer that `fake` was trained to be: the same weights, bit for bit."""
        q_NK = quantize(fake.weight, fake.grid, fake.scheme)
        return cls.from_integers(q_NK, fake.grid, fake.scheme, fake.bias, cache_dtype)

    @property
    def grid(self) -> Grid:
        if self.weight_zero_point is None:
            return Grid(self.weight_scale)
        zero_GN = unpack_integers(self.weight_zero_point.T, self.out_features, self.scheme.bits)
        return Grid(self.weight_scale, zero_GN.T.contiguous())

    def integers(self) -> Tensor:
        """q, int8 [N, K]."""
        return unpack_integers(self.weight_packed, self.in_features, self.scheme.bits)

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """(q - zero) * scale in `dtype`, [N, K]."""
        return dequantize(self.integers(), *self.grid, self.scheme.group_length(self.in_features), dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.cache_dtype is None:
            return F.linear(x, self.dense_weight(x.dtype), self.bias)
        assert self.weight_dense is not None, "load a state dict or use from_integers before the first call"
        if x.dtype != self.weight_dense.dtype:
            raise ValueError(f"packed for {self.weight_dense.dtype} but called with {x.dtype}; set cache_dtype to it")
        return F.linear(x, self.weight_dense, self.bias)

    def extra_repr(self) -> str:
        return _describe(self.in_features, self.out_features, self.scheme)

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


def _describe(in_features: int, out_features: int, scheme: QuantScheme) -> str:
    kind = "" if scheme.symmetric else ", asymmetric"
    return f"{in_features}, {out_features}, bits={scheme.bits}, group_size={scheme.group_size}{kind}"
