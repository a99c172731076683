"""A table of a benchmark whose rows are made one by one, by several calls and by several processes at once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Rows:
    """One file a row, {"name": ..., ...}, in a folder."""

    def __init__(self, folder: Path, place: Callable[[Row], Any]) -> None:
        """`place`: the key that rows are sorted by."""
        self.folder, self.place = folder, place
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self, row: Row) -> None:
        """Adds a row, or puts it in the place of the one with its name."""
        path = self.folder / f"{_spelled(row['name'])}.json"
        part = path.with_suffix(".part")  # whoever reads at this moment finds a whole row
        part.write_text(json.dumps(row))
        part.replace(path)

    def all(self) -> list[Row]:
        return sorted((json.loads(path.read_text()) for path in self.folder.glob("*.json")), key=self.place)

    def find(self, name: str) -> Row | None:
        path = self.folder / f"{_spelled(name)}.json"
        return json.loads(path.read_text()) if path.exists() else None


def _spelled(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-.+" else "_" for c in name)
