"""How far each way of quantizing SmolLM2-135M-Instruct falls from the original, and what distillation wins back.

    python benchmarks/target_smollm2.py --model FOLDER --conversations FILES --work FOLDER --out RESULT ROW...

FOLDER is a Hugging Face folder of the model. FILES are JSON lines (.xz) with `prompt` and `answer`, written by
the model itself; those whose prompt's SHA-256 is 0 modulo 50 are held out, the others are trained on. One GPU.

A row is named WHAT:GROUP, in the order in which the rows below need each other:

    original            the model itself
    rtn awq gptq        post-training quantization
    even                gptq on inputs that are evened out first
    frozen              distillation on the grid of the best of these, its scales frozen
    learned             the same, its scales learned
    head8-rounded head4-rounded    `frozen`, its head rounded to INT8 or INT4 by GPTQ
    head8 head4         distillation as in `learned`, the head quantized from the start and learned too
    head8-alone head4-alone        the same, the layers kept: give a --start
    head8-fixed head4-fixed        the same, the head kept as GPTQ rounds it: the layers learn around it
    try:GROUP:RATE:BATCH_ROWS:STEPS    `frozen` with another schedule, measured on fewer rows and not part of the table

With `--start WHAT`, `learned` and the heads begin with the weights of that row, its head too where both have one; give
another `--seed` too, or the same text comes again.

Every row is measured in float32 against the original on the held-out answers. Distillation: activations in bfloat16,
masters in float32, forward KL over the whole vocabulary, all tokens of a conversation. What is made stays in --work, so
that the rows can be spread over several calls, also at the same time (a training of this small model leaves a GPU idle
for a third of the time); the result is rewritten after every row.

The weights of this copy were 4-bit (GGUF Q4_1, groups of 32, asymmetric) before they were what is called original here.
"""

import argparse
import hashlib
import json
import lzma
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rows import Row, Rows
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import twofold
from twofold.data.conversations import Conversation, PackedRows, pack
from twofold.data.generate import GenerateConfig, generate
from twofold.evaluation.fidelity import fidelity
from twofold.models.calibration import QuantizeConfig, quantize_target
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target
from twofold.models.smoothing import apply_smoothing
from twofold.models.tokenizer import Tokenizer
from twofold.ops.kernels import Kernels
from twofold.quant.gptq import Hessian, gptq
from twofold.quant.linear import FakeQuantLinear, PackedLinear, pack_linears, replace_linears
from twofold.quant.rounding import Grid
from twofold.quant.scheme import QuantScheme
from twofold.training.distill import DistillConfig, distill
from twofold.training.optimizer import OptimizerConfig

ROW = 1024
IM_END = 2
SYSTEM = {"role": "system", "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"}
PTQ = ("rtn", "awq", "gptq", "even")
HEADS = {"head8": QuantScheme(bits=8, group_size=64), "head4": QuantScheme(bits=4, group_size=32)}
QAD = ("frozen", "learned", *(f"{head}{kind}" for head in HEADS for kind in ("-rounded", "-alone", "-fixed", "")))
WHAT = ("original", *PTQ, *QAD)
# Rows that answer IFEval's prompts.
ANSWERED = ("original", "awq g32", "gptq g32", "frozen g32", "learned g32", "head8-rounded g32", "head4 g32")


