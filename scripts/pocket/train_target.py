"""Trains the pocket model: a Qwen3.5-architecture language model of 8.9 M parameters.

    python scripts/pocket/make_tokenizer.py && python scripts/pocket/make_corpus.py
    python scripts/pocket/train_target.py --steps 14000     # one GPU, about ten minutes on an H200

Next-token cross-entropy over whole documents packed into rows that do not see each other, bf16 autocast. Matrices
inside the layers are optimized by Muon, everything else by AdamW; warm-up, then linear decay to zero. A checkpoint is
kept, and running the command again goes on from it.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from twofold.models.causal_lm import CausalLM
from twofold.models.config import ModelConfig
from twofold.models.mixers import GatedDeltaNet
from twofold.ops.kernels import Kernels

ASSETS = Path(__file__).parents[2] / "twofold" / "assets" / "pocket"


class Rows:
    """Documents in shuffled order, laid end to end and cut into rows of T + 1 tokens."""

    def __init__(self, path: Path, length: int, device: str) -> None:
        data = np.load(path)
        self.tokens = torch.from_numpy(data["tokens"].astype(np.int32)).to(device)
        self.bounds = np.append(data["starts"], len(data["tokens"]))
        self.length = length

    def epoch(self, seed: int) -> tuple[Tensor, Tensor]:
        """Token ids [N, T + 1] and positions [N, T + 1]; a position of 0 starts a document or a row."""
        order = np.random.default_rng(seed).permutation(len(self.bounds) - 1)
        starts, sizes = self.bounds[:-1][order], np.diff(self.bounds)[order]
        offsets = np.cumsum(sizes) - sizes
        inside = np.arange(sizes.sum()) - np.repeat(offsets, sizes)
        index = torch.from_numpy(np.repeat(starts, sizes) + inside).to(self.tokens.device)
        width = self.length + 1
        rows = len(index) // width
        ids = self.tokens[index[: rows * width]].view(rows, width).long()
        positions = torch.from_numpy(inside[: rows * width].reshape(rows, width)).to(self.tokens.device)
        first = positions[:, :1]  # a document cut by a row's border restarts there
        still = (positions == 0).cumsum(1) == (positions[:, :1] == 0).long()
        return ids, torch.where(still, positions - first, positions)


def initialize(model: CausalLM, seed: int) -> None:
    torch.manual_seed(seed)
    depth = (2 * model.config.num_layers) ** -0.5
    for name, p in model.named_parameters():
        if p.dim() >= 2:
            torch.nn.init.normal_(p, std=0.02 * (depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 1))
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            heads = len(module.dt_bias)
            torch.nn.init.normal_(module.conv1d.weight, std=0.3)
            module.A_log.data = torch.empty(heads).uniform_(1, 16).log()
            step = torch.exp(torch.empty(heads).uniform_(np.log(0.001), np.log(0.1)))
            module.dt_bias.data = step + torch.log(-torch.expm1(-step))  # softplus^-1


def loss_of(model: CausalLM, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy and the number of targets; the first token of a document is not predicted."""
    hidden, _ = model(ids[:, :-1], positions[:, :-1])
    target = torch.where(positions[:, 1:] > 0, ids[:, 1:], -100)
    total = F.cross_entropy(model.logits(hidden).flatten(0, 1).float(), target.flatten(), reduction="sum")
    return total, (target >= 0).sum()


@torch.no_grad()
def heldout_loss(model: CausalLM, rows: Rows, batch: int, dtype: torch.dtype, max_rows: int | None) -> float:
    ids, positions = (x[:max_rows] for x in rows.epoch(0))
    total, count = 0.0, 0
    for i in range(0, len(ids), batch):
        with torch.autocast(ids.device.type, dtype=dtype):
            loss, n = loss_of(model, ids[i : i + batch], positions[i : i + batch])
        total, count = total + loss.item(), count + int(n)
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(".cache/pocket"))
    parser.add_argument("--out", type=Path, default=Path(".cache/pocket/target"))
    parser.add_argument("--steps", type=int, default=14_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end the schedule by then, if earlier")
    parser.add_argument("--batch", type=int, default=64, help="rows in a step")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--muon-lr", type=float, default=3e-3)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--heldout-rows", type=int, help="rows of the final held-out loss (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")

    config = ModelConfig.from_hf(json.loads((ASSETS / "config.json").read_text()))
    kernels = Kernels.cuda() if args.device == "cuda" else Kernels.reference()
    model = CausalLM(config, kernels)
    initialize(model, args.seed)
    model.to(args.device)
    if args.compile:
        for layer in model.layers:
            layer.compile()
    matrices, others = [], []
    for name, p in model.named_parameters():
        inner = (
            name.startswith("layers.") and p.dim() == 2 and not name.endswith(("in_proj_a.weight", "in_proj_b.weight"))
        )
        (matrices if inner else others).append(p)
    optimizers = [
        torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.01, fused=args.device == "cuda"),
    ]
    peaks = [args.muon_lr, args.adam_lr]
    checkpoint = args.out / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True, map_location=args.device)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        step = saved["step"]

    train = Rows(args.data / "train.npz", args.length, args.device)
    heldout = Rows(args.data / "heldout.npz", args.length, args.device)
    per_epoch = len(train.tokens) // (args.length + 1) // args.batch
    epoch, ids, positions = -1, None, None
    running = torch.zeros((), device=args.device)
    mark, mark_step = time.monotonic(), step
    progress = 0.0
    while progress < 1:
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            ids, positions = train.epoch(args.seed + 1000 + epoch)
        assert ids is not None
        assert positions is not None
        rate = min(1.0, (step + 1) / 200, (1 - progress) / 0.8)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
        rows = slice((step % per_epoch) * args.batch, (step % per_epoch + 1) * args.batch)
        with torch.autocast(args.device, dtype=torch.bfloat16):
            total, count = loss_of(model, ids[rows], positions[rows])
            loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        running += loss.detach()
        step += 1
        progress = max(step / args.steps, (time.monotonic() - began) / args.seconds)
        if step % 250 == 0 or progress >= 1 or step in (1, 2, 10, 50):
            seconds, steps = time.monotonic() - mark, step - mark_step
            tokens = steps * args.batch * args.length / seconds
            held = heldout_loss(model, heldout, args.batch, torch.bfloat16, 256) if step % 1000 == 0 else float("nan")
            print(
                f"step {step}/{args.steps} epoch {epoch} train {running.item() / steps:.4f} held-out {held:.4f} "
                f"{tokens / 1e3:.0f}K tokens/s {time.monotonic() - began:.0f} s",
                flush=True,
            )
            running.zero_()
            mark, mark_step = time.monotonic(), step
    state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
    torch.save(state, checkpoint)
    weights = {
        f"model.{k}": v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"
    }
    save_file(weights, str(args.out / "model.safetensors"), metadata={"format": "pt"})
    model.load_state_dict({k: v.to(torch.bfloat16).float() for k, v in model.state_dict().items()})
    final = heldout_loss(model, heldout, args.batch, torch.bfloat16, args.heldout_rows)
    print(f"saved after step {step}; held-out loss of the bf16 weights {final:.4f}, perplexity {np.exp(final):.2f}")


if __name__ == "__main__":
    main()
