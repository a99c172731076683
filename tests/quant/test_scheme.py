import copy
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig

from twofold.quant.scheme import QuantScheme


def test_a_group_that_does_not_divide_names_the_layer() -> None:
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.down_proj: group_size 128 .* 4304 inputs"):
        QuantScheme(group_size=128).validate("layers.3.mlp.down_proj", (1152, 4304))


@pytest.mark.parametrize(("group_size", "num_groups"), [(16, 269), (-1, 1), (4304, 1)])
def test_a_group_that_divides_is_accepted(group_size: int, num_groups: int) -> None:
    scheme = QuantScheme(group_size=group_size)
    scheme.validate("layer", (1152, 4304))
    assert scheme.num_groups(4304) == num_groups


def test_a_weight_that_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="conv1d"):
        QuantScheme().validate("conv1d", (64, 1, 4))


@pytest.mark.parametrize(
    ("entries", "words"),
    [({"bits": 3}, "bits"), ({"symmetric": False}, "asymmetric"), ({"group_size": 0}, "group_size = 0")],
)
def test_schemes_that_do_not_exist_are_refused(entries: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        QuantScheme(**entries)


@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_compressed_tensors_reads_our_config_and_we_read_theirs(group_size: int) -> None:
    scheme = QuantScheme(group_size=group_size)
    ours = scheme.to_compressed_tensors(["lm_head", "re:.*fc$"])
    theirs = QuantizationConfig.model_validate(copy.deepcopy(ours))
    weights = theirs.config_groups["group_0"].weights
    assert (weights.num_bits, weights.type, weights.symmetric) == (4, "int", True)
    assert weights.strategy == ("channel" if group_size == -1 else "group")
    assert weights.group_size == (None if group_size == -1 else group_size)
    assert theirs.config_groups["group_0"].targets == ["Linear"]
    assert (theirs.format, theirs.quantization_status) == ("pack-quantized", "compressed")
    assert theirs.ignore == ["lm_head", "re:.*fc$"]
    assert QuantScheme.from_compressed_tensors(ours) == scheme
    assert QuantScheme.from_compressed_tensors(theirs.model_dump(mode="json")) == scheme


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("quant_method",), "gptq", "quant_method"),
        (("format",), "int-quantized", "format"),
        (("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme"),
        (("config_groups",), {}, "config_groups"),
        (("config_groups", "group_0", "weights"), None, "group_0"),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}, "input_activations"),
        (("config_groups", "group_0", "weights", "num_bits"), 8, "num_bits is 8"),
        (("config_groups", "group_0", "weights", "type"), "float", "type"),
        (("config_groups", "group_0", "weights", "symmetric"), False, "symmetric"),
        (("config_groups", "group_0", "weights", "actorder"), "group", "actorder"),
        (("config_groups", "group_0", "weights", "strategy"), "tensor", "strategy"),
        (("config_groups", "group_0", "weights", "group_size"), None, "group_size None"),
    ],
)
def test_a_config_that_does_not_fit_says_where(path: tuple[str, ...], value: object, words: str) -> None:
    config = QuantScheme().to_compressed_tensors([])
    place: Any = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=words):
        QuantScheme.from_compressed_tensors(config)


def test_two_groups_must_agree() -> None:
    config = QuantScheme().to_compressed_tensors([])
    other = copy.deepcopy(config["config_groups"]["group_0"])
    config["config_groups"]["group_1"] = other
    assert QuantScheme.from_compressed_tensors(config) == QuantScheme()
    other["weights"]["group_size"] = 64
    with pytest.raises(ValueError, match="group_1"):
        QuantScheme.from_compressed_tensors(config)
