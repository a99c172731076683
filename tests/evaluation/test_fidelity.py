"""Fidelity by its definitions, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from tests.models.tiny import HYBRID, build
from tests.training.test_draft import packed
from twofold.evaluation.fidelity import fidelity, prefill_fidelity
from twofold.models.causal_lm import CausalLM


def model(seed: int) -> CausalLM:
    return build(HYBRID, seed=seed).requires_grad_(False)


def by_hand(student: CausalLM, teacher: CausalLM) -> dict[str, float]:
    """Each document alone, each answer token from the tokens before it."""
    rows = packed()
    kls, agree, nll = [], [], []
    for row in range(len(rows)):
        for at in range(rows.answer_NT.shape[1]):
            position = int(rows.positions_NT[row, at])
            if not rows.answer_NT[row, at] or position == 0:
                continue
            before = rows.token_ids_NT[row : row + 1, at - position : at]
            p, q = (m.logits(m(before)[0])[0, -1].double().softmax(dim=0).tolist() for m in (teacher, student))
            kls.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
            agree.append(p.index(max(p)) == q.index(max(q)))
            nll.append(-math.log(q[int(rows.token_ids_NT[row, at])]))
    count = len(kls)
    assert count == 9 + 11 + 5 + 4
    return {"kl": sum(kls) / count, "top1": sum(agree) / count, "ppl": math.exp(sum(nll) / count)}


@torch.no_grad()
def test_a_model_is_faithful_to_itself() -> None:
    teacher = model(0)
    got = fidelity(teacher, teacher, packed())
    assert got["kl"] == 0.0
    assert got["top1"] == 1.0
    assert got["ppl"] == pytest.approx(by_hand(teacher, teacher)["ppl"], rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("batch_rows", [1, 8])
def test_another_model_by_hand(batch_rows: int) -> None:
    teacher, student = model(0), model(0)
    for index, parameter in enumerate(student.parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        parameter += 0.03 * noise
    got = fidelity(student, teacher, packed(), batch_rows)
    wanted = by_hand(student, teacher)
    assert 0 < wanted["top1"] < 1
    assert got == pytest.approx(wanted, rel=1e-3)
    assert got["kl"] > 0.01


def test_8_bit_products_cost_a_little_everywhere_but_in_the_head() -> None:
    plain, eight_bits = model(0), model(0)
    assert prefill_fidelity(plain, eight_bits, packed())["kl"] == 0.0
    eight_bits = model(0)
    kernels = eight_bits.kernels.with_fp8_prefill("cpu")
    assert kernels is not None
    eight_bits.kernels = kernels
    got = prefill_fidelity(plain, eight_bits, packed())
    assert 0 < got["kl"] < 0.2  # of a random model, whose scores are steep
    assert eight_bits.head.frozen is plain.head.frozen
