"""The head that drafts: the target's rows, rounded or fewer; its scores are the target's where it has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import pocket
from tests.decoding import oracle
from tests.decoding.test_step import SAMPLINGS, ids, prompt, tiny
from tests.models.test_drafter_checkpoint import packed
from tests.models.tiny import VOCABULARY
from twofold.decoding.step import decode
from twofold.models.draft_head import DraftHeadConfig, count_tokens, make_draft_head
from twofold.models.drafter_checkpoint import load_drafter, save_drafter
from twofold.ops.kernels import Kernels
from twofold.ops.sampling import Sampling
from twofold.quant.linear import PackedLinear
from twofold.quant.rounding import fake_quantize, search_grid
from twofold.quant.scheme import QuantScheme

CONFIGS = [
    DraftHeadConfig(bits=8),
    DraftHeadConfig(bits=4, group_size=16),
    DraftHeadConfig(rows=20),
    DraftHeadConfig(bits=8, group_size=-1, rows=20),
]
COUNTS = torch.randint(50, (VOCABULARY,), generator=torch.Generator().manual_seed(0))


def test_counts() -> None:
    assert count_tokens([[1, 1, 3], [], [3, 1]], 5).tolist() == [0, 3, 0, 2, 0]
    assert count_tokens([], 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("frozen", [False, True])
def test_scores_are_those_of_the_rounded_rows(config: DraftHeadConfig, frozen: bool) -> None:
    target, drafter = tiny()
    weight = target.lm_head.weight.detach()
    drafter.draft_head = make_draft_head(config, target.lm_head, COUNTS)
    if frozen:
        drafter.freeze()
    kept = sorted(sorted(range(VOCABULARY), key=lambda v: (-int(COUNTS[v]), v))[: config.rows or VOCABULARY])
    scheme = config.scheme
    rows = weight[kept] if scheme is None else fake_quantize(weight[kept], search_grid(weight[kept], scheme), scheme)
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
    wanted = torch.full((2, 3, VOCABULARY), -torch.inf)
    wanted[..., kept] = hidden @ rows.T
    torch.testing.assert_close(drafter.scores(target, hidden), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
@pytest.mark.parametrize("config", CONFIGS)
def test_the_answer_does_not_change(config: DraftHeadConfig, sampling: Sampling) -> None:
    target, drafter = tiny()
    drafter.draft_head = make_draft_head(config, target.lm_head, COUNTS)
    wanted = oracle.plain(target, prompt(7), 24, sampling)
    assert ids(list(decode(target, drafter, prompt(7), 24, sampling))) == wanted


def test_a_trained_drafter_keeps_most_of_its_length() -> None:
    target, drafter = pocket.target(), load_drafter(pocket.FOLDER / "drafter", kernels=Kernels.cpu())
    plain = [oracle.plain(target, asked, 48) for asked in pocket.prompts(3)]
    counts = count_tokens(plain, target.config.vocab_size)
    cycles = {}
    for name, config in (("own", None), ("int8", DraftHeadConfig(bits=8)), ("hot", DraftHeadConfig(rows=600))):
        drafter.draft_head = None if config is None else make_draft_head(config, target.lm_head, counts)
        answers = [list(decode(target, drafter, asked, 48, Sampling())) for asked in pocket.prompts(3)]
        assert [ids(answer) for answer in answers] == plain
        cycles[name] = sum(len(answer) for answer in answers)
    assert cycles["int8"] <= 1.03 * cycles["own"]
    assert cycles["hot"] <= 1.03 * cycles["own"]  # all tokens of these answers have a row


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("quantized", [False, True])
def test_what_is_saved_is_loaded(config: DraftHeadConfig, quantized: bool, tmp_path: Path) -> None:
    target, drafter = tiny()
    with torch.no_grad():
        target.lm_head.weight.copy_(target.lm_head.weight.bfloat16())
    if quantized:
        packed(drafter)
    plain = tmp_path / "plain"
    save_drafter(drafter, plain)
    drafter.draft_head = make_draft_head(config, target.lm_head, COUNTS)
    save_drafter(drafter, tmp_path / "with")
    loaded = load_drafter(tmp_path / "with")
    assert loaded.draft_head is not None
    assert loaded.draft_head.config == config
    assert isinstance(loaded.draft_head.linear, PackedLinear) == (config.bits < 16)
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded.scores(target, hidden), drafter.scores(target, hidden))
    # what other engines read is the same as without
    name = "model.safetensors"
    assert (plain / name).read_bytes() == (tmp_path / "with" / name).read_bytes()
    hf, without = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "with", plain))
    assert hf.pop("draft_head")["rows"] == config.rows
    assert hf == without
    assert load_drafter(plain).draft_head is None


def test_a_damaged_head_is_named(tmp_path: Path) -> None:
    target, drafter = tiny()
    drafter.draft_head = make_draft_head(DraftHeadConfig(rows=20), target.lm_head, COUNTS)
    save_drafter(drafter, tmp_path)
    file = tmp_path / "draft_head.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"row_ids": tensors["row_ids"] + VOCABULARY}, file)
    with pytest.raises(ValueError, match=f"row_ids are no tokens of a vocabulary of {VOCABULARY}"):
        load_drafter(tmp_path)
    save_file({"row_ids": tensors["row_ids"]}, file)
    with pytest.raises(ValueError, match=r"has no tensor linear\.weight"):
        load_drafter(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=r"draft_head\.safetensors is missing"):
        load_drafter(tmp_path)


def test_a_bad_config_is_refused() -> None:
    target, _ = tiny()
    with pytest.raises(ValueError, match="the target's own"):
        DraftHeadConfig()
    with pytest.raises(ValueError, match="leaves nothing to guess"):
        DraftHeadConfig(rows=0)
    with pytest.raises(ValueError, match=f"more than the vocabulary of {VOCABULARY}"):
        make_draft_head(DraftHeadConfig(rows=1000), target.lm_head, COUNTS)
    with pytest.raises(ValueError, match="does not divide"):
        make_draft_head(DraftHeadConfig(bits=4, group_size=24), target.lm_head, COUNTS)


def test_scheme() -> None:
    assert DraftHeadConfig(bits=4, group_size=64).scheme == QuantScheme(bits=4, group_size=64)
    assert DraftHeadConfig(rows=5).scheme is None
