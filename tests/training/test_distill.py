"""Distillation moves the layers' weights on frozen scales, by the gradient that mathematics says."""

from __future__ import annotations

import copy
import itertools
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
from twofold.quant.rounding import fake_quantize, search_grid
from twofold.quant.scheme import QuantScheme
from twofold.training import distill as distill_module
from twofold.training.distill import DistillConfig, distill, trainable
from twofold.training.divergence import Divergence
from twofold.training.optimizer import OptimizerConfig

SCHEME = QuantScheme(group_size=16)


def fake(model: CausalLM, learn_scale: bool = False, head: bool = False) -> CausalLM:
    def layer(_: str, linear: torch.nn.Linear) -> FakeQuantLinear:
        grid = search_grid(linear.weight.detach(), SCHEME)
        return FakeQuantLinear.from_linear(linear, grid, SCHEME, learn_scale=learn_scale)

    replace_linears(model, [*packable_linears(model.config), *(["lm_head"] if head else [])], layer)
    return model


def rows() -> PackedRows:
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(VOCABULARY, (16,), generator=draw).tolist() for _ in range(6)]
    return pack([Conversation(ids[:5], ids[5 : 10 + i]) for i, ids in enumerate(texts)], 32)


def settings(steps: int = 1, **options: Any) -> DistillConfig:
    own = {name: options.pop(name) for name in list(options) if name in DistillConfig.__dataclass_fields__}
    optimizer = OptimizerConfig(steps=steps, learning_rate=options.pop("rate", 1e-3), **options)
    return DistillConfig(**{"optimizer": optimizer, "batch_rows": 3, "row_length": 32, "vocab_chunk": 40} | own)


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
            plain.get_parameter(f"{name}.weight").copy_(fake_quantize(layer.weight, layer.grid, SCHEME))

    captured: list[Tensor] = []

    def one_step(_: Any, inputs_at: Any, loss_of: Any, *__: Any, **___: Any) -> list[dict[str, float]]:
        captured.append(loss_of(*inputs_at(0)))
        captured[0].backward()
        return []

    monkeypatch.setattr(distill_module, "train", one_step)
    run(student, teacher, tmp_path, settings(tokens=tokens))

    batch = rows().select(rows().batch(3, 0, 0))
    counted = batch.used_NT.clone()
    if tokens == "answer":  # what predicts an answer's token stands before it, in its document
        for n, t in itertools.product(*map(range, counted.shape)):
            after = t + 1 < counted.shape[1] and batch.positions_NT[n, t + 1] > 0
            counted[n, t] = after and batch.answer_NT[n, t + 1]
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


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_kl_falls(precision: str, tmp_path: Path) -> None:
    teacher, student = build(HYBRID).requires_grad_(False), fake(build(HYBRID))
    config = settings(steps=60, rate=3e-3, validate_every=20, precision=precision)
    history = run(student, teacher, tmp_path, config)
    assert [entry["step"] for entry in history] == [0, 20, 40, 60]
    assert history[0]["kl"] > 1e-3
    assert history[-1]["kl"] < 0.5 * history[0]["kl"]


@pytest.mark.parametrize("config", [HYBRID, PLAIN], ids=["hybrid", "plain"])
@pytest.mark.parametrize("teacher_kind", ["online", "stored", "topk"])
@pytest.mark.parametrize("head", [False, True])
def test_in_bfloat16_it_heals_as_in_float32(config: ModelConfig, teacher_kind: str, head: bool, tmp_path: Path) -> None:
    """Masters stay float32, and their first steps go where float32's go, as far as Adam's, nearly the signs of
    gradients, let small ones."""
    students = []
    for precision in ("float32", "bfloat16"):
        teacher, student = build(config).requires_grad_(False), fake(build(config), head=head)
        before = {name: p.detach().clone() for name, p in student.named_parameters()}
        told = settings(steps=3, precision=precision, teacher=teacher_kind, top_k=16, head=head)
        run(student, teacher.eval(), tmp_path / precision, told)
        assert {p.dtype for p in student.parameters()} == {torch.float32}
        moved = [(p - before[n]).flatten() for n, p in student.named_parameters() if n in trainable(student, head)]
        students.append(torch.cat(moved))
    assert students[0].norm() > 0
    assert torch.nn.functional.cosine_similarity(*students, dim=0) > 0.7
    assert not torch.equal(*students)


