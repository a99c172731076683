"""GPTQ over a whole network, in the order in which its layers compute."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from twofold.quant.gptq import GptqReport, Hessian, gptq
from twofold.quant.linear import PackedLinear, replace_linears
from twofold.quant.scheme import QuantScheme


class _Counter(Protocol):
    def add(self, x_TK: Tensor, /) -> None: ...


Counted = TypeVar("Counted", bound=_Counter)


@torch.no_grad()
def gptq_in_order(
    network: nn.Module,
    groups: Sequence[Sequence[str]],
    run: Callable[[], object],
    scheme: QuantScheme,
    damping: float,
    report: Callable[[int, int, str], None],
) -> dict[str, GptqReport]:
    """Replaces the named linear layers by packed ones, group by group.

    `run` passes the calibration data through the network. A group sees the outputs of the groups before it as they
    are after quantization, so errors do not pile up unnoticed. ValueError, before any work, for a layer whose width
    the group size does not divide.
    """
    for name in (name for group in groups for name in group):
        scheme.validate(name, _linear(network, name).weight.shape)
    reports: dict[str, GptqReport] = {}
    for number, group in enumerate(groups, 1):
        hessians = _hessians(network, group, run)

        def pack(name: str, linear: nn.Linear, hessians: dict[str, Hessian] = hessians) -> nn.Module:
            q, grid, reports[name] = gptq(linear.weight, hessians[name].matrix(), scheme, damping)
            return PackedLinear.from_integers(q, grid, scheme, linear.bias, cache_dtype=linear.weight.dtype)

        replace_linears(network, group, pack)
        report(number, len(groups), ", ".join(group))
    return reports


def _hessians(network: nn.Module, names: Sequence[str], run: Callable[[], object]) -> dict[str, Hessian]:
    def hessian(linear: nn.Linear) -> Hessian:
        return Hessian(linear.in_features, device=linear.weight.device)

    return observe(network, names, run, hessian)


@torch.no_grad()
def observe(
    network: nn.Module, names: Sequence[str], run: Callable[[], object], make: Callable[[nn.Linear], Counted]
) -> dict[str, Counted]:
    """What `make` gives for each named linear layer, after all inputs [T, K] that `run` sends it were added."""
    observed: dict[str, Counted] = {}
    handles = []
    for name in names:
        layer = _linear(network, name)
        counted = observed[name] = make(layer)

        def count(_: nn.Module, inputs: tuple[Any, ...], counted: Counted = counted) -> None:
            x: Tensor = inputs[0]
            counted.add(x.flatten(0, -2))

        handles.append(layer.register_forward_pre_hook(count))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return observed


def _linear(network: nn.Module, name: str) -> nn.Linear:
    layer = network.get_submodule(name)
    assert isinstance(layer, nn.Linear), f"{name} is no dense linear layer"
    return layer
