"""Training of the drafter at Qwen3.5-4B's shape, random weights, one GPU: tokens/s and peak memory.

    python benchmarks/draft_4b_step.py --out benchmarks/results/draft_4b_step.json

The paper's settings: 5 layers, blocks of 16, rows of 3,072 tokens, 512 anchors a row, hard labels, gamma 7, 32 rows a
step, taken here `--rows` at a time with their gradients summed. The target is bfloat16, asked at every step, its INT4
twin being as dear in training; the drafter has float32 weights and AdamW, activations in bfloat16. Attention is flex
attention; `--attention mask` takes the reference's mask instead, `--loss` another loss. `--captured`: all parts of a
step are one CUDA graph, and the optimizer's step another.

Tokens are those of the rows; a step drafts 512 * 16 more for each row.

Model flops: 2 a weight and token of a row for the target's layers; 6 a weight and token for the drafter's, of rows in
what projects the context, of blocks elsewhere; for the head 4 a weight and guess (the scores, and the gradient of what
they are made from), and 2 more for each term that asks the target's distribution. Attention does not count.
"""

import argparse
import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from target_4b_step import PEAK, random_model
from torch import Tensor

import twofold
from twofold.data.conversations import PackedRows
from twofold.data.features import features_of
from twofold.models.config import ModelConfig
from twofold.models.drafter import Drafter
from twofold.models.drafter_config import DrafterConfig, DraftShape
from twofold.models.shapes import QWEN3_5_4B
from twofold.ops.documents import most_documents
from twofold.ops.draft_attention import draft_attention, flex_draft_attention
from twofold.ops.kernels import Kernels
from twofold.training.blocks import Blocks, make_blocks, sample_anchors
from twofold.training.draft import DraftConfig, draft_loss, total_weight
from twofold.training.losses import DraftLoss
from twofold.training.optimizer import OptimizerConfig, new_optimizer
from twofold.training.step import WARM_UPS, Inputs, TrainingStep

LOSSES = {"hard": DraftLoss(hard=1.0), "soft": DraftLoss(soft=1.0), "mixed": DraftLoss(hard=0.1, total_variation=0.9)}
SHAPE = DraftShape(mask_token_id=248_070, target_layer_ids=(1, 8, 15, 22, 29))


