"""What the commands do with a finished run."""

import hashlib
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import torch

from twofold.decoding.engine import Engine
from twofold.evaluation.acceptance import EvaluateConfig
from twofold.evaluation.engine import measure_engine
from twofold.evaluation.engine_result import EngineBench
from twofold.evaluation.latency import BenchConfig
from twofold.evaluation.roofline import PAPER_A10G, against, find_gpu, predict
from twofold.export.card import Card
from twofold.export.engines import find_engine
from twofold.export.folders import Exported, export
from twofold.models.shapes import find_shape
from twofold.models.tokenizer import Tokenizer
from twofold.ops.kernels import Kernels
from twofold.pipeline import measure_stages
from twofold.pipeline.artifact import MANIFEST, Manifest, lineage, made_anew, read_artifact
from twofold.pipeline.checkpoint import Checkpoints
from twofold.pipeline.digest import Json, file_digest, plain, write_atomically
from twofold.pipeline.models import decode_precision, device, load_draft, load_frozen
from twofold.pipeline.progress import Progress
from twofold.pipeline.recipe import load_config
from twofold.pipeline.report import read_report
from twofold.pipeline.stage import StageContext
from twofold.pipeline.stages import STAGES
from twofold.pipeline.target_stages import With
from twofold.training.precision import Precision, dtype_of

C = TypeVar("C")


def load_engine(directory: Path, precision: Precision | None = None) -> Engine:
    """The quantized target and drafter of a run, in what this machine decodes best unless `precision` says otherwise.
    ValueError when a stage they need is not finished, or outdated."""
    target, drafter = _finished(directory, "pack"), _finished(directory, "draft_quantize")
    precision = precision or decode_precision()
    return Engine(
        load_frozen(target, precision),
        load_draft(drafter, precision).freeze(),
        Tokenizer.load(target),
        model_name=directory.resolve().name,
    )


def export_run(directory: Path, engine: str, destination: Path, drafter: str = "draft_quantize") -> Exported:
    """The target of a run, and the drafter of stage `drafter` ("none": no drafter), in the folders of an engine.
    ValueError, and nothing written, when they are damaged or outdated, or as `export` says."""
    found = find_engine(engine)
    target = _finished(directory, "pack", hashes=True)
    draft = None if drafter == "none" or found.drafter is None else _finished(directory, drafter, hashes=True)
    made = lineage(directory, "pack") | ({} if draft is None else lineage(directory, drafter))
    recipe = _without_places({"model": made["pack"].config, "seed": made["pack"].seed, **_sections(made)})
    card = Card(
        name=directory.resolve().name,
        base_model=str(recipe["model"]),
        recipe=recipe,
        report=_report_of(directory, made),
    )
    return export(target, draft, destination, found, card)


def _sections(made: Mapping[str, Manifest]) -> dict[str, Json]:
    """What each stage was made with, less the model that all were."""
    configs = {stage.name: made[stage.name].config for stage in STAGES if stage.name in made}
    return {name: config.get("own", config) for name, config in configs.items() if isinstance(config, dict)}


def _report_of(directory: Path, made: Mapping[str, Manifest]) -> Json:
    """The figures of a run's report, None where it is not one of these artifacts as they are now."""
    manifests = lineage(directory, "report")
    if not made.keys() <= manifests.keys() or made_anew(manifests) is not None:
        return None
    return read_report(_finished(directory, "report", hashes=True) / "report.json")


def _without_places(entry: Json) -> Json:
    """Paths of this machine, which are nobody's business, cut down to their last part."""
    if isinstance(entry, dict):
        return {key: _without_places(value) for key, value in entry.items()}
    if isinstance(entry, list):
        return [_without_places(value) for value in entry]
    return Path(entry).name if isinstance(entry, str) and Path(entry).is_absolute() else entry


