"""Stages that make the target: prompts, generate, quantize, distill, pack, regenerate."""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from twofold.data.conversations import (
    Conversation,
    PackedRows,
    load_conversations,
    pack,
    save_conversations,
)
from twofold.data.generate import GenerateConfig, generate
from twofold.data.prompts import PromptsConfig, read_labelled_prompts, tokenize_prompts
from twofold.evaluation.fidelity import fidelity
from twofold.models.calibration import Calibration, QuantizeConfig, quantize_target
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import save_target
from twofold.models.smoothing import apply_smoothing
from twofold.models.tokenizer import Tokenizer
from twofold.pipeline.artifact import read_manifest
from twofold.pipeline.digest import Json
from twofold.pipeline.models import decode_precision, device, load, load_frozen
from twofold.pipeline.recipe import load_config
from twofold.pipeline.stage import StageContext
from twofold.quant.linear import FakeQuantLinear, PackedLinear, pack_linears
from twofold.training.distill import DistillConfig, distill

C = TypeVar("C")
Metrics = dict[str, Json]
TRAIN, HELDOUT, SMOOTHING = "train.safetensors", "heldout.safetensors", "smoothing.safetensors"
LAYERS = "layers.json"
CATEGORIES = "heldout_categories.json"


@dataclass(frozen=True, kw_only=True)
class With(Generic[C]):
    """A stage's own config and the original model that it also depends on."""

    model: Path
    own: C


def prompts(context: StageContext[With[PromptsConfig]]) -> Metrics:
    """Reads and tokenizes the prompts, all errors first."""
    config, tokenizer = context.config.own, Tokenizer.load(context.config.model)
    metrics: Metrics = {}
    for name, path, count in (
        (TRAIN, config.train, config.count),
        (HELDOUT, config.heldout, config.heldout_count),
    ):
        read = read_labelled_prompts(path, count)
        ids = tokenize_prompts([prompt.text for prompt in read], tokenizer, config.max_tokens)
        save_conversations([Conversation(i, []) for i in ids], context.output / name)
        metrics[name.removesuffix(".safetensors")] = len(ids)
        if name == HELDOUT:
            (context.output / CATEGORIES).write_text(json.dumps([prompt.category for prompt in read]))
    return metrics


def _answer(model: CausalLM, config: GenerateConfig, context: StageContext[Any]) -> Metrics:
    tokens = 0
    for name, seed in ((HELDOUT, context.seed + 1_000_000), (TRAIN, context.seed)):
        asked = [c.prompt_ids for c in load_conversations(context.inputs["prompts"] / name)]
        answered = generate(model, asked, config, seed, context.report, context.checkpoints.folder)
        save_conversations(answered, context.output / name)
        tokens += sum(len(c.answer_ids) for c in answered)
    return {"answer_tokens": tokens}


def generate_answers(context: StageContext[With[GenerateConfig]]) -> Metrics:
    """The original model answers the prompts."""
    return _answer(load_frozen(context.config.model, decode_precision()), context.config.own, context)


def regenerate_answers(context: StageContext[GenerateConfig]) -> Metrics:
    """The quantized and healed target answers them."""
    return _answer(load_frozen(context.inputs["pack"], decode_precision()), context.config, context)


def quantize(context: StageContext[With[QuantizeConfig]]) -> Metrics:
    """The grid, and the quality that post-training quantization gives; `LAYERS` says how each layer came out.

    With an imported checkpoint its grid is taken as it is, and distillation starts from its rounded weights.
    """
    config, source = context.config.own, context.config.model
    if config.checkpoint is not None:
        return _import_grid(context, config.checkpoint)
    model = load(source)
    rows = pack(load_conversations(context.inputs["generate"] / TRAIN), 512)
    rows = rows.select(torch.arange(min(config.rows, len(rows))))
    texts = rows.token_ids_NT, rows.positions_NT, rows.used_NT
    made = quantize_target(model, *texts, config, context.report)
    save_quantized(model, made, config, source, context.output)
    worst = max(made.layers, key=lambda layer: layer.weight_error)
    return {
        "layers": len(made.layers),
        "mean_error": sum(layer.weight_error for layer in made.layers) / len(made.layers),
        "worst_layer": worst.name,
        "worst_error": worst.weight_error,
        "fallbacks": [layer.name for layer in made.layers if layer.fallback],
    }


def _import_grid(context: StageContext[With[QuantizeConfig]], checkpoint: Path) -> Metrics:
    model, original = load(checkpoint), load(context.config.model)
    packed = [name for name, layer in model.named_modules() if isinstance(layer, PackedLinear)]
    if not packed:
        raise ValueError(f"{checkpoint} has no packed layer; name a compressed-tensors checkpoint, or leave it out")
    if model.config != original.config and replace(model.config, tie_embeddings=True) != original.config:
        raise ValueError(f"{checkpoint} is no quantized {context.config.model}: their config.json differ in shape")
    save_target(model, context.output, checkpoint)
    return {"layers": len(packed), "imported": str(checkpoint)}


