"""Samples have the distribution asked for; their noise depends on seed, position and token alone."""

from __future__ import annotations

import math

import pytest
import torch

from twofold.ops import sampling as sampling_module
from twofold.ops.sampling import Sampling, choose, filtered, gumbel_noise, lead

LOGITS = [1.9, -0.3, 0.4, 1.1, 1.0, -2.0, 0.9, 0.1, -1.0, 1.7, 0.35, -0.6]


def exact(logits: list[float], sampling: Sampling) -> list[float]:
    """The distribution by its definition, filter after filter, each on what the one before left."""
    weights = {token: math.exp(logit / sampling.temperature) for token, logit in enumerate(logits)}
    kept = sorted(weights, key=lambda token: -weights[token])
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    total, mass, nucleus = sum(weights[t] for t in kept), 0.0, []
    for token in kept:
        if mass >= sampling.top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    nucleus = [t for t in nucleus if weights[t] >= sampling.min_p * weights[nucleus[0]]]
    total = sum(weights[t] for t in nucleus)
    return [weights[t] / total if t in nucleus else 0.0 for t in range(len(logits))]


def draws(logits: list[float], sampling: Sampling, count: int) -> list[int]:
    rows = torch.tensor(logits).expand(1, count, -1)
    return choose(rows, torch.arange(count)[None], sampling)[0].bincount(minlength=len(logits)).tolist()


def test_temperature_one_gives_the_softmax() -> None:
    logits = [2.0, 1.5, 1.0, 0.5]  # e^2 / sum = 0.455
    assert abs(draws(logits, Sampling(temperature=1.0), 4000)[0] - 1820) < 4 * math.sqrt(4000 * 0.455 * 0.545)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5, seed=1),
        Sampling(temperature=2.0, top_k=5),
        Sampling(temperature=0.8, top_p=0.7),
        Sampling(temperature=1.0, min_p=0.3),
        Sampling(temperature=1.5, top_k=9, top_p=0.9, min_p=0.2, seed=7),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_p=1e-6),
    ],
)
def test_frequencies_are_those_of_the_exact_distribution(sampling: Sampling) -> None:
    count, wanted = 20_000, exact(LOGITS, sampling)
    got = draws(LOGITS, sampling, count)
    assert [n for n, p in zip(got, wanted, strict=True) if p == 0] == [0] * wanted.count(0.0)
    kept = [(n, p * count) for n, p in zip(got, wanted, strict=True) if p > 0]
    freedom = len(kept) - 1
    chi_square = sum((n - m) ** 2 / m for n, m in kept)
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom)


def test_filters_keep_the_scores_of_what_they_keep() -> None:
    scores = torch.tensor(LOGITS)
    kept = filtered(scores, Sampling(temperature=1.0, top_k=4, top_p=0.9))
    wanted = exact(LOGITS, Sampling(temperature=1.0, top_k=4, top_p=0.9))
    assert [p > 0 for p in wanted] == kept.isfinite().tolist()
    assert torch.equal(kept[kept.isfinite()], scores[kept.isfinite()])


def test_temperature_zero_is_the_first_argmax() -> None:
    logits = torch.tensor([[[0.0, 3.0, 3.0, 1.0], [2.0, 1.0, 0.0, -1.0]]])
    assert choose(logits, torch.tensor([[5, 6]]), Sampling(top_k=2)).tolist() == [[1, 0]]


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor([3, 11, 2**40 + 5]), torch.tensor([[0, 1, 2, 900], [7, 6, 5, 4], [1, 2, 3, 4]])
    whole = gumbel_noise(seeds, positions, 97)
    for row in range(3):
        for at in range(4):
            alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1, at : at + 1], 50)
            assert torch.equal(whole[row, at, :50], alone[0, 0])
    order = torch.tensor([2, 0, 1])
    assert torch.equal(whole[order].flip(1), gumbel_noise(seeds[order], positions[order].flip(1), 97))
    halves = [gumbel_noise(seeds, part, 97) for part in positions.split(2, dim=1)]
    assert torch.equal(whole, torch.cat(halves, dim=1))