def bench(directory: Path) -> Json:
    """Measures the ledger again, with the settings of the run, prints and returns it."""
    context = _again(directory, "bench", BenchConfig)
    measured = measure_stages.bench(context)
    for setting, variants in measured.items():
        baseline = variants[measure_stages.LEDGER[0]]["total_ms"]
        for name, latency in variants.items():
            print(
                f"{setting:<8}{name:<16}{latency['ttft_ms']:>9.1f} ms first {latency['ms_per_token']:>8.2f} ms/token "
                f"{latency['total_ms']:>9.1f} ms total {baseline / latency['total_ms']:>6.2f}x "
                f"accept length {latency['accept_length']:.2f}"
            )
    return measured


def bench_shape(
    shape: str,
    config: EngineBench,
    command: str,
    *,
    overlap: bool = True,
    file: Path | None = None,
    deadline: float = math.inf,
) -> None:
    """Measures the engine at a shape on this machine's GPU (a tiny one also without), prints it and writes it to `file`
    after every piece. What `file` already has of the same measurement by the same code is gone on with.

    ValueError where it has another; it is left as it is.
    """
    found, on = find_shape(shape), device()
    if on.type == "cpu" and shape != "tiny":
        raise ValueError(f"--shape {shape} needs a GPU; without one, --shape tiny shows the same path")
    where = measure_stages.environment()
    if on.type == "cuda":
        where |= {"cuda": str(torch.version.cuda), "driver": _driver()}
    same = {"code": _code(), "environment": where, "shape": shape, "overlap": overlap, **plain(config)}
    earlier = None if file is None else _earlier(file, same)
    if earlier is not None and earlier["complete"]:
        print(f"{file} is complete; to measure again, delete it or give another --json FILE")
        return

    def keep(result: Json) -> None:
        if file is not None:
            date = datetime.now(UTC).date().isoformat()
            whole = {"command": command, "commit": _commit(), "date": date, **same, **result}
            write_atomically(file, json.dumps(whole, indent=2) + "\n")

    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    kernels, dtype = Kernels.auto(on, overlap=overlap), dtype_of(decode_precision())
    measure_engine(found, config, kernels, on, dtype, print, keep=keep, earlier=earlier, deadline=deadline)


def _earlier(file: Path, same: dict[str, Json]) -> dict[str, Json] | None:
    """The result in `file`, None where there is no file. ValueError unless it agrees with `same`."""
    if not file.exists():
        return None
    remedy = "give another --json FILE, or delete it to begin anew"
    try:
        result = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON; {remedy}") from error
    if not isinstance(result, dict) or "processes" not in result:
        raise ValueError(f"{file} is no result of bench --shape that could be gone on with; {remedy}")
    other = [key for key, value in same.items() if result.get(key) != value]
    if other:
        raise ValueError(f"{file} was measured with other {', '.join(other)}; {remedy}")
    return result