def test_stored_features_make_the_same_student(tmp_path: Path) -> None:
    teacher = build(HYBRID).requires_grad_(False)
    computed, stored = fake(build(HYBRID, seed=1)), fake(build(HYBRID, seed=1))
    run(computed, teacher, tmp_path / "computed", settings(steps=3))
    run(stored, teacher, tmp_path / "stored", settings(steps=3, teacher="stored"))
    for name, tensor in computed.state_dict().items():
        torch.testing.assert_close(stored.state_dict()[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


def test_the_teacher_does_not_change(tmp_path: Path) -> None:
    teacher, student = build(HYBRID).requires_grad_(False), fake(build(HYBRID))
    before = copy.deepcopy(teacher.state_dict())
    run(student, teacher, tmp_path, settings(steps=2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


def fake_weights(student: CausalLM, plain: CausalLM) -> dict[str, Tensor]:
    """Weights of `plain` as dense expressions of the student's parameters: Q(W) with gradient 1 in W, and in a learned
    scale s LSQ's, round(W / s) - W / s where not clipped and round(W / s) clamped where it is."""
    weights = dict(plain.named_parameters())
    for name, layer in student.named_modules():
        if not isinstance(layer, FakeQuantLinear):
            continue
        w, s = layer.weight, layer.scale
        stored = layer.grid.scale_NG.to(w.dtype)[:, :, None]
        steps = w.detach().unflatten(1, (-1, SCHEME.group_size)) / stored
        q = steps.round().clamp(-8, 7)
        clipped = (steps.round() < -8) | (steps.round() > 7)
        expression = (q * stored).flatten(1) + w - w.detach()
        if layer.learn_scale:
            slope = torch.where(clipped, q, q - steps)
            expression = expression + (slope * (s - s.detach())[:, :, None]).flatten(1)
        weights[f"{name}.weight"] = expression
    return weights


def dense_divergence(kind: Divergence, log_q: Tensor, log_p: Tensor) -> Tensor:
    log_m = ((log_q.exp() + log_p.exp()) / 2).log()
    kl = torch.nn.functional.kl_div  # of (log b, log a): a log(a / b)
    terms = {
        "forward_kl": lambda: kl(log_q, log_p, reduction="none", log_target=True),
        "reverse_kl": lambda: kl(log_p, log_q, reduction="none", log_target=True),
        "jensen_shannon": lambda: (
            0.5
            * (
                kl(log_m, log_p, reduction="none", log_target=True)
                + kl(log_m, log_q, reduction="none", log_target=True)
            )
        ),
    }
    return terms[kind]().sum(dim=-1).mean()


@pytest.mark.parametrize("learned", [False, True], ids=["frozen", "learned"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("config", "kind", "head"),
    [
        (PLAIN, "forward_kl", False),
        (HYBRID, "forward_kl", True),
        (PLAIN, "reverse_kl", True),
        (HYBRID, "jensen_shannon", False),
    ],
)
def test_the_gradient_against_dense_autograd_in_float64(
    config: ModelConfig,
    kind: Divergence,
    head: bool,
    learned: bool,
    checkpointing: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every trained parameter, the head's and the scales' too, to float64's digits."""
    teacher = build(config, dtype=torch.float64).requires_grad_(False)
    plain = build(config, dtype=torch.float64, seed=1)
    student = fake(build(config, dtype=torch.float64, seed=1), learned, head)

    def one_step(_: Any, inputs_at: Any, loss_of: Any, *__: Any, **___: Any) -> list[dict[str, float]]:
        loss = loss_of(*inputs_at(0))
        loss.backward()
        values.append(loss)
        return []

    values: list[Tensor] = []
    monkeypatch.setattr(distill_module, "train", one_step)
    scales: Any = "learned" if learned else "frozen"
    run(
        student,
        teacher,
        tmp_path,
        settings(divergence=kind, head=head, scales=scales, activation_checkpointing=checkpointing),
    )
    found = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    assert found.keys() == trainable(student, head).keys()
    assert ("lm_head.weight" in found) == head
    assert any(name.endswith(".scale") for name in found) == learned

    for parameter in student.parameters():
        parameter.requires_grad_(True).grad = None
    weights = fake_weights(student, plain)
    batch = rows().select(rows().batch(3, 0, 0))
    body = {name: weight for name, weight in weights.items() if not name.startswith("lm_head.")}
    hidden, _ = torch.func.functional_call(plain, body, (batch.token_ids_NT, batch.positions_NT), tie_weights=False)
    # with tied embeddings the head is the embedding's own matrix, and only the head is quantized
    head_VD = weights.get("lm_head.weight", plain.lm_head.weight)
    log_q = (hidden[batch.used_NT] @ head_VD.T).log_softmax(dim=-1)
    log_p = teacher.logits(teacher(batch.token_ids_NT, batch.positions_NT)[0])[batch.used_NT].log_softmax(dim=-1)
    wanted = dense_divergence(kind, log_q, log_p)
    wanted.backward()
    torch.testing.assert_close(values[0].detach(), wanted.detach(), rtol=1e-9, atol=1e-12)
    for name, gradient in found.items():
        parameter = student.get_parameter(name)
        dense = parameter.grad if parameter.grad is not None else plain.get_parameter(name).grad
        assert dense is not None, name
        assert float(dense.abs().max()) > 0, name
        tolerance = 1e-6 if name.endswith(".scale") else 1e-9  # scales are float32
        assert float((gradient - dense).norm() / dense.norm()) < tolerance, name


def test_scales_learn_at_their_own_rate(tmp_path: Path) -> None:
    """After one step of Adam each moved by its rate; without one of their own that is a tenth of the weights'."""
    teacher = build(PLAIN).requires_grad_(False)
    for own, rate in ((None, 1e-4), (5e-4, 5e-4)):
        student = fake(build(PLAIN, seed=1), learn_scale=True)
        before = {name: p.detach().clone() for name, p in student.named_parameters()}
        config = settings(scales="learned", scale_learning_rate=own, clip=1e9, weight_decay=0.1)
        run(student, teacher, tmp_path / f"{rate}", config)
        for name, start in before.items():
            moved = (student.get_parameter(name).detach() - start).abs().max()
            if name.endswith(".scale"):
                assert float(moved) == pytest.approx(rate, rel=1e-2), name
            elif name.endswith("q_proj.weight"):
                assert float(moved) > 0.9e-3, name


@pytest.mark.parametrize("scales", ["frozen", "learned"])
def test_killed_and_resumed_is_bit_equal(scales: Literal["frozen", "learned"], tmp_path: Path) -> None:
    """20 steps are 10, a kill, and 10; with the head, the best so far and a teacher that is looked up."""
    teacher = build(HYBRID).requires_grad_(False)
    options = {"checkpoint_every": 10, "validate_every": 5, "scales": scales, "head": True, "best": True}
    config = settings(steps=20, teacher="topk", top_k=20, activation_checkpointing=True, **options)

    class Killed(Exception):  # noqa: N818
        pass

    def kill(done: int, *_: object) -> None:
        if done == 13:
            raise Killed

    def student() -> CausalLM:
        return fake(build(HYBRID), scales == "learned", head=True)

    def go(model: CausalLM, folder: Path, report: Any) -> list[dict[str, float]]:
        validate = lambda: fidelity(model, teacher, rows())  # noqa: E731
        return distill(model, teacher, rows(), config, 0, Checkpoints(folder), report, validate)

    whole, parts, resumed = student(), student(), student()
    wanted = go(whole, tmp_path / "whole", lambda *_: None)
    with pytest.raises(Killed):
        go(parts, tmp_path / "parts", kill)
    assert go(resumed, tmp_path / "parts", lambda *_: None) == wanted
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    start = student().state_dict()
    assert not torch.equal(whole.lm_head.weight, start["lm_head.weight"])
    assert torch.equal(whole.embed_tokens.weight, start["embed_tokens.weight"])
    # what is left is the best
    assert fidelity(whole, teacher, rows())["kl"] == pytest.approx(min(entry["kl"] for entry in wanted), rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"divergence": "reverse_kl"},
        {"divergence": "jensen_shannon"},
        {"teacher": "topk", "top_k": 8},
        {"scales": "learned", "head": True, "activation_checkpointing": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_each_way_lowers_the_kl(options: dict[str, Any], tmp_path: Path) -> None:
    teacher = build(HYBRID).requires_grad_(False)
    student = fake(build(HYBRID), options.get("scales") == "learned", options.get("head", False))
    history = run(student, teacher, tmp_path, settings(steps=50, rate=3e-3, validate_every=50, **options))
    assert history[-1]["kl"] < 0.6 * history[0]["kl"]
    assert not student.checkpointing


def test_all_of_the_vocabulary_kept_is_the_teacher_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradient, up to float16, in which the probabilities are kept; a few of them are less."""
    teacher = build(HYBRID).requires_grad_(False)
    losses: list[float] = []

    def one_step(_: Any, inputs_at: Any, loss_of: Any, *__: Any, **___: Any) -> list[dict[str, float]]:
        loss = loss_of(*inputs_at(0))
        loss.backward()
        losses.append(loss.item())
        return []

    monkeypatch.setattr(distill_module, "train", one_step)
    gradients: list[Tensor] = []
    for options in ({}, {"teacher": "topk", "top_k": VOCABULARY}, {"teacher": "topk", "top_k": 8}):
        student = fake(build(HYBRID, seed=1))
        run(student, teacher, tmp_path, settings(tokens="answer", **options))
        gradients.append(torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 1e-2
    assert 0 < losses[2] < losses[0]


@pytest.mark.parametrize(("whose", "where"), [("student", r"layers\.2"), ("teacher", r"the teacher's layers\.1")])
def test_nan_is_found_in_its_layer(whose: str, where: str, tmp_path: Path) -> None:
    teacher, student = build(HYBRID).requires_grad_(False), fake(build(HYBRID))
    checkpoints = Checkpoints(tmp_path)

    def poison(done: int, *_: object) -> None:
        if done == 3:
            model, layer = (student, 2) if whose == "student" else (teacher, 1)
            with torch.no_grad():
                model.layers[layer].mlp.down_proj.weight[0, 0] = torch.nan

    with pytest.raises(ValueError, match=rf"step 3: the loss is not finite, first in {where};"):
        distill(student, teacher, rows(), settings(steps=6, checkpoint_every=2), 0, checkpoints, poison, dict)
    found = checkpoints.latest()
    assert found is not None
    assert found[0] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": "topk", "divergence": "reverse_kl"}, r'divergence = "reverse_kl" needs all of the teacher\'s'),
        ({"scale_learning_rate": 1e-5}, r'scale_learning_rate is for scales = "learned"'),
        ({"best": True}, r"best = true chooses among validations; set optimizer\.validate_every"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**options)


def test_a_head_that_is_not_quantized_does_not_learn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="head = true trains a quantized head, and this one is not"):
        run(fake(build(HYBRID)), build(HYBRID), tmp_path, settings(head=True))


def test_a_head_can_learn_alone(tmp_path: Path) -> None:
    teacher, student = build(HYBRID).requires_grad_(False), fake(build(HYBRID))
    weight, scheme = student.lm_head.weight.detach(), QuantScheme(group_size=8)
    student.set_submodule("lm_head", FakeQuantLinear(weight, search_grid(weight, scheme), scheme))
    before = copy.deepcopy(student.state_dict())
    history = run(student, teacher, tmp_path, settings(steps=30, rate=3e-3, validate_every=30, head=True, layers=False))
    assert {name for name, x in student.state_dict().items() if not torch.equal(x, before[name])} == {"lm_head.weight"}
    assert history[-1]["kl"] < 0.9 * history[0]["kl"]


def test_something_must_learn() -> None:
    with pytest.raises(ValueError, match="layers = false leaves nothing to learn"):
        settings(layers=False)
