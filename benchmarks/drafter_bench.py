"""What the rows of `drafter_smollm2.py` share: targets and text, made once; trainings; how acceptance is counted."""

import argparse
import gzip
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from drafter_recipes import (
    BEST,
    DIRECT,
    KEPT,
    MARKOV,
    NOISE,
    QUANTIZED,
    ROUNDED,
    Training,
    trainings,
)
from rows import Row, Rows
from safetensors.torch import load_file, save_file
from target_smollm2 import IM_END, SYSTEM, NoCheckpoints, conversations

import twofold
from twofold.data.conversations import Conversation, PackedRows, load_conversations, pack, save_conversations
from twofold.data.generate import GenerateConfig, generate
from twofold.decoding.acceptance import Acceptance
from twofold.models.calibration import QuantizeConfig, quantize_target
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target, save_target
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import load_drafter, save_drafter
from twofold.models.drafter_config import DrafterConfig, DraftShape
from twofold.models.drafter_start import start_from_target, with_markov_head
from twofold.models.tokenizer import Tokenizer
from twofold.ops.kernels import Kernels
from twofold.pipeline.target_stages import save_quantized, student_of
from twofold.quant.linear import pack_linears
from twofold.training.blocks import teacher_forced_acceptance
from twofold.training.distill import DistillConfig, distill
from twofold.training.draft import DraftConfig, train_drafter
from twofold.training.losses import DraftLoss
from twofold.training.optimizer import OptimizerConfig
from twofold.training.precision import dtype_of

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def quiet(*_: object) -> None:
    pass


