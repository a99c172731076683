"""A tensor taken out of a folder, or renamed, is an error that names it: every kind of tensor, every loader."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.models.test_checkpoint import pack
from tests.models.test_drafter import SHAPE
from tests.models.test_drafter_checkpoint import packed
from tests.models.tiny import HYBRID, PLAIN, build
from twofold.export.card import Card
from twofold.export.engines import find_engine
from twofold.export.folders import export
from twofold.models.calibration import QuantizeConfig
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target, packable_linears, save_target
from twofold.models.config import ModelConfig
from twofold.models.draft_head import DraftHeadConfig, make_draft_head
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import load_drafter, save_drafter
from twofold.models.drafter_config import DrafterConfig
from twofold.models.speculators import BORROWED
from twofold.pipeline.checkpoint import Checkpoints
from twofold.pipeline.stage import StageContext
from twofold.pipeline.target_stages import With, quantize, student_of
from twofold.quant.scheme import QuantScheme

SYMMETRIC, ASYMMETRIC = QuantScheme(group_size=16), QuantScheme(group_size=16, symmetric=False)
Make = Callable[[Path], Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class Loader:
    """`make` writes a folder with `file` in it and returns what loads it; `optional` may be left out of `file`."""

    make: Make
    file: str = "model.safetensors"
    optional: Collection[str] = ()


def quiet(*_: object) -> None:
    pass


def target(config: ModelConfig, scheme: QuantScheme | None = None) -> CausalLM:
    model = build(config)
    if scheme is not None:
        pack(model, packable_linears(config), scheme)
    return model


def drafter(scheme: QuantScheme | None = None, markov_rank: int = 0) -> Drafter:
    shape = replace(SHAPE, markov_rank=markov_rank)
    made = Drafter.initialized(DrafterConfig.for_target(HYBRID, shape), 0)
    return made if scheme is None else packed(made, scheme)


def of_target(config: ModelConfig, scheme: QuantScheme | None = None) -> Make:
    def make(folder: Path) -> Callable[[], object]:
        save_target(target(config, scheme), folder)
        return lambda: load_target(folder)

    return make


def of_drafter(made: Callable[[], Drafter]) -> Make:
    def make(folder: Path) -> Callable[[], object]:
        save_drafter(made(), folder)
        return lambda: load_drafter(folder)

    return make


def with_head() -> Drafter:
    made, head = drafter(), nn.Linear(HYBRID.hidden_size, HYBRID.vocab_size, bias=False)
    made.draft_head = make_draft_head(
        DraftHeadConfig(bits=4, group_size=16, rows=20), head, torch.ones(HYBRID.vocab_size)
    )
    return made


def of_export(engine: str) -> Make:
    """The drafter in an export."""

    def make(folder: Path) -> Callable[[], object]:
        source = folder.parent
        save_target(target(HYBRID, SYMMETRIC), source / "target")
        (source / "target" / "tokenizer.json").write_text("{}")
        save_drafter(drafter(SYMMETRIC), source / "drafter")
        card = Card(name="tiny", base_model="base")
        made = export(source / "target", source / "drafter", source / "export", find_engine(engine), card)
        assert made.drafter is not None
        made.drafter.rename(folder)
        return lambda: load_drafter(folder)

    return make


def start_of_distillation(folder: Path) -> Callable[[], object]:
    """Stage quantize with `checkpoint = FOLDER`, and the student that distillation makes of it."""
    original, output = folder.parent / "original", folder.parent / "quantize"
    save_target(target(HYBRID), original)
    save_target(target(HYBRID, ASYMMETRIC), folder)

    def load() -> None:
        context = StageContext(
            config=With(model=original, own=QuantizeConfig(checkpoint=folder)),
            seed=0,
            inputs={},
            output=output,
            checkpoints=Checkpoints(output / "steps"),
            report=quiet,
        )
        quantize(context)
        student_of(original, output)

    return load


LOADERS = {
    "target BF16": Loader(make=of_target(HYBRID)),
    "target BF16, plain attention": Loader(make=of_target(PLAIN)),
    "target W4A16": Loader(make=of_target(HYBRID, SYMMETRIC)),
    "target W4A16, asymmetric": Loader(make=of_target(PLAIN, ASYMMETRIC)),
    "drafter BF16": Loader(make=of_drafter(drafter)),
    "drafter INT4": Loader(make=of_drafter(lambda: drafter(SYMMETRIC))),
    "drafter with a Markov head": Loader(make=of_drafter(lambda: drafter(markov_rank=4))),
    "drafter for SGLang": Loader(make=of_export("sglang")),
    # The format lets embedding and head out, and speculators 0.9 writes neither: the target's are used anyway.
    "drafter of speculators": Loader(make=of_export("speculators"), optional=BORROWED),
    "draft head": Loader(make=of_drafter(with_head), file="draft_head.safetensors"),
    "start of distillation": Loader(make=start_of_distillation),
}


def renamed(name: str) -> str:
    """Of another layer: layers.0.mlp.up_proj.weight -> layers.0.mlp.other_up_proj.weight."""
    parent, dot, part = name.rpartition(".")
    above, middle, layer = parent.rpartition(".")
    return f"{above}{middle}other_{layer}{dot}{part}"


@pytest.mark.parametrize("name", LOADERS)
def test_a_tensor_that_is_removed_or_renamed_is_named(name: str, tmp_path: Path) -> None:
    loader, folder = LOADERS[name], tmp_path / "folder"
    load = loader.make(folder)
    load()
    tensors = load_file(folder / loader.file)
    kinds = {re.sub(r"\d+", "N", tensor): tensor for tensor in tensors}
    assert len(kinds) >= 4
    for tensor in kinds.values():
        others = {other: value for other, value in tensors.items() if other != tensor}
        own = re.escape(tensor.removeprefix("model."))
        if tensor not in loader.optional:
            save_file(others, folder / loader.file)
            with pytest.raises(ValueError, match=rf"has no tensor {own}\b"):
                load()
        for other in (renamed(tensor), f"{tensor}_old"):
            save_file({**others, other: tensors[tensor]}, folder / loader.file)
            wanted = rf"unexpected tensor {re.escape(other)}" if tensor in loader.optional else f"has no tensor {own}"
            with pytest.raises(ValueError, match=rf"{wanted}\b"):
                load()
    save_file(tensors, folder / loader.file)
    load()
