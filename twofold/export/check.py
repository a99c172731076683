"""Whether a written folder holds what it was made from. Every difference is a ValueError that names the tensor."""

from pathlib import Path

import torch
from torch import Tensor, nn

from twofold.export.engines import Engine
from twofold.models.checkpoint import load_target
from twofold.models.drafter_checkpoint import load_drafter
from twofold.models.folder import own_names, read_json, read_tensors
from twofold.models.packed import PACKED_PARTS
from twofold.quant.linear import PackedLinear
from twofold.quant.scheme import from_compressed_tensors


def check_target(exported: Path, artifact: Path) -> None:
    """The exported target's tensors are those of the artifact, bit for bit where packed, in bfloat16 where dense.

    Its names are read from the file itself, not from a model, and both load by the rules of `load_target`; all EOS
    ids must be in both config files.
    """
    ids = load_target(artifact, torch.bfloat16).config.eos_token_ids
    load_target(exported, torch.bfloat16)
    given, written = (own_names(read_tensors(folder), folder) for folder in (artifact, exported))
    if read_json(exported / "config.json").get("tie_word_embeddings"):
        given.pop("lm_head.weight", None)  # a copy of the embedding, written once
    _equal(written, given, exported)
    for name in ("config.json", "generation_config.json"):
        said = read_json(exported / name).get("eos_token_id")
        if sorted([said] if isinstance(said, int) else said or []) != list(ids):
            raise ValueError(f"{exported / name}: eos_token_id is {said}, the model ends with {list(ids)}")


def check_drafter(exported: Path, artifact: Path, engine: Engine) -> None:
    """As `check_target`; layers that the engine wants dense hold the values of the packed ones, in bfloat16."""
    given, written = load_drafter(artifact, torch.bfloat16), load_drafter(exported, torch.bfloat16)
    if (a := vars(given.config)) != (b := vars(written.config)):
        different = sorted(key for key in a if a[key] != b[key] and a[key] is not None)
        if different:
            raise ValueError(f"{exported / 'config.json'} describes another drafter: {', '.join(different)} differ")
    given.draft_head = None  # stays behind: engines draft with the target's
    expected = given.state_dict()
    for name in engine.dense:
        layer = given.get_submodule(name)
        if isinstance(layer, PackedLinear):
            for part in PACKED_PARTS:
                expected.pop(name + part, None)
            expected[f"{name}.weight"] = layer.dense_weight(torch.bfloat16)
    _equal(written.state_dict(), expected, exported)
    _check_patterns(exported, written)
    hf = read_json(exported / "config.json")
    causal = hf["dflash_config"]["causal"] if engine.drafter == "dflash" else not hf["sliding_window_non_causal"]
    if causal:
        raise ValueError(f"{exported / 'config.json'} calls the drafter causal, which it is not")


def _check_patterns(exported: Path, drafter: nn.Module) -> None:
    """No layer by a bare name: engines compare names behind prefixes of their own."""
    quantization = read_json(exported / "config.json").get("quantization_config")
    if quantization is None:
        return
    from_compressed_tensors(quantization)
    if bare := [pattern for pattern in quantization["ignore"] if not pattern.startswith("re:")]:
        raise ValueError(
            f"{exported / 'config.json'}: ignore has {bare[0]!r}, which engines do not find; use a pattern"
        )


def _equal(written: dict[str, Tensor], given: dict[str, Tensor], folder: Path) -> None:
    if missing := sorted(given.keys() - written.keys()):
        raise ValueError(f"{folder} has no tensor {missing[0]}")
    if unexpected := sorted(written.keys() - given.keys()):
        raise ValueError(f"{folder} has an unexpected tensor {unexpected[0]}")
    for name, tensor in written.items():
        other = given[name]
        if not name.endswith(PACKED_PARTS):
            other = other.to(torch.bfloat16)
        if tensor.shape != other.shape:
            raise ValueError(f"{folder}: {name} has shape {list(tensor.shape)}, given was {list(other.shape)}")
        if not torch.equal(tensor.to(other.dtype), other):
            raise ValueError(f"{folder}: {name} differs from what it was made from")
