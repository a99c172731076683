"""Exit codes, one-line errors, and help from which a newcomer can work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

import twofold.pipeline.recipe
import twofold.pipeline.stages
from tests.pipeline.test_report import plausible
from tests.pipeline.toy import STAGES, ToyRecipe
from twofold.cli import main
from twofold.pipeline.recipe import read_recipe


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command line over the toy stages; returns its recipe's file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(twofold.pipeline.stages, "STAGES", STAGES)
    monkeypatch.setattr(twofold.pipeline.recipe, "load_recipe", lambda name: read_recipe(Path(name), ToyRecipe))
    (tmp_path / "source.txt").write_text("twelve chars")
    file = tmp_path / "toy.toml"
    file.write_text('name = "toy"\n[seeds]\nsource = "source.txt"\n')
    return file


def test_run_status_and_run_again(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(toy), "--until", "walk"]) == 0
    assert Path("runs/toy/walk/numbers.json").exists()
    assert main(["status", "runs/toy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-3:]] == [
        ["seeds", "finished"],
        ["walk", "finished"],
        ["judge", "missing"],
    ]
    assert main(["run", str(toy), "--json", "out/figures.json"]) == 0
    figures = json.loads(Path("out/figures.json").read_text())
    assert [stage["state"] for stage in figures["stages"]] == ["finished"] * 3
    assert figures["stages"][0]["metrics"] == {"count": 3}


def test_a_missed_gate_is_1_and_said(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy.write_text("least = 2.0\n" + toy.read_text())
    assert main(["run", str(toy), "--json", "figures.json"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("twofold: gate missed: score 0.")
    assert "< 2: missed by 1." in error
    assert json.loads(Path("figures.json").read_text())["stages"][2]["state"] == "finished"


def test_an_interrupt_is_130(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("twofold.pipeline.run.run_pipeline", interrupted)
    assert main(["run", str(toy)]) == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "toy.toml", "--until", "wall"], "no stage 'wall'; stages are: seeds, walk, judge"),
        (["run", "bad.toml"], "bad.toml [walk]: unknown key 'stepz'; did you mean 'steps'?"),
        (["run", "none.toml"], "there is no none.toml; check the path"),
        (["roofline", "--shape", "tiny", "--gpu", "h200", "--measured", "."], ".: Is a directory; check the path"),
        (["status", "nowhere"], "nowhere is not a folder of a run"),
        (["status", "my runs"], "start one with: twofold run RECIPE --out 'my runs'"),
        (["chat", "nowhere"], "nowhere is not a folder of a run; make one with: twofold run pocket"),
        (["chat", "."], ". has no finished stage 'pack'; go on with: twofold run RECIPE --out ."),
        (["export", ".", "out", "--to", "vllm"], ". has no finished stage 'pack'"),
        (["bench", "."], ". has no finished stage 'bench'; go on with: twofold run RECIPE --out ."),
        (["bench"], "give either the folder of a run or --shape NAME"),
        (["bench", ".", "--shape", "tiny"], "give either the folder of a run or --shape NAME"),
        (["bench", "--shape", "large"], "there is no shape 'large'; shapes are: qwen3.5-4b, tiny"),
        (["bench", ".", "--rows", "BF16", "--seconds", "9"], "rows, seconds: for --shape NAME only; a run is measured"),
        (["bench", "--shape", "tiny", "--rows", "BF16,INT4"], "the ledger has no row 'INT4' on this machine"),
        (["bench", "--shape", "tiny", "--seconds", "9"], "can be gone on with: give --json FILE too"),
        (["bench", "--shape", "tiny", "--accept-length", "9"], "a block of 8 gains 1 to 8 tokens a cycle, not 9.0"),
        (["bench", "--shape", "tiny", "--settings", "1/4"], "a setting is PROMPT/NEW, both at least 2 tokens"),
        (
            ["roofline", "--shape", "tiny", "--gpu", "h200", "--accept-length", "0"],
            "a block of 8 gains 1 to 8 tokens a cycle, not 0.0",
        ),
        (["roofline", "--shape", "tiny", "--gpu", "h200", "--accept-length", "nan"], "tokens a cycle, not nan"),
        (["roofline", "--shape", "tiny", "--gpu", "b200"], "there is no data of a GPU 'b200'; GPUs are: a10g"),
        (["eval", "."], ". has no finished stage 'evaluate'"),
        (["report", "."], "there is no report.json; finish the run first"),
    ],
)
def test_bad_input_is_2_and_one_line(
    toy: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    Path("bad.toml").write_text(toy.read_text() + "[walk]\nstepz = 1\n")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("twofold: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_an_unknown_recipe_lists_the_built_in_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "pockt"]) == 2
    assert re.search(r"built in are: (\w+, )*pocket", capsys.readouterr().err)


def test_a_defect_keeps_its_traceback(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*arguments: Any, **options: Any) -> None:
        raise KeyError("defect")

    monkeypatch.setattr("twofold.pipeline.run.run_pipeline", defect)
    with pytest.raises(KeyError):
        main(["run", str(toy)])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["serve"],
        ["serve", ".", "--port", "x"],
        ["run", "a", "--o"],
        ["bench", "--shape", "tiny", "--settings", "64-128"],
        ["bench", "--shape", "tiny", "--batch", "1;2"],
    ],
)
def test_bad_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: twofold" in capsys.readouterr().err


@pytest.mark.parametrize("file", [".", "toy.toml/figures.json", "/proc/none/figures.json"])
@pytest.mark.parametrize("command", ["run toy.toml", "bench .", "bench --shape tiny", "roofline", "eval .", "doctor"])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    toy: Path, capsys: pytest.CaptureFixture[str], command: str, file: str
) -> None:
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--json", file])
    assert caught.value.code == 2
    assert f"argument --json: {file} cannot be written (" in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


def test_work_that_fails_leaves_the_file_of_figures_as_it_was(toy: Path) -> None:
    Path("figures.json").write_text("earlier")
    assert main(["run", "toy.toml", "--until", "wall", "--json", "figures.json"]) == 2
    assert main(["run", "toy.toml", "--until", "wall", "--json", "new/figures.json"]) == 2
    assert Path("figures.json").read_text() == "earlier"
    assert not Path("new").exists()


def test_commands_reach_their_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    app, terminal = types.ModuleType("app"), types.ModuleType("terminal")
    commands = types.ModuleType("commands")
    terminal.chat = lambda engine, *streams: calls.append((engine, streams))  # type: ignore[attr-defined]
    app.serve = lambda load, host, port: calls.append((load(), host, port))  # type: ignore[attr-defined]
    commands.load_engine = lambda directory, precision: f"{precision} of {directory}"  # type: ignore[attr-defined]
    commands.bench = lambda directory: {"speedup": 2.0}  # type: ignore[attr-defined]
    exported = types.SimpleNamespace(target="T", drafter=None, command="serve T")
    commands.export_run = lambda *arguments: calls.append(arguments) or exported  # type: ignore[attr-defined]
    commands.evaluate = lambda directory: {"kl": 0.5}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "twofold.serving.app", app)
    monkeypatch.setitem(sys.modules, "twofold.serving.terminal", terminal)
    monkeypatch.setitem(sys.modules, "twofold.pipeline.commands", commands)
    file = tmp_path / "figures.json"
    assert main(["chat", str(tmp_path)]) == 0
    assert main(["serve", str(tmp_path), "--port", "9", "--precision", "bfloat16"]) == 0
    streams = sys.stdin, sys.stdout, sys.stderr
    assert calls == [(f"None of {tmp_path}", streams), (f"bfloat16 of {tmp_path}", "127.0.0.1", 9)]
    assert main(["export", str(tmp_path), "--to", "vllm", "out", "--drafter", "none"]) == 0
    assert calls[2:] == [(tmp_path, "vllm", Path("out"), "none")]
    assert main(["bench", str(tmp_path), "--json", str(file)]) == 0
    assert json.loads(file.read_text()) == {"speedup": 2.0}
    assert main(["eval", str(tmp_path), "--json", str(file)]) == 0
    assert json.loads(file.read_text()) == {"kl": 0.5}


def test_bench_of_a_shape_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.json"
    settings = ["--settings", "8/6", "--runs", "1", "--warm-ups", "0", "--accept-length", "2.5"]
    assert main(["bench", "--shape", "tiny", *settings, "--json", str(file)]) == 0
    assert "random weights, forced acceptance" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["command"].startswith("twofold bench --shape tiny --settings 8/6")
    assert {"commit", "date", "environment", "bf16_ms_per_token", "int4_ms_per_token", "cycle_ms"} <= set(found)
    assert found["ttft_ms"].keys() == found["total_ms"].keys() == {"8/6"}


BENCH = [
    "bench",
    "--shape",
    "tiny",
    "--settings",
    "8/6,10/6",
    "--runs",
    "1",
    "--warm-ups",
    "0",
    "--accept-length",
    "2.5",
]


def test_an_interrupted_bench_goes_on_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from twofold.evaluation import engine

    file, time_answers, found = tmp_path / "new" / "engine.json", engine.time_answers, []

    def interrupted(*arguments: Any) -> Any:
        if file.exists():
            found.append(json.loads(file.read_text()))
        if len(found) == 3:
            raise KeyboardInterrupt
        return time_answers(*arguments)

    command = [*BENCH, "--json", str(file)]
    with monkeypatch.context() as patch:
        patch.setattr(engine, "time_answers", interrupted)
        assert main(command) == 130
    assert [sum(len(row["settings"]) for row in result["ledger"]) for result in found] == [1, 2, 3]
    kept = json.loads(file.read_text())
    assert kept == found[-1]
    assert kept["complete"] is False
    assert {"command", "commit", "date", "environment", "shape", "runs"} <= set(kept)
    assert main([*command, "--seconds", "1e9"]) == 0  # its time is no part of what is measured
    whole = json.loads(file.read_text())
    assert whole["complete"] is True
    assert len(whole["ledger"]) == 7
    assert whole["ledger"][0] == kept["ledger"][0]
    assert whole["command"].endswith("--seconds 1e9")
    assert os.listdir(file.parent) == ["engine.json"]
    capsys.readouterr()
    assert main(command) == 0
    assert "is complete; to measure again, delete it or give another" in capsys.readouterr().out
    assert json.loads(file.read_text()) == whole


@pytest.mark.parametrize(
    ("more", "content", "message"),
    [
        (["--runs", "2", "--no-overlap"], None, "was measured with other overlap, runs; give another --json FILE"),
        (["--rows", "BF16"], None, "was measured with other rows; give another --json FILE"),
        ([], {"code": "of yesterday"}, "was measured with other code; give another --json FILE"),
        ([], {"environment": {"hardware": "another"}}, "was measured with other environment; give another --json FILE"),
        ([], "[", "is no JSON; give another --json FILE, or delete it to begin anew"),
        ([], "{}", "is no result of bench --shape that could be gone on with; give another --json FILE"),
    ],
)
def test_bench_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], content: Any, message: str
) -> None:
    file = tmp_path / "engine.json"
    if isinstance(content, str):
        file.write_text(content)
    else:
        assert main([*BENCH, "--json", str(file)]) == 0
        whole = json.loads(file.read_text())
        file.write_text(json.dumps(whole | {"complete": False} | (content or {})))
    before = file.read_bytes()
    capsys.readouterr()
    assert main([*BENCH, *more, "--json", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"{file} {message}" in error
    assert error.count("\n") == 1
    assert file.read_bytes() == before


def test_roofline_prints_the_paper_beside_an_a10g(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "roofline.json"
    assert main(["roofline", "--shape", "qwen3.5-4b", "--gpu", "a10g", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    for number in ("232", "782", "2313"):
        assert f"the paper measured {number} ms in all on an A10G" in out
    rows = json.loads(file.read_text())["settings"]["short"]
    assert rows[0]["name"] == "BF16"
    # and how far it is off a measurement: half the time of all that is predicted
    half = {key: rows[0][key] / 2 for key in ("cycle_ms", "ttft_ms", "total_ms")}
    measured = {"shape": "qwen3.5-4b", "ledger": [{"name": "BF16", "settings": {"short": half}}]}
    file.write_text(json.dumps(measured))
    assert main(["roofline", "--shape", "qwen3.5-4b", "--gpu", "a10g", "--measured", str(file)]) == 0
    assert "predicted over measured: cycle +100%, first token +100%, total +100%" in capsys.readouterr().out
    assert main(["roofline", "--shape", "tiny", "--gpu", "a10g", "--measured", str(file)]) == 2
    assert "is no result of bench --shape tiny" in capsys.readouterr().err


ROW = '{{"shape": "tiny", "ledger": [{{"name": "BF16", "settings": {{"short": {}}}}}]}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"shape": "tiny", "ledger": 3}',
        b'{"shape": "tiny", "ledger": [{}]}',
        ROW.format('{"cycle_ms": 1.0}').encode(),
        ROW.format('{"cycle_ms": 0, "ttft_ms": 1, "total_ms": 1}').encode(),
        ROW.format('{"cycle_ms": "1", "ttft_ms": 1, "total_ms": 1}').encode(),
    ],
)
def test_roofline_names_a_file_that_is_no_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    file = tmp_path / "measured.json"
    file.write_bytes(content)
    assert main(["roofline", "--shape", "tiny", "--gpu", "h200", "--measured", str(file)]) == 2
    expected = f"twofold: error: {file} is no result of bench --shape tiny; make one with --json\n"
    assert capsys.readouterr() == ("", expected)


def test_report_makes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text(json.dumps(plausible()))
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("2.84x as fast")
    assert "2.84x as fast" in (tmp_path / "report.html").read_text()


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[1] for line in lines} >= {
        "python",
        "torch",
        "cpu",
        "memory",
        "disk",
        "triton",
        "nvcc",
    }
    assert all(line.split()[0] in ("ok", "no", "info") for line in lines)
    assert json.loads((tmp_path / "doctor.json").read_text())["python"]["text"].startswith("3.")


def test_help_is_quick_and_needs_nothing_heavy() -> None:
    code = (
        "import sys\nfrom twofold.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules), 'heavy import'\n"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.monotonic() - started < 2  # 0.1 s on an idle machine
    assert "twofold run pocket" in done.stdout


def test_who_draws_no_figure_does_not_wait_for_matplotlib() -> None:
    code = (
        "import sys, twofold.pipeline.commands, twofold.pipeline.stages, twofold.serving.app\n"
        "assert 'matplotlib' not in sys.modules, 'heavy import'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
