"""Whether the fast path says what the reference says: replayed cycles of the GPU's kernels against eager references.

    python benchmarks/fast_path.py --target FOLDER --drafter FOLDER --conversations CONVERSATIONS.safetensors --out F

Prompts are conversations (of `twofold.data.conversations`): first as they are, then, for every length of `--lengths`,
as many of them after one another as fill it. Both answer greedily. Answers are compared up to the first token that
differs: there `gap` is the distance of the reference's two best scores, whose rounding to bfloat16 alone is worth 0.125
at scores of 16 and above. The accepted counts of the cycles before it are equal, or a guess of the drafter differed
first: `draft_gap` is the distance of the reference drafter's two best scores there.
"""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import twofold
from twofold.data.conversations import load_conversations
from twofold.decoding.graphs import CapturedCycle
from twofold.decoding.step import Cycle, decode, new_rows, prefill
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import load_drafter
from twofold.ops.kernels import Kernels
from twofold.ops.sampling import Sampling
from twofold.training.precision import dtype_of

GREEDY = Sampling()


def load(args: argparse.Namespace, kernels: Kernels) -> tuple[CausalLM, Drafter]:
    dtype = dtype_of(args.precision)
    target = load_target(args.target, dtype, kernels).to(args.device).freeze()
    drafter = load_drafter(args.drafter, dtype, kernels)
    if args.window is not None:
        drafter.config = replace(drafter.config, sliding_window=args.window)
    return target, drafter.to(args.device).freeze()


def asked(args: argparse.Namespace) -> list[tuple[str, list[int]]]:
    told = load_conversations(args.conversations)
    made = [("short", c.prompt_ids) for c in told[: args.prompts]]
    text = [token for c in told for token in (*c.prompt_ids, *c.answer_ids)]
    for number, length in enumerate(args.lengths):
        start = number * 1000 % max(1, len(text) - length)
        made.append((str(length), (text * (1 + length // len(text)))[start:][:length]))
    return made


def tokens(cycles: Iterable[Cycle]) -> list[int]:
    return [token for cycle in cycles for token in cycle.token_ids]


def counts(cycles: Sequence[Cycle], within: int) -> list[int]:
    """num_accepted of the cycles that began within the first tokens."""
    starts = accumulate((len(cycle.token_ids) for cycle in cycles), initial=0)
    return [cycle.num_accepted for cycle, start in zip(cycles, starts, strict=False) if start < within]


def compare(got: Sequence[Cycle], wanted: Sequence[Cycle], block: int) -> dict[str, Any]:
    ours, theirs = tokens(got), tokens(wanted)
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    found: dict[str, Any] = {"tokens": len(theirs), "same": len(theirs) if same is None else same}
    if same is not None:
        scores = torch.cat([c.logits[: len(c.token_ids)] for c in wanted if c.logits is not None])
        best = scores[same].float().topk(2).values
        found["gap"] = float(best[0] - best[1])
    within = (len(theirs) - block if same is None else same - block) + 1  # cycles that end before
    found["accepted"], found["reference_accepted"] = counts(got, within), counts(wanted, within)
    found["accepted_equal"] = found["accepted"] == found["reference_accepted"]
    return found


def first_other_guess(got: Sequence[int], wanted: Sequence[int]) -> tuple[int, int] | None:
    """(cycle, guess) from 0 where the accepted counts first differ: one drafter's guess was right there and the other's
    was not."""
    found = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), None)
    return None if found is None else (found, min(got[found], wanted[found]))


@torch.inference_mode()
def draft_gap(target: CausalLM, drafter: Drafter, ids: list[int], guess: int) -> float:
    """The distance of the two best scores of a guess of the block that the last of `ids` is the anchor of."""
    block = drafter.config.block_size
    rows = new_rows(target, drafter, 1, len(ids) + block)
    prefill(target, drafter, rows, torch.tensor([ids[:-1]], device=target.device), GREEDY)
    block_BN = torch.full((1, block), drafter.config.mask_token_id, device=target.device)
    block_BN[:, 0] = ids[-1]
    assert rows.draft_state is not None
    hidden = drafter.draft(rows.draft_state, target.embed_tokens(block_BN))
    best = drafter.scores(target, hidden[:, 1 + guess]).float().topk(2).values[0]
    return float(best[0] - best[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=24, help="short ones")
    parser.add_argument("--lengths", type=int, nargs="*", default=[511, 512, 513, 4096])
    parser.add_argument("--window", type=int, default=512, help="of the drafter's context")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    fast, reference = load(args, Kernels.auto(args.device)), load(args, Kernels.reference())
    prompts = asked(args)
    captured = CapturedCycle(*fast, max(len(ids) for _, ids in prompts) + args.max_tokens, GREEDY)
    rows = []
    for name, ids in prompts:
        began = time.perf_counter()
        got = list(captured.decode(ids, args.max_tokens, 0))
        between = time.perf_counter()
        wanted = list(decode(*reference, tuple(ids), args.max_tokens, GREEDY))
        seconds = {"seconds": between - began, "reference_seconds": time.perf_counter() - between}
        rows.append({"name": name, "prompt": len(ids)} | compare(got, wanted, fast[1].config.block_size) | seconds)
        if (other := first_other_guess(rows[-1]["accepted"], rows[-1]["reference_accepted"])) is not None:
            cycle, guess = other
            rows[-1]["draft_gap"] = draft_gap(*reference, ids + tokens(wanted[:cycle]), guess)
        print(json.dumps(rows[-1]), flush=True)
    gaps = [row["gap"] for row in rows if "gap" in row]
    result = {
        "command": f"python benchmarks/fast_path.py --target FOLDER --drafter FOLDER --window {args.window} "
        f"--precision {args.precision}",
        "date": datetime.now(UTC).date().isoformat(),
        "environment": {
            "hardware": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
            "torch": torch.__version__,
            "twofold": twofold.__version__,
        },
        "answers": len(rows),
        "answers_equal": len(rows) - len(gaps),
        "largest_gap": max(gaps, default=0.0),
        "accepted_equal": sum(row["accepted_equal"] for row in rows),
        "largest_draft_gap": max((row["draft_gap"] for row in rows if "draft_gap" in row), default=0.0),
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        {key: result[key] for key in ("answers", "answers_equal", "largest_gap", "accepted_equal", "largest_draft_gap")}
    )


if __name__ == "__main__":
    main()
