"""The same answers from vLLM and from Twofold: exports, serves, compares, prints a table; exit code 1 on a miss.

python scripts/interop/compare.py                       # the shipped pocket model, rounded to INT4 here and now
python scripts/interop/compare.py --run runs/pocket     # a finished run: its healed target, its drafters
python scripts/interop/compare.py --target FOLDER ...   # pocket models quantized otherwise, alone and with the drafter

Greedy answers to held-out prompts. vLLM computes in bfloat16 (its head in float32), Twofold in float32. A prompt agrees
when all tokens are equal, or when the first that differs is Twofold's second choice within NEAR_TIE of its first. The
accept length is (tokens - 1 an answer) / cycles, for both. vLLM answers for the next export while Twofold answers for
this one, each on one core.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

import twofold
from twofold.cli import writable_file
from twofold.data.prompts import read_prompts, tokenize_prompts
from twofold.decoding.step import decode
from twofold.export.card import Card
from twofold.export.engines import find_engine
from twofold.export.folders import Exported, export
from twofold.models.checkpoint import load_target, packable_linears, save_target
from twofold.models.draft_quantization import packable_groups
from twofold.models.drafter_checkpoint import load_drafter, save_drafter
from twofold.models.tokenizer import Tokenizer
from twofold.ops.kernels import Kernels
from twofold.ops.sampling import Sampling
from twofold.pipeline.measure_stages import environment
from twofold.quant.linear import FakeQuantLinear, PackedLinear, replace_linears
from twofold.quant.rounding import search_grid
from twofold.quant.scheme import QuantScheme

POCKET = Path(twofold.__file__).parent / "assets" / "pocket"
PROMPTS, TOKENS, WINDOW = 16, 64, 12
NEAR_TIE, ACCEPT_LENGTH = 0.05, 0.10
SCHEME = QuantScheme(group_size=32)
# What vLLM says of weights that it could not place or did not find.
COMPLAINT = re.compile(
    r"skip(ping)? (loading|weight)|missing weight|not initialized from|unexpected weight|(is|were) not loaded"
    r"|error in weight loading",
    re.I,
)


@dataclass(frozen=True, kw_only=True)
class Result:
    name: str
    equal: int
    near_ties: int
    accept_length: tuple[float, float] | None  # vLLM's, ours
    misses: list[str]
    stand_ins: list[str]


def pack(module: nn.Module, names: list[str], scheme: QuantScheme = SCHEME) -> None:
    def packed(_: str, linear: nn.Linear) -> PackedLinear:
        grid = search_grid(linear.weight.detach(), scheme)
        return PackedLinear.from_fake(FakeQuantLinear.from_linear(linear, grid, scheme))

    replace_linears(module, names, packed)


def artifacts(work: Path, run: Path | None) -> tuple[Path, Path, Path]:
    """Folders of the INT4 target, the BF16 drafter and the INT4 drafter."""
    if run is not None:
        return run / "pack", run / "draft_finetune", run / "draft_quantize"
    target, drafter = load_target(POCKET), load_drafter(POCKET / "drafter")
    pack(target, packable_linears(target.config))
    save_target(target, work / "pack", POCKET)
    pack(drafter, [name for group in packable_groups(drafter.config) for name in group])
    save_drafter(drafter, work / "draft_quantize")
    return work / "pack", POCKET / "drafter", work / "draft_quantize"


def windowed(drafter: Path, window: int | None, folder: Path) -> Path:
    made = load_drafter(drafter)
    made.config = replace(made.config, sliding_window=window)
    save_drafter(made, folder)
    return folder


def exports(work: Path, run: Path | None, targets: list[Path]) -> Iterator[tuple[str, Exported]]:
    """Name, export: of the targets of others, or of a run, or of the shipped model."""
    cases: list[tuple[str, str, Path, Path | None]] = []
    for target in targets:
        cases.append((str(target), "vllm", target, None))
        cases.append((f"{target} + BF16 drafter", "vllm", target, POCKET / "drafter"))
    if not targets:
        packed, dense_drafter, drafter = artifacts(work, run)
        whole, window = (windowed(drafter, w, work / f"drafter_{w}") for w in (None, WINDOW))
        cases = [
            ("BF16", "vllm", POCKET, None),
            ("W4A16", "vllm", packed, None),
            ("W4A16 + BF16 drafter", "vllm", packed, dense_drafter),
            ("W4A16 + INT4 drafter", "vllm", packed, whole),
            (f"W4A16 + INT4 drafter, window {WINDOW}", "vllm", packed, window),
            ("the same, speculators' format", "speculators", packed, window),
        ]
    card = Card(name="pocket", base_model="pocket")
    for number, (name, engine, model, draft) in enumerate(cases):
        yield name, export(model, draft, work / f"export_{number}", find_engine(engine), card)


def ask_vllm(python: Path, exported: Exported, prompts: list[list[int]], work: Path) -> tuple[dict[str, Any], str]:
    """vLLM's answers, and its log; `work` is a new folder."""
    work.mkdir()
    block = 1 if exported.drafter is None else load_drafter(exported.drafter).config.block_size
    job = {
        "target": str(exported.target),
        "drafter": None if exported.drafter is None else str(exported.drafter),
        "num_speculative_tokens": block - 1,
        "prompts": prompts,
        "max_tokens": TOKENS,
    }
    (work / "job.json").write_text(json.dumps(job))
    command = [python, Path(__file__).parent / "vllm_side.py", work / "job.json", work / "answer.json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nvLLM ended with {done.returncode}")
    return json.loads((work / "answer.json").read_text()), done.stdout


