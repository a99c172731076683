"""What each way of training, quantizing and using a drafter gains a cycle, on SmolLM2-135M-Instruct. One GPU.

    python benchmarks/drafter_smollm2.py --model FOLDER --conversations CONVERSATIONS... --prompts NAME=FILE... \\
        --work WORK --out RESULT.json [--only ROW...]

FOLDER is a Hugging Face folder of the model. CONVERSATIONS are JSON lines (.xz) with `prompt` and `answer`, written by
the model itself; those whose prompt's SHA-256 is 0 modulo 50 are left out. FILE has JSON lines (.gz or not) with
`prompt`, `question` or `turns`, and optionally `category`: what is measured on, never trained on.

What drafters learn from is CONVERSATIONS ("given"), the INT4 target's own greedy answers to `--own-prompts` of the
same prompts ("own"), or both. They are short: in the longer trainings every `--joined`-th row is one document, so
that contexts as long as a row are seen, and what comes of them has a sliding window of `--window` tokens. `--kept`
goes on from a drafter of an earlier run.

WORK keeps the INT4 target, its greedy answers, every trained drafter and every row, so that the rows can be made in
several calls, also at the same time once "answers" is there: a call makes the rows of `--only`
(all by default) that WORK does not have and that fit into `--seconds`, rewriting RESULT after each. `--only` takes
names, with * for anything; `--list` prints them.

Accept length: the INT4 target answers every prompt greedily; a drafter drafts at every anchor of those answers, and the
cycles that decoding would take are counted (`teacher_forced_acceptance`; the row "engine" measures the decode loop
itself on the same prompts). Intervals are 95 %, by bootstrap over prompts. Trainings of one budget see the same tokens;
drafters are trained with activations in bfloat16, and measured in float32.

The weights of this copy were 4-bit (GGUF Q4_1, groups of 32, asymmetric) before they were what is called original here.
"""

import argparse
import copy
import gzip
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rows import Row, Rows
from safetensors.torch import load_file, save_file
from target_smollm2 import IM_END, SYSTEM, NoCheckpoints, conversations

import twofold
from twofold.data.conversations import Conversation, PackedRows, load_conversations, pack, save_conversations
from twofold.data.generate import GenerateConfig, generate
from twofold.decoding.acceptance import Acceptance
from twofold.evaluation.acceptance import measure_acceptance
from twofold.evaluation.latency import Variant, measure_latency
from twofold.models.calibration import QuantizeConfig, quantize_target
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target, save_target
from twofold.models.draft_head import DraftHeadConfig, count_tokens, make_draft_head
from twofold.models.draft_quantization import DraftQuantizeConfig, quantize_drafter
from twofold.models.drafter import Drafter
from twofold.models.drafter_checkpoint import load_drafter, save_drafter
from twofold.models.drafter_config import DrafterConfig, DraftShape
from twofold.models.drafter_start import start_from_target, with_markov_head
from twofold.models.tokenizer import Tokenizer
from twofold.ops.kernels import Kernels
from twofold.ops.sampling import Sampling
from twofold.pipeline.target_stages import save_quantized, student_of
from twofold.quant.linear import pack_linears
from twofold.quant.scheme import QuantScheme
from twofold.training.blocks import calibration_drafts, teacher_forced_acceptance
from twofold.training.distill import DistillConfig, distill
from twofold.training.draft import DraftConfig, train_drafter
from twofold.training.losses import DraftLoss
from twofold.training.optimizer import OptimizerConfig
from twofold.training.precision import dtype_of

HARD, SOFT, TV = DraftLoss(hard=1.0), DraftLoss(soft=1.0), DraftLoss(total_variation=1.0)
MIXED = DraftLoss(hard=0.1, total_variation=0.9)  # DSpark's
SOFT_TV = DraftLoss(soft=0.5, total_variation=0.5)
NOISE = "direct hard, from noise"  # the paper's, but for its stages
BEST = "two stages best loss"
LONGER = f"{BEST}, longer"  # what is quantized, windowed, given other heads and run
WINDOWED = f"{LONGER}, window trained in"
MARKOV = f"{LONGER}, Markov head"
ROUNDED = f"{LONGER}, trained INT4"
KEPT = "an earlier run's"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True, kw_only=True)
class Training:
    """`share` of the budget's steps, each of as many tokens times `rows`, on the original target ("bf16") or the
    quantized one ("int4"), from `text` ("given", "own" or "both") in rows of `length` tokens, every `joined`-th one
    document; `start` is the training that it goes on from, at `rate` times the learning rate; without one a drafter
    starts at the target's last layers, or at `noise`. It sees `window` tokens, once trained, or as it is trained in. A
    loss of None is the best of the direct ones."""

    target: str = "int4"
    loss: DraftLoss | None = HARD
    positions: str = "decay"
    share: float = 1.0
    rows: int = 1
    text: str = "given"
    length: int | None = None
    joined: int = 0
    start: str | None = None
    rate: float = 1.0
    noise: bool = False
    quantize: QuantScheme | None = None
    markov_rank: int = 0
    window: int | None = None
    trained_in: bool = False


