"""IFEval (arXiv:2311.07911) of answers that `target_smollm2.py --ifeval` wrote, with standard errors.

    pip install "lm_eval[ifeval]==0.4.13"
    python benchmarks/score_ifeval.py --prompts ifeval.jsonl --result target_smollm2.json ifeval_*.jsonl

The checkers are those of lm-eval 0.4.13. `prompt_strict` is the share of prompts all of whose instructions were
followed, `instruction_strict` that of instructions; the standard error of a share over n prompts is
sqrt(p (1 - p) / (n - 1)), and of the instructions that of a mean over prompts of unequal weight:
sqrt(sum_i (f_i - p m_i)^2) / sum_i m_i, where f_i of m_i instructions of prompt i were followed. Both go into the rows
of the result. Sentences are split by a Punkt model which is trained on the answers, since NLTK's own has to be
downloaded.
"""

import argparse
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any


def punkt(texts: list[str], folder: Path) -> None:
    """Writes NLTK's model of English sentences under `folder`, learned from the texts."""
    from nltk.tokenize.punkt import PunktTrainer, save_punkt_params

    trainer = PunktTrainer("\n".join(texts))
    path = folder / "tokenizers" / "punkt_tab" / "english"
    path.mkdir(parents=True)
    save_punkt_params(trainer.get_params(), str(path))


def scores(prompts: dict[str, dict[str, Any]], answers: list[dict[str, str]]) -> dict[str, float]:
    from lm_eval.tasks.ifeval.utils import process_results

    whole: list[bool] = []
    parts: list[list[bool]] = []
    for answer in answers:
        found = process_results(prompts[answer["prompt"]], [answer["response"]])
        whole.append(bool(found["prompt_level_strict_acc"]))
        parts.append([bool(x) for x in found["inst_level_strict_acc"]])
    share = sum(whole) / len(whole)
    total = sum(map(len, parts))
    followed = sum(map(sum, parts)) / total
    spread = sum((sum(part) - followed * len(part)) ** 2 for part in parts)
    return {
        "prompt_strict": share,
        "prompt_strict_stderr": math.sqrt(share * (1 - share) / (len(whole) - 1)),
        "instruction_strict": followed,
        "instruction_strict_stderr": math.sqrt(spread) / total,
    }


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, nargs="+", metavar="ifeval_ROW.jsonl")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    answers = {path.stem.removeprefix("ifeval_").replace("_", " "): read(path) for path in args.answers}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NLTK_DATA"] = folder  # before the checkers look for it
        punkt([answer["response"] for made in answers.values() for answer in made], Path(folder))
        prompts = {entry["prompt"]: entry for entry in read(args.prompts)}
        result = json.loads(args.result.read_text())
        rows = {row["name"]: row for row in result["rows"]}
        for name, made in answers.items():
            found = scores(prompts, made)
            print(name, json.dumps(found), flush=True)
            if name not in rows:
                raise SystemExit(f"{args.result} has no row {name!r}; measure it first")
            rows[name]["ifeval"] = found
        args.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