def _code() -> str:
    """Names the sources of this package by their content, which a commit does not where they were changed since."""
    package = Path(__file__).parents[1]
    sources = sorted(path for pattern in ("*.py", "*.cu") for path in package.rglob(pattern))
    content = [[path.relative_to(package).as_posix(), file_digest(path)] for path in sources]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def roofline(shape: str, gpu: str, accept_length: float, measured: Path | None = None) -> Json:
    """Prints and returns what a GPU can do at a shape, by bytes, operations and launches; beside it how far that is off
    what `bench --shape` measured there."""
    found, device = find_shape(shape), find_gpu(gpu)
    figures = {} if measured is None else _by_setting(measured, shape)
    print(f"{device.name}: {device.gigabytes_per_s:g} GB/s, {device.bf16_tflops:g} TF in BF16. {device.source}")
    print(f"predicted at accept length {accept_length:g}; a floor is at the data sheet's peaks and free launches\n")
    result: Json = {"shape": shape, "gpu": gpu, "accept_length": accept_length, "settings": {}}
    for name, (prompt, new_tokens) in BenchConfig().settings().items():
        rows = predict(found, device, prompt, new_tokens, accept_length)
        for row in rows:
            print(
                f"{name:<8}{row.name:<16}{row.gigabytes:>6.2f} GB {row.floor_ms:>8.2f} floor "
                f"{row.cycle_ms:>8.2f} ms/cycle {row.ms_per_token:>7.2f} ms/token "
                f"{row.ttft_ms:>9.1f} ms first {row.total_ms:>9.1f} ms total"
            )
        result["settings"][name] = [vars(row) for row in rows]
        for off in against(rows, figures.get(name, {})):
            print(
                f"{name:<8}{off['name']:<16}predicted over measured: cycle {off['cycle_ms']:+.0%}, first token "
                f"{off['ttft_ms']:+.0%}, total {off['total_ms']:+.0%}"
            )
            result["settings"][name].append({**off, "name": f"{off['name']}, error"})
        if (shape, gpu) == ("qwen3.5-4b", "a10g"):
            (swa,) = (row for row in rows if row.name == "+ SWA")
            paper = PAPER_A10G[name]
            print(f"{name:<8}the paper measured {paper:g} ms in all on an A10G; predicted {swa.total_ms:.0f} ms")
            result["settings"][name].append({"name": "paper", "total_ms": paper})
    return result


def _by_setting(file: Path, shape: str) -> dict[str, dict[str, dict[str, float]]]:
    """The figures of every setting and step in a file of `bench --shape`."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    try:
        data = json.loads(file.read_text())
        right = data["shape"] == shape
        for row in data["ledger"]:
            for setting, figures in row["settings"].items():
                right = right and all(figures[key] > 0 for key in ("cycle_ms", "ttft_ms", "total_ms"))
                found.setdefault(setting, {})[row["name"]] = figures
    except (ValueError, KeyError, TypeError, AttributeError):
        right = False
    if not right:
        raise ValueError(f"{file} is no result of bench --shape {shape}; make one with --json")
    return found


def _commit() -> str:
    """Of the checkout that this package lies in; "unknown" where it lies in none."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def evaluate(directory: Path) -> Json:
    """Measures quality, acceptance and losslessness again, with the settings of the run, prints and returns them."""
    measured = measure_stages.evaluate(_again(directory, "evaluate", EvaluateConfig))
    for name, figures in measured.items():
        shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items() if isinstance(value, int | float))
        print(f"{name:<10}{shown}")
    return measured


def _finished(directory: Path, stage: str, *, hashes: bool = False) -> Path:
    """The folder of a stage's artifact. ValueError unless it is whole (by the sha256 of its files too if `hashes`) and
    up to date."""
    folder, command = directory / stage, f"twofold run RECIPE --out {shlex.quote(str(directory))}"
    if not folder.is_dir():
        raise ValueError(f"{directory} has no finished stage {stage!r}; go on with: {command}")
    read_artifact(folder, hashes=hashes)
    if (anew := made_anew(lineage(directory, stage))) is not None:
        raise ValueError(f"{folder} is outdated ({anew} was made anew since); bring it up to date with: {command}")
    return folder


def _again(directory: Path, stage: str, cls: type[C]) -> StageContext[With[C]]:
    """The context in which a finished stage was run, to run it once more beside its artifact."""
    folder = _finished(directory, stage)
    manifest = read_artifact(folder)
    try:
        own = load_config(cls, dict(manifest.config["own"]), "config")
        config = With(model=Path(manifest.config["model"]), own=own)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / MANIFEST} is damaged ({error}); delete the folder {folder} and run the recipe again"
        ) from error
    return StageContext(
        config=config,
        seed=manifest.seed,
        inputs={name: _finished(directory, name) for name in manifest.parents},
        output=directory,
        checkpoints=Checkpoints(directory / ".again"),
        report=Progress(stage, 0, "steps", sys.stderr),
    )
