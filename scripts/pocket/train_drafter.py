"""Trains the pocket model's DFlash drafter on the pocket model's own answers.

    python scripts/pocket/train_drafter.py generate      # one GPU: a minute
    python scripts/pocket/train_drafter.py train         # one GPU: the given seconds, and 24 GB for stored features

`generate` lets the target answer training prompts, three of four batches greedily and one at temperature 0.7, and
stores each batch. `train` learns to guess those answers in blocks: soft labels, Muon for matrices and AdamW for the
rest, linear decay to zero over the given seconds.
"""

import argparse
import time
from pathlib import Path

import torch

from twofold.data.conversations import PackedRows, load_conversations, pack, save_conversations
from twofold.data.features import feature_source
from twofold.data.generate import GenerateConfig, generate
from twofold.data.prompts import read_prompts
from twofold.models.checkpoint import load_target
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import save_drafter
from twofold.models.drafter_config import DrafterConfig, DraftShape
from twofold.models.layers import dense_weight
from twofold.models.tokenizer import Tokenizer
from twofold.ops.kernels import Kernels
from twofold.training.blocks import make_blocks, sample_anchors, teacher_forced_acceptance
from twofold.training.draft import DraftConfig, draft_loss
from twofold.training.losses import DraftLoss
from twofold.training.optimizer import OptimizerConfig, new_optimizer, set_rate

ASSETS = Path(__file__).parents[2] / "twofold" / "assets" / "pocket"
SHAPE = DraftShape(
    num_layers=2,
    intermediate_size=768,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    block_size=6,
    mask_token_id=3,
    target_layer_ids=(1, 4, 7),
)


def make_answers(args: argparse.Namespace) -> None:
    target = load_target(ASSETS, kernels=Kernels.auto(args.device)).to(args.device).freeze()
    tokenizer = Tokenizer.load(ASSETS)
    for name, count, part in (("heldout", 100, 100), ("train", args.prompts, args.part)):
        prompts = read_prompts(args.data / f"{name}_prompts.jsonl", 3 * count)
        ids = [i for i in (tokenizer.chat_ids([{"role": "user", "content": p}]) for p in prompts) if len(i) <= 64]
        for number, start in enumerate(range(0, min(count, len(ids)), part)):
            stored = args.out / f"{name}-{number:03}.safetensors"
            if stored.exists():
                continue
            temperature = 0.7 if name == "train" and number % 4 == 0 else 0.0
            config = GenerateConfig(max_new_tokens=160, temperature=temperature, batch_size=part)
            made = generate(target, ids[start : start + part], config, number, lambda *_: None)
            save_conversations(made, stored.with_suffix(".writing"))
            stored.with_suffix(".writing").rename(stored)
            print(f"{stored.name}: {sum(len(c.answer_ids) for c in made)} answer tokens", flush=True)


def read_rows(folder: Path, name: str) -> PackedRows:
    files = sorted(folder.glob(f"{name}-*.safetensors"))
    return pack([c for file in files for c in load_conversations(file)], 512)


def train(args: argparse.Namespace) -> None:
    kernels = Kernels.auto(args.device)
    target = load_target(ASSETS, kernels=kernels).to(args.device).freeze()
    drafter = Drafter.initialized(DrafterConfig.for_target(target.config, SHAPE), args.seed, kernels).to(args.device)
    config = DraftConfig(
        optimizer=OptimizerConfig(steps=1, learning_rate=args.learning_rate, method="muon"),
        loss=DraftLoss(soft=1.0),
        anchors=args.anchors,
        gamma=3.0,
    )
    optimizer = new_optimizer(dict(drafter.named_parameters()), config.optimizer, {})
    rows, heldout = read_rows(args.out, "train"), read_rows(args.out, "heldout").to(target.device)
    head = dense_weight(target.lm_head, torch.float32)
    features = feature_source(target, rows, SHAPE.target_layer_ids, True, 64)
    print(f"{len(rows)} rows, {int(rows.answer_NT.sum())} answer tokens", flush=True)
    began, reported, step, average = time.monotonic(), 0.0, 0, float("nan")
    while (progress := (time.monotonic() - began) / args.seconds) < 1:
        set_rate(optimizer, args.learning_rate * min((step + 1) / 20, 1.0, (1 - progress) / 0.7))
        numbers = rows.batch(args.rows, step, args.seed)
        batch = rows.select(numbers).to(target.device)
        blocks = make_blocks(batch, sample_anchors(batch, args.anchors, step), SHAPE.block_size, SHAPE.mask_token_id)
        loss = draft_loss(drafter, target, batch, blocks, features(numbers, batch), config, head)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        average = loss.item() if step == 1 else 0.95 * average + 0.05 * loss.item()
        if time.monotonic() - reported > 60:
            reported = time.monotonic()
            accepted = teacher_forced_acceptance(drafter, target, heldout).accept_length
            save_drafter(drafter, args.out / "drafter")
            print(f"step {step} {reported - began:.0f} s loss {average:.3f} held-out {accepted:.3f}", flush=True)
    save_drafter(drafter, args.out / "drafter")
    accepted = teacher_forced_acceptance(drafter, target, heldout).accept_length
    print(f"step {step}: held-out accept length {accepted:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("generate", "train"))
    parser.add_argument("--data", type=Path, default=Path(".cache/pocket"))
    parser.add_argument("--out", type=Path, default=Path(".cache/pocket/draft"))
    parser.add_argument("--prompts", type=int, default=36_000)
    parser.add_argument("--part", type=int, default=3072, help="answers made at a time")
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=8e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    (make_answers if args.what == "generate" else train)(args)


if __name__ == "__main__":
    main()
