"""Published numbers: keeps a run's report under benchmarks/results, and writes the tables of the docs from there.

python scripts/tables.py --take runs/pocket pocket_cpu    # the report of a run becomes a published result
python scripts/tables.py                                  # tables between <!-- results:NAME --> and <!-- end -->
python scripts/tables.py --check                          # exit code 1 if a table differs from its result
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- results:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def take(run: Path, name: str) -> None:
    report = json.loads((run / "report.json").read_text())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    result = {"command": report.pop("command"), "commit": commit.stdout.strip(), **report}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def tables(name: str, result: dict[str, Any]) -> str:
    """The tables of a result, in Markdown."""
    writers = {
        "engine_4b": engine_rows,
        "drafter_smollm2": draft_rows,
        "target_smollm2": target_rows,
        "target_4b_step": step_rows,
        "draft_4b_step": draft_step_rows,
        "interop_cpu": interop_rows,
        "interop_llm_compressor": interop_rows,
        "interop_transformers": transformers_rows,
    }
    return writers.get(name, report_tables)(result)


def target_rows(result: dict[str, Any]) -> str:
    lines = [
        f"{result['model']}, {result['heldout_tokens']:,} held-out answer tokens, {result['environment']['hardware']}, "
        f"{result['date']}. KL recovered over the best of rounding, AWQ and GPTQ: {result['kl_recovery']:.1%}.",
        "",
        "| | KL to the original | top-1 agreement | perplexity | IFEval, % of prompts | MB |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        steps = f", {row['steps']} steps at {row['learning_rate']:g}" if "steps" in row else ""
        start = f", from {row['start']}" if "start" in row else ""
        figures = f"{row['kl']:.4f} | {row['top1']:.3f} | {row['ppl']:.3f} | {ifeval(row)} | {row['bytes'] / 1e6:.1f}"
        lines.append(f"| {row['name']}{start}{steps} | {figures} |")
    return "\n".join(lines) + "\n"


def draft_rows(result: dict[str, Any]) -> str:
    lines = [
        f"{result['model']}; {result['prompts']} prompts, {result['environment']['hardware']}, {result['date']}.",
        "",
        "| | loss, weights | starts from | steps | accept length (95 %) | against the same, not quantized |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "accept_length" not in row:
            continue
        what = f"{loss_of(row['loss'])}, {row['weights']}" if "loss" in row else ""
        low, high = row["interval"]
        over = ""
        if "over_dense" in row:
            least, most = row["over_dense_interval"]
            over = f"{row['over_dense']:.3f} ({least:.3f} to {most:.3f})"
        when = f" ({row['date']})" if "date" in row else ""
        lines.append(
            f"| {row['name']}{when} | {what} | {row.get('start', '')} | {row.get('steps', '')} | "
            f"{row['accept_length']:.2f} ({low:.2f} to {high:.2f}) | {over} |"
        )
    return "\n".join(lines) + "\n"


def loss_of(loss: dict[str, float]) -> str:
    return " + ".join(f"{share:g} {name.replace('_', ' ')}" for name, share in loss.items() if share)


def engine_rows(result: dict[str, Any]) -> str:
    """The engine at a shape: the ledger at every setting, then single cycles; of an incomplete result what it has."""
    where, ledger, processes = result["environment"], result["ledger"], result.get("processes", [result])
    several = len(processes) > 1

    def process(figures: dict[str, Any]) -> str:
        return f" {figures['process']} |" if several else ""

    copies = " and ".join(f"{process['copy_gb_per_s']:,.0f}" for process in processes)
    lines = [
        f"`{result['command']}` on {result['date']}: {where['hardware']}, torch {where['torch']}, {result['kind']}, "
        f"{result['runs']} runs, medians; a copy moves {copies} GB/s.",
    ]
    if not result.get("complete", True):
        lines += ["", "Not complete: what is not here was not measured."]
    if several:
        lines += ["", "Measured by several processes, one after another: only rows of the same one make a ratio."]
    lines += [
        "",
        "| prompt/new | | first token, ms | cycle, ms | per token, ms | total, ms | GB a cycle | of a copy | kernels |"
        + several * " process |",
        "|---|---|---|---|---|---|---|---|---|" + several * "---|",
    ]
    for setting in dict.fromkeys(setting for row in ledger for setting in row["settings"]):
        for row in ledger:
            if (x := row["settings"].get(setting)) is None:
                continue
            kernels = "" if x["kernels"] is None else x["kernels"]
            lines.append(
                f"| {setting} | {row['name']} | {x['ttft_ms']:.1f} | {x['cycle_ms']:.2f} | {x['ms_per_token']:.2f} | "
                f"{x['total_ms']:.0f} | {x['bytes'] / 1e9:.2f} | {x['share_of_copy']:.0%} | {kernels} |{process(x)}"
            )
    if result["cycles"]:
        lines += [
            "",
            "| cycle | batch | context | ms |" + several * " process |",
            "|---|---|---|---|" + several * "---|",
        ]
        for name, cycles in result["cycles"].items():
            lines += [f"| {name} | {c['batch']} | {c['context']:,} | {c['cycle_ms']:.2f} |{process(c)}" for c in cycles]
    return "\n".join(lines) + "\n"


def ifeval(row: dict[str, Any]) -> str:
    if "ifeval" not in row:
        return ""
    return f"{100 * row['ifeval']['prompt_strict']:.1f} ± {100 * row['ifeval']['prompt_strict_stderr']:.1f}"


def step_rows(result: dict[str, Any]) -> str:
    whole = result.get("whole_vocabulary", {})
    fit = "does not fit" if "out_of_memory" in whole else f"{whole.get('peak_gib', float('nan')):.1f} GiB"
    lines = [
        f"`{result['command']}` on {result['date']}: {result['environment']['hardware']}, sequence "
        f"{result['sequence']:,}, optimizer states {result['optimizer_states']}.",
        "",
        "| | |",
        "|---|---|",
        f"| peak memory | {result['peak_gib']:.1f} GiB |",
        f"| tokens a second | {result['tokens_per_s']:,.0f} |",
        f"| share of the bf16 peak | {result['share_of_bf16_peak']:.0%} |",
        f"| all logits at once | {fit} |",
    ]
    return "\n".join(lines) + "\n"


def draft_step_rows(result: dict[str, Any]) -> str:
    lines = [
        f"`{result['command']}` on {result['date']}: {result['environment']['hardware']}, {result['batch_rows']} rows "
        f"of {result['row_length']:,} tokens a step, {result['anchors']} blocks of {result['block']} in each.",
        "",
        "| | |",
        "|---|---|",
        f"| peak memory | {result['peak_gib']:.1f} GiB |",
        f"| tokens a second, of rows | {result['tokens_per_s']:,.0f} |",
        f"| and drafted | {result['drafted_tokens_per_s']:,.0f} |",
        f"| share of the bf16 peak | {result['share_of_bf16_peak']:.0%} |",
    ]
    return "\n".join(lines) + "\n"


def interop_rows(result: dict[str, Any]) -> str:
    minutes = {name: f"{seconds / 60:.1f}" for name, seconds in result["seconds"].items()}
    lines = [
        f"`{result['command']}` on {result['date']}: {result['hardware']}, vLLM {result['vllm']}; "
        f"{minutes['environment']} minutes for the environment and {minutes['comparison']} for the rest. Stood in for: "
        f"{', '.join(result['results'][0]['stand_ins']) or 'nothing'}.",
        "",
        "| export | equal | near-ties | accept length, vLLM | Twofold | missed |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        lengths = row["accept_length"]
        theirs, ours = ("", "") if lengths is None else (f"{length:.2f}" for length in lengths)
        missed = "; ".join(row["misses"]) or "none"
        lines.append(f"| {row['name']} | {row['equal']} | {row['near_ties']} | {theirs} | {ours} | {missed} |")
    return "\n".join(lines) + "\n"


def transformers_rows(result: dict[str, Any]) -> str:
    found: dict[str, dict[str, float]] = {}
    for row in result["results"]:
        version = f"{row['transformers']} | {row['compressed_tensors']}"
        found.setdefault(version, {})[row["name"]] = row["difference"]
    names = list(next(iter(found.values())))
    rows = result["results"]
    lines = [
        f"`{result['command']}` on {result['date']}: {result['hardware']}, torch {result['torch']}; the largest "
        f"difference of a logit over {rows[0]['positions']} positions, at {sum(row['other_tokens'] for row in rows)} "
        "of which another token was best.",
        "",
        f"| transformers | compressed-tensors | {' | '.join(names)} |",
        "|---" * (2 + len(names)) + "|",
    ]
    for version, differences in found.items():
        lines.append(f"| {version} | {' | '.join(f'{differences[name]:.1e}' for name in names)} |")
    return "\n".join(lines) + "\n"


def report_tables(result: dict[str, Any]) -> str:
    target, environment = result["target"], result["environment"]
    lines = [
        f"Measured by `{result['command']}` on {result['date']}: {environment['hardware']}, "
        f"{environment['precision']}, torch {environment['torch']}.",
        "",
        "| step | ms per token | speed-up | accept length |",
        "|---|---|---|---|",
    ]
    for row in result["ledger"]:
        accept = "" if row["accept_length"] is None else f"{row['accept_length']:.2f}"
        lines.append(f"| {row['name']} | {row['ms_per_token']:.1f} | {row['speedup']:.2f}x | {accept} |")
    lines += [
        "",
        "| target | KL to the original | top-1 agreement | perplexity |",
        "|---|---|---|---|",
        f"| original | 0 | 1 | {target['teacher']['ppl']:.3f} |",
    ]
    lines += [
        f"| {title} | {target[key]['kl']:.4f} | {target[key]['top1']:.4f} | {target[key]['ppl']:.3f} |"
        for key, title in (("ptq", "INT4, rounded"), ("qad", "INT4, healed"))
    ]
    lossless = result["lossless"]
    lines += [
        "",
        f"KL recovered by distillation: {target['kl_recovery']:.0%}. Lossless: {lossless['divergences']} of "
        f"{lossless['prompts']} answers ({lossless['tokens']} tokens) differ from plain decoding.",
    ]
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    def table(match: re.Match[str]) -> str:
        return match[1] + tables(match[2], json.loads((RESULTS / f"{match[2]}.json").read_text())) + match[3]

    return PLACE.sub(table, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", nargs=2, metavar=("RUN", "NAME"))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.take:
        take(Path(options.take[0]), options.take[1])
    different = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text()
        if filled(text) != text:
            different.append(page.name)
            if not options.check:
                page.write_text(filled(text))
    if options.check and different:
        sys.exit(f"{', '.join(different)}: tables differ from benchmarks/results; run python scripts/tables.py")


if __name__ == "__main__":
    main()
