"""A small campaign on one pool of ranks: interrupted, gone on with, and every count proved against what must come out."""

from __future__ import annotations

import csv
import json
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from unsilent.errors import UsageError
from unsilent.lab.campaign.outcome import Class
from unsilent.lab.campaign.report import run
from unsilent.lab.campaign.runner import TRIALS
from unsilent.lab.pool import RankPool

SPEC = """\
name = "small"

[job]
steps = 5
parallelism = ["ddp-3"]

[checks.everything]
audit_every = 1
replicas_every = 1

[checks.votes]
audit_every = 0
replicas_every = 1

[sites.forward]
target = "blocks.1.ffn.up"
rank = 1

[sites.weight]
target = "head.weight"
rank = 2

[sites.sum]
site = "reduction"

[faults.bit]
pattern = "bit_flip"
bit = 20
step = 2

[faults.nan]
pattern = "nan"
step = 2
sites = ["forward"]
"""

# With all checks whatever is on one rank is found; with votes alone only what makes replicas differ, and NaN always.
EXPECTED = {
    ("everything", "forward", "bit"): Class.REPAIRED,
    ("everything", "forward", "nan"): Class.REPAIRED,
    ("everything", "weight", "bit"): Class.REPAIRED,
    ("everything", "sum", "bit"): Class.MISSED_SMALL,
    ("everything", "none", "none"): Class.CLEAN,
    ("votes", "forward", "bit"): Class.MISSED_SMALL,
    ("votes", "forward", "nan"): Class.REPAIRED,
    ("votes", "weight", "bit"): Class.REPAIRED,
    ("votes", "sum", "bit"): Class.MISSED_SMALL,
    ("votes", "none", "none"): Class.CLEAN,
}


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_campaign_is_interrupted_gone_on_with_and_counted(tmp_path: Path, pool3: RankPool) -> None:
    spec, out = tmp_path / "small.toml", tmp_path / "out"
    spec.write_text(SPEC)
    first = run(spec=spec, out=out, only=4, pools={3: pool3})
    assert (first["trials"], first["planned"]) == (4, len(EXPECTED))
    # A trial whose line was cut short, as by a kill, is run again.
    lines = (out / TRIALS).read_bytes()
    (out / TRIALS).write_bytes(lines[:-40])

    record = run(spec=spec, out=out, pools={3: pool3})
    found = rows(out)
    assert {(r["checks"], r["site"], r["fault"]): r["class"] for r in found} == {
        key: one.value for key, one in EXPECTED.items()
    }
    assert len(found) == record["trials"] == record["planned"] == len(EXPECTED)
    kept = [line for line in lines.splitlines()[:-1] if line in (out / TRIALS).read_bytes().splitlines()]
    assert len(kept) == 4  # the head and three trials
    counts = Counter(one.value for one in EXPECTED.values())
    assert {r["class"]: r["count"] for r in record["classes"] if r["checks"] == "all" and r["count"]} == dict(counts)
    assert record["confusion"] == [
        {"faulty": "rank 1", "named": "rank 1", "trials": 3},
        {"faulty": "rank 2", "named": "rank 2", "trials": 2},
    ]
    assert record["false_alarms"]["alarms"] == 0
    assert record["unexpected"] == record["switched_off"] == []
    assert record["pools_replaced"] == 0

    _follows_the_schema(json.loads((out / "campaign.json").read_text()))
    assert (out / "coverage.png").read_bytes().startswith(b"\x89PNG")
    assert "missed harmful" in (out / "campaign.html").read_text()

    again = run(spec=spec, out=out)  # nothing is left, and nothing is started
    assert {**again, "conditions": None} == {**record, "conditions": None}
    spec.write_text(SPEC.replace("bit = 20", "bit = 21"))
    with pytest.raises(UsageError, match="of another specification"):
        run(spec=spec, out=out)


def _follows_the_schema(record: dict[str, Any]) -> None:
    schema = json.loads(files("unsilent.schemas").joinpath("campaign.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator(schema).validate(record)
