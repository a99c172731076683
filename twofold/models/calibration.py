"""Post-training quantization of the target on calibration text, one layer at a time.

The hidden states of all calibration rows stand before layer i; the layer is observed, quantized and left behind.
So a layer costs a few passes over itself, and no more of the network than that layer is at work at once.

N rows, T tokens, D hidden size; a linear layer has K inputs; what makes them has P channels.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from twofold.models.causal_lm import CausalLM
from twofold.models.layers import RMSNorm
from twofold.models.smoothing import InputGroup, fold, input_groups, linear_at
from twofold.quant.awq import InputStatistics, choose_scale, fold_into_norm, smoothing_scales
from twofold.quant.gptq import even_scales, gptq, hessian_error
from twofold.quant.linear import PackedLinear
from twofold.quant.rounding import Grid, quantize, search_grid
from twofold.quant.scheme import QuantScheme


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """How the target is quantized before it is healed.

    rtn: rounding to nearest on the searched grid, which does not look at the text. gptq: rounding column by column
    with compensation (`damping` is its share of the mean diagonal), `even` on inputs scaled first (`even_scales`). awq:
    inputs scaled first, then rounded to nearest. `max_fallbacks` is the share of layers that gptq may merely round
    where H could not be factorized. `batch_rows` rows go through a layer at once.

    `head` quantizes the output head too: by gptq, or where the method is rtn to nearest; awq would change what the
    head's input means to a drafter. A tied embedding stays as it is.

    For stage quantize: `rows` rows of 512 tokens of the original's answers are the calibration text; `checkpoint` is a
    compressed-tensors folder of the same model whose grids are taken instead of new ones.
    """

    method: Literal["rtn", "gptq", "awq"] = "rtn"
    bits: int = 4
    group_size: int = 32
    symmetric: bool = True
    damping: float = 0.01
    even: bool = False
    max_fallbacks: float = 0.0
    batch_rows: int = 8
    rows: int = 64
    head: QuantScheme | None = None
    checkpoint: Path | None = None

    def __post_init__(self) -> None:
        if self.method not in ("rtn", "gptq", "awq"):
            raise ValueError(f"method {self.method!r} is not known; use 'rtn', 'gptq' or 'awq'")
        if min(self.batch_rows, self.rows) < 1:
            raise ValueError(f"batch_rows = {self.batch_rows}, rows = {self.rows}: each is 1 or more")
        if self.even and self.method != "gptq":
            raise ValueError(f'even = true is for method = "gptq", not "{self.method}"; leave it out')
        _ = self.scheme  # has checks of its own
        ignored = [f.name for f in fields(self) if f.name != "checkpoint" and getattr(self, f.name) != f.default]
        if self.checkpoint is not None and ignored:
            raise ValueError(f"checkpoint takes its grids as they are; leave out {', '.join(ignored)}")

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(bits=self.bits, group_size=self.group_size, symmetric=self.symmetric)


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """How a linear layer came out, D being what was added to its weight W by rounding.

    `weight_error` = |D| / |W| (Frobenius), `output_error` = tr(D H D^T) / tr(W H W^T), with H of the inputs that
    `quantize_target` saw; for awq, W and the inputs are the scaled ones. `damping` is what gptq used, `alpha` what awq
    chose, None elsewhere. `fallback`: gptq merely rounded it to nearest.
    """

    name: str
    method: str
    weight_error: float
    output_error: float
    damping: float | None = None
    alpha: float | None = None
    fallback: bool = False


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Reports in computing order, and the scales that were folded: name of the producer -> s, float64 [P]."""

    layers: list[LayerReport]
    smoothing: dict[str, Tensor]


