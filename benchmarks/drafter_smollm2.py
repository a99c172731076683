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
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path

import torch
from drafter_bench import Bench, one_a_row, quiet
from drafter_recipes import (
    BEST,
    HEADS,
    LONGER,
    MARKOV,
    QUANTIZED,
    ROUNDED,
    WINDOWED,
    WINDOWS,
    Training,
    trainings,
)

from twofold.data.conversations import Conversation
from twofold.decoding.acceptance import Acceptance
from twofold.evaluation.acceptance import measure_acceptance
from twofold.evaluation.latency import Variant, measure_latency
from twofold.models.draft_head import DraftHeadConfig, count_tokens, make_draft_head
from twofold.models.draft_quantization import DraftQuantizeConfig, quantize_drafter
from twofold.ops.sampling import Sampling
from twofold.training.blocks import calibration_drafts, teacher_forced_acceptance


def trained_row(bench: Bench, name: str, training: Training) -> None:
    drafter, about = bench.train(name, training)
    found = bench.acceptance(drafter)
    if training.quantize is not None:
        about |= bench.over(LONGER if name == ROUNDED else BEST, found)
    bench.row(name, found, about)


def quantized_row(bench: Bench, name: str, method: str) -> None:
    drafter, target = bench.drafter(LONGER), bench.target("int4")
    text = bench.text(bench.args.longer_text)
    rows = text.select(text.batch(bench.args.calibration_rows, 0, 0)).to(bench.device)
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
    "intermediate", "taps", "mask_token", "distill_steps", "calibration_rows", "group_size",
    "max_tokens", "per_file", "precision",
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
    parser.add_argument("--calibration-rows", type=int, default=256, help="of quantized drafters, 16 blocks in each")
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
    bench = Bench(args, list(rows), SETTINGS)
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