def random_rows(config: ModelConfig, num_rows: int, length: int, seed: int) -> PackedRows:
    """Four conversations a row, half of each an answer."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (num_rows, length), generator=draw)
    positions = (torch.arange(length) % (length // 4)).expand(num_rows, -1).contiguous()
    return PackedRows(ids, positions, positions >= length // 8, torch.ones_like(ids, dtype=torch.bool))


def flops(drafter: Drafter, target: torch.nn.Module, row_tokens: int, loss: DraftLoss, guesses: int) -> float:
    config = drafter.config
    body = sum(p.numel() for p in target.layers.parameters() if p.dim() == 2)  # type: ignore[union-attr, operator]
    kv = 2 * config.num_layers * config.hidden_size * config.num_kv_heads * config.head_dim
    context = drafter.fc.weight.numel() + kv
    block = sum(p.numel() for p in drafter.layers.parameters() if p.dim() == 2)
    drafted = guesses / (config.block_size - 1) * config.block_size
    asked = 2 * (loss.soft > 0) + 2 * (loss.total_variation > 0)
    head = config.vocab_size * config.hidden_size
    return row_tokens * (2 * body + 6 * context) + drafted * 6 * block + guesses * (4 + asked) * head


def measure(args: argparse.Namespace, config: ModelConfig, shape: DraftShape, device: torch.device) -> dict[str, Any]:
    attend = flex_draft_attention if args.attention == "flex" else draft_attention
    kernels = replace(Kernels.auto(device), draft_attention=attend)
    target = random_model(config, device)
    drafter = Drafter.initialized(DrafterConfig.for_target(config, shape), 0, kernels).to(device)
    optimizer_config = OptimizerConfig(steps=args.steps, learning_rate=1e-3, captured=args.captured)
    training = DraftConfig(
        optimizer=optimizer_config,
        loss=LOSSES[args.loss],
        gamma=7.0,
        batch_rows=args.rows,
        row_length=args.length,
        anchors=args.anchors,
        precision="bfloat16",
        vocab_chunk=args.vocab_chunk,
    )
    head = target.lm_head.weight.detach()
    parts = max(1, args.batch_rows // args.rows)

    def inputs_at(step: int) -> Inputs:
        rows = random_rows(config, parts * args.rows, args.length, step)
        return sample_anchors(rows, args.anchors, step), *vars(rows).values()

    def blocks_of(anchors: Tensor, *fields: Tensor) -> Blocks:
        return make_blocks(PackedRows(*fields), anchors, shape.block_size, shape.mask_token_id)

    most = most_documents(random_rows(config, args.rows, args.length, 0).positions_NT, args.rows)

    def loss_of(anchors: Tensor, *fields: Tensor) -> Tensor:
        """The value is that of all parts; what is left to differentiate is the last one."""
        whole = blocks_of(anchors, *fields)
        total, value = total_weight(whole.valid_BAK, training), torch.zeros((), device=device)
        for part in range(parts):
            own = slice(part * args.rows, (part + 1) * args.rows)
            rows, blocks = PackedRows(*(x[own] for x in fields)), Blocks(*(x[own] for x in whole))
            features = features_of(target, rows, shape.target_layer_ids, most if args.captured else None)
            loss = draft_loss(drafter, target, rows, blocks, features, training, head, total)
            if part + 1 < parts:
                loss.backward()
                loss = loss.detach()
            value = value + loss
        return value

    parameters = dict(drafter.named_parameters())
    optimizer = new_optimizer(parameters, optimizer_config, {})
    work = TrainingStep(list(parameters.values()), loss_of, optimizer, 1.0, captured=args.captured)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    inputs = inputs_at(0)
    guesses = int(blocks_of(*inputs).valid_BAK.sum())
    for step in range(args.steps):
        began = time.perf_counter()
        work.begin(inputs)
        inputs = inputs_at(step + 1)
        loss, _ = work.read()
        work.finish()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        print(f"step {step}: {times[-1]:.2f} s loss {loss:.4f}", flush=True)
    warm = sorted(times[WARM_UPS + 1 if args.captured else 1 :] or times)
    seconds = warm[len(warm) // 2]
    tokens = parts * args.rows * args.length
    return {
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "tokens_per_s": tokens / seconds,
        "drafted_tokens_per_s": parts * args.rows * args.anchors * shape.block_size / seconds,
        "seconds_per_step": seconds,
        "seconds_first_step": times[0],
        "share_of_bf16_peak": flops(drafter, target, tokens, training.loss, guesses) / seconds / PEAK,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch-rows", type=int, default=32)
    parser.add_argument("--rows", type=int, default=4, help="at a time")
    parser.add_argument("--length", type=int, default=3072)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--loss", choices=tuple(LOSSES), default="hard")
    parser.add_argument("--attention", choices=("flex", "mask"), default="flex")
    parser.add_argument("--vocab-chunk", type=int, default=65_536)
    parser.add_argument("--captured", action=argparse.BooleanOptionalAction, default=False, help="steps as CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="a toy's shape on the CPU, to see that it runs")
    args = parser.parse_args()
    if args.captured and args.steps <= WARM_UPS + 1:
        parser.error(f"the first {WARM_UPS + 1} steps are not replayed; give more --steps")
    config, shape, device = QWEN3_5_4B, SHAPE, torch.device("cuda")
    if args.tiny:
        device = torch.device("cpu")
        few = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 512, "layer_types": config.layer_types[:4]}
        config = replace(config, **few)  # type: ignore[arg-type]
        shape = replace(shape, num_layers=2, intermediate_size=64, mask_token_id=500, target_layer_ids=(1, 3))
    result: dict[str, Any] = {
        "command": "python benchmarks/draft_4b_step.py "
        + f"--batch-rows {args.batch_rows} --rows {args.rows} --loss {args.loss} --attention {args.attention}"
        + f" --steps {args.steps}{' --captured' * args.captured}",
        "date": datetime.now(UTC).date().isoformat(),
        "environment": {
            "hardware": "CPU" if args.tiny else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "twofold": twofold.__version__,
        },
        "batch_rows": args.batch_rows,
        "row_length": args.length,
        "anchors": args.anchors,
        "block": shape.block_size,
        "loss": args.loss,
        "attention": args.attention,
        **measure(args, config, shape, device),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
