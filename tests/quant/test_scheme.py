import copy
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig

from twofold.quant.scheme import QuantScheme, from_compressed_tensors, to_compressed_tensors


def _config(scheme: QuantScheme = QuantScheme()) -> dict[str, Any]:
    return to_compressed_tensors({scheme: ["Linear"]}, [])


@pytest.mark.parametrize(("bits", "qmin", "qmax"), [(4, -8, 7), (8, -128, 127)])
def test_the_ends_of_the_grid(bits: int, qmin: int, qmax: int) -> None:
    scheme = QuantScheme(bits=bits)
    assert (scheme.qmin, scheme.qmax) == (qmin, qmax)


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


@pytest.mark.parametrize(("entries", "words"), [({"bits": 3}, "bits = 3"), ({"group_size": 0}, "group_size = 0")])
def test_schemes_that_do_not_exist_are_refused(entries: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        QuantScheme(**entries)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_compressed_tensors_reads_our_config_and_we_read_theirs(group_size: int, symmetric: bool, bits: int) -> None:
    scheme = QuantScheme(bits=bits, group_size=group_size, symmetric=symmetric)
    ours = to_compressed_tensors({scheme: ["Linear"]}, ["lm_head", "re:.*fc$"])
    theirs = QuantizationConfig.model_validate(copy.deepcopy(ours))
    weights = theirs.config_groups["group_0"].weights
    assert (weights.num_bits, weights.type, weights.symmetric) == (bits, "int", symmetric)
    assert weights.strategy == ("channel" if group_size == -1 else "group")
    assert weights.group_size == (None if group_size == -1 else group_size)
    assert theirs.config_groups["group_0"].targets == ["Linear"]
    assert (theirs.format, theirs.quantization_status) == ("pack-quantized", "compressed")
    assert theirs.ignore == ["lm_head", "re:.*fc$"]
    assert from_compressed_tensors(ours) == {"Linear": scheme}
    assert from_compressed_tensors(theirs.model_dump(mode="json")) == {"Linear": scheme}


def test_several_schemes_are_several_groups() -> None:
    body, head = QuantScheme(), QuantScheme(bits=8, group_size=-1, symmetric=False)
    ours = to_compressed_tensors({body: ["Linear"], head: ["re:.*lm_head$", "model.layers.0.mlp.up_proj"]}, [])
    theirs = QuantizationConfig.model_validate(copy.deepcopy(ours))
    assert {name: group.weights.num_bits for name, group in theirs.config_groups.items()} == {
        "group_0": 4,
        "group_1": 8,
    }
    expected = {"Linear": body, "re:.*lm_head$": head, "model.layers.0.mlp.up_proj": head}
    assert from_compressed_tensors(ours) == expected
    assert from_compressed_tensors(theirs.model_dump(mode="json")) == expected


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("quant_method",), "gptq", "quant_method"),
        (("format",), "int-quantized", "format"),
        (("kv_cache_scheme",), {"num_bits": 8}, "kv_cache_scheme"),
        (("config_groups",), {}, "config_groups"),
        (("config_groups", "group_0", "weights"), None, "group_0"),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}, "input_activations"),
        (("config_groups", "group_0", "weights", "num_bits"), 3, "num_bits is 3; only 4 and 8 are supported"),
        (("config_groups", "group_0", "weights", "type"), "float", "type is 'float'; only 'int' is supported"),
        (("config_groups", "group_0", "weights", "symmetric"), None, "symmetric"),
        (("config_groups", "group_0", "weights", "actorder"), "group", "actorder"),
        (("config_groups", "group_0", "weights", "strategy"), "tensor", "strategy"),
        (("config_groups", "group_0", "weights", "group_size"), None, "group_size None"),
    ],
)
def test_a_config_that_does_not_fit_says_where(path: tuple[str, ...], value: object, words: str) -> None:
    config = _config()
    place: Any = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=words):
        from_compressed_tensors(config)
