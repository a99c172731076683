"""The same logits from every transformers that Twofold allows: exit code 1 where they differ by BOUND or more.

python scripts/interop/compare_transformers.py --python .venv-transformers-5.17/bin/python [--python ...]

Exports of the pocket model, dense and packed, in float32 on both sides; all positions of rows
of held-out prompts, four a row, which is longer than a chunk of Gated DeltaNet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from compare import POCKET, pack
from safetensors.torch import load_file
from torch import Tensor

from twofold.cli import writable_file
from twofold.data.prompts import read_prompts, tokenize_prompts
from twofold.export.card import Card
from twofold.export.engines import find_engine
from twofold.export.folders import export
from twofold.models.checkpoint import load_target, packable_linears, save_target
from twofold.models.tokenizer import Tokenizer
from twofold.pipeline.measure_stages import environment
from twofold.quant.scheme import QuantScheme

PROMPTS, BOUND = 16, 1e-3
SCHEMES = {
    "BF16": None,
    "W4A16": QuantScheme(group_size=32),
    "W4A16, asymmetric": QuantScheme(group_size=32, symmetric=False),
    "W8A16, a scale a channel": QuantScheme(bits=8, group_size=-1),
}


def exports(work: Path) -> Iterator[tuple[str, Path]]:
    for number, (name, scheme) in enumerate(SCHEMES.items()):
        target = POCKET
        if scheme is not None:
            model, target = load_target(POCKET), work / f"packed_{number}"
            pack(model, packable_linears(model.config), scheme)
            save_target(model, target, POCKET)
        card = Card(name="pocket", base_model="pocket")
        yield name, export(target, None, work / f"export_{number}", find_engine("transformers"), card).target


@torch.inference_mode()
def ours(target: Path, prompts: list[list[int]]) -> list[Tensor]:
    """[T, V] a prompt."""
    model = load_target(target).freeze()
    return [model.logits(model(torch.tensor([ids]))[0])[0] for ids in prompts]


def theirs(python: Path, target: Path, prompts: list[list[int]], work: Path) -> tuple[dict[str, Any], list[Tensor]]:
    (work / "job.json").write_text(json.dumps({"target": str(target), "prompts": prompts}))
    files = [work / name for name in ("job.json", "answer.json", "logits.safetensors")]
    side = Path(__file__).parent / "transformers_side.py"
    done = subprocess.run([python, side, *files], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{python} ended with {done.returncode}")
    rows = load_file(files[2])
    return json.loads(files[1].read_text()), [rows[str(i)] for i in range(len(prompts))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, action="append", required=True, help="an environment with transformers")
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    hardware = environment()["hardware"]
    torch.set_num_threads(1)
    ids = tokenize_prompts(read_prompts(POCKET / "heldout_prompts.jsonl", PROMPTS), Tokenizer.load(POCKET), 512)
    prompts = [[*a, *b, *c, *d] for a, b, c, d in zip(*[iter(ids)] * 4, strict=True)]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name, target in exports(Path(folder)):
            expected = ours(target, prompts)
            for python in options.python:
                answer, logits = theirs(python, target, prompts, Path(folder))
                pairs = list(zip(logits, expected, strict=True))
                row = {
                    "name": name,
                    **answer,
                    "positions": sum(len(a) for a, _ in pairs),
                    "difference": max(float((a - b).abs().max()) for a, b in pairs),
                    "other_tokens": sum(int((a.argmax(-1) != b.argmax(-1)).sum()) for a, b in pairs),
                }
                results.append(row)
                print(
                    f"transformers {row['transformers']:<8} {name:<26} {row['positions']} positions, logits within "
                    f"{row['difference']:.1e}, {row['other_tokens']} other tokens",
                    *row["misplaced"],
                    flush=True,
                )
    if options.json is not None:
        figures = {
            "command": "make interop-transformers",
            "date": date.today().isoformat(),
            "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip(),
            "hardware": hardware,
            "torch": torch.__version__,
            "results": results,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(any(row["difference"] >= BOUND or row["misplaced"] for row in results))


if __name__ == "__main__":
    sys.exit(main())
