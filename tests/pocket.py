"""The trained model that comes with Twofold, loaded once a test process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import twofold
from twofold.data.prompts import read_prompts, tokenize_prompts
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import load_drafter
from twofold.models.drafter_config import DrafterConfig, DraftShape
from twofold.models.tokenizer import Tokenizer
from twofold.ops.kernels import Kernels

FOLDER = Path(twofold.__file__).parent / "assets" / "pocket"
SHAPE = DraftShape(
    num_layers=2,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    block_size=8,
    mask_token_id=3,
    target_layer_ids=(1, 4, 7),
)


@cache
def target() -> CausalLM:
    return load_target(FOLDER, kernels=Kernels.cpu()).freeze()


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@cache
def untrained_drafter() -> Drafter:
    """It guesses at random: what is accepted is chance."""
    config = DrafterConfig.for_target(target().config, SHAPE)
    return Drafter.initialized(config, 0, Kernels.cpu()).freeze()


@cache
def trained_drafter() -> Drafter:
    """The drafter that comes along."""
    return load_drafter(FOLDER / "drafter", kernels=Kernels.cpu()).freeze()


@cache
def prompts(count: int) -> tuple[tuple[int, ...], ...]:
    """Held-out prompts as ids."""
    texts = read_prompts(FOLDER / "heldout_prompts.jsonl", count)
    return tuple(tuple(ids) for ids in tokenize_prompts(texts, tokenizer(), 512))