DIRECT = {
    "direct hard": Training(),
    "direct soft": Training(loss=SOFT),
    "direct total variation": Training(loss=TV),
    "direct hard + total variation": Training(loss=MIXED),
    "direct soft + total variation": Training(loss=SOFT_TV),
    "direct hard, D-PACE": Training(positions="dpace"),
    "direct soft, D-PACE": Training(loss=SOFT, positions="dpace"),
}


def trainings(args: argparse.Namespace) -> dict[str, Training]:
    """In this order, since the later ones build on the earlier."""
    first, qat = args.first_share, QuantScheme(group_size=args.group_size)
    goes_on = Training(
        loss=None,
        share=args.longer,
        rows=args.longer_rows,
        text=args.longer_text,
        length=args.longer_length,
        joined=args.joined,
        start=LONGER,
        rate=0.25,
        window=args.window or None,
    )
    return {
        NOISE: Training(noise=True),
        **DIRECT,
        "direct best loss, Markov head": Training(loss=None, markov_rank=64),
        "direct best loss, own answers": Training(loss=None, text="own"),
        "stage 1 hard": Training(target="bf16", share=first),
        "two stages hard": Training(share=1 - first, start="stage 1 hard"),
        "stage 1 best loss": Training(target="bf16", loss=None, share=first),
        BEST: Training(loss=None, share=1 - first, start="stage 1 best loss"),
        f"{BEST}, trained INT4": Training(loss=None, share=1 - first, start="stage 1 best loss", quantize=qat),
        LONGER: replace(goes_on, start=BEST if args.kept is None else KEPT),
        MARKOV: replace(goes_on, share=args.longer / 10, markov_rank=64),
        WINDOWED: replace(goes_on, share=first, trained_in=True),
        ROUNDED: replace(goes_on, share=1.0, rate=0.1, quantize=qat),
    }