def compare(name: str, exported: Exported, prompts: list[list[int]], answer: dict[str, Any], log: str) -> Result:
    target = load_target(exported.target, kernels=Kernels.cpu()).freeze()
    drafter = None
    if exported.drafter is not None:
        drafter = load_drafter(exported.drafter, kernels=Kernels.cpu()).freeze()
    stop_ids, greedy = frozenset(target.config.eos_token_ids), Sampling(temperature=0.0)
    misses = [f"log: {line.strip()}" for line in log.splitlines() if COMPLAINT.search(line)]
    equal = near_ties = tokens = cycles = 0
    for number, (prompt, theirs) in enumerate(zip(prompts, answer["tokens"], strict=True)):
        made = list(decode(target, drafter, tuple(prompt), TOKENS, greedy, stop_ids))
        ours = [token for cycle in made for token in cycle.token_ids]
        tokens += len(ours) - 1
        cycles += len(made) - 1
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if first is not None:
            scores = torch.cat([cycle.logits for cycle in made])[first]
            rank = 1 + int((scores > scores[theirs[first]]).sum())
            gap = float(scores.max() - scores[theirs[first]])
            near = rank == 2 and gap < NEAR_TIE
            near_ties += near
            if not near:
                misses.append(f"prompt {number}, token {first}: rank {rank}, gap {gap:.3f}")
        elif len(ours) != len(theirs):
            misses.append(f"prompt {number}: {len(theirs)} tokens, ours {len(ours)}")
        else:
            equal += 1
    lengths = None
    if drafter is not None:
        gained = sum(len(theirs) - 1 for theirs in answer["tokens"])
        lengths = gained / max(1, answer["drafts"]), tokens / max(1, cycles)
        if abs(lengths[0] / lengths[1] - 1) > ACCEPT_LENGTH:
            misses.append(f"accept length {lengths[0]:.2f}, ours {lengths[1]:.2f}")
    return Result(
        name=name,
        equal=equal,
        near_ties=near_ties,
        accept_length=lengths,
        misses=misses,
        stand_ins=answer["stand_ins"],
    )


def made_in(python: Path) -> int:
    """The seconds that environment.sh took."""
    return int((python.parents[1] / ".installed").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--run", type=Path, metavar="DIR", help="a finished run (default: the shipped model, rounded)")
    given.add_argument("--target", type=Path, metavar="FOLDER", nargs="+", default=[], help="quantized pocket models")
    parser.add_argument("--python", type=Path, default=Path(".venv-interop/bin/python"), help="vLLM's environment")
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    start, hardware = time.perf_counter(), environment()["hardware"]
    texts = read_prompts(POCKET / "heldout_prompts.jsonl", PROMPTS)
    prompts = tokenize_prompts(texts, Tokenizer.load(POCKET), 512)
    torch.set_num_threads(1)  # threads that wait for one another lose most where the machine is shared
    results, version = [], ""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as vllm:
        work = Path(folder)
        asked = [
            (name, exported, vllm.submit(ask_vllm, options.python, exported, prompts, work / f"job_{number}"))
            for number, (name, exported) in enumerate(exports(work, options.run, options.target))
        ]
        for name, exported, answered in asked:
            answer, log = answered.result()
            version = answer["version"]
            result = compare(name, exported, prompts, answer, log)
            lengths = ""
            if result.accept_length is not None:
                lengths = "accept length {:.2f}, ours {:.2f}".format(*result.accept_length)
            print(
                f"{name:<36} {result.equal:>2} of {PROMPTS} equal, {result.near_ties} near-ties  {lengths:<32} "
                f"{'ok' if not result.misses else 'MISSED'}",
                flush=True,
            )
            for miss in result.misses:
                print(f"    {miss}", flush=True)
            results.append(result)
    stand_ins = sorted({name for result in results for name in result.stand_ins})
    print(f"vLLM {version}; stood in for on this machine: {', '.join(stand_ins) or 'nothing'}")
    seconds = {"environment": made_in(options.python), "comparison": round(time.perf_counter() - start)}
    print(", ".join(f"{name} {value} s" for name, value in seconds.items()))
    if options.json is not None:
        figures = {
            "command": "make interop" if not options.target else "make llm-compressor",
            "date": date.today().isoformat(),
            "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip(),
            "hardware": hardware,
            "seconds": seconds,
            "vllm": version,
            "torch": torch.__version__,
            "results": [vars(result) for result in results],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(any(result.misses for result in results))


if __name__ == "__main__":
    sys.exit(main())