@torch.no_grad()
def quantize_target(
    model: CausalLM,
    token_ids_NT: Tensor,
    positions_NT: Tensor,
    used_NT: Tensor,
    config: QuantizeConfig,
    report: Callable[[int, int, str], None],
) -> Calibration:
    """Replaces the linear layers of `model` (see `packable_linears`) by packed ones, in place; the head if asked.

    The rows are packed documents, as `CausalLM.forward` takes them; only tokens in `used` are counted. A layer's
    inputs are the outputs of the quantized layers before it: as in GPTQ's paper, since those are what it will see in
    use. Inside a layer, gptq takes group after group, each on what the quantized ones before it make. Rounding to
    nearest compensates nothing, so for rtn and awq one pass through the layer, still dense inside, serves all groups.

    To train from the result: a layer's frozen grid is `PackedLinear.grid`. Master weights on it are either the
    rounded ones, `PackedLinear.dense_weight`, or the original ones, after `apply_smoothing(original, smoothing)`
    where awq was used; dense layers and norms of that model are then those of this one. For rtn and awq both starts
    compute the same; for gptq only the rounded ones are what gptq made, the original ones on its grid are rounded to
    nearest.

    ValueError, before any work, for a layer whose width the group size does not divide; and when more than
    `max_fallbacks` of the layers were merely rounded. The model is half done after an error.
    """
    assert model.norm.frozen is None, "a frozen model would not notice that its weights change"
    groups = [input_groups(model.config, i) for i in range(model.config.num_layers)]
    names = [name for layer in groups for group in layer for name in group.quantized]
    for name in names:
        config.scheme.validate(name, linear_at(model, name).weight.shape)
    if config.head is not None:
        names.append("lm_head")
        config.head.validate("lm_head", linear_at(model, "lm_head").weight.shape)
    rows = _Rows(model, token_ids_NT, positions_NT, used_NT, config.batch_rows)
    reports: list[LayerReport] = []
    smoothing: dict[str, Tensor] = {}
    for i, layer in enumerate(model.layers):
        if config.even:
            for group, inputs in zip(groups[i], rows.observe(layer, groups[i]), strict=True):
                smoothing[group.producer] = _even_out(model, group, _hessian(group, inputs), config.damping)
        hessians: dict[str, Tensor] = {}
        alphas: dict[str, float] = {}
        if config.method != "gptq":
            for group, inputs in zip(groups[i], rows.observe(layer, groups[i]), strict=True):
                hessians[group.producer] = _hessian(group, inputs)
                if config.method == "awq":
                    scale_P, alphas[group.producer] = _smooth(model, group, inputs, config.scheme)
                    smoothing[group.producer] = scale_P
                    scale_K = scale_P[group.owner_K].to(hessians[group.producer])
                    hessians[group.producer] /= scale_K[:, None] * scale_K
        for group in groups[i]:
            if config.method == "gptq":
                hessians[group.producer] = _hessian(group, rows.observe(layer, [group])[0])
            how = config.method, config.scheme, config.damping, alphas.get(group.producer)
            for made in _quantize(model, group, hessians[group.producer], *how):
                reports.append(made)
                report(len(reports), len(names), f"{made.name}, output error {made.output_error:.2g}")
            check_fallbacks(reports, len(names), config.max_fallbacks)
        if i + 1 < len(model.layers) or config.head is not None:
            rows.advance(layer)
    if config.head is not None:
        group = InputGroup("norm", ("lm_head",), (), torch.arange(model.config.hidden_size))
        method: Literal["rtn", "gptq"] = "rtn" if config.method == "rtn" else "gptq"
        hessian_DD = _hessian(group, rows.observe_head())
        reports += _quantize(model, group, hessian_DD, method, config.head, config.damping, None)
        report(len(reports), len(names), f"lm_head, output error {reports[-1].output_error:.2g}")
        check_fallbacks(reports, len(names), config.max_fallbacks)
    return Calibration(layers=reports, smoothing=smoothing)


class _Rows:
    """The calibration rows as they stand before a layer, in batches."""

    def __init__(
        self, model: CausalLM, token_ids_NT: Tensor, positions_NT: Tensor, used_NT: Tensor, batch_rows: int
    ) -> None:
        if not bool(used_NT.any()):
            raise ValueError("there is no calibration token; give more or longer samples")
        self._model = model
        self._batches = [
            tuple(part.to(model.device) for part in parts)
            for parts in zip(*(x.split(batch_rows) for x in (token_ids_NT, positions_NT, used_NT)), strict=True)
        ]
        self._hidden = [model.embed_tokens(token_ids) for token_ids, _, _ in self._batches]
        self._used_BT = used_NT[:0]  # of the batch that is in the layer

    def observe(self, layer: nn.Module, groups: Sequence[InputGroup]) -> list[InputStatistics]:
        """One pass through the layer: what the groups get to see, padding left out."""
        observed = []
        handles = []
        for group in groups:
            linear = linear_at(self._model, group.quantized[0])
            inputs = InputStatistics(linear.weight)
            observed.append(inputs)

            def count(_: nn.Module, given: tuple[Any, ...], inputs: InputStatistics = inputs) -> None:
                inputs.add(given[0][self._used_BT])

            handles.append(linear.register_forward_pre_hook(count))
        try:
            for _ in self._outputs(layer):
                pass
        finally:
            for handle in handles:
                handle.remove()
        return observed

    def observe_head(self) -> InputStatistics:
        """What the head gets to see, once the rows stand behind the last layer."""
        inputs = InputStatistics(linear_at(self._model, "lm_head").weight)
        for x_BTD, (_, _, used_BT) in zip(self._hidden, self._batches, strict=True):
            inputs.add(self._model.norm(x_BTD[used_BT]))
        return inputs

    def advance(self, layer: nn.Module) -> None:
        """To stand behind the layer."""
        for i, x_BTD in enumerate(self._outputs(layer)):
            self._hidden[i] = x_BTD

    def _outputs(self, layer: nn.Module) -> Iterator[Tensor]:
        for x_BTD, (token_ids_BT, positions_BT, used_BT) in zip(self._hidden, self._batches, strict=True):
            self._used_BT = used_BT
            yield layer(x_BTD, self._model.place(token_ids_BT, positions_BT, None), None)


