"""Which stretch can be rerun, from which start of the run: everything that cannot be is refused before ranks start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from unsilent.checkpoint import CheckpointStore
from unsilent.cli import app
from unsilent.errors import CheckpointError, UsageError
from unsilent.events import EventLog, add_start, read_starts
from unsilent.inventory import Inventory
from unsilent.offline.recheck import Plan, plan
from unsilent.training.loop import Options, options_from_json, options_to_json

ENVIRONMENT = {"threads": 1}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of 4 and 8 updates; one start logged 0 to 8 updates, a second one, from 4 on, up to 12."""
    model = nn.Linear(2, 2)
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for steps in (4, 8):
        store.save(Inventory(model, torch.optim.SGD(model.parameters())), steps=steps)
    for name, states in (("one", (0, 2, 4, 6, 8)), ("two", (4, 6, 10, 12))):
        log = EventLog(tmp_path / "run", rank=0, run_id=name)
        for after in states:
            log.write("fingerprints", after, steps=after, weights=f"{after:016x}", switched={"deterministic": [after]})
        log.close()
        start = {"run": name, "command": "train", "options": {}, "world_size": 3, "environment": ENVIRONMENT}
        add_start(tmp_path / "run", start)
    return tmp_path / "run"


def planned(run: Path, steps: str = "4..11", checkpoint: int = 4) -> Plan:
    return plan(run / "checkpoints" / f"step-{checkpoint:08}", steps, run, run.parent / "out")


def test_the_newest_start_that_holds_the_steps_is_taken(run: Path) -> None:
    found = planned(run)
    assert (found.start["run"], found.begin, found.first, found.last, found.world_size) == ("two", 4, 4, 11, 3)
    assert found.logged.first == 4  # where that process began: its first step reduced in a fresh layout
    assert found.logged.kernels[10] == "deterministic"


def test_an_older_start_is_taken_where_the_newer_logged_nothing_of_the_steps(run: Path) -> None:
    assert planned(run, "7..7", 4).start["run"] == "one"


@pytest.mark.parametrize(
    ("steps", "checkpoint", "words"),
    [
        ("4", 4, "must be A..B"),
        ("8..4", 4, "must be A..B"),
        ("-1..4", 4, "must be A..B"),
        ("3..6", 4, "nothing before step 4"),
        ("12..20", 4, "its starts logged: 0 to 8; 4 to 12 updates"),
        ("4..11", 6, "there is no checkpoint"),
    ],
)
def test_what_cannot_be_compared_is_refused(run: Path, steps: str, checkpoint: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        planned(run, steps, checkpoint)


def test_a_run_that_does_not_say_how_it_was_made_is_refused(run: Path) -> None:
    (run / "run.json").unlink()
    with pytest.raises(UsageError, match="only runs of unsilent train"):
        planned(run)


def test_a_run_without_votes_is_refused(run: Path) -> None:
    (run / "events.jsonl").write_text("")
    with pytest.raises(UsageError, match="its log holds none"):
        planned(run)


def test_a_distrusted_checkpoint_is_no_place_to_begin(run: Path) -> None:
    CheckpointStore(run / "checkpoints").distrust(4, "rank 2 was wrong")
    with pytest.raises(CheckpointError, match="rank 2 was wrong"):
        planned(run)


def test_the_runs_own_directory_is_not_written_to(run: Path) -> None:
    with pytest.raises(UsageError, match="the run's own directory"):
        plan(run / "checkpoints" / "step-00000004", "4..11", run, run)


def test_the_command_finds_the_run_beside_the_checkpoint_and_says_what_is_wrong_once(run: Path) -> None:
    checkpoint = run / "checkpoints" / "step-00000004"
    words = ["recheck", "--from", str(checkpoint), "--steps", "0..3", "--out", str(run.parent / "out")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "nothing before step 4" in result.stderr


@pytest.mark.parametrize("options", [{}, {"data": Path("text.txt"), "clip": float("inf"), "bf16": True, "steps": 7}])
def test_options_come_back_from_the_run_file_as_they_were(tmp_path: Path, options: dict[str, Any]) -> None:
    wanted = Options(out=tmp_path, **options)
    add_start(tmp_path, {"options": options_to_json(wanted)})
    (start,) = read_starts(tmp_path)
    found = options_from_json(start["options"])
    assert found.data == (None if wanted.data is None else wanted.data.resolve())
    assert {**vars(found), "data": None} == {**vars(wanted), "data": None}


def test_options_of_another_version_are_passed_over_and_nonsense_is_refused(tmp_path: Path) -> None:
    record = options_to_json(Options(out=tmp_path))
    assert options_from_json({**record, "of_tomorrow": 1}) == Options(out=tmp_path)
    with pytest.raises(UsageError, match="not started with options that are understood"):
        options_from_json({"out": "x"})


def test_every_start_is_kept_and_a_damaged_file_reads_as_none(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []
    assert add_start(tmp_path, {"run": "a"}) and add_start(tmp_path, {"run": "b"})
    assert [start["run"] for start in read_starts(tmp_path)] == ["a", "b"]
    (tmp_path / "run.json").write_text("{")
    assert read_starts(tmp_path) == []
