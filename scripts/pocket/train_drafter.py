"""Trains the pocket model's DFlash drafter on the pocket model's own answers.

    python scripts/pocket/train_drafter.py --seconds 240      # one GPU

The target answers the training prompts, half of them greedily and half at temperature 0.7, and the drafter learns to
guess those answers in blocks. With --seconds the number of steps is chosen from the measured time of a step.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from twofold.data.conversations import load_conversations, pack, save_conversations
from twofold.data.generate import GenerateConfig, generate
from twofold.data.prompts import read_prompts
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target
from twofold.models.drafter import Drafter, DrafterConfig, DraftShape
from twofold.models.drafter_checkpoint import save_drafter
from twofold.models.tokenizer import Tokenizer
from twofold.ops.kernels import Kernels
from twofold.training.draft import DraftConfig, teacher_forced_acceptance, train_drafter
from twofold.training.loop import OptimizerConfig

ASSETS = Path(__file__).parents[2] / "twofold" / "assets" / "pocket"


SHAPE = DraftShape(
    num_layers=2,
    intermediate_size=768,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    block_size=8,
    mask_token_id=3,
    target_layer_ids=(1, 4, 7),
)


class NoCheckpoints:
    def latest(self) -> None:
        return None

    def save(self, step: int, write: Callable[[Path], object]) -> None:
        pass


def answers(target: CausalLM, data: Path, stored: Path, count: int, batch: int) -> None:
    """Writes the target's answers, and those to held-out prompts beside them."""
    tokenizer = Tokenizer.load(ASSETS)
    for name, limit in (("train", count), ("heldout", min(256, count))):
        prompts = read_prompts(data / f"{name}_prompts.jsonl", limit)
        ids = [i for i in (tokenizer.chat_ids([{"role": "user", "content": p}]) for p in prompts) if len(i) <= 192]
        made = []
        for temperature, part in ((0.0, ids[::2]), (0.7, ids[1::2])):
            if name == "heldout":
                part, temperature = (ids, 0.0) if temperature == 0 else ([], 0.7)
            config = GenerateConfig(max_new_tokens=256, temperature=temperature, batch_size=batch)
            made += generate(target, part, config, 1, lambda *a: print("generate", *a, flush=True))
        save_conversations(made, stored / f"{name}.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(".cache/pocket"))
    parser.add_argument("--target", type=Path, default=ASSETS)
    parser.add_argument("--out", type=Path, default=Path(".cache/pocket/drafter"))
    parser.add_argument("--prompts", type=int, default=45_000)
    parser.add_argument("--generate-batch", type=int, default=3072)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    kernels = Kernels.cuda() if args.device == "cuda" else Kernels.cpu()
    target = load_target(args.target, kernels=kernels).to(args.device).requires_grad_(False)
    if not (args.out / "heldout.safetensors").exists():
        began = time.monotonic()
        answers(target, args.data, args.out, args.prompts, args.generate_batch)
        print(f"generated in {time.monotonic() - began:.0f} s", flush=True)
    rows = pack(load_conversations(args.out / "train.safetensors"), 512)
    heldout = pack(load_conversations(args.out / "heldout.safetensors"), 512).to(args.device)
    print(f"{len(rows)} rows, {int(rows.answer_NT.sum())} answer tokens", flush=True)

    drafter = Drafter.initialized(DrafterConfig.for_target(target.config, SHAPE), args.seed, kernels).to(args.device)

    def fit(steps: int) -> None:
        config = DraftConfig(
            optimizer=OptimizerConfig(
                steps=steps, learning_rate=args.learning_rate, weight_decay=0.01, validate_every=max(1, steps // 8)
            ),
            batch_rows=args.rows,
            anchors=args.anchors,
        )

        def validate() -> dict[str, float]:
            value = teacher_forced_acceptance(drafter, target, heldout, 64)
            print(f"held-out accept length (teacher-forced) {value:.3f}", flush=True)
            return {"accept_length": value}

        def report(done: int, total: int, note: str) -> None:
            if done % 200 == 0:
                print(f"step {done}/{total} {note} {time.monotonic() - began:.0f} s", flush=True)

        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.device == "cuda"):
            train_drafter(drafter, target, rows, config, args.seed, NoCheckpoints(), report, validate)

    began = time.monotonic()
    steps = args.steps
    if args.seconds is not None:
        start = {name: value.clone() for name, value in drafter.state_dict().items()}
        fit(3)
        mark = time.monotonic()
        fit(20)
        steps = max(20, int((args.seconds - (time.monotonic() - began)) / (time.monotonic() - mark) * 20))
        drafter.load_state_dict(start)
    print(f"{steps} steps", flush=True)
    fit(steps)
    save_drafter(drafter, args.out)


if __name__ == "__main__":
    main()
