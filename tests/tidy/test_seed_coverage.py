"""Every statement of the sources has an answer, and the answer exists."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent.parent
ANSWERS = tomllib.loads((ROOT / "docs" / "seed-coverage.toml").read_text("utf-8"))


def row_ids() -> list[str]:
    with (ROOT / "docs" / "seed-rows.csv").open(encoding="utf-8", newline="") as file:
        return [row["id"] for row in csv.DictReader(file)]


def test_every_row_is_answered_once_and_in_order() -> None:
    assert len(row_ids()) == 127
    assert list(ANSWERS) == row_ids()


@pytest.mark.parametrize("row", row_ids())
def test_the_answer_exists(row: str) -> None:
    answer: dict[str, Any] = ANSWERS[row]
    assert answer["note"]
    if answer["answer"] == "planned":
        assert answer.keys() == {"answer", "part", "note"}
        assert answer["part"] in range(2, 10)
        return
    assert answer.keys() == {"answer", "where", "note"}
    assert answer["answer"] in ("test", "document", "limit")
    found = [path for path in ROOT.glob(answer["where"]) if path.is_file()]
    assert found, f"{row}: nothing stands at {answer['where']}"
    if answer["answer"] == "test":
        assert all(path.name.startswith("test_") or path.name.endswith("_bench.py") for path in found)
    else:
        assert all(path.suffix == ".md" for path in found)
