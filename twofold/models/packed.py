"""Which layers of a folder are packed and how: config.json's `quantization_config`, and the tensors it means."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twofold.models.folder import PREFIXES
from twofold.quant.linear import PackedLinear, replace_linears
from twofold.quant.rounding import stored_scale
from twofold.quant.scheme import QuantScheme, from_compressed_tensors, to_compressed_tensors

PACKED_PARTS = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point")

# Engines join the members into one matrix of this name, which has one scheme.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
}


def quantization_config(
    module: nn.Module, ignore: Sequence[str] = (), file_name: Callable[[str], str] = str, beside: str = "/"
) -> dict[str, Any] | None:
    """The `quantization_config` that describes the packed layers of `module`; None when it has none.

    The commonest scheme takes the class "Linear", the layers of every other scheme are named in a config group of
    their own. Dense layers that `ignore` does not match are added to it, under the names that `file_name` gives. Layers
    whose names begin with `beside` are kept elsewhere.
    ValueError for layers that engines join and that do not have one scheme.
    """
    layers = {name: layer for name, layer in module.named_modules() if not name.startswith(beside)}
    schemes = {name: layer.scheme for name, layer in layers.items() if isinstance(layer, PackedLinear)}
    if not schemes:
        return None
    _check_fused(schemes)
    ((commonest, _),) = Counter(schemes.values()).most_common(1)
    targets: dict[QuantScheme, dict[str, None]] = {commonest: {"Linear": None}}
    for name, scheme in schemes.items():
        if scheme != commonest:
            targets.setdefault(scheme, {})[_expression(name)] = None
    dense = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    names = [file_name(name) for name in dense if not _matching(name, ignore)]
    return to_compressed_tensors({scheme: list(found) for scheme, found in targets.items()}, [*ignore, *names])


def install_packed(
    module: nn.Module, tensors: Mapping[str, Tensor], quantization: Mapping[str, Any] | None, folder: Path
) -> None:
    """Puts an empty `PackedLinear` where `tensors` has packed weights.

    ValueError unless those layers are the ones that `quantization`, of config.json, says.
    """
    packed = {name.removesuffix(PACKED_PARTS[0]) for name in tensors if name.endswith(PACKED_PARTS[0])}
    if quantization is None:
        if packed:
            raise ValueError(f"{folder}: {min(packed)} is packed, but config.json has no quantization_config")
        return
    try:
        targets = from_compressed_tensors(quantization)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    schemes = _schemes(module, targets, quantization.get("ignore") or ())
    linears = {name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    stored = {name.rpartition(".")[0] for name in tensors if name.endswith((".weight", PACKED_PARTS[0]))}
    if missing := sorted(schemes.keys() - stored):
        raise ValueError(
            f"{folder} has no tensor {missing[0]}{PACKED_PARTS[0]}, although by targets and ignore of config.json's "
            "quantization_config that layer is packed"
        )
    if unexpected := sorted(packed - linears):
        raise ValueError(
            f"{folder} has an unexpected tensor {unexpected[0]}{PACKED_PARTS[0]}; config.json may be wrong"
        )
    for name in sorted(linears):
        if (name in schemes) != (name in packed):
            raise ValueError(
                f"{name} is {'packed' if name in packed else 'dense'} in the weights, but by targets and "
                f"ignore of config.json's quantization_config it is {'packed' if name in schemes else 'dense'}"
            )

    def empty(name: str, linear: nn.Linear) -> nn.Module:
        needed = [linear.out_features, linear.in_features]
        schemes[name].validate(name, needed)
        said = tensors.get(f"{name}.weight_shape")
        if said is not None and said.tolist() != needed:
            raise ValueError(f"{folder}: {name}.weight_shape says {said.tolist()}, where config.json needs {needed}")
        with torch.device("meta"):
            return PackedLinear(linear.in_features, linear.out_features, schemes[name], linear.bias is not None)

    replace_linears(module, sorted(packed), empty)


def stored_as(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of a file as a model holds it: dense ones in `dtype`, packed ones as they are."""
    if name.endswith(".weight_scale"):
        try:
            return stored_scale(tensor)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return tensor if name.endswith(PACKED_PARTS) else tensor.to(dtype)


def _check_fused(schemes: Mapping[str, QuantScheme]) -> None:
    for name, scheme in schemes.items():
        parent, _, own = name.rpartition(".")
        for other in (f"{parent}.{member}" for members in _FUSED.values() if own in members for member in members):
            if other not in schemes:
                raise ValueError(f"{name} is packed and {other} is not; engines join them, so pack all or none")
            if schemes[other] != scheme:
                raise ValueError(
                    f"{name} and {other} are packed with different schemes; engines join them, so give them the same"
                )


def _expression(name: str) -> str:
    """A target that means the layer under any prefix, by its own name and as an engine joins it."""
    parent, dot, own = name.rpartition(".")
    for joined, members in _FUSED.items():
        if own in members:
            own = f"({'|'.join((*members, joined))})"
    return f"re:.*{re.escape(parent + dot)}{own}$"


def _schemes(module: nn.Module, targets: Mapping[str, QuantScheme], ignore: Sequence[str]) -> dict[str, QuantScheme]:
    """What config.json says of every nn.Linear that it packs."""
    found: dict[str, QuantScheme] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and not _matching(name, ignore) and (said := _matching(name, targets)):
            # The nearest description first, as in compressed-tensors: name, expression, class.
            nearest = min(said, key=lambda target: (target == "Linear", target.startswith("re:"), target))
            found[name] = targets[nearest]
    return found


def _matching(name: str, patterns: Iterable[str]) -> Collection[str]:
    """The patterns that mean a Linear: by name, with or without prefix, by "re:" and an expression, or by class."""
    spellings = [name, *(prefix + name for prefix in PREFIXES)]
    return [
        pattern
        for pattern in patterns
        if pattern == "Linear"
        or pattern in spellings
        or (pattern.startswith("re:") and any(re.match(pattern[3:], spelling) for spelling in spellings))
    ]