def _hessian(group: InputGroup, inputs: InputStatistics) -> Tensor:
    hessian_KK = inputs.hessian()
    if not bool(torch.isfinite(hessian_KK).all()):
        raise ValueError(
            f"{group.quantized[0]}: its inputs have NaN or infinity on the calibration text; "
            "check the checkpoint, or use a wider dtype"
        )
    return hessian_KK


def _smooth(model: CausalLM, group: InputGroup, inputs: InputStatistics, scheme: QuantScheme) -> tuple[Tensor, float]:
    """Chooses and folds the scales of a group; returns them and the exponent."""
    hessian_KK = _hessian(group, inputs)
    scales_AP = smoothing_scales(inputs.magnitude(group.owner_K))
    alphas = torch.linspace(0, 1, len(scales_AP)).tolist()
    producer = model.get_submodule(group.producer)
    if isinstance(producer, RMSNorm):  # compare what will be stored
        weight_P = producer.weight.cpu()
        scales_AP = torch.stack([fold_into_norm(weight_P, s, producer.offset)[1] for s in scales_AP])
    weights = [linear_at(model, name).weight.to(hessian_KK.dtype) for name in group.quantized]
    best = choose_scale(weights, [hessian_KK] * len(weights), scales_AP[:, group.owner_K].to(hessian_KK), scheme)
    return fold(model, group, scales_AP[best]), alphas[best]


def _even_out(model: CausalLM, group: InputGroup, hessian_KK: Tensor, damping: float) -> Tensor:
    """Folds the `even_scales` of a group, of a channel the geometric mean of those of its inputs; returns them."""
    weight_NK = torch.cat([linear_at(model, name).weight.detach() for name in group.quantized])
    log_K = even_scales(weight_NK, hessian_KK, damping).log().cpu()
    count_P = torch.bincount(group.owner_K)
    log_P = torch.bincount(group.owner_K, log_K) / count_P
    return fold(model, group, log_P.exp())


def _quantize(
    model: CausalLM,
    group: InputGroup,
    hessian_KK: Tensor,
    method: Literal["rtn", "gptq", "awq"],
    scheme: QuantScheme,
    damping: float,
    alpha: float | None,
) -> list[LayerReport]:
    """Packs the layers of a group in their places. Rows are rounded independently, so one matrix holds them all."""
    linears = [linear_at(model, name) for name in group.quantized]
    weight_NK = torch.cat([linear.weight.detach() for linear in linears])
    used_damping, fallback = None, False
    if method == "gptq":
        q_NK, grid, rounding = gptq(weight_NK, hessian_KK, scheme, damping)
        used_damping, fallback = rounding.damping, rounding.rounded_to_nearest
    else:
        grid = search_grid(weight_NK, scheme, hessian_KK.diagonal() if method == "awq" else None)
        q_NK = quantize(weight_NK, grid, scheme)
    reports, first = [], 0
    for name, linear in zip(group.quantized, linears, strict=True):
        rows = slice(first, first := first + linear.out_features)
        own = Grid(grid.scale_NG[rows], None if grid.zero_NG is None else grid.zero_NG[rows])
        packed = PackedLinear.from_integers(q_NK[rows], own, scheme, linear.bias)
        model.set_submodule(name, packed)
        weight_error, output_error = rounding_errors(linear.weight.detach(), packed, hessian_KK)
        made = LayerReport(
            name=name,
            method=method,
            weight_error=weight_error,
            output_error=output_error,
            damping=used_damping,
            alpha=alpha,
            fallback=fallback,
        )
        reports.append(made)
    return reports


def rounding_errors(weight_NK: Tensor, packed: PackedLinear, hessian_KK: Tensor) -> tuple[float, float]:
    """`weight_error` and `output_error` of a `LayerReport`; 0 where there is nothing to err from."""
    wide_NK = weight_NK.to(hessian_KK.dtype)
    added_NK = packed.dense_weight(hessian_KK.dtype) - wide_NK
    norm, energy = float(wide_NK.norm()), hessian_error(wide_NK, hessian_KK)
    return (
        float(added_NK.norm()) / norm if norm > 0 else 0.0,
        hessian_error(added_NK, hessian_KK) / energy if energy > 0 else 0.0,
    )


def check_fallbacks(reports: Sequence[LayerReport], num_layers: int, max_fallbacks: float) -> None:
    """ValueError when more than that share of the layers was merely rounded."""
    fallbacks = [report.name for report in reports if report.fallback]
    if len(fallbacks) > max_fallbacks * num_layers:
        raise ValueError(
            f"GPTQ fell back to round-to-nearest for {len(fallbacks)} of {num_layers} layers, {fallbacks[0]} first, "
            f"where max_fallbacks = {max_fallbacks} allows {int(max_fallbacks * num_layers)}; "
            "use more calibration rows or more damping"
        )