def _heldout_rows(context: StageContext[With[DistillConfig]]) -> PackedRows:
    return pack(load_conversations(context.inputs["generate"] / HELDOUT), context.config.own.row_length)


def save_quantized(model: CausalLM, made: Calibration, config: QuantizeConfig, source: Path, folder: Path) -> None:
    """A model of `quantize_target` as `student_of` reads it."""
    save_target(model, folder, source)
    if config.method != "gptq":
        save_file(made.smoothing, str(folder / SMOOTHING))
    (folder / LAYERS).write_text(json.dumps([asdict(layer) for layer in made.layers], indent=1))


def student_of(original: Path, quantized: Path, learn_scale: bool = False) -> CausalLM:
    """What distillation trains: the model of stage quantize, with master weights behind its grids.

    Where it was rounded to nearest they are the original's, after what AWQ folded; of GPTQ, which moved them, and of
    an imported checkpoint they are the rounded weights.
    """
    model = load(quantized)
    packed = {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}
    smoothing = quantized / SMOOTHING
    moved = set(packed)
    if smoothing.exists():
        model = load(original)
        apply_smoothing(model, load_file(str(smoothing)))
        layers = json.loads((quantized / LAYERS).read_text())
        moved = {layer["name"] for layer in layers if layer["method"] == "gptq"}
    for name, layer in packed.items():
        weight = layer.dense_weight(torch.float32) if name in moved else model.get_parameter(f"{name}.weight")
        fake = FakeQuantLinear(weight, layer.grid, layer.scheme, layer.bias, learn_scale=learn_scale)
        model.set_submodule(name, fake)
    return model.to(device())


def heal(context: StageContext[With[DistillConfig]]) -> Metrics:
    """Quantization-aware distillation from the original model, on its own answers or the quantized one's."""
    config = context.config.own
    teacher = load_frozen(context.config.model)
    student = student_of(context.config.model, context.inputs["quantize"], config.scales == "learned")
    told = _own_answers(context) if config.text == "student" else context.inputs["generate"] / TRAIN
    rows = pack(load_conversations(told), config.row_length)
    heldout = _heldout_rows(context)

    def validate() -> dict[str, float]:
        return fidelity(student, teacher, heldout)

    history = distill(student, teacher, rows, config, context.seed, context.checkpoints, context.report, validate)
    save_file(_healed(student, config.head), str(context.output / "student.safetensors"))
    return {"curve": [dict(entry) for entry in history]}


def _own_answers(context: StageContext[With[DistillConfig]]) -> Path:
    """The quantized model's answers to the prompts of stage generate, made as that stage made its own.

    Kept beside the checkpoints, so that a resumed run learns from them without asking again.
    """
    path = context.checkpoints.folder / "answers.safetensors"
    if not path.exists():
        folder = context.inputs["generate"]
        made = load_config(GenerateConfig, read_manifest(folder).config["own"], str(folder))
        asked = [c.prompt_ids for c in load_conversations(folder / TRAIN)]
        student = load_frozen(context.inputs["quantize"])
        answered = generate(student, asked, made, context.seed, context.report, path.parent)
        temporary = path.with_name(f".{path.name}")
        save_conversations(answered, temporary)
        os.replace(temporary, path)
    return path


def _healed(student: CausalLM, head: bool) -> dict[str, Tensor]:
    """The master weights, and learned scales as they are stored; without a head that has not learned."""
    healed = {n: p.detach() for n, p in student.named_parameters() if head or not n.startswith("lm_head.")}
    for name in healed:
        if name.endswith(".scale"):
            layer = student.get_submodule(name.removesuffix(".scale"))
            assert isinstance(layer, FakeQuantLinear)
            healed[name] = layer.grid.scale_NG
    return {name: tensor.cpu().contiguous() for name, tensor in healed.items()}


def pack_target(context: StageContext[Path]) -> Metrics:
    """The healed weights on their grid, as a compressed-tensors folder that other engines read."""
    student = student_of(context.config, context.inputs["quantize"])
    healed = load_file(str(context.inputs["distill"] / "student.safetensors"))
    missing, unexpected = student.load_state_dict(healed, strict=False)
    assert not unexpected, unexpected
    assert all(name.endswith(("scale", "zero", "lm_head.weight")) for name in missing), missing
    names = pack_linears(student)
    save_target(student, context.output, context.config)
    size = (context.output / "model.safetensors").stat().st_size
    return {"layers": len(names), "bytes": size, "bytes_before": (context.config / "model.safetensors").stat().st_size}
