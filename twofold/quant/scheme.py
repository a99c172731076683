"""What is quantized and how: one frozen description, and its spelling in a checkpoint's config.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twofold.ops.integers import limits

CHANNEL = -1


@dataclass(frozen=True, kw_only=True)
class QuantScheme:
    """Integer weights in groups along the input dimension: w = (q - zero) * scale, q in [qmin, qmax].

    `bits` is 4 or 8. `group_size` is the number of inputs that share a scale; -1 gives each output channel one.
    A symmetric scheme has no zero points: they are 0.
    """

    bits: int = 4
    group_size: int = 32
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits = {self.bits} is not supported; use bits = 4 or bits = 8")
        if self.group_size != CHANNEL and self.group_size < 1:
            raise ValueError(f"group_size = {self.group_size} is no group; use a positive number, or -1 for channels")

    @property
    def qmin(self) -> int:
        """-2^(bits-1)"""
        return limits(self.bits)[0]

    @property
    def qmax(self) -> int:
        """2^(bits-1) - 1"""
        return limits(self.bits)[1]

    def group_length(self, num_inputs: int) -> int:
        """Inputs to a scale in a layer of `num_inputs` inputs."""
        return num_inputs if self.group_size == CHANNEL else self.group_size

    def num_groups(self, num_inputs: int) -> int:
        """Scales to an output channel in a layer of `num_inputs` inputs, which the group must divide."""
        return num_inputs // self.group_length(num_inputs)

    def validate(self, name: str, shape: Sequence[int]) -> None:
        """Raise ValueError, naming the layer, unless a weight of `shape` [N, K] can be quantized so."""
        if len(shape) != 2 or min(shape) < 1:
            raise ValueError(f"{name}: a weight of shape {list(shape)} is not [out, in]; leave it out")
        num_inputs = shape[1]
        if num_inputs % self.group_length(num_inputs):
            raise ValueError(
                f"{name}: group_size {self.group_size} does not divide its {num_inputs} inputs; "
                "choose a group_size that does, or leave this layer out"
            )


def to_compressed_tensors(targets: Mapping[QuantScheme, Sequence[str]], ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json for a `pack-quantized` checkpoint: one config group for each scheme.

    A target is a layer's name, "re:" and a regular expression, or a class: "Linear" takes every nn.Linear that no
    name or expression takes. What matches `ignore` is dense.
    """
    groups = {f"group_{i}": _written_group(*item) for i, item in enumerate(targets.items())}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def from_compressed_tensors(config: Mapping[str, Any]) -> dict[str, QuantScheme]:
    """Target -> scheme of a `quantization_config`; ValueError names the entry that does not fit.

    A target in two groups belongs to the later one, as in compressed-tensors itself.
    """
    _require(config, "quantization_config", "quant_method", "compressed-tensors")
    _require(config, "quantization_config", "format", "pack-quantized")
    _require(config, "quantization_config", "kv_cache_scheme", None)
    groups = config.get("config_groups")
    if not groups:
        raise ValueError("quantization_config: config_groups is missing or empty")
    schemes: dict[str, QuantScheme] = {}
    for name, group in groups.items():
        scheme = _read_group(f"config_groups.{name}", group)
        schemes |= dict.fromkeys(group.get("targets") or (), scheme)
    return schemes


def _written_group(scheme: QuantScheme, targets: Sequence[str]) -> dict[str, Any]:
    channel = scheme.group_size == CHANNEL
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if channel else "group",
        "group_size": None if channel else scheme.group_size,
        "dynamic": False,
    }
    return {
        "targets": list(targets),
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "pack-quantized",
    }


def _read_group(where: str, group: Any) -> QuantScheme:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ValueError(f"{where}: no weights entry; only weight quantization is supported")
    _require(group, where, "input_activations", None)
    _require(group, where, "output_activations", None)
    if group.get("format") is not None:
        _require(group, where, "format", "pack-quantized")
    # The keys that may be absent have these defaults in the format itself.
    weights, where = {"type": "int", "symmetric": True, "dynamic": False, **group["weights"]}, f"{where}.weights"
    _require(weights, where, "num_bits", 4, 8)
    _require(weights, where, "type", "int")
    _require(weights, where, "symmetric", True, False)
    _require(weights, where, "dynamic", False)
    if weights.get("actorder") == "group":
        raise ValueError(f"{where}: actorder 'group' stores columns out of order; only None or 'weight' fits")
    group_size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy == "channel" or (strategy is None and group_size == CHANNEL):
        group_size = CHANNEL
    elif strategy not in ("group", None) or not isinstance(group_size, int):
        raise ValueError(f"{where}: strategy {strategy!r} with group_size {group_size!r} is not supported")
    return QuantScheme(bits=weights["num_bits"], group_size=group_size, symmetric=weights["symmetric"])


def _require(entries: Mapping[str, Any], where: str, key: str, *supported: object) -> None:
    if entries.get(key) not in supported:
        known = " and ".join(repr(value) for value in supported)
        verb = "is" if len(supported) == 1 else "are"
        raise ValueError(f"{where}: {key} is {entries.get(key)!r}; only {known} {verb} supported")
