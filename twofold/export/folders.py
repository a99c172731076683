"""Artifacts -> the folders that an engine loads, checked before they get their name.

    DEST/target/    config.json, generation_config.json, model.safetensors, tokenizer, chat template, README.md
    DEST/drafter/   config.json, model.safetensors, README.md; for engines that draft

DEST appears when all of it is written and checked, or not at all.
"""

import json
import os
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twofold.export.card import Card, drafter_card, target_card
from twofold.export.check import check_drafter, check_target
from twofold.export.engines import Engine
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target, save_target
from twofold.models.config import LINEAR
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import check_fits, load_drafter, save_drafter
from twofold.models.folder import TOKENIZER_FILES, WEIGHTS, read_json, read_tensors, save_weights
from twofold.models.packed import quantization_config
from twofold.models.speculators import BORROWED, to_speculators
from twofold.quant.linear import PackedLinear


@dataclass(frozen=True, kw_only=True)
class Exported:
    target: Path
    drafter: Path | None
    command: str


def export(target: Path, drafter: Path | None, destination: Path, engine: Engine, card: Card) -> Exported:
    """Writes the model in `target`, and the drafter in `drafter` if the engine drafts, for `engine`.

    ValueError, and nothing written, when `destination` is there already, when a folder is not whole, when drafter and
    target do not belong together, when layers that engines join are packed differently, or when what was written does
    not hold the same tensors as what was given.
    """
    if destination.exists():
        raise ValueError(f"{destination} is there already; remove it, or choose another destination")
    model = load_target(target, torch.bfloat16)
    quantization_config(model)  # refuses joined layers of more than one scheme
    if not (target / "tokenizer.json").is_file():
        raise ValueError(f"{target} holds no tokenizer.json; copy the tokenizer of the original model there")
    drafting = drafter if engine.drafter is not None else None
    draft = None
    if drafting is not None:
        draft = load_drafter(drafting, torch.bfloat16)
        check_fits(drafting, model)
        if draft.markov_head is not None:
            raise ValueError("no engine knows a drafter's Markov head; export one trained with markov_rank = 0")
        draft.draft_head = None  # engines draft with the target's
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as made:
        folder = Path(made) / "whole"
        save_target(model, folder / "target", target, _said_outright(model))
        check_target(folder / "target", target)
        if draft is not None and drafting is not None:
            _write_drafter(draft, model, folder, engine)
            check_drafter(folder / "drafter", drafting, engine)
        block = None if draft is None else draft.config.block_size
        command = serve_command(engine, destination, block, model.config.max_position_embeddings)
        (folder / "target" / "README.md").write_text(target_card(card, model.config, engine, command))
        if draft is not None:
            (folder / "drafter" / "README.md").write_text(drafter_card(card, draft.config, engine, command))
        os.replace(folder, destination)
    return Exported(
        target=destination / "target", drafter=None if draft is None else destination / "drafter", command=command
    )


def serve_command(engine: Engine, destination: Path, block: int | None, context: int) -> str:
    """The command for a shell that serves an export, with a drafter of block size `block` or (None) without."""
    words, values = engine.serve, {"target": str(destination / "target"), "context": context}
    if block is not None:
        drafter = str(destination / "drafter")
        words += engine.speculate
        values |= {"drafter": drafter, "drafter_json": json.dumps(drafter), "block": block, "drafted": block - 1}
    return shlex.join(word.format(**values) for word in words)


def _said_outright(model: CausalLM) -> dict[str, Any]:
    """What a config may leave out and engines then guess: the state of Gated DeltaNet, which in bfloat16 drifts."""
    return {"mamba_ssm_dtype": "float32"} if LINEAR in model.config.layer_types else {}


def _write_drafter(draft: Drafter, model: CausalLM, folder: Path, engine: Engine) -> None:
    _unpack(draft, engine)
    save_drafter(draft, folder / "drafter")
    path = folder / "drafter" / "config.json"
    written = read_json(path)
    quantization = written.pop("quantization_config", None)
    if quantization is not None:
        # Names of layers become patterns: engines put prefixes before them.
        linears = {name for name, layer in draft.named_modules() if isinstance(layer, nn.Linear)}
        quantization["ignore"] = [engine.dense.get(name, f"re:.*{name}$") for name in sorted(linears)]
    if engine.drafter == "speculators":
        architecture = read_json(folder / "target" / "config.json")["architectures"][0]
        written = to_speculators(draft.config, "../target", architecture)
        if quantization is not None:  # vLLM looks inside, others outside
            written["transformer_layer_config"]["quantization_config"] = quantization
        _add_borrowed(folder / "drafter", model)
    if quantization is not None:
        written["quantization_config"] = quantization
    path.write_text(json.dumps(written, indent=2) + "\n")
    for name in TOKENIZER_FILES:  # engines open the drafter's tokenizer too
        if (folder / "target" / name).is_file():
            shutil.copyfile(folder / "target" / name, folder / "drafter" / name)


def _unpack(draft: Drafter, engine: Engine) -> None:
    """Makes the packed layers that the engine does not load packed dense again."""
    packed = {name for name in engine.dense if isinstance(draft.get_submodule(name), PackedLinear)}
    for name in sorted(packed):
        layer = draft.get_submodule(name)
        assert isinstance(layer, PackedLinear)
        dense = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=torch.bfloat16)
        dense.weight = nn.Parameter(layer.dense_weight(torch.bfloat16), requires_grad=False)
        draft.set_submodule(name, dense)


def _add_borrowed(folder: Path, model: CausalLM) -> None:
    head = model.lm_head
    if not isinstance(head, nn.Linear):
        raise ValueError(
            "the speculators format holds a dense head, the target's is quantized; export for vllm instead"
        )
    tensors: dict[str, Tensor] = read_tensors(folder)
    for name, weight in zip(BORROWED, (model.embed_tokens.weight, head.weight), strict=True):
        tensors[name] = weight.detach().to(torch.bfloat16).clone()
    save_weights(tensors, folder / WEIGHTS)