def read_prompts(sources: Iterable[str], limit: int) -> list[tuple[str, str]]:
    """(category, text): of each file at most `limit`, evenly taken."""
    found = []
    for source in sources:
        name, _, file = source.partition("=")
        raw = Path(file).read_bytes()
        lines = (gzip.decompress(raw) if file.endswith(".gz") else raw).decode().splitlines()
        entries = [json.loads(line) for line in lines if line.strip()]
        for number in range(min(limit, len(entries))):
            entry = entries[number * len(entries) // min(limit, len(entries))]
            text = entry["turns"][0] if "turns" in entry else entry.get("question") or entry["prompt"]
            if name == "humaneval":
                text = f"Complete this Python function:\n\n{text}"
            category = entry.get("category", "")
            found.append((name if not category else "mt_bench" if category in MT_BENCH else category, text))
    return found


class Bench:
    """Targets and text, made once; the table so far, its rows in `order`. `settings` are what its command tells."""

    def __init__(self, args: argparse.Namespace, order: list[str], settings: tuple[str, ...]) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.deadline = time.monotonic() + args.seconds
        self.work: Path = args.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.kernels = Kernels.auto(self.device)
        self.tokenizer = Tokenizer.load(args.model)
        self.settings = {name: getattr(args, name) for name in settings}
        self.rows = Rows(self.work / "rows", lambda row: order.index(row["name"]))
        self.measured: dict[str, Acceptance] = {}
        self.targets: dict[tuple[str, torch.dtype], CausalLM] = {}

    def left(self) -> float:
        return self.deadline - time.monotonic()

    # text

    @cached_property
    def conversations(self) -> list[Conversation]:
        path = self.work / "conversations.safetensors"
        if not path.exists():
            made, _ = conversations(self.args.conversations, self.tokenizer, self.args.limit)
            save_conversations(made, path)
            print(f"{len(made)} conversations, {self.left():.0f} s left", flush=True)
        return load_conversations(path)

    def own_answers(self) -> list[Conversation]:
        """The INT4 target's greedy answers to prompts of the conversations, evenly taken, but for long ones."""
        path, told = self.work / "own.safetensors", self.conversations
        if not path.exists():
            number = min(self.args.own_prompts, len(told))
            prompts = [told[i * len(told) // number].prompt_ids for i in range(number)]
            prompts = [ids for ids in prompts if len(ids) + self.args.own_tokens <= self.args.row_length // 2]
            config = GenerateConfig(
                max_new_tokens=self.args.own_tokens, temperature=0.0, batch_size=self.args.own_batch
            )
            target = self.target("int4", dtype_of(self.args.precision))
            save_conversations(generate(target, prompts, config, 0, self.progress("own answers")), path)
        return load_conversations(path)

    def text(self, kind: str, length: int | None = None) -> PackedRows:
        length = length or self.args.row_length
        path = self.work / f"rows_{kind}_{length}.safetensors"
        if not path.exists():
            told = self.conversations if kind == "given" else self.own_answers()
            if kind == "both":
                told = told + self.conversations
            fits = [c for c in told if len(c.prompt_ids) + len(c.answer_ids) <= length]
            save_file(vars(pack(fits, length)), str(path))
        made = PackedRows(**load_file(str(path)))
        print(f"{kind}: {len(made)} rows of {length} tokens, {self.left():.0f} s left", flush=True)
        return made

    @cached_property
    def questions(self) -> tuple[list[str], list[list[int]]]:
        """Categories and prompts."""
        found = read_prompts(self.args.prompts, self.args.per_file)
        ids = [self.tokenizer.chat_ids([SYSTEM, {"role": "user", "content": text}]) for _, text in found]
        kept = [(c, i) for (c, _), i in zip(found, ids, strict=True) if len(i) <= self.args.longest_prompt]
        return [c for c, _ in kept], [i for _, i in kept]

    def answers(self, kind: str) -> list[Conversation]:
        """The INT4 target's greedy answers: to the questions ("short"), or to questions after other text ("long")."""
        path = self.work / f"answers_{kind}.safetensors"
        if not path.exists():
            asked = self.questions[1] if kind == "short" else self.long_prompts()
            config = GenerateConfig(max_new_tokens=self.args.max_tokens, temperature=0.0, batch_size=128)
            made = generate(self.target("int4"), asked, config, 0, quiet)
            save_conversations(made, path)
            tokens = sum(len(c.answer_ids) for c in made)
            print(f"{kind}: {len(made)} answers, {tokens} tokens, {self.left():.0f} s left", flush=True)
        return load_conversations(path)

    def long_prompts(self) -> list[list[int]]:
        """Questions of the decode loop after whole conversations, `long_context` tokens in all."""
        made, other = [], 0
        for asked in self.questions[1][:: max(1, len(self.questions[1]) // self.args.long_prompts)]:
            before: list[int] = []
            while len(before) + len(asked) < self.args.long_context:
                told = self.conversations[other]
                ended = [] if told.answer_ids[-1:] == [IM_END] else [IM_END]
                before += told.prompt_ids + told.answer_ids + ended
                other += 1
            made.append([*before[: self.args.long_context - len(asked)], *asked])
        return made[: self.args.long_prompts]

    # models

    def target(self, kind: str, dtype: torch.dtype = torch.float32) -> CausalLM:
        if (kind, dtype) not in self.targets:
            folder = self.args.model if kind == "bf16" else self.int4()
            self.targets[kind, dtype] = load_target(folder, dtype, self.kernels).to(self.device).freeze()
        return self.targets[kind, dtype]

    def int4(self) -> Path:
        """AWQ in groups of 32, healed for a moment by distillation."""
        folder, ptq = self.work / "target", self.work / "target_ptq"
        if (folder / "config.json").exists():
            return folder
        text = self.text("given")
        rows = text.select(torch.arange(min(32, len(text))))
        model = load_target(self.args.model, torch.float32, self.kernels).to(self.device)
        texts = rows.token_ids_NT, rows.positions_NT, rows.used_NT
        grid = QuantizeConfig(method="awq", group_size=self.args.group_size)
        save_quantized(model, quantize_target(model, *texts, grid, quiet), grid, self.args.model, ptq)
        student = student_of(self.args.model, ptq)
        optimizer = OptimizerConfig(
            steps=self.args.distill_steps, learning_rate=2e-4, checkpoint_every=10**9, captured=self.args.captured
        )
        config = DistillConfig(
            optimizer=optimizer, batch_rows=16, row_length=self.args.row_length, precision=self.args.precision
        )
        teacher = self.target("bf16", dtype_of(self.args.precision))
        distill(student, teacher, text, config, 0, NoCheckpoints(), self.progress("target"), dict)
        pack_linears(student)
        save_target(student, folder, self.args.model)
        print(f"INT4 target made, {self.left():.0f} s left", flush=True)
        return folder

    def progress(self, name: str) -> Callable[[int, int, str], None]:
        def report(step: int, total: int, text: str) -> None:
            if step % max(1, total // 5) == 0:
                print(f"  {name}: step {step} of {total}, {text}, {self.left():.1f} s left", flush=True)

        return report

    def folder(self, name: str) -> Path:
        return self.work / "".join(c if c.isalnum() else "_" for c in name)

    def drafter(self, name: str) -> Drafter:
        return load_drafter(self.folder(name), kernels=self.kernels).to(self.device)

    def config(self, training: Training) -> DraftConfig:
        loss, positions = training.loss, training.positions
        if loss is None:
            best = self.best_direct()
            loss, positions = DraftLoss(**best["loss"]), best["weights"]
        steps = max(1, round(training.share * self.args.steps))
        length = training.length or self.args.row_length
        return DraftConfig(
            optimizer=OptimizerConfig(
                steps=steps,
                learning_rate=training.rate * self.args.learning_rate,
                method=self.args.method,
                checkpoint_every=10**9,
                captured=self.args.captured,
            ),
            loss=loss,
            positions=positions,  # type: ignore[arg-type]
            gamma=self.args.gamma,
            batch_rows=max(1, training.rows * self.args.batch_rows * self.args.row_length // length),
            row_length=length,
            anchors=self.args.anchors * length // self.args.row_length,
            precision=self.args.precision,
            joined=training.joined,
            vocab_chunk=65_536,
            quantize=training.quantize,
            scales="frozen" if training.quantize is None else "learned",
        )

    def best_direct(self) -> Row:
        rows = [row for row in self.rows.all() if row["name"] in DIRECT]
        if not rows:
            raise ValueError('the best loss is chosen among the rows "direct ..." of one loss; make them first')
        return max(rows, key=lambda row: row["accept_length"])

    def train(self, name: str, training: Training) -> tuple[Drafter, dict[str, Any]]:
        config = self.config(training)
        target = self.target(training.target, dtype_of(self.args.precision))
        if training.start == KEPT:
            drafter = self.new_drafter(target, training)
            drafter.load_state_dict(load_file(str(self.args.kept)))
        elif training.start is not None:
            drafter = self.drafter(training.start)
            if training.markov_rank:
                drafter = with_markov_head(drafter, training.markov_rank, 0)
        else:
            drafter = self.new_drafter(target, training)
            if not training.noise:
                start_from_target(drafter, target)
        drafter.config = replace(drafter.config, sliding_window=training.window if training.trained_in else None)
        text = self.text(training.text, training.length)  # making it is no part of the time
        began = time.monotonic()
        train_drafter(drafter, target, text, config, 0, NoCheckpoints(), self.progress(name), dict)
        seconds = time.monotonic() - began
        drafter.config = replace(drafter.config, sliding_window=training.window)
        save_drafter(drafter, self.folder(name))
        steps = config.optimizer.steps
        about = {
            "target": training.target,
            "loss": asdict(config.loss),
            "weights": config.positions,
            "text": training.text,
            "row_length": config.row_length,
            "joined": training.joined,
            "window": training.window,
            "start": training.start or ("noise" if training.noise else "the target's last layers"),
            "steps": steps,
            "batch_rows": config.batch_rows,
            "seconds": round(seconds, 1),
            "tokens_per_s": round(steps * config.batch_rows * config.row_length / seconds),
        }
        return self.drafter(name), about

    def new_drafter(self, target: CausalLM, training: Training) -> Drafter:
        shape = DraftShape(
            num_layers=self.args.layers,
            intermediate_size=self.args.intermediate,
            num_heads=target.config.num_heads,
            num_kv_heads=target.config.num_kv_heads,
            head_dim=target.config.head_dim,
            block_size=self.args.block,
            mask_token_id=self.args.mask_token,
            target_layer_ids=tuple(self.args.taps),
            markov_rank=training.markov_rank,
        )
        made = DrafterConfig.for_target(target.config, shape)
        return Drafter.initialized(made, 0, self.kernels).to(self.device)

    # rows

    def acceptance(self, drafter: Drafter, kind: str = "short") -> Acceptance:
        """By the INT4 target; answers a row each, so that they keep the order of the questions."""
        answers, found = self.answers(kind), Acceptance(drafter.config.block_size)
        longest = max(len(c.prompt_ids) + len(c.answer_ids) for c in answers)
        batch = max(1, 65_536 // longest)
        order = sorted(range(len(answers)), key=lambda i: len(answers[i].prompt_ids) + len(answers[i].answer_ids))
        parts: dict[int, Any] = {}
        target = self.target("int4")
        for start in range(0, len(order), batch):
            numbers = order[start : start + batch]
            length = max(len(answers[i].prompt_ids) + len(answers[i].answer_ids) for i in numbers)
            rows = one_a_row([answers[i] for i in numbers], length)
            got = teacher_forced_acceptance(drafter, target, rows, batch_rows=batch)
            parts |= dict(zip(numbers, got.answers, strict=True))
        categories = self.questions[0] if kind == "short" else [""] * len(answers)
        for number in range(len(answers)):
            found.add(parts[number].elements(), categories[number])
        return found

    def row(self, name: str, found: Acceptance, about: dict[str, Any]) -> None:
        self.measured[name] = found
        self.rows.keep({"name": name, **about, **found.figures()})
        self.write()
        low, high = found.interval()
        print(f"{name}: {found.accept_length:.3f} [{low:.3f}, {high:.3f}], {self.left():.0f} s left", flush=True)

    def over(self, name: str, found: Acceptance) -> dict[str, Any]:
        """How `found` compares with that drafter, in BF16 and with the target's own head."""
        if name not in self.measured:
            self.measured[name] = self.acceptance(self.drafter(name))
        ratio, low, high = found.over(self.measured[name])
        return {"over_dense": ratio, "over_dense_interval": [low, high]}

    def write(self) -> None:
        rows = {row["name"]: row for row in self.rows.all()}
        recipes = {n for n in trainings(self.args) if n.startswith(BEST)} - {MARKOV}  # its time is in the row "latency"
        best = max((rows[n]["accept_length"] for n in recipes if n in rows), default=None)
        kinds = [f"drafter {method}" for method in QUANTIZED] + [f"{BEST}, trained INT4", ROUNDED]
        quantized = [rows[name]["over_dense"] for name in kinds if name in rows]
        result = {
            "command": "python benchmarks/drafter_smollm2.py --model FOLDER --conversations CONVERSATIONS --prompts "
            "PROMPTS --work WORK --out RESULT "
            + " ".join(f"--{k.replace('_', '-')} {text_of(v)}" for k, v in self.settings.items())
            + (" --captured" if self.args.captured else " --no-captured")
            + ("" if self.args.kept is None else " --kept WEIGHTS"),
            "date": datetime.now(UTC).date().isoformat(),
            "environment": {
                "hardware": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU",
                "torch": torch.__version__,
                "twofold": twofold.__version__,
            },
            "model": "SmolLM2-135M-Instruct (its weights were 4-bit, GGUF Q4_1, before), INT4 target: AWQ g32, healed",
            "accept_length": best,
            "hard_label_direct": rows[NOISE]["accept_length"] if NOISE in rows else None,
            "quantized_over_bf16": max(quantized, default=None),
            "prompts": len(self.questions[1]),
            "rows": list(rows.values()),
        }
        self.args.out.write_text(json.dumps(result, indent=1) + "\n")


def one_a_row(answers: list[Conversation], length: int) -> PackedRows:
    parts = [pack([answer], length) for answer in answers]
    fields = ("token_ids_NT", "positions_NT", "answer_NT", "used_NT")
    return PackedRows(*(torch.cat([getattr(part, name) for part in parts]) for name in fields))


def text_of(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
