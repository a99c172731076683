"""The documents' tables are those of benchmarks/results."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_tables_agree_with_results() -> None:
    checked = subprocess.run([sys.executable, "scripts/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    for name in ("scripts/tables.py", "README.md", "benchmarks/results/pocket_cpu.json"):
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / name).read_text())
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text().replace("| baseline |", "| baseline  |"))
    checked = subprocess.run(
        [sys.executable, "scripts/tables.py", "--check"], cwd=tmp_path, capture_output=True, text=True
    )
    assert checked.returncode == 1
    assert "README.md" in checked.stderr
