"""One step of quantization-aware distillation at Qwen3.5-4B's shape, random weights, one GPU: memory and tokens/s.

    python benchmarks/target_4b_step.py --out benchmarks/results/target_4b_step.json

The teacher is bfloat16; the student has float32 master weights behind fake INT4 (group 32), bfloat16 activations and
checkpointed layers. Teacher and student share embedding and head, as they do in training. Adam's state is 8 bit, or
float32 with `--states float32`. `--whole` also tries the step with all logits at once, as the paper takes it.

Model flops: 2 a weight and token for the teacher's pass, 6 for the student's forward and backward pass, 4 for the
student's head (which is not trained), and for full attention 4 T a head dimension and token in the teacher, 12 T in the
student, halved as causal. Recomputed work does not count.
"""

import argparse
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import twofold
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import packable_linears
from twofold.models.config import FULL, ModelConfig
from twofold.models.shapes import QWEN3_5_4B
from twofold.ops.kernels import Kernels
from twofold.quant.linear import FakeQuantLinear, replace_linears
from twofold.quant.rounding import minmax_grid
from twofold.quant.scheme import QuantScheme
from twofold.training.distill import trainable
from twofold.training.divergence import linear_divergence
from twofold.training.optimizer import OptimizerConfig, new_optimizer

PEAK = 989.4e12  # dense bf16 flop/s of an H200

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def in_chunks(student_MD: Tensor, teacher_MD: Tensor, head_VD: Tensor) -> Tensor:
    return linear_divergence(student_MD, head_VD, teacher_MD, head_VD, chunk=16_384)


def all_logits(student_MD: Tensor, teacher_MD: Tensor, head_VD: Tensor) -> Tensor:
    log_q, log_p = ((x @ head_VD.T).float().log_softmax(dim=-1) for x in (student_MD, teacher_MD))
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


def random_model(config: ModelConfig, device: torch.device) -> CausalLM:
    """Weights N(0, 1 / fan_in) in bfloat16."""
    with torch.device("meta"):
        model = CausalLM(config, Kernels.auto(device))
    model.to_empty(device=device).to(torch.bfloat16)
    model.lm_head.weight = model.embed_tokens.weight
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                p.normal_(std=p.shape[-1] ** -0.5)
            else:
                p.fill_(0.0 if "norm" in name and "linear_attn" not in name else 1.0)
    return model.requires_grad_(False)


def student_of(teacher: CausalLM, scheme: QuantScheme) -> CausalLM:
    """The same weights, layers as float32 masters behind fake INT4; embedding and head are the teacher's tensors."""
    student = random_model(teacher.config, teacher.device)
    student.embed_tokens.weight = student.lm_head.weight = teacher.embed_tokens.weight
    replace_linears(
        student,
        packable_linears(teacher.config),
        lambda name, linear: FakeQuantLinear.from_linear(linear, minmax_grid(linear.weight, scheme), scheme),
    )
    student.checkpointing = True
    return student


def flops(config: ModelConfig, model: CausalLM, tokens: int) -> float:
    head = model.embed_tokens.weight.numel()
    body = sum(p.numel() for p in model.layers.parameters() if p.dim() == 2)
    full = sum(kind == FULL for kind in config.layer_types)
    attention = 0.5 * full * tokens * config.num_heads * config.head_dim * (4 + 12)
    return tokens * (8 * body + (2 + 4) * head + attention)


def measure(tokens: int, states: str, loss_of: Loss, steps: int, device: torch.device) -> dict[str, Any]:
    config = QWEN3_5_4B
    teacher = random_model(config, device)
    student = student_of(teacher, QuantScheme())
    parameters = trainable(student)
    for p in parameters.values():
        p.requires_grad_(True)
    optimizer = new_optimizer(parameters, OptimizerConfig(steps=steps, learning_rate=2e-6, states=states), {})
    ids = torch.randint(config.vocab_size, (1, tokens), device=device)
    head = teacher.embed_tokens.weight
    torch.cuda.reset_peak_memory_stats()
    times = []
    for step in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.no_grad():
            wanted = teacher(ids)[0].flatten(0, 1)
        hidden = student(ids)[0].flatten(0, 1)
        loss = loss_of(hidden, wanted, head)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        print(f"step {step}: {times[-1]:.2f} s loss {loss.item():.4f}", flush=True)
    seconds = sorted(times[1:] or times)[len(times[1:]) // 2]
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "tokens_per_s": tokens / seconds,
        "seconds_per_step": seconds,
        "share_of_bf16_peak": flops(config, teacher, tokens) / seconds / PEAK,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--states", choices=("8bit", "float32"), default="8bit")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--whole", action="store_true", help="also the step without chunks of the vocabulary")
    args = parser.parse_args()
    device = torch.device("cuda")
    result: dict[str, Any] = {
        "command": f"python benchmarks/target_4b_step.py --states {args.states}" + " --whole" * args.whole,
        "date": datetime.now(UTC).date().isoformat(),
        "environment": {
            "hardware": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "twofold": twofold.__version__,
        },
        "sequence": args.tokens,
        "optimizer_states": args.states,
        **measure(args.tokens, args.states, in_chunks, args.steps, device),
    }
    if args.whole:
        torch.cuda.empty_cache()
        try:
            result["whole_vocabulary"] = measure(args.tokens, args.states, all_logits, 2, device)
        except torch.cuda.OutOfMemoryError as error:
            result["whole_vocabulary"] = {"out_of_memory": str(error).split(". ")[0]}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