def test_every_bit_of_a_seed_counts() -> None:
    """And the noise of a seed below 2^32 is as it was when only those bits did."""
    seeds = torch.tensor([5, 5 + 2**32, 5 + 2**62, 5 - 2**63, -1, 2**32 - 1])
    noise = gumbel_noise(seeds, torch.zeros(len(seeds), 1, dtype=torch.long), 50)[:, 0]
    assert len(noise.unique(dim=0)) == len(seeds)
    assert noise[0, :3].tolist() == pytest.approx([-1.01942, -0.51817, 1.99651], abs=1e-4)


def test_noise_is_finite_gumbel_and_uncorrelated() -> None:
    noise = gumbel_noise(torch.arange(20), torch.arange(100).expand(20, -1), 500)  # a million
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.57722) < 5e-3  # Euler's constant; standard error 1.3e-3
    assert abs(noise.var() - math.pi**2 / 6) < 2e-2
    centred = noise - noise.mean()
    pairs = (
        (centred[1:], centred[:-1]),
        (centred[:, 1:], centred[:, :-1]),
        (centred[..., 1:], centred[..., :-1]),
        (centred[1:, :-1], centred[:-1, 1:]),
    )
    for a, b in pairs:
        assert abs((a * b).mean() / noise.var()) < 5e-3


@pytest.mark.parametrize("bits", [0, 0xFFFFFFFF])
def test_the_least_and_the_most_bits_give_finite_noise(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """-log(-log u) at u = 2^-24 and 1 - 2^-24."""
    rows = iter([torch.tensor([bits]), torch.tensor([[0]]), torch.tensor([0]), torch.tensor([[[bits]]])])
    monkeypatch.setattr(sampling_module, "_mix", lambda _: next(rows))
    u = 2.0**-24 if bits == 0 else 1 - 2.0**-24
    noise = gumbel_noise(torch.tensor([0]), torch.tensor([[0]]), 1)
    assert float(noise) == pytest.approx(-math.log(-math.log(u)), rel=1e-3)


def test_each_row_may_have_its_own_seed() -> None:
    logits, positions = torch.randn(1, 40, 30).expand(3, -1, -1), torch.arange(40).expand(3, -1)
    seeds = torch.tensor([4, 5, 4])
    rows = choose(logits, positions, Sampling(temperature=1.0), seeds)
    for row, seed in zip(rows, seeds.tolist(), strict=True):
        alone = choose(logits[:1], positions[:1], Sampling(temperature=1.0, seed=seed))
        assert torch.equal(row, alone[0])
    assert not torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, seed=5), Sampling(temperature=1.5)])
def test_the_lead_is_what_a_token_can_lose(sampling: Sampling) -> None:
    """Lowered by less than it, the chosen token is still chosen; by more, another."""
    torch.manual_seed(0)
    for position in range(20):
        logits = torch.randn(50)
        place = torch.tensor([[position]])
        token = int(choose(logits[None, None], place, sampling))
        for share, same in ((0.99, True), (1.01, False)):
            lowered = logits.clone()
            lowered[token] -= share * lead(logits, position, sampling)
            assert (int(choose(lowered[None, None], place, sampling)) == token) == same


def test_a_token_without_rivals_leads_by_any_distance() -> None:
    assert lead(torch.randn(9), 0, Sampling(temperature=1.0, top_k=1)) == math.inf


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"top_k": -1}, "top_k -1 is negative; 0 switches it off"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"min_p": 1.0}, "min_p 1.0"),
    ],
)
def test_what_is_no_sampling_is_an_error(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [Sampling(temperature=1e-40), Sampling(temperature=1.0, top_p=1e-46)])
def test_the_least_values_are_the_argmax(sampling: Sampling) -> None:
    logits = torch.tensor([[[1.0, 5.0, 4.9, -3.0]] * 64])
    assert choose(logits, torch.arange(64)[None], sampling).unique().tolist() == [1]