QUANTIZED = ("RTN", "AWQ", "GPTQ")
HEADS: dict[str, DraftHeadConfig] = {
    "INT8": DraftHeadConfig(bits=8, group_size=-1),
    "INT4": DraftHeadConfig(bits=4, group_size=32),
    "16384 rows": DraftHeadConfig(rows=16_384),
    "8192 rows": DraftHeadConfig(rows=8_192),
    "8192 rows INT8": DraftHeadConfig(bits=8, group_size=-1, rows=8_192),
}
WINDOWS = (None, 2048, 1024, 512)


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
    """Targets and text, made once; the table so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.deadline = time.monotonic() + args.seconds
        self.work: Path = args.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.kernels = Kernels.auto(self.device)
        self.tokenizer = Tokenizer.load(args.model)
        order = list(all_rows(args))
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
        settings = {k: v for k, v in vars(self.args).items() if k in SETTINGS}
        rows = {row["name"]: row for row in self.rows.all()}
        recipes = {n for n in trainings(self.args) if n.startswith(BEST)} - {MARKOV}  # its time is in the row "latency"
        best = max((rows[n]["accept_length"] for n in recipes if n in rows), default=None)
        kinds = [f"drafter {method}" for method in QUANTIZED] + [f"{BEST}, trained INT4", ROUNDED]
        quantized = [rows[name]["over_dense"] for name in kinds if name in rows]
        result = {
            "command": "python benchmarks/drafter_smollm2.py --model FOLDER --conversations CONVERSATIONS --prompts "
            "PROMPTS --work WORK --out RESULT "
            + " ".join(f"--{k.replace('_', '-')} {text_of(v)}" for k, v in settings.items())
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


def trained_row(bench: Bench, name: str, training: Training) -> None:
    drafter, about = bench.train(name, training)
    found = bench.acceptance(drafter)
    if training.quantize is not None:
        about |= bench.over(LONGER if name == ROUNDED else BEST, found)
    bench.row(name, found, about)


def quantized_row(bench: Bench, name: str, method: str) -> None:
    drafter, target = bench.drafter(LONGER), bench.target("int4")
    text = bench.text(bench.args.longer_text)
    rows = text.select(text.batch(min(256, 4 * bench.args.batch_rows), 0, 0)).to(bench.device)
    config = DraftQuantizeConfig(method=method.lower(), group_size=bench.args.group_size)  # type: ignore[arg-type]
    began = time.monotonic()
    reports = quantize_drafter(drafter, calibration_drafts(drafter, target, rows, 16, 0), config, quiet)
    errors = [layer.output_error for layer in reports]
    about = {
        "mean_output_error": sum(errors) / len(errors),
        "fallbacks": sum(layer.fallback for layer in reports),
        "seconds": round(time.monotonic() - began, 1),
    }
    found = bench.acceptance(drafter)
    bench.row(name, found, about | bench.over(LONGER, found))


def head_row(bench: Bench, name: str, config: DraftHeadConfig) -> None:
    drafter, target = bench.drafter(LONGER), bench.target("int4")
    rows = config.rows
    if rows is not None and rows >= target.config.vocab_size:
        return
    counts = count_tokens((c.answer_ids for c in bench.conversations), target.config.vocab_size)
    drafter.draft_head = make_draft_head(config, target.lm_head, counts).to(bench.device)
    found = bench.acceptance(drafter)
    bench.row(name, found, bench.over(LONGER, found))


def window_row(bench: Bench, name: str, window: int | None) -> None:
    """On long contexts, or on the questions as they are."""
    drafter = bench.drafter(LONGER)
    drafter.config = replace(drafter.config, sliding_window=window)
    if name.startswith(LONGER):
        bench.row(name, bench.acceptance(drafter), {})
    else:
        bench.row(name, bench.acceptance(drafter, "long"), {"context": bench.args.long_context})


def trained_window_row(bench: Bench, name: str) -> None:
    bench.row(name, bench.acceptance(bench.drafter(WINDOWED), "long"), {"context": bench.args.long_context})


def engine_row(bench: Bench, name: str) -> None:
    """The decode loop on the first questions, and the trainer's measure on the same."""
    target, drafter = bench.target("int4"), bench.drafter(LONGER)
    categories, prompts = bench.questions
    step = max(1, len(prompts) // bench.args.engine_prompts)
    categories, prompts = categories[::step], prompts[::step]
    frozen = copy.deepcopy(drafter).freeze()
    found, answers = measure_acceptance(
        target, frozen, prompts, bench.args.max_tokens, Sampling(), bench.progress(name), categories
    )
    trainer = Acceptance(drafter.config.block_size)
    for prompt, answer in zip(prompts, answers, strict=True):
        rows = one_a_row([Conversation(prompt, answer)], len(prompt) + len(answer))
        trainer.add(teacher_forced_acceptance(drafter, target, rows).answers[0].elements())
    about = {"trainer": trainer.accept_length, "over_trainer": found.accept_length / trainer.accept_length}
    bench.row(name, found, about)


def latency_row(bench: Bench, name: str) -> None:
    """Milliseconds a token in the decode loop, with the target's own head and the others: captured cycles of one
    sequence, in float32."""
    target = bench.target("int4")
    counts = count_tokens((c.answer_ids for c in bench.conversations), target.config.vocab_size)
    variants = {"plain": Variant(target, None), "own head": Variant(target, bench.drafter(LONGER).freeze())}
    if (bench.folder(MARKOV) / "config.json").exists():
        variants["Markov head"] = Variant(target, bench.drafter(MARKOV).freeze())
    for head, config in HEADS.items():
        if config.rows is None or config.rows < target.config.vocab_size:
            drafter = bench.drafter(LONGER)
            drafter.draft_head = make_draft_head(config, target.lm_head, counts).to(bench.device)
            variants[head] = Variant(target, drafter.freeze())
    measured = measure_latency(variants, bench.questions[1][:: max(1, len(bench.questions[1]) // 4)][:4], 64, 1, quiet)
    found = {variant: asdict(latency) for variant, latency in measured.items()}
    bench.rows.keep({"name": name, "variants": found})
    bench.write()
    print(name, {variant: round(latency["ms_per_token"], 2) for variant, latency in found.items()}, flush=True)


def answers_row(bench: Bench, name: str) -> None:
    tokens = {kind: sum(len(c.answer_ids) for c in bench.answers(kind)) for kind in ("short", "long")}
    bench.rows.keep({"name": name, "tokens": tokens})


def all_rows(args: argparse.Namespace) -> dict[str, Callable[[Bench], None]]:
    rows: dict[str, Callable[[Bench], None]] = {"answers": lambda bench: answers_row(bench, "answers")}
    for name, training in trainings(args).items():
        rows[name] = lambda bench, n=name, t=training: trained_row(bench, n, t)
    for method in QUANTIZED:
        name = f"drafter {method}"
        rows[name] = lambda bench, n=name, m=method: quantized_row(bench, n, m)
    for head, config in HEADS.items():
        rows[f"head {head}"] = lambda bench, n=f"head {head}", c=config: head_row(bench, n, c)
    for window in WINDOWS:
        size = "full" if window is None else window
        for name in (f"window {size}", f"{LONGER}, window {size}"):
            rows[name] = lambda bench, n=name, w=window: window_row(bench, n, w)
    rows["window trained in"] = lambda bench: trained_window_row(bench, "window trained in")
    rows["engine"] = lambda bench: engine_row(bench, "engine")
    rows["latency"] = lambda bench: latency_row(bench, "latency")
    return rows


SETTINGS = (
    "steps", "first_share", "longer", "longer_rows", "longer_text", "longer_length", "joined", "window", "own_prompts",
    "own_tokens", "method", "learning_rate", "batch_rows", "row_length", "anchors", "block", "gamma", "layers",
    "intermediate", "taps", "mask_token", "distill_steps", "group_size", "max_tokens", "per_file", "precision",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--conversations", type=Path, nargs="+")
    parser.add_argument("--prompts", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="ROW", help="names, with * for anything")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--limit", type=int, default=60_000, help="conversations")
    parser.add_argument("--steps", type=int, default=800, help="of every direct training, and of both stages together")
    parser.add_argument("--first-share", type=float, default=0.5, help="of the steps, for stage 1")
    parser.add_argument("--longer", type=float, default=6.0, help="budgets of steps that the best recipe goes on for")
    parser.add_argument("--longer-rows", type=int, default=1, help="times the rows of its steps")
    parser.add_argument("--longer-text", choices=("given", "own", "both"), default="both", help="that it learns from")
    parser.add_argument("--longer-length", type=int, default=1024, help="tokens of its rows, of which it has as many")
    parser.add_argument("--joined", type=int, default=2, help="every so many of these rows are one document (0: none)")
    parser.add_argument("--window", type=int, default=512, help="of the longer drafters' context (0: all of it)")
    parser.add_argument("--kept", type=Path, metavar="WEIGHTS", help="safetensors that it starts from")
    parser.add_argument("--own-prompts", type=int, default=40_000, help="that the INT4 target answers itself")
    parser.add_argument("--own-batch", type=int, default=4096, help="answers at a time")
    parser.add_argument("--own-tokens", type=int, default=256, help="of an answer at most")
    parser.add_argument("--method", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--batch-rows", type=int, default=8)
    parser.add_argument("--row-length", type=int, default=1024)
    parser.add_argument("--anchors", type=int, default=256)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--gamma", type=float, default=4.0)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--taps", type=int, nargs="+", default=[1, 8, 15, 22, 28])
    parser.add_argument("--mask-token", type=int, default=5, help="a token that never occurs in text")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--distill-steps", type=int, default=300)
    parser.add_argument("--per-file", type=int, default=120, help="prompts of each file")
    parser.add_argument("--longest-prompt", type=int, default=1500)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--long-prompts", type=int, default=32)
    parser.add_argument("--long-context", type=int, default=3000)
    parser.add_argument("--engine-prompts", type=int, default=24)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--captured", action=argparse.BooleanOptionalAction, default=True, help="steps as CUDA graphs")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    rows = all_rows(args)
    if args.list:
        print("\n".join(rows))
        return
    missing = [k for k in ("model", "conversations", "prompts", "work", "out") if getattr(args, k) is None]
    if missing:
        parser.error("give --" + ", --".join(missing))
    torch.set_float32_matmul_precision("high")
    bench = Bench(args)
    longest = 0.0
    for name, make in rows.items():
        if bench.rows.find(name) is not None or not any(fnmatch(name, wanted) for wanted in args.only):
            continue
        if bench.left() < 1.2 * longest:
            print(f"{name}: {bench.left():.0f} s left, and the longest row took {longest:.0f}; call again", flush=True)
            break
        began = time.monotonic()
        make(bench)
        longest = max(longest, time.monotonic() - began)
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
