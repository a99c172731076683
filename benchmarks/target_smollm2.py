"""How far each way of quantizing SmolLM2-135M-Instruct falls from the original, and what distillation wins back.

    python benchmarks/target_smollm2.py --model FOLDER --conversations CONVERSATIONS... --out RESULT.json

FOLDER is a Hugging Face folder of the model. CONVERSATIONS are JSON lines (.xz) with `prompt` and `answer`, written by
the model itself; those whose prompt's SHA-256 is 0 modulo 50 are held out, the others are trained on. One GPU.

Every row is measured in float32 against the original on the held-out answers. Distillation: activations in bfloat16,
masters in float32, forward KL over the whole vocabulary, all tokens of a conversation. The result is rewritten after
every row; rows that do not fit into `--seconds` are left out.

The weights of this copy were 4-bit (GGUF Q4_1, groups of 32, asymmetric) before they were what is called original here.
"""

import argparse
import hashlib
import json
import lzma
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

import twofold
from twofold.data.conversations import Conversation, pack
from twofold.data.generate import GenerateConfig, generate
from twofold.evaluation.fidelity import fidelity
from twofold.models.calibration import Calibration, QuantizeConfig, quantize_target
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target
from twofold.models.smoothing import apply_smoothing
from twofold.models.tokenizer import Tokenizer
from twofold.ops.kernels import Kernels
from twofold.quant.linear import FakeQuantLinear, PackedLinear, pack_linears, replace_linears
from twofold.quant.rounding import search_grid
from twofold.quant.scheme import QuantScheme
from twofold.training.distill import DistillConfig, distill
from twofold.training.optimizer import OptimizerConfig

ROW = 1024
IM_END = 2
SYSTEM = {"role": "system", "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"}


def conversations(paths: Iterable[Path], tokenizer: Tokenizer, limit: int) -> tuple[list[Conversation], ...]:
    """(for training, held out), at most `limit` in all."""
    train, heldout = [], []
    lines = [line for path in sorted(paths) for line in lzma.decompress(path.read_bytes()).splitlines()]
    for line in lines[:limit]:
        entry = json.loads(line)
        user = {"role": "user", "content": entry["prompt"]}
        answer = tokenizer.encode(entry["answer"]) + ([IM_END] if entry["finish"] == "stop" else [])
        made = Conversation(tokenizer.chat_ids([SYSTEM, user]), answer)
        digest = int(hashlib.sha256(entry["prompt"].encode()).hexdigest(), 16)
        (heldout if digest % 50 == 0 else train).append(made)
    return train, heldout


class NoCheckpoints:
    """A short training is done again rather than resumed."""

    def latest(self) -> None:
        return None

    def save(self, step: int, write: object) -> None:
        return None


