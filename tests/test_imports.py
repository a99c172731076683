"""Imports point downward: the order of the packages is the architecture."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import twofold

ORDER = (
    ("ops",),
    ("quant",),
    ("models",),
    ("data", "decoding", "export"),
    ("training", "evaluation", "serving"),
    ("pipeline",),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def violations(package: Path) -> list[str]:
    """One line for every import under `package` that points upward or sideways."""
    found = []
    for path in sorted(package.rglob("*.py")):
        module = (package.name, *path.relative_to(package).with_suffix("").parts)
        if len(module) == 2 and module[1] == "__init__":
            source = None  # the root is below all: it may import nothing of the package
        else:
            source = module[1]
            if source not in RANK:
                found.append(f"{path.relative_to(package)}: {source} has no place in the order")
                continue
        for line, target in imports(path, module, package):
            if target == source:
                continue
            if target not in RANK:
                found.append(f"{path.relative_to(package)}:{line}: {target} has no place in the order")
            elif source is None or RANK[target] >= RANK[source]:
                found.append(f"{path.relative_to(package)}:{line}: {source or 'root'} imports {target}")
    return found


def imports(path: Path, module: tuple[str, ...], package: Path) -> list[tuple[int, str]]:
    """(line, subpackage) of every import of the own package, wherever in the file it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = module[: len(module) - node.level] if node.level else ()
            start += tuple(node.module.split(".")) if node.module else ()
            names = [(*start, alias.name) for alias in node.names]
        for name in names:
            if len(name) < 2 or name[0] != package.name:
                continue
            is_module = (package / name[1]).is_dir() or (package / f"{name[1]}.py").exists()
            if is_module:  # else an attribute of the root, such as __version__
                found.append((node.lineno, name[1]))
    return found


def test_twofold_imports_point_downward() -> None:
    assert violations(Path(twofold.__file__).parent) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "house"
    for name in ("ops", "data", "decoding", "training", "evaluation", "pipeline"):
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").write_text("")
        (root / name / "part.py").write_text("")
    (root / "__init__.py").write_text("__version__ = '1'\n")
    (root / "cli.py").write_text("from house.pipeline import part\nfrom house import __version__\n")
    return root


def test_a_downward_tree_passes(tree: Path) -> None:
    (tree / "training" / "part.py").write_text("import house.data.part\nfrom ..ops import part\nimport os\n")
    assert violations(tree) == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("ops/part.py", "import house.training.part", "ops/part.py:1: ops imports training"),
        ("ops/part.py", "from house.training import part", "ops/part.py:1: ops imports training"),
        ("ops/part.py", "from house import data", "ops/part.py:1: ops imports data"),
        ("ops/part.py", "from ..pipeline.part import x", "ops/part.py:1: ops imports pipeline"),
        ("ops/__init__.py", "from ..data import part", "ops/__init__.py:1: ops imports data"),
        (
            "data/part.py",
            "def f():\n    from house.decoding import part",
            "data/part.py:2: data imports decoding",
        ),
        ("evaluation/part.py", "import house.training", "evaluation/part.py:1: evaluation imports training"),
        ("pipeline/part.py", "import house.cli", "pipeline/part.py:1: pipeline imports cli"),
        ("__init__.py", "from house.ops import part", "__init__.py:1: root imports ops"),
        ("misc.py", "", "misc.py: misc has no place in the order"),
    ],
)
def test_a_planted_import_is_found(tree: Path, file: str, text: str, expected: str) -> None:
    (tree / file).write_text(text + "\n")
    assert violations(tree) == [expected]