def conversations(paths: Iterable[Path], tokenizer: Tokenizer, limit: int) -> tuple[list[Conversation], ...]:
    """(for training, held out), at most `limit` in all."""
    train, heldout = [], []
    lines = [line for path in sorted(paths) for line in lzma.decompress(path.read_bytes()).splitlines()]
    entries = [json.loads(line) for line in lines[:limit]]
    for entry, said in zip(entries, tokenizer.encode_all([entry["answer"] for entry in entries]), strict=True):
        user = {"role": "user", "content": entry["prompt"]}
        answer = said + ([IM_END] if entry["finish"] == "stop" else [])
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
        self.args, self.device, self.work = args, torch.device(args.device), args.work
        self.deadline = time.monotonic() + args.seconds
        self.work.mkdir(parents=True, exist_ok=True)
        self.tokenizer = Tokenizer.load(args.model)
        self.rows = Rows(self.work / "rows", place)
        self.tries = Rows(self.work / "tries", lambda row: row["kl"])
        self.train, self.heldout = self.text()
        self.original = self.load().freeze()
        self.teacher = self.load().to(torch.bfloat16).requires_grad_(False)
        print(f"{len(self.train)} rows to train on, {len(self.heldout)} held out", flush=True)

    def text(self) -> tuple[PackedRows, PackedRows]:
        kept = [self.work / "train.safetensors", self.work / "heldout.safetensors"]
        if not all(path.exists() for path in kept):
            parts = conversations(self.args.conversations, self.tokenizer, self.args.limit)
            for path, rows in zip(kept, (pack(part, ROW) for part in parts), strict=True):
                save_file(vars(rows), str(path))
        train, heldout = (PackedRows(**load_file(str(path))) for path in kept)
        return train, heldout.select(torch.arange(min(self.args.heldout_rows, len(heldout))))

    def load(self) -> CausalLM:
        return load_target(self.args.model, torch.float32, Kernels.auto(self.device)).to(self.device)

    def keep(self, table: Rows, row: Row) -> None:
        table.keep(row)
        print(json.dumps(row), f"{self.left():.0f} s left", flush=True)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def measure(self, what: str, group_size: int) -> None:
        name, began = f"{what} g{group_size}", time.monotonic()
        if what == "original":
            self.row(what, self.load())
        elif what in PTQ:
            model, about = self.ptq(what, group_size)
            self.row(name, model, seconds=time.monotonic() - began, **about)
        elif what in QAD and not what.endswith("-rounded"):
            head, fixed = HEADS.get(what.partition("-")[0]), what.endswith("-fixed")
            student = self.student(group_size, learned=what != "frozen")
            about: dict[str, Any] = {"grid": self.best(group_size)}
            start = None if what == "frozen" or self.args.start is None else f"{self.args.start} g{group_size}"
            if start is not None:
                about["start"] = self.load_trained(student, start, "layers.")
            if head is not None:  # on what these layers make
                about["head"] = asdict(head)
                self.quantize_head(student, head, learned=not fixed)
                if start is not None and not fixed:
                    self.load_trained(student, start, "lm_head.")
            learns = {"head": head is not None and not fixed, "layers": not what.endswith("-alone")}
            about |= self.qad(student, self.args.steps, *self.schedule(), **learns)
            parts = ("layers.",) if head is None else ("layers.", "lm_head.")
            trained = {k: v.contiguous() for k, v in student.state_dict().items() if k.startswith(parts)}
            save_file(trained, str(self.work / f"{name}.safetensors"))
            self.row(name, student, **about)
        elif what in QAD:
            student = self.student(group_size, learned=False)
            start = self.load_trained(student, f"frozen g{group_size}", "layers.")
            self.quantize_head(student, HEADS[what.removesuffix("-rounded")], learned=False)
            self.row(name, student, start=start, head=asdict(HEADS[what.removesuffix("-rounded")]))
        else:
            raise SystemExit(f"there is no row {what!r}")

    def load_trained(self, student: CausalLM, name: str, part: str) -> str:
        trained = load_file(str(self.work / f"{name}.safetensors"))
        student.load_state_dict({k: v for k, v in trained.items() if k.startswith(part)}, strict=False)
        return name

    def attempt(self, group_size: int, rate: float, batch_rows: int, steps: int) -> None:
        student = self.student(group_size, learned=False)
        about = self.qad(student, steps, rate, batch_rows)
        pack_linears(student)
        found = fidelity(
            student.float().freeze(), self.original, self.heldout.select(torch.arange(min(32, len(self.heldout))))
        )
        self.keep(self.tries, {"name": f"{rate} {batch_rows} {steps}", **about, **found})

    def schedule(self) -> tuple[float, int]:
        """Learning rate and rows a step: those given, else those of the best try."""
        if self.args.rate is not None:
            return self.args.rate, self.args.batch_rows
        best = self.tries.all()[0]
        return best["learning_rate"], best["batch_rows"]

    def ptq(self, method: str, group_size: int) -> tuple[CausalLM, dict[str, Any]]:
        """Keeps the grids and the smoothing in --work, and what GPTQ made of the weights."""
        model = self.load()
        kind = {"method": "gptq", "even": True} if method == "even" else {"method": method}
        config = QuantizeConfig(group_size=group_size, **kind)  # type: ignore[arg-type]
        rows = self.train.select(torch.arange(self.args.calibration_rows))
        made = quantize_target(model, rows.token_ids_NT, rows.positions_NT, rows.used_NT, config, lambda *_: None)
        packed = {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}
        kept = {f"grid/{name}": layer.grid.scale_NG for name, layer in packed.items()}
        if config.method == "gptq":
            kept |= {f"weight/{name}": layer.dense_weight(torch.float32) for name, layer in packed.items()}
        kept |= {f"smoothing/{name}": scale for name, scale in made.smoothing.items()}
        save_file({k: v.contiguous() for k, v in kept.items()}, str(self.work / f"{method} g{group_size}.safetensors"))
        errors = [layer.output_error for layer in made.layers]
        return model, {"mean_output_error": sum(errors) / len(errors)}

    def best(self, group_size: int) -> str:
        kl = {row["name"]: row["kl"] for row in self.rows.all()}
        return min((m for m in PTQ if f"{m} g{group_size}" in kl), key=lambda m: kl[f"{m} g{group_size}"])

    def student(self, group_size: int, learned: bool) -> CausalLM:
        """The original's weights, or GPTQ's, as masters on the best grid; activations in bfloat16, norms in float32."""
        kept = load_file(str(self.work / f"{self.best(group_size)} g{group_size}.safetensors"))
        model, scheme = self.load(), QuantScheme(group_size=group_size)
        apply_smoothing(model, {k.removeprefix("smoothing/"): v for k, v in kept.items() if k.startswith("smoothing/")})

        def fake(name: str, linear: nn.Linear) -> FakeQuantLinear:
            grid = Grid(kept[f"grid/{name}"].to(linear.weight.device))
            weight = kept.get(f"weight/{name}", linear.weight.detach()).to(linear.weight.device)
            return FakeQuantLinear(weight, grid, scheme, linear.bias, learn_scale=learned)

        replace_linears(model, [k.removeprefix("grid/") for k in kept if k.startswith("grid/")], fake)
        model.embed_tokens.to(torch.bfloat16)
        model.norm.to(torch.bfloat16)
        model.lm_head.weight = model.embed_tokens.weight
        return model

    @torch.no_grad()
    def quantize_head(self, model: CausalLM, scheme: QuantScheme, learned: bool) -> None:
        """By GPTQ on the hidden states of this model; masters in float32, and the embedding stays as it is."""
        weight = model.embed_tokens.weight.detach().float()
        hessian = Hessian(weight.shape[1], device=self.device)
        for numbers in torch.arange(self.args.calibration_rows).split(8):
            batch = self.train.select(numbers).to(self.device)
            hessian.add(model(batch.token_ids_NT, batch.positions_NT)[0][batch.used_NT])
        q_VD, grid, _ = gptq(weight, hessian.matrix(), scheme)
        rounded = PackedLinear.from_integers(q_VD, grid, scheme).dense_weight(torch.float32)
        model.set_submodule("lm_head", FakeQuantLinear(rounded, grid, scheme, learn_scale=learned))

    def qad(
        self, student: CausalLM, steps: int, rate: float, batch_rows: int, *, head: bool = False, layers: bool = True
    ) -> dict[str, Any]:
        """Trains in place; returns what was done."""
        learned = any(isinstance(layer, FakeQuantLinear) and layer.learn_scale for layer in student.modules())
        config = DistillConfig(
            optimizer=OptimizerConfig(
                steps=steps,
                learning_rate=rate,
                betas=(0.9, 0.95),
                checkpoint_every=10**9,
                captured=self.args.captured,
            ),
            batch_rows=batch_rows,
            row_length=ROW,
            scales="learned" if learned else "frozen",
            head=head,
            layers=layers,
            vocab_chunk=student.config.vocab_size,
        )
        began = time.monotonic()
        losses: list[str] = []

        def report(step: int, total: int, text: str) -> None:
            if step % max(1, total // 8) == 0:
                losses.append(text.removeprefix("loss "))

        distill(student, self.teacher, self.train, config, self.args.seed, NoCheckpoints(), report, dict)
        print("  losses", *losses, flush=True)
        seconds = time.monotonic() - began
        return {"learning_rate": rate, "batch_rows": batch_rows, "steps": steps, "seconds": seconds}

    def row(self, name: str, model: CausalLM, **about: Any) -> None:
        """Measures a model (its copy in float32) and writes the table."""
        pack_linears(model)
        size = sum(t.numel() * (2 if t.is_floating_point() else t.element_size()) for t in unique_tensors(model))
        frozen = model.float().freeze()
        row = {"name": name, **about, **fidelity(frozen, self.original, self.heldout), "bytes": size}
        if self.args.ifeval is not None and name in ANSWERED:
            self.answer(name, frozen)
        self.keep(self.rows, row)
        self.write()

    def answer(self, name: str, model: CausalLM) -> None:
        """Answers to IFEval's prompts, for `score_ifeval.py`."""
        prompts = [json.loads(line)["prompt"] for line in self.args.ifeval.read_text().splitlines()]
        ids = [self.tokenizer.chat_ids([SYSTEM, {"role": "user", "content": prompt}]) for prompt in prompts]
        config = GenerateConfig(max_new_tokens=512, temperature=0.0, batch_size=len(prompts))
        began = time.monotonic()
        made = generate(model, ids, config, 0, lambda *_: None)
        eos = set(model.config.eos_token_ids)
        texts = [self.tokenizer.decode([i for i in c.answer_ids if i not in eos]) for c in made]
        with (self.args.out.parent / f"ifeval_{name.replace(' ', '_')}.jsonl").open("w") as file:
            for prompt, text in zip(prompts, texts, strict=True):
                file.write(json.dumps({"prompt": prompt, "response": text}) + "\n")
        print(f"  IFEval answered in {time.monotonic() - began:.0f} s", flush=True)

    def asked(self) -> list[str]:
        tries = [f"try:32:{t['learning_rate']}:{t['batch_rows']}:{t['steps']}" for t in self.tries.all()]
        names = [row["name"].replace(" g", ":") for row in self.rows.all()]
        first = [name for name in names if name.split(":")[0] in ("original", *PTQ)]
        return first + tries + [name for name in names if name not in first]

    def write(self) -> None:
        kl = {row["name"]: row["kl"] for row in self.rows.all()}
        best = min((kl[f"{m} g32"] for m in PTQ if f"{m} g32" in kl), default=None)
        healed = min((kl[name] for name in ("frozen g32", "learned g32") if name in kl), default=None)
        result = {
            "command": "python benchmarks/target_smollm2.py --model FOLDER --conversations FILES --work FOLDER "
            f"--out RESULT --steps {self.args.steps} {'--captured' if self.args.captured else '--no-captured'} "
            f"{' '.join(self.asked())}",
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
            "tries": self.tries.all(),
            "kl_recovery": None if best is None or healed is None else 1 - healed / best,
            "rows": self.rows.all(),
        }
        self.args.out.write_text(json.dumps(result, indent=1) + "\n")


def place(row: Row) -> tuple[int, int]:
    """Where a row stands in the table."""
    what, _, group_size = row["name"].partition(" g")
    return int(group_size or 0), WHAT.index(what)


def unique_tensors(model: CausalLM) -> Iterable[Tensor]:
    return {t.data_ptr(): t for t in model.state_dict().values()}.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="ROW", help="original, or WHAT:GROUP; see above")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--conversations", type=Path, nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ifeval", type=Path, help="its prompts are answered, for scoring afterwards")
    parser.add_argument("--seconds", type=float, default=1500, help="no row is begun with less than 60 of them left")
    parser.add_argument("--limit", type=int, default=60_000, help="conversations")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--start", help="the row whose weights learned, head8 and head4 begin with")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the text")
    parser.add_argument("--rate", type=float, help="default: that of the best try, and its rows a step")
    parser.add_argument("--batch-rows", type=int, default=16)
    parser.add_argument("--heldout-rows", type=int, default=128)
    parser.add_argument("--calibration-rows", type=int, default=64)
    parser.add_argument("--captured", action=argparse.BooleanOptionalAction, default=True, help="steps as CUDA graphs")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    bench = Bench(args)
    for row in args.rows:
        if bench.left() < 60:
            raise SystemExit(f"no time left for {row} and what follows")
        what, *more = row.split(":")
        if what == "try":
            group_size, rate, batch_rows, steps = more
            bench.attempt(int(group_size), float(rate), int(batch_rows), int(steps))
        else:
            bench.measure(what, int(more[0]) if more else 0)


if __name__ == "__main__":
    main()
