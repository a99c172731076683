"""The GPU's decode kernels inside a model, against the references; on a GPU, or (but for products) in Triton's
interpreter."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import accumulate

import pytest
import torch

from tests import pocket
from tests.ops.decode.on_device import DEVICE
from twofold.decoding.graphs import CapturedCycle
from twofold.decoding.step import Cycle, Rows, decode, decode_cycle, new_rows, prefill
from twofold.evaluation.roofline import variants
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import load_drafter
from twofold.models.shapes import find_shape
from twofold.models.state import DeltaState, KeyValueCache
from twofold.ops.kernels import Kernels
from twofold.ops.sampling import Sampling

TINY = find_shape("tiny")
BLOCK = TINY.drafter.block_size


def with_dense_products() -> Kernels:
    reference = Kernels.reference()
    return replace(
        Kernels.cuda(),
        freeze_linear=reference.freeze_linear,
        freeze_packed=reference.freeze_packed,
        top1=reference.top1,
    )


@cache
def pair(kind: str, dtype: torch.dtype, step: str = "+ SWA") -> tuple[CausalLM, Drafter | None]:
    """The same weights, numbers of bfloat16, with either kernels and in any dtype."""
    made = {"reference": Kernels.reference, "passes": with_dense_products, "all": Kernels.cuda}
    kernels = Kernels.cuda(overlap=True) if kind == "overlapping" else made[kind]()
    for name, target, drafter in variants(TINY, kernels, torch.device("cpu"), dtype):
        torch.manual_seed(5)
        for model in (target, drafter):
            for p in () if model is None else model.parameters():
                if p.dim() >= 2:
                    p.data.copy_((torch.randn(p.shape) * p.shape[-1] ** -0.5).bfloat16())
            for buffer_name, buffer in () if model is None else model.named_buffers():
                if buffer_name.endswith("weight_packed"):
                    buffer.copy_(torch.randint(-(2**31), 2**31, buffer.shape, dtype=buffer.dtype))
                elif buffer_name.endswith("weight_scale"):
                    buffer.copy_(buffer.bfloat16())
        if name == step:
            return target.to(DEVICE).freeze(), None if drafter is None else drafter.to(DEVICE).freeze()
    raise AssertionError(step)


def prompts(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(TINY.target.vocab_size, (rows, length), generator=generator).to(DEVICE)


def prefilled(kind: str, length: int, dtype: torch.dtype) -> tuple[Rows, torch.Tensor]:
    target, drafter = pair(kind, dtype)
    rows = new_rows(target, drafter, 2, 160)
    return rows, prefill(target, drafter, rows, prompts(2, length), Sampling())


def assert_near(ours: Rows, wanted: Rows, tolerance: float) -> None:
    assert torch.equal(ours.state.lengths_B, wanted.state.lengths_B)
    length = int(wanted.state.lengths_B.min())
    assert ours.draft_state is not None
    assert wanted.draft_state is not None
    layers = [*ours.state.layers, *ours.draft_state.caches], [*wanted.state.layers, *wanted.draft_state.caches]
    for a, b in zip(*layers, strict=True):
        if isinstance(a, KeyValueCache):
            assert isinstance(b, KeyValueCache)
            pairs = [(a.k_BSGD[:, :length], b.k_BSGD[:, :length]), (a.v_BSGD[:, :length], b.v_BSGD[:, :length])]
        else:
            assert isinstance(b, DeltaState)
            pairs = [(a.conv_BWC, b.conv_BWC), (a.state_BHKV, b.state_BHKV)]
        for x, y in pairs:
            assert (x.float() - y.float()).norm() <= tolerance * y.float().norm()


def given(accepted: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return accepted


@pytest.mark.triton
@pytest.mark.parametrize("length", [3, 16, 40, 70])
def test_passes_and_commits_are_those_of_the_references(length: int) -> None:
    """Prefill, then cycles whose rows accept numbers of their own; float32, so up to the order of sums."""
    kinds = ("passes", "reference")
    (ours, logits), (wanted, expected) = (prefilled(kind, length, torch.float32) for kind in kinds)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert_near(ours, wanted, 1e-4)
    for counts in ([0, 7], [3, 1], [7, 7], [2, 0]):
        wanted.anchors_B.copy_(ours.anchors_B)
        accepted = torch.tensor(counts, device=DEVICE)
        scores = [
            decode_cycle(*pair(kind, torch.float32), rows, Sampling(), BLOCK, accept=partial(given, accepted))
            for kind, rows in zip(kinds, (ours, wanted), strict=True)
        ]
        assert scores[0] is not None
        assert scores[1] is not None
        assert_near(ours, wanted, 1e-3)
        if torch.equal(ours.emitted_BN, wanted.emitted_BN):  # else the drafts differed by a near-tie
            torch.testing.assert_close(*scores, rtol=5e-3, atol=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("step", ["BF16", "INT4 target", "+ BF16 drafter", "+ INT4 drafter", "+ SWA", "+ INT4 head"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["all", "overlapping"])
def test_a_captured_cycle_is_the_eager_one(step: str, sampling: Sampling, kind: str) -> None:
    """The same kernels over the same numbers: the same bits."""
    target, drafter = pair("all", torch.bfloat16, step)
    captured = CapturedCycle(*pair(kind, torch.bfloat16, step), 200, sampling)
    rows = new_rows(target, drafter, 1, captured.rows.state.max_length, sampling.seed)
    for length in (31, 32, 33, 128):  # around the window, and four of it
        asked = prompts(1, length)
        first = captured.start(asked, sampling.seed).clone()
        rows.reset(sampling.seed)
        prefill(target, drafter, rows, asked, sampling)
        assert torch.equal(first, rows.anchors_B)
        for _ in range(6):
            captured.launch()
            got = captured.read()
            rows.know(rows.state.max_length - captured.num_tokens, exact=False)
            decode_cycle(target, drafter, rows, sampling, captured.num_tokens, scores=False)
            gained, *tokens = rows.emitted_BN[0].tolist()
            assert got == [tokens[:gained]]


@pytest.mark.gpu
@pytest.mark.parametrize("step", ["BF16", "INT4 target", "+ INT4 head"])
def test_packed_products_are_as_near_as_dense_ones(step: str) -> None:
    """Hidden states of whole passes against float32: bfloat16 costs 3 to 15 % with these weights on any path, and
    products with packed weights, which round less, no more of it than the matrices they stand for."""
    ours, dense = (pair(kind, torch.bfloat16, step)[0] for kind in ("all", "passes"))
    exact = pair("reference", torch.float32, step)[0]
    for rows, length in ((32, 1), (4, 16), (1, 100), (1, 300)):
        asked = prompts(rows, length)
        with torch.no_grad():
            h, a, b = (model(asked, state=model.new_state(rows, 400))[0].float() for model in (exact, ours, dense))
        assert (a - h).norm() <= 1.2 * (b - h).norm()
        assert (b - h).norm() <= 0.3 * h.norm()
        scores = ours.logits(a.bfloat16()).float()  # rounded: of two that are equal then, top1 knows the greater
        chosen = scores.gather(-1, ours.top1(a.bfloat16())[..., None])[..., 0]
        assert (chosen >= scores.amax(dim=-1) - scores.abs().amax(dim=-1) * 2.0**-7).all()


@pytest.mark.gpu
def test_memory_is_flat_over_ten_thousand_cycles() -> None:
    target, drafter = pair("all", torch.bfloat16)
    none = torch.zeros(1, dtype=torch.long, device=DEVICE)
    captured = CapturedCycle(target, drafter, 10_100, Sampling(), accept=partial(given, none))
    captured.start(prompts(1, 20), 0)
    held = []
    for number in range(10_000):
        captured.launch()
        captured.read()
        if number % 100 == 50:
            held.append(torch.cuda.memory_allocated())
    assert len(set(held)) == 1
    assert captured.rows.state.lengths_B.tolist() == [10_020]


WINDOW = 64
GAP = 0.25  # of the two best scores in bfloat16, below which a first difference is a near-tie


@cache
def trained(fast: bool) -> tuple[CausalLM, Drafter]:
    """The pocket model and its drafter, with a window; exact in float32 where there is no GPU."""
    gpu = DEVICE == "cuda"
    kernels = (Kernels.cuda() if gpu else Kernels.cpu()) if fast else Kernels.reference()
    dtype = torch.bfloat16 if gpu else torch.float32
    target = load_target(pocket.FOLDER, dtype, kernels).to(DEVICE).freeze()
    drafter = load_drafter(pocket.FOLDER / "drafter", dtype, kernels)
    drafter.config = replace(drafter.config, sliding_window=WINDOW)
    return target, drafter.to(DEVICE).freeze()


FAR = [pytest.param(length, marks=pytest.mark.gpu) for length in (4096, 32_768)]


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 4 * WINDOW, *FAR])
def test_the_trained_model_says_the_same(length: int) -> None:
    """A replayed cycle of fast kernels against eager references, at the borders of the window and far out: the same
    tokens and accepted counts up to a first difference, which must be a near-tie."""
    text = [token for asked in pocket.prompts(3) for token in asked]
    asked = tuple((text * (length // len(text) + 1))[:length])
    wanted = list(decode(*trained(False), asked, 64, Sampling()))
    got = list(CapturedCycle(*trained(True), length + 64, Sampling()).decode(asked, 64, 0))
    tokens, expected = ([token for cycle in cycles for token in cycle.token_ids] for cycles in (got, wanted))
    assert len(tokens) == len(expected) == 64
    same = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), None)
    whole = 64 - trained(True)[1].config.block_size if same is None else same
    counts = [counted(cycles, whole) for cycles in (got, wanted)]
    if DEVICE == "cpu":
        assert same is None
        assert counts[0] == counts[1]
    elif same is not None:
        assert gap(wanted, same) < GAP


def counted(cycles: list[Cycle], tokens: int) -> list[int]:
    """num_accepted of the cycles that began within the first tokens."""
    starts = accumulate((len(cycle.token_ids) for cycle in cycles), initial=0)
    return [cycle.num_accepted for cycle, start in zip(cycles, starts, strict=False) if start < tokens]


def gap(cycles: list[Cycle], token: int) -> float:
    """Between the two best scores for a token."""
    scores = torch.cat([cycle.logits[: len(cycle.token_ids)] for cycle in cycles if cycle.logits is not None])
    best = scores[token].float().topk(2).values
    return float(best[0] - best[1])
