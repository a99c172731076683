"""The command line. Heavy modules are imported by the commands that need them, so that --help is instant."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twofold import __version__

_DESCRIPTION = """\
Twofold takes a causal language model and gives back the same model several times faster:
quantized to INT4 and healed by distillation, served by lossless speculative decoding.

Start here:
  twofold doctor                           what this machine can run
  twofold run pocket --out runs/pocket     the whole line on the small model that comes along
  twofold chat runs/pocket                 talk to the result
"""

_RUN = """\
Runs a recipe: prompts, generate, quantize, distill, pack, regenerate, draft_pretrain, draft_finetune,
draft_quantize, evaluate, bench, report. Every stage leaves a folder under DIR. What is finished is skipped,
what was interrupted is resumed (also after a crash), what follows from a changed section is done anew.

examples:
  twofold run pocket                            a built-in recipe, into runs/pocket
  twofold run my.toml --out runs/my             your own; copy a built-in one to begin
  twofold run my.toml --until distill           only as far as the healed target
"""

_EXIT = """\
exit codes: 0 done, 1 a quality gate was missed, 2 bad input, 130 interrupted (the same command resumes)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 done, 1 gate missed, 2 bad input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else list(arguments)
    from safetensors import SafetensorError

    from twofold.evaluation.gates import GateFailure

    try:
        options.command(options)
    except GateFailure as failure:
        for gate in failure.missed:
            print(f"twofold: gate missed: {gate.describe()}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # who reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor is it told again at the end
        return 0
    except (ValueError, OSError, SafetensorError) as error:
        if options.traceback:
            traceback.print_exc()
        print(f"twofold: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _one_line(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"there is no {error.filename}; check the path"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check the path, its permissions and the room on the disk"
    return " ".join(str(error).split())


def _run(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from twofold.evaluation.gates import GateFailure
    from twofold.pipeline.recipe import load_recipe
    from twofold.pipeline.run import run_pipeline, status
    from twofold.pipeline.stages import STAGES

    recipe = load_recipe(options.recipe)
    out = options.out or Path("runs") / recipe.name

    def write_figures() -> None:
        stages = [asdict(stage) for stage in status(out, STAGES)]
        _write_json(options.json, {"recipe": options.recipe, "out": str(out), "stages": stages})

    try:
        run_pipeline(recipe, out, STAGES, sys.stdout, until=options.until)
    except GateFailure:  # what was measured counts, also when a gate stops the line
        write_figures()
        raise
    write_figures()


def _status(options: argparse.Namespace) -> None:
    from twofold.pipeline.progress import duration
    from twofold.pipeline.run import figures, status
    from twofold.pipeline.stages import STAGES

    for stage in status(options.directory, STAGES):
        time = duration(stage.seconds) if stage.seconds else ""
        notes = [figures(stage.metrics)] if stage.metrics else []
        if stage.step is not None:
            notes.append(f"(to resume from step {stage.step})")
        print(f"{stage.name:<15} {stage.state:<12}{time:>8}  {'  '.join(notes)}".rstrip())


def _chat(options: argparse.Namespace) -> None:
    directory = _existing(options.directory)
    from twofold.pipeline.commands import load_engine
    from twofold.serving.terminal import chat

    chat(load_engine(directory, options.precision), sys.stdin, sys.stdout, sys.stderr)


def _serve(options: argparse.Namespace) -> None:
    directory = _existing(options.directory)
    from twofold.pipeline.commands import load_engine
    from twofold.serving.app import serve

    serve(lambda: load_engine(directory, options.precision), host=options.host, port=options.port)


def _bench(options: argparse.Namespace) -> None:
    if (options.directory is None) == (options.shape is None):
        raise ValueError("give either the folder of a run or --shape NAME")
    names = ("settings", "batches", "contexts", "warm_ups", "runs", "rows", "seconds")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.shape is not None:
        _bench_shape(options, given)
        return
    if given:
        raise ValueError(
            f"{', '.join(given)}: for --shape NAME only; a run is measured with the settings of its recipe"
        )
    directory = _existing(options.directory)
    from twofold.pipeline.commands import bench

    _write_json(options.json, bench(directory))


def _bench_shape(options: argparse.Namespace, given: dict[str, Any]) -> None:
    deadline = time.monotonic() + given.pop("seconds", math.inf)
    if options.seconds is not None and options.json is None:
        raise ValueError("--seconds stops a measurement that can be gone on with: give --json FILE too")
    from twofold.evaluation.engine_result import EngineBench
    from twofold.pipeline.commands import bench_shape

    config = EngineBench(accept_length=options.accept_length, **given)
    command = shlex.join(["twofold", *options.arguments])
    bench_shape(options.shape, config, command, overlap=not options.no_overlap, file=options.json, deadline=deadline)


def _roofline(options: argparse.Namespace) -> None:
    from twofold.pipeline.commands import roofline

    _write_json(options.json, roofline(options.shape, options.gpu, options.accept_length, options.measured))


def _eval(options: argparse.Namespace) -> None:
    directory = _existing(options.directory)
    from twofold.pipeline.commands import evaluate

    _write_json(options.json, evaluate(directory))


def _export(options: argparse.Namespace) -> None:
    directory = _existing(options.directory)
    from twofold.pipeline.commands import export_run

    made = export_run(directory, options.to, options.destination, options.drafter)
    print(made.target)
    if made.drafter is not None:
        print(made.drafter)
    print(f"\nserve it with:\n  {made.command}")


def _report(options: argparse.Namespace) -> None:
    directory = _existing(options.directory)
    from twofold.pipeline.report import build_report, headline, read_report

    data = read_report(directory / "report.json")
    build_report(data, directory)
    print(headline(data))
    print(directory / "report.html")


def _doctor(options: argparse.Namespace) -> None:
    from twofold.pipeline.doctor import examine

    findings = examine()
    for finding in findings:
        print(f"{finding.mark:<5} {finding.name:<14} {finding.text}")
    _write_json(options.json, {f.name: {"mark": f.mark, "text": f.text} for f in findings})


def _existing(directory: Path) -> Path:
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a folder of a run; make one with: twofold run pocket")
    return directory


def _write_json(file: Path | None, data: Any) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(data, indent=2) + "\n")


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1,2,4")
    return tuple(map(int, parts))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _settings(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [part.split("/") for part in text.split(",")]
    if not all(len(pair) == 2 and pair[0].isdecimal() and pair[1].isdecimal() for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of PROMPT/NEW such as 64/128,2048/256")
    return tuple((int(a), int(b)) for a, b in pairs)


def writable_file(text: str) -> Path:
    """A file that can be written, or made with the folders above it: tried before the work, and nothing is changed."""
    file = Path(text).absolute()
    there = next(path for path in (file, *file.parents) if os.path.exists(path))
    try:
        file.open("a").close() if there == file else tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written ({error.strerror}); check the path") from None
    return Path(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give a number from 0 to 65535")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="twofold", description=_DESCRIPTION, epilog=_EXIT, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"twofold {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, command: Any, help: str, description: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=help, description=description, epilog=_EXIT, formatter_class=raw, allow_abbrev=False
        )
        added.set_defaults(command=command)
        return added

    def directory(to: argparse.ArgumentParser) -> None:
        to.add_argument("directory", metavar="DIR", type=Path, help="folder of a run, such as runs/pocket")

    def json_file(to: argparse.ArgumentParser) -> None:
        to.add_argument("--json", metavar="FILE", type=writable_file, help="also write the figures to FILE")

    run = add("run", _run, "make a model faster, by a recipe", _RUN)
    run.add_argument("recipe", metavar="RECIPE", help="a built-in recipe (pocket) or a TOML file")
    run.add_argument("--out", metavar="DIR", type=Path, help="where to (default: runs/NAME of the recipe)")
    run.add_argument("--until", metavar="STAGE", help="stop after this stage")
    json_file(run)
    directory(
        add(
            "status",
            _status,
            "what is done in a folder, and what is not",
            "One line a stage: finished, outdated (its input was made anew since), interrupted, or missing.",
        )
    )
    chat = add("chat", _chat, "talk to a finished model", "Talk in this terminal.\n\n  twofold chat runs/pocket\n")
    directory(chat)
    serve = add(
        "serve",
        _serve,
        "serve a finished model (OpenAI-compatible), with a chat page",
        "An OpenAI-compatible server, with a page to chat on.\n\n"
        "  twofold serve runs/pocket              then open http://127.0.0.1:8000\n",
    )
    directory(serve)
    for command in (chat, serve):
        command.add_argument(
            "--precision",
            choices=("float32", "bfloat16"),
            help="of products and activations (default: bfloat16 on a GPU, float32 on a CPU)",
        )
    serve.add_argument("--host", default="127.0.0.1", help="default: %(default)s, this machine only")
    serve.add_argument("--port", type=_port, default=8000, help="default: %(default)s")
    bench = add(
        "bench",
        _bench,
        "measure the speed of a finished model",
        "Times plain and speculative decoding on this machine: of a finished run, or of the engine at a model's shape\n"
        "with random weights and forced acceptance. At a shape, FILE is written after every piece, and the same\n"
        "command goes on with one that is not complete.\n\n"
        "  twofold bench runs/pocket --json speed.json\n"
        "  twofold bench --shape qwen3.5-4b --accept-length 5.03 --json engine.json\n"
        '  twofold bench --shape qwen3.5-4b --rows "BF16,+ INT4 head" --runs 5\n',
    )
    bench.add_argument("directory", metavar="DIR", type=Path, nargs="?", help="folder of a run, such as runs/pocket")
    bench.add_argument("--shape", metavar="NAME", help="qwen3.5-4b, or tiny")
    bench.add_argument(
        "--accept-length", type=float, default=5.03, metavar="X", help="tokens a cycle, the mean (default: %(default)s)"
    )
    bench.add_argument("--settings", type=_settings, metavar="P/N,...", help="default: 64/128,2048/256,8192/256")
    bench.add_argument("--batch", dest="batches", type=_numbers, metavar="B,...", help="also single cycles at these")
    bench.add_argument("--context", dest="contexts", type=_numbers, metavar="C,...", help="also single cycles at these")
    bench.add_argument("--warm-ups", type=int, metavar="N", help="runs that do not count (default: 5)")
    bench.add_argument("--runs", type=int, metavar="N", help="runs that the medians are of (default: 50)")
    bench.add_argument("--rows", type=_names, metavar="NAME,...", help='of the ledger, such as "BF16,+ INT4 head"')
    bench.add_argument("--seconds", type=float, metavar="S", help="stop before; the same command goes on with FILE")
    bench.add_argument("--no-overlap", action="store_true", help="kernels wait for the last to end, also on sm_90")
    json_file(bench)
    roofline = add(
        "roofline",
        _roofline,
        "predict the speed on a GPU",
        "What a GPU can do at a model's shape: bytes, operations and launches of every step of the ledger.\n\n"
        "  twofold roofline --shape qwen3.5-4b --gpu a10g\n",
    )
    roofline.add_argument("--shape", required=True, metavar="NAME", help="qwen3.5-4b, or tiny")
    roofline.add_argument(
        "--gpu", required=True, metavar="NAME", help="a10g, rtx5000ada, l4, rtx4090, a100, h100 or h200"
    )
    roofline.add_argument(
        "--accept-length", type=float, default=5.03, metavar="X", help="tokens a cycle (default: %(default)s)"
    )
    roofline.add_argument(
        "--measured", type=Path, metavar="FILE", help="of bench --shape there: also how far it is off"
    )
    json_file(roofline)
    evaluate = add(
        "eval",
        _eval,
        "measure the quality of a finished model",
        "Compares the finished model with its teacher on held-out text.\n\n"
        "  twofold eval runs/pocket --json quality.json\n",
    )
    directory(evaluate)
    json_file(evaluate)
    export = add(
        "export",
        _export,
        "write a finished model for another engine",
        "Writes DEST/target and DEST/drafter for an engine, with model cards and the command that serves them, and\n"
        "checks that they hold the same tensors as the run.\n\n"
        "  twofold export runs/pocket --to vllm /models/pocket\n",
    )
    directory(export)
    export.add_argument("destination", metavar="DEST", type=Path, help="a folder that is not there yet")
    export.add_argument("--to", required=True, choices=("vllm", "sglang", "transformers", "speculators"), help="engine")
    export.add_argument(
        "--drafter",
        choices=("draft_quantize", "draft_finetune", "draft_pretrain", "none"),
        default="draft_quantize",
        help="the stage whose drafter goes along (default: %(default)s)",
    )
    directory(
        add(
            "report",
            _report,
            "make DIR/report.html from DIR/report.json",
            "Draws DIR/report.html, a page that stands alone, from the figures in DIR/report.json.",
        )
    )
    doctor = add("doctor", _doctor, "what this machine can run, and why not", "Examines this machine; changes nothing.")
    json_file(doctor)
    return parser


if __name__ == "__main__":
    sys.exit(main())
