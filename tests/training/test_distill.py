"""Distillation moves the layers' weights on frozen scales, by the gradient that mathematics says."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.models.tiny import HYBRID, PLAIN, VOCABULARY, build
from twofold.data.conversations import Conversation, PackedRows, pack
from twofold.evaluation.fidelity import fidelity
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import packable_linears
from twofold.models.config import ModelConfig
from twofold.pipeline.checkpoint import Checkpoints
from twofold.quant.linear import FakeQuantLinear, pack_linears, replace_linears
from twofold.quant.rounding import fake_quantize, search_scale
from twofold.quant.scheme import QuantScheme
from twofold.training import distill as distill_module
from twofold.training.distill import DistillConfig, distill, trainable
from twofold.training.loop import OptimizerConfig

SCHEME = QuantScheme(group_size=16)


def fake(model: CausalLM) -> CausalLM:
    def layer(_: str, linear: torch.nn.Linear) -> FakeQuantLinear:
        return FakeQuantLinear.from_linear(linear, search_scale(linear.weight.detach(), SCHEME), SCHEME)

    replace_linears(model, packable_linears(model.config), layer)
    return model


def rows() -> PackedRows:
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(VOCABULARY, (16,), generator=draw).tolist() for _ in range(6)]
    return pack([Conversation(ids[:5], ids[5 : 10 + i]) for i, ids in enumerate(texts)], 32)


def settings(steps: int = 1, tokens: Literal["all", "answer"] = "all", **options: Any) -> DistillConfig:
    optimizer = OptimizerConfig(steps=steps, learning_rate=options.pop("rate", 1e-3), **options)
    return DistillConfig(optimizer=optimizer, batch_rows=3, row_length=32, tokens=tokens, vocab_chunk=40)


def run(student: CausalLM, teacher: CausalLM, folder: Path, config: DistillConfig) -> list[dict[str, float]]:
    return distill(
        student,
        teacher,
        rows(),
        config,
        0,
        Checkpoints(folder),
        lambda *_: None,
        lambda: fidelity(student, teacher, rows()),
    )


@pytest.mark.parametrize("tokens", ["all", "answer"])
@pytest.mark.parametrize("config", [HYBRID, PLAIN], ids=["hybrid", "plain"])
def test_the_gradient_is_that_of_the_rounded_model(
    config: ModelConfig, tokens: Literal["all", "answer"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Straight-through: dL/dW = dL/dQ at Q(W), Q's found by dense autograd on a plain model of weights Q(W)."""
    teacher = build(config).requires_grad_(False)
    student = fake(build(config, seed=1))
    plain = build(config, seed=1)
    with torch.no_grad():
        for name in packable_linears(config):
            layer = student.get_submodule(name)
            assert isinstance(layer, FakeQuantLinear)
            plain.get_parameter(f"{name}.weight").copy_(fake_quantize(layer.weight, layer.scale, SCHEME))

    captured: list[Tensor] = []

    def one_step(parameters: dict[str, torch.nn.Parameter], loss_at: Any, *_: Any) -> list[dict[str, float]]:
        captured.append(loss_at(0))
        captured[0].backward()
        return []

    monkeypatch.setattr(distill_module, "train", one_step)
    run(student, teacher, tmp_path, settings(tokens=tokens))

    batch = rows().select(rows().batch(3, 0, 0))
    counted = batch.answer_NT if tokens == "answer" else batch.used_NT
    assert 0 < int(counted.sum()) < counted.numel()
    log_p, log_q = (
        m.logits(m(batch.token_ids_NT, batch.positions_NT)[0])[counted].log_softmax(dim=-1) for m in (teacher, plain)
    )
    wanted = (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean()
    wanted.backward()
    torch.testing.assert_close(captured[0], wanted, rtol=1e-4, atol=1e-5)
    trained = trainable(student)
    assert {name.split(".")[0] for name in trained} == {"layers"}
    for name, parameter in student.named_parameters():
        if name not in trained:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        gradient = plain.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_scales_embedding_and_head_stay_byte_for_byte(tmp_path: Path) -> None:
    teacher, student = build(HYBRID).requires_grad_(False), fake(build(HYBRID))
    before = copy.deepcopy(student.state_dict())
    run(student, teacher, tmp_path, settings(steps=4, weight_decay=0.1))
    changed = {name for name, tensor in student.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(trainable(student))
    for name, tensor in student.state_dict().items():
        if name.endswith("scale"):
            assert torch.equal(tensor.view(torch.int16), before[name].view(torch.int16))
    assert not any(p.requires_grad for p in student.parameters())
    # what was trained is what is packed
    ids, positions = rows().token_ids_NT, rows().positions_NT
    with torch.no_grad():
        trained = student(ids, positions)[0]
        pack_linears(student)
        assert torch.equal(student(ids, positions)[0], trained)


def test_the_kl_falls(tmp_path: Path) -> None:
    teacher, student = build(HYBRID).requires_grad_(False), fake(build(HYBRID))
    history = run(student, teacher, tmp_path, settings(steps=60, rate=3e-3, validate_every=20))
    assert [entry["step"] for entry in history] == [0, 20, 40, 60]
    assert history[0]["kl"] > 1e-3
    assert history[-1]["kl"] < 0.5 * history[0]["kl"]


def test_stored_features_make_the_same_student(tmp_path: Path) -> None:
    teacher = build(HYBRID).requires_grad_(False)
    computed, stored = fake(build(HYBRID, seed=1)), fake(build(HYBRID, seed=1))
    run(computed, teacher, tmp_path / "computed", settings(steps=3))
    run(stored, teacher, tmp_path / "stored", replace(settings(steps=3), store_features=True))
    for name, tensor in computed.state_dict().items():
        torch.testing.assert_close(stored.state_dict()[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


def test_the_teacher_does_not_change(tmp_path: Path) -> None:
    teacher, student = build(HYBRID).requires_grad_(False), fake(build(HYBRID))
    before = copy.deepcopy(teacher.state_dict())
    run(student, teacher, tmp_path, settings(steps=2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
