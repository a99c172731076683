"""The trainings, heads and windows that `drafter_smollm2.py` compares."""

import argparse
from dataclasses import dataclass, replace

from twofold.models.draft_head import DraftHeadConfig
from twofold.quant.scheme import QuantScheme
from twofold.training.losses import DraftLoss

HARD, SOFT, TV = DraftLoss(hard=1.0), DraftLoss(soft=1.0), DraftLoss(total_variation=1.0)
MIXED = DraftLoss(hard=0.1, total_variation=0.9)  # DSpark's
SOFT_TV = DraftLoss(soft=0.5, total_variation=0.5)
NOISE = "direct hard, from noise"  # the paper's, but for its stages
BEST = "two stages best loss"
LONGER = f"{BEST}, longer"  # what is quantized, windowed, given other heads and run
WINDOWED = f"{LONGER}, window trained in"
MARKOV = f"{LONGER}, Markov head"
ROUNDED = f"{LONGER}, trained INT4"
KEPT = "an earlier run's"


@dataclass(frozen=True, kw_only=True)
class Training:
    """`share` of the budget's steps, each of as many tokens times `rows`, on the original target ("bf16") or the
    quantized one ("int4"), from `text` ("given", "own" or "both") in rows of `length` tokens, every `joined`-th one
    document; `start` is the training that it goes on from, at `rate` times the learning rate; without one a drafter
    starts at the target's last layers, or at `noise`. It sees `window` tokens, once trained, or as it is trained in. A
    loss of None is the best of the direct ones."""

    target: str = "int4"
    loss: DraftLoss | None = HARD
    positions: str = "decay"
    share: float = 1.0
    rows: int = 1
    text: str = "given"
    length: int | None = None
    joined: int = 0
    start: str | None = None
    rate: float = 1.0
    noise: bool = False
    quantize: QuantScheme | None = None
    markov_rank: int = 0
    window: int | None = None
    trained_in: bool = False


DIRECT = {
    "direct hard": Training(),
    "direct soft": Training(loss=SOFT),
    "direct total variation": Training(loss=TV),
    "direct hard + total variation": Training(loss=MIXED),
    "direct soft + total variation": Training(loss=SOFT_TV),
    "direct hard, D-PACE": Training(positions="dpace"),
    "direct soft, D-PACE": Training(loss=SOFT, positions="dpace"),
}


def trainings(args: argparse.Namespace) -> dict[str, Training]:
    """In this order, since the later ones build on the earlier."""
    first, qat = args.first_share, QuantScheme(group_size=args.group_size)
    goes_on = Training(
        loss=None,
        share=args.longer,
        rows=args.longer_rows,
        text=args.longer_text,
        length=args.longer_length,
        joined=args.joined,
        start=LONGER,
        rate=0.25,
        window=args.window or None,
    )
    return {
        NOISE: Training(noise=True),
        **DIRECT,
        "direct best loss, Markov head": Training(loss=None, markov_rank=64),
        "direct best loss, own answers": Training(loss=None, text="own"),
        "stage 1 hard": Training(target="bf16", share=first),
        "two stages hard": Training(share=1 - first, start="stage 1 hard"),
        "stage 1 best loss": Training(target="bf16", loss=None, share=first),
        BEST: Training(loss=None, share=1 - first, start="stage 1 best loss"),
        f"{BEST}, trained INT4": Training(loss=None, share=1 - first, start="stage 1 best loss", quantize=qat),
        LONGER: replace(goes_on, start=BEST if args.kept is None else KEPT),
        MARKOV: replace(goes_on, share=args.longer / 10, markov_rank=64),
        WINDOWED: replace(goes_on, share=first, trained_in=True),
        ROUNDED: replace(goes_on, share=1.0, rate=0.1, quantize=qat),
    }


QUANTIZED = ("RTN", "AWQ", "GPTQ")
HEADS: dict[str, DraftHeadConfig] = {
    "INT8": DraftHeadConfig(bits=8, group_size=-1),
    "INT4": DraftHeadConfig(bits=4, group_size=32),
    "16384 rows": DraftHeadConfig(rows=16_384),
    "8192 rows": DraftHeadConfig(rows=8_192),
    "8192 rows INT8": DraftHeadConfig(bits=8, group_size=-1, rows=8_192),
}
WINDOWS = (None, 2048, 1024, 512)
