"""Whether the fast path says what the reference says: replayed cycles of the GPU's kernels against eager references.

    python benchmarks/fast_path.py --target FOLDER --drafter FOLDER --conversations CONVERSATIONS.safetensors --out F

Prompts are conversations (of `twofold.data.conversations`): first as they are, then, for every length of `--lengths`,
as many of them after one another as fill it. Both answer greedily, activations in bfloat16. Answers are compared up to
the first token that differs: there `gap` is the distance of the reference's two best scores, whose rounding to bfloat16
alone is worth 0.125 at scores of 16 and above; the accepted counts of the cycles before it must be equal.
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
from twofold.decoding.step import Cycle, decode
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import load_drafter
from twofold.ops.kernels import Kernels
from twofold.ops.sampling import Sampling

GREEDY = Sampling()


def load(args: argparse.Namespace, kernels: Kernels) -> tuple[CausalLM, Drafter]:
    target = load_target(args.target, torch.bfloat16, kernels).to(args.device).freeze()
    drafter = load_drafter(args.drafter, torch.bfloat16, kernels)
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
        print(json.dumps(rows[-1]), flush=True)
    gaps = [row["gap"] for row in rows if "gap" in row]
    result = {
        "command": f"python benchmarks/fast_path.py --target FOLDER --drafter FOLDER --window {args.window}",
        "date": datetime.now(UTC).date().isoformat(),
        "environment": {
            "hardware": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
            "torch": torch.__version__,
            "twofold": twofold.__version__,
        },
        "answers": len(rows),
        "answers_equal": len(rows) - len(gaps),
        "largest_gap": max(gaps, default=0.0),
        "accepted_equal": all(row["accepted_equal"] for row in rows),
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print({key: result[key] for key in ("answers", "answers_equal", "largest_gap", "accepted_equal")})


if __name__ == "__main__":
    main()
