"""Weights of 4, 8 or 16 bits in the order in which tensor cores take them, and products with few rows.

M rows, N outputs, K inputs, G groups of g inputs. The matrix that a `PackedWeight` stands for is

    w[n, k] = (q[n, k] - zero[n, k // g]) * scale[n, k // g]        (4 bits; 8 bits without zero points)

or, at 16 bits, a bfloat16 matrix as it is.

Layout. The operand A of `mma.m16n8k16` wants, in lane 4 i + t, of a tile of 16 outputs the outputs i and i + 8, each
at four inputs. Which inputs is free as long as x is read in the same order; a step of 64 inputs is dealt out so that
lane t has for j < 4, c < 4

    k(t, j, c) = 32 (j // 2) + 8 t + 4 (j % 2) + c

and reads x in runs of 16 bytes. Of 4-bit numbers a lane's 32 are four words, one for each j, whose nibbles p and p + 4
(value q + 8) are the operand's register p: (output i, c 0 1), (i + 8, c 0 1), (i, c 2 3), (i + 8, c 2 3). So 16 bytes
of a lane feed four products. 8-bit numbers are two such planes, q = 16 h + l with h = q >> 4 first. At 16 bits a lane
has four registers for each j. `words` is int32 [tiles, steps, planes, 32 lanes, 4].

`scales` is int32 [tiles, scale steps, 8, words]: for i, and for each group inside a step of 64 (two if g = 32), the
bfloat16 pair (scale of output i, of i + 8); then, with zero points, the pairs -(136 + zero).

`gated` weights are [gate; up] and tiles take 8 outputs of each, so that silu(gate) * up needs no second pass.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.ops.norms import silu_mul

STEP = 64


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    words: Tensor
    scales: Tensor | None
    bits: int
    group_size: int  # 0 at 16 bits
    asymmetric: bool
    num_outputs: int
    num_inputs: int
    gated: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.words, self.scales) if x is not None)

    @property
    def out_features(self) -> int:
        """Width of `packed_linear`'s result."""
        return self.num_outputs // 2 if self.gated else self.num_outputs


def pack_w4(
    q_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, group_size: int, gated: bool = False
) -> PackedWeight:
    """From int8 q and zero in [-8, 7] and bfloat16 scales.

    Raises ValueError where the sizes do not fit: K a multiple of 64 and of the group, the group 32 or a multiple of 64,
    N of 8 (16 if gated).
    """
    _check(q_NK, gated)
    groups = _groups(q_NK, scale_NG, group_size)
    if q_NK.numel() and not -8 <= int(q_NK.min()) <= int(q_NK.max()) <= 7:
        raise ValueError("4 bits hold values in [-8, 7]; quantize with 4 bits, or use pack_w8")
    pairs = [_pairs(scale_NG, gated)]
    if zero_NG is not None:
        pairs.append(_pairs((-136.0 - zero_NG.float()).to(torch.bfloat16), gated))
    return PackedWeight(
        words=_plane(q_NK.to(torch.int32) + 8, gated).unsqueeze(2),
        scales=_by_step(pairs, groups),
        bits=4,
        group_size=group_size,
        asymmetric=zero_NG is not None,
        num_outputs=q_NK.shape[0],
        num_inputs=q_NK.shape[1],
        gated=gated,
    )


def pack_w8(q_NK: Tensor, scale_NG: Tensor, group_size: int, gated: bool = False) -> PackedWeight:
    """From int8 q and bfloat16 scales; symmetric. ValueError as `pack_w4`."""
    _check(q_NK, gated)
    groups = _groups(q_NK, scale_NG, group_size)
    q = q_NK.to(torch.int32)
    planes = [_plane((q >> 4) + 8, gated), _plane(q & 15, gated)]
    return PackedWeight(
        words=torch.stack(planes, dim=2),
        scales=_by_step([_pairs(scale_NG, gated)], groups),
        bits=8,
        group_size=group_size,
        asymmetric=False,
        num_outputs=q_NK.shape[0],
        num_inputs=q_NK.shape[1],
        gated=gated,
    )