class Bench:
    """The original, the text, and the rows of the table so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.deadline = time.monotonic() + args.seconds
        tokenizer = Tokenizer.load(args.model)
        train, heldout = conversations(args.conversations, tokenizer, args.limit)
        self.train, self.heldout = pack(train, ROW), pack(heldout, ROW)
        self.heldout = self.heldout.select(torch.arange(min(args.heldout_rows, len(self.heldout))))
        self.calibration = self.train.select(torch.arange(args.calibration_rows))
        self.original = self.load().freeze()
        self.teacher = self.training_copy()
        self.rows: list[dict[str, Any]] = []
        self.settings = {"groups": args.groups, "steps": [args.steps], "learning-rates": args.learning_rates}
        self.questions: list[tuple[str, list[int]]] = []
        if args.ifeval is not None:
            lines = [json.loads(line) for line in args.ifeval.read_text().splitlines()]
            chats = [[SYSTEM, {"role": "user", "content": line["prompt"]}] for line in lines]
            self.questions = [(line["prompt"], tokenizer.chat_ids(c)) for line, c in zip(lines, chats, strict=True)]
        self.tokenizer = tokenizer
        print(f"{len(self.train)} rows to train on, {len(self.heldout)} held out", flush=True)

    def load(self) -> CausalLM:
        return load_target(self.args.model, torch.float32, Kernels.auto(self.device)).to(self.device)

    def training_copy(self) -> CausalLM:
        """The original with activations, embedding and head in bfloat16; norms and layers of a student stay float32."""
        return self.load().to(torch.bfloat16).requires_grad_(False)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def ptq(self, method: str, group_size: int) -> tuple[CausalLM, Calibration]:
        model = self.load()
        rows, config = self.calibration, QuantizeConfig(method=method, group_size=group_size)  # type: ignore[arg-type]
        ids, positions, used = rows.token_ids_NT, rows.positions_NT, rows.used_NT
        made = quantize_target(model, ids, positions, used, config, lambda *_: None)
        return model, made

    def student(self, grids: CausalLM, start: CausalLM, learned: bool, head: QuantScheme | None) -> CausalLM:
        """`start`'s weights as masters on the grids of `grids`; a quantized head on a searched grid."""

        def fake(name: str, linear: nn.Linear) -> FakeQuantLinear:
            packed = grids.get_submodule(name)
            assert isinstance(packed, PackedLinear)
            return FakeQuantLinear.from_linear(linear, packed.grid, packed.scheme, learn_scale=learned)

        names = [name for name, layer in grids.named_modules() if isinstance(layer, PackedLinear) and name != "lm_head"]
        replace_linears(start, names, fake)
        start.embed_tokens.to(torch.bfloat16)
        start.norm.to(torch.bfloat16)
        if head is None:
            start.lm_head.weight = start.embed_tokens.weight
        else:
            untie(start)
            weight = start.lm_head.weight.detach().float()
            start.lm_head = FakeQuantLinear(weight, search_grid(weight, head), head, learn_scale=learned)  # type: ignore[assignment]
        return start

    def qad(self, student: CausalLM, steps: int, rate: float, learned: bool, head: bool) -> float:
        """Trains in place; returns seconds."""
        config = DistillConfig(
            optimizer=OptimizerConfig(steps=steps, learning_rate=rate, betas=(0.9, 0.95), checkpoint_every=10**9),
            batch_rows=self.args.batch_rows,
            row_length=ROW,
            scales="learned" if learned else "frozen",
            head=head,
            vocab_chunk=student.config.vocab_size,
        )
        began = time.monotonic()
        losses: list[str] = []

        def report(step: int, total: int, text: str) -> None:
            if step % max(1, total // 5) == 0:
                losses.append(text.removeprefix("loss "))

        distill(student, self.teacher, self.train, config, 0, NoCheckpoints(), report, dict)
        print("  losses", *losses, flush=True)
        return time.monotonic() - began

    def row(self, name: str, model: CausalLM, **about: Any) -> dict[str, Any]:
        """Measures a model (its copy in float32) and writes the table."""
        pack_linears(model)
        size = sum(t.numel() * (2 if t.is_floating_point() else t.element_size()) for t in unique_tensors(model))
        frozen = model.float().freeze()
        row = {"name": name, **about, **fidelity(frozen, self.original, self.heldout), "bytes": size}
        if self.questions and self.left() > 40:
            row["ifeval_answers"] = self.answer(name, frozen)
        self.rows.append(row)
        self.write()
        print(json.dumps(row), f"{self.left():.0f} s left", flush=True)
        return row

    def answer(self, name: str, model: CausalLM) -> str:
        config = GenerateConfig(max_new_tokens=512, temperature=0.0, batch_size=len(self.questions))
        made = generate(model, [ids for _, ids in self.questions], config, 0, lambda *_: None)
        eos = set(model.config.eos_token_ids)
        texts = [self.tokenizer.decode([i for i in c.answer_ids if i not in eos]) for c in made]
        path = self.args.out.parent / f"ifeval_{name.replace(' ', '_').replace('+', 'and')}.jsonl"
        with path.open("w") as file:
            for (prompt, _), text in zip(self.questions, texts, strict=True):
                file.write(json.dumps({"prompt": prompt, "response": text}) + "\n")
        return path.name

    def write(self) -> None:
        known = {row["name"]: row["kl"] for row in self.rows}
        best = min((kl for name, kl in known.items() if name in ("RTN g32", "AWQ g32", "GPTQ g32")), default=None)
        healed = min((kl for name, kl in known.items() if name.endswith("scales g32")), default=None)
        result = {
            "command": "python benchmarks/target_smollm2.py --model FOLDER --conversations CONVERSATIONS --out RESULT "
            + " ".join(f"--{name} {' '.join(map(str, value))}" for name, value in self.settings.items()),
            "date": datetime.now(UTC).date().isoformat(),
            "environment": {
                "hardware": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU",
                "torch": torch.__version__,
                "twofold": twofold.__version__,
            },
            "model": "SmolLM2-135M-Instruct (its weights were 4-bit, GGUF Q4_1, before)",
            "heldout_tokens": int(self.heldout.answer_NT.sum()),
            "train_rows": len(self.train),
            "row_length": ROW,
            "batch_rows": self.args.batch_rows,
            "kl_recovery": None if best is None or healed is None else 1 - healed / best,
            "rows": self.rows,
        }
        self.args.out.write_text(json.dumps(result, indent=1) + "\n")


def untie(model: CausalLM) -> None:
    model.lm_head.weight = nn.Parameter(model.embed_tokens.weight.detach().clone())


def unique_tensors(model: CausalLM) -> Iterable[torch.Tensor]:
    return {t.data_ptr(): t for t in model.state_dict().values()}.values()


def with_head(model: CausalLM, scheme: QuantScheme) -> CausalLM:
    """Rounds the head to nearest; the embedding stays."""
    untie(model)
    weight = model.lm_head.weight.detach().float()
    model.lm_head = FakeQuantLinear(weight, search_grid(weight, scheme), scheme)  # type: ignore[assignment]
    return model


def state_of(model: CausalLM) -> Mapping[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--conversations", type=Path, nargs="+", required=True)
    parser.add_argument("--ifeval", type=Path, help="its prompts are answered, for scoring afterwards")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--limit", type=int, default=60_000, help="conversations")
    parser.add_argument("--groups", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch-rows", type=int, default=16)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[3e-5])
    parser.add_argument("--heldout-rows", type=int, default=128)
    parser.add_argument("--calibration-rows", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    bench = Bench(args)
    bench.row("original", bench.load())
    for group_size in args.groups:
        measure_group(bench, group_size)


def measure_group(bench: Bench, group_size: int) -> None:
    suffix, args = f"g{group_size}", bench.args
    made: dict[str, tuple[CausalLM, Calibration]] = {}
    kl: dict[str, float] = {}
    for method in ("rtn", "awq", "gptq"):
        model, calibration = bench.ptq(method, group_size)
        made[method] = model, calibration
        errors = [layer.output_error for layer in calibration.layers]
        kl[method] = bench.row(f"{method.upper()} {suffix}", model, mean_output_error=sum(errors) / len(errors))["kl"]
    method = min(kl, key=lambda m: kl[m])
    grids, calibration = made[method]

    def start() -> CausalLM:
        model = bench.load()
        apply_smoothing(model, calibration.smoothing)
        return model

    states: dict[bool, Mapping[str, torch.Tensor]] = {}
    for learned in (False, True):
        for rate in args.learning_rates:
            if bench.left() < 60:
                return
            student = bench.student(grids, start(), learned, None)
            seconds = bench.qad(student, args.steps, rate, learned, head=False)
            states[learned] = state_of(student)
            name = f"QAD {'learned' if learned else 'frozen'} scales {suffix}"
            about = {"grid": method, "learning_rate": rate, "steps": args.steps, "seconds": seconds}
            bench.row(name, student, **about)
    for bits, head in ((8, QuantScheme(bits=8, group_size=-1)), (4, QuantScheme(bits=4, group_size=32))):
        student = bench.student(grids, start(), True, None)
        student.load_state_dict(states[True])
        bench.row(f"+ INT{bits} head, rounded {suffix}", with_head(student, head))
    for bits, head in ((8, QuantScheme(bits=8, group_size=-1)), (4, QuantScheme(bits=4, group_size=32))):
        if bench.left() < 60:
            return
        student = bench.student(grids, start(), True, head)
        seconds = bench.qad(student, args.steps, args.learning_rates[-1], True, head=True)
        bench.row(f"QAD + INT{bits} head {suffix}", student, steps=args.steps, seconds=seconds)


if __name__ == "__main__":
    main()
