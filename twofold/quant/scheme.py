"""What is quantized and how: one frozen description, and its spelling in a checkpoint's config.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CHANNEL = -1


@dataclass(frozen=True, kw_only=True)
class QuantScheme:
    """Symmetric INT4 weights in groups along the input dimension: w = q * scale, q in [-8, 7].

    `group_size` is the number of inputs that share a scale; -1 gives each output channel one scale.
    """

    bits: int = 4
    group_size: int = 32
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits != 4:
            raise ValueError(f"bits = {self.bits} is not supported; use bits = 4")
        if not self.symmetric:
            raise ValueError("asymmetric quantization is not supported; use symmetric = true")
        if self.group_size != CHANNEL and self.group_size < 1:
            raise ValueError(f"group_size = {self.group_size} is no group; use a positive number, or -1 for channels")

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

    def to_compressed_tensors(self, ignore: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config` of config.json for a `pack-quantized` checkpoint.

        Every nn.Linear counts as quantized but those in `ignore` (names, or "re:" and a regular expression).
        """
        channel = self.group_size == CHANNEL
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if channel else "group",
            "group_size": None if channel else self.group_size,
            "dynamic": False,
        }
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "kv_cache_scheme": None,
        }

    @classmethod
    def from_compressed_tensors(cls, config: Mapping[str, Any]) -> "QuantScheme":
        """Read the scheme from a `quantization_config`; ValueError names the entry that does not fit."""
        _require(config, "quantization_config", "quant_method", "compressed-tensors")
        _require(config, "quantization_config", "format", "pack-quantized")
        _require(config, "quantization_config", "kv_cache_scheme", None)
        groups = config.get("config_groups")
        if not groups:
            raise ValueError("quantization_config: config_groups is missing or empty")
        schemes = {name: _read_group(name, group) for name, group in groups.items()}
        if len(set(schemes.values())) > 1:
            raise ValueError(f"config_groups: {sorted(schemes)} differ; one scheme a model is supported")
        return next(iter(schemes.values()))


def _require(entries: Mapping[str, Any], where: str, key: str, expected: object) -> None:
    if entries.get(key) != expected:
        raise ValueError(f"{where}: {key} is {entries.get(key)!r}; only {expected!r} is supported")


def _read_group(name: str, group: Any) -> QuantScheme:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ValueError(f"config_groups.{name}: no weights entry; only weight quantization is supported")
    _require(group, f"config_groups.{name}", "input_activations", None)
    _require(group, f"config_groups.{name}", "output_activations", None)
    if group.get("format") is not None:
        _require(group, f"config_groups.{name}", "format", "pack-quantized")
    weights, where = group["weights"], f"config_groups.{name}.weights"
    # The keys that may be absent have these defaults in the format itself.
    defaults = {"type": "int", "symmetric": True, "dynamic": False, **weights}
    _require(defaults, where, "num_bits", 4)
    _require(defaults, where, "type", "int")
    _require(defaults, where, "symmetric", True)
    _require(defaults, where, "dynamic", False)
    if weights.get("actorder") == "group":
        raise ValueError(f"{where}: actorder 'group' stores columns out of order; only None or 'weight' fits")
    group_size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy == "channel" or (strategy is None and group_size == CHANNEL):
        return QuantScheme(group_size=CHANNEL)
    if strategy not in ("group", None) or not isinstance(group_size, int):
        raise ValueError(f"{where}: strategy {strategy!r} with group_size {group_size!r} is not supported")
    return QuantScheme(group_size=group_size)