def pack_bf16(weight_NK: Tensor, gated: bool = False) -> PackedWeight:
    """A bfloat16 matrix in the same order; its product is exact up to the sums."""
    _check(weight_NK, gated)
    bits = weight_NK.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    half = _tiles(bits, gated)  # [tile, h, i, step, jh, t, jl, c]
    pair = half[..., 0::2] | half[..., 1::2] << 16  # [..., c pair]
    words = pair.permute(0, 3, 4, 6, 2, 5, 7, 1).flatten(2, 3).flatten(3, 4).flatten(4, 5)
    return PackedWeight(
        words=words.contiguous(),
        scales=None,
        bits=16,
        group_size=0,
        asymmetric=False,
        num_outputs=weight_NK.shape[0],
        num_inputs=weight_NK.shape[1],
        gated=gated,
    )


def unpack(weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """w [N, K], each number rounded once to `dtype`; the reference (`linear_cuda.unpack` for a large one)."""
    words = weight.words
    if weight.bits == 16:
        pairs = words.unflatten(4, (2, 2)).unflatten(3, (8, 4)).unflatten(2, (2, 2))
        pairs = pairs.permute(0, 7, 4, 1, 2, 5, 3, 6)  # [tile, h, i, step, jh, t, jl, c pair]
        halves = torch.stack((pairs, pairs >> 16), dim=-1).flatten(-2).to(torch.int16)
        return _rows(halves, weight).view(torch.bfloat16).to(dtype)
    planes = [_rows(_nibbles(words[:, :, plane]), weight) for plane in range(words.shape[2])]
    q = planes[0] - 8 if weight.bits == 4 else (planes[0] - 8) * 16 + planes[1]
    assert weight.scales is not None
    groups = 2 if weight.group_size == 32 else 1
    pairs = weight.scales.unflatten(3, (-1, groups))  # [tile, scale step, i, (scale, shift), group]
    halves = torch.stack((pairs, pairs >> 16), dim=1).to(torch.int16).view(torch.bfloat16).float()
    numbers = halves.permute(4, 0, 1, 3, 2, 5).flatten(4, 5)  # [(scale, shift), tile, h, i, G]
    scale_NG = _ungated(numbers[0].flatten(0, 2), weight)
    wide = torch.promote_types(dtype, torch.float32)
    q = q.to(wide).unflatten(1, (scale_NG.shape[1], -1))
    if weight.asymmetric:
        q = q + (136.0 + _ungated(numbers[1].flatten(0, 2), weight)).to(wide).unsqueeze(-1)
    return (q * scale_NG.to(wide).unsqueeze(-1)).flatten(1).to(dtype)


def packed_linear(
    x_MK: Tensor,
    weight: PackedWeight,
    *,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_MN: Tensor | None = None,
    tail: PackedWeight | None = None,
) -> Tensor:
    """y = f(x w^T) [M, N] in the dtype of x, sums in float32 at least; the reference of `linear_cuda.packed_linear`.

    With `norm_K` (offset included) x is x / rms(x) * norm. A gated weight gives silu(gate) * up [M, N / 2]. The
    residual is added before the one rounding. `tail` has more outputs of the same x, which stand behind the others.
    """
    wide = torch.promote_types(x_MK.dtype, torch.float32)
    x = x_MK.to(wide)
    if norm_K is not None:
        x = F.rms_norm(x, (x.shape[-1],), norm_K.to(wide), eps)
    y = x @ unpack(weight, wide).T
    if weight.gated:
        y = silu_mul(*y.chunk(2, dim=-1))
    if tail is not None:
        y = torch.cat((y, x @ unpack(tail, wide).T), dim=-1)
    if residual_MN is not None:
        y = y + residual_MN.to(wide)
    return y.to(x_MK.dtype)


def top1(
    x_MK: Tensor, weight: PackedWeight, *, norm_K: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(ids [M] int64, scores [M] float32): the largest of x w^T in each row, the lowest id among equals."""
    wide = torch.promote_types(x_MK.dtype, torch.float32)
    scores = packed_linear(x_MK.to(wide), weight, norm_K=norm_K, eps=eps)
    best = scores.max(dim=-1).values
    return (scores == best[:, None]).int().argmax(dim=-1), best.float()


def _check(weight_NK: Tensor, gated: bool) -> None:
    outputs, inputs = weight_NK.shape
    if inputs % STEP or outputs % (16 if gated else 8):
        raise ValueError(
            f"a packed weight has K a multiple of {STEP} and N of {16 if gated else 8}, got {outputs} x {inputs}; "
            "keep this layer dense"
        )


def _groups(q_NK: Tensor, scale_NG: Tensor, group_size: int) -> int:
    """Scale groups inside a step of 64 inputs."""
    outputs, inputs = q_NK.shape
    if group_size != 32 and (group_size <= 0 or group_size % STEP):
        raise ValueError(f"group size {group_size} is not served; use 32 or a multiple of {STEP}")
    if scale_NG.dtype != torch.bfloat16 or scale_NG.shape != (outputs, inputs // group_size) or inputs % group_size:
        raise ValueError(
            f"scales are {scale_NG.dtype} {list(scale_NG.shape)}; "
            f"{outputs} x {inputs} in groups of {group_size} needs bfloat16 [{outputs}, {inputs // group_size}]"
        )
    return 2 if group_size == 32 else 1


def _padded(x_NX: Tensor, gated: bool) -> Tensor:
    """Outputs in the order of the tiles, filled up to a whole one."""
    if gated:
        return x_NX.unflatten(0, (2, -1, 8)).transpose(0, 1).flatten(0, 2)
    return F.pad(x_NX, (0, 0, 0, -len(x_NX) % 16))


def _ungated(x_NX: Tensor, weight: PackedWeight) -> Tensor:
    """Inverse of `_padded`."""
    if weight.gated:
        return x_NX.unflatten(0, (-1, 2, 8)).transpose(0, 1).flatten(0, 2)
    return x_NX[: weight.num_outputs]


def _tiles(x_NK: Tensor, gated: bool) -> Tensor:
    """[tile, h, i, step, jh, t, jl, c]"""
    x = _padded(x_NK, gated)
    return x.view(x.shape[0] // 16, 2, 8, x.shape[1] // STEP, 2, 4, 2, 4)


def _rows(x: Tensor, weight: PackedWeight) -> Tensor:
    """[N, K] from [tile, h, i, step, jh, t, jl, c]."""
    return _ungated(x.reshape(x.shape[0] * 16, weight.num_inputs), weight)


def _plane(u_NK: Tensor, gated: bool) -> Tensor:
    """int32 [tile, step, lane, j] from numbers 0..15."""
    x = _tiles(u_NK, gated)
    words = torch.zeros((), dtype=torch.int32, device=x.device)
    for p, (h, c) in enumerate(((0, 0), (1, 0), (0, 2), (1, 2))):
        words = words | x[:, h, ..., c] << 4 * p | x[:, h, ..., c + 1] << 4 * p + 16
    return words.permute(0, 2, 1, 4, 3, 5).flatten(4, 5).flatten(2, 3).contiguous()  # [tile, step, (i, t), (jh, jl)]


def _nibbles(words: Tensor) -> Tensor:
    """[tile, h, i, step, jh, t, jl, c] of a plane."""
    x = words.unflatten(3, (2, 2)).unflatten(2, (8, 4)).permute(0, 2, 1, 4, 3, 5)  # [tile, i, step, jh, t, jl]
    shifts = [[4 * (h + (c & 2)) + 16 * (c & 1) for c in range(4)] for h in range(2)]
    return torch.stack([torch.stack([x >> s & 15 for s in row], dim=-1) for row in shifts], dim=1)


def _pairs(x_NG: Tensor, gated: bool) -> Tensor:
    """int32 [tile, G, i]: the bfloat16 of outputs i (low half) and i + 8."""
    bits = _padded(x_NG.view(torch.int16).to(torch.int32) & 0xFFFF, gated).unflatten(0, (-1, 2, 8))
    return (bits[:, 0] | bits[:, 1] << 16).transpose(1, 2)


def _by_step(pairs: list[Tensor], groups: int) -> Tensor:
    """int32 [tile, scale step, i, words] of pairs [tile, G, i]."""
    split = [x.unflatten(1, (-1, groups)) for x in pairs]
    return torch.cat(split, dim=2).transpose(2, 3).contiguous()
