"""``unsilent train`` under torchrun: the same bits guarded or not, a repair, a resume, a quarantine, bad input.

Three ranks play three nodes. A start costs seconds, so that each run below serves several tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.ranks import train_job
from unsilent.checkpoint import verify
from unsilent.cli import app
from unsilent.events import excluded_nodes, read, read_exit
from unsilent.lab.pool import RankPool
from unsilent.ledger import read_directory

SMALL = ["--batch", "2", "--sequence-length", "16"]
TRANSIENT = """
site = "forward"
pattern = "relative"
target = "model.layers.2.self_attn.o_proj"
rank = 2
step = 3
"""
STUCK = """
site = "forward"
pattern = "stuck_lane"
target = "model.layers.0.mlp"
rank = 2
from_step = 3
"""
NOWHERE = """
site = "forward"
pattern = "nan"
target = "model.layers.9.mlp"
rank = 0
step = 1
"""


class Ended:
    """How one start of the command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.said = [line for line in err.splitlines() if line.startswith("unsilent: ")]
        self.everything = out + err
        lines = out.splitlines()
        self.json: dict[str, Any] = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


def under_torchrun(out: Path, *words: str, ranks: int = 3) -> Ended:
    """Through ``unsilent exec``, whose JSON holds exit.json, and torchrun."""
    python = [sys.executable, "-m"]
    launcher = [*python, "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "unsilent", "train"]
    command = [*python, "unsilent", "exec", "--json", "--", *launcher, "--out", str(out), *SMALL, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return Ended(done.returncode, done.stdout, done.stderr)


def alone(out: Path, *words: str) -> Ended:
    """In this process."""
    result = CliRunner().invoke(app, ["train", "--out", str(out), "--json", *SMALL, *words])
    return Ended(result.exit_code, result.stdout, result.stderr)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun does; and this process keeps the threads it has


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def clean(home: Path, pool3: RankPool) -> dict[str, Any]:
    """Guarded, no fault, checkpoints after 2 and 4 steps."""
    words = ["--steps", "4", "--save-every", "2", "--nodes-imitated", "3", "--eval-every", "2"]
    return pool3.results(train_job.train, home / "clean", [*SMALL, *words])[0]


@pytest.fixture(scope="module")
def plain(home: Path, pool3: RankPool) -> dict[str, Any]:
    """The same without a guard."""
    return pool3.results(train_job.train, home / "plain", [*SMALL, "--steps", "4", "--unguarded"])[0]


@pytest.fixture(scope="module")
def repaired(home: Path, pool3: RankPool) -> dict[str, Any]:
    """The same with one wrong activation on rank 2."""
    fault = home / "transient.toml"
    fault.write_text(TRANSIENT)
    words = ["--steps", "4", "--save-every", "2", "--nodes-imitated", "3", "--fault", str(fault)]
    return pool3.results(train_job.train, home / "repaired", [*SMALL, *words])[0]


@pytest.fixture(scope="module")
def quarantined(home: Path) -> Ended:
    """A device that is wrong from step 3 on, caught in step 3, taken out in step 4."""
    fault = home / "stuck.toml"
    fault.write_text(STUCK)
    words = ["--steps", "8", "--save-every", "2", "--nodes-imitated", "3", "--quarantine", "auto"]
    return under_torchrun(home / "quarantined", *words, "--fault", str(fault), "--ledger", str(home / "ledger"))


def test_a_guarded_run_ends_with_the_bits_of_the_plain_one(clean: dict[str, Any], plain: dict[str, Any]) -> None:
    assert len(clean["weights_sha256"]) == 64
    for what in ("weights_sha256", "loss", "evaluation_loss"):
        assert clean[what] == plain[what]


def test_the_last_line_says_what_was_checked(home: Path, clean: dict[str, Any], plain: dict[str, Any]) -> None:
    assert clean["checks"]["audit"] == 2  # before each save
    assert clean["verdicts"] == []
    assert clean["nodes"] == ["node-0", "node-1", "node-2"]
    assert plain["checks"] == {}
    for name in ("clean", "plain"):
        record = read_exit(home / name)
        assert record is not None
        assert (record["exit_code"], record["step"]) == (0, 4)


def test_a_repaired_run_ends_with_the_bits_of_the_clean_one(clean: dict[str, Any], repaired: dict[str, Any]) -> None:
    assert repaired["faults"][0]["fired"] == 1
    (verdict,) = repaired["verdicts"]
    assert (verdict["kind"], verdict["action"], verdict["step"]) == ("TRANSIENT", "REPAIR", 3)
    assert [suspect["node"] for suspect in verdict["suspects"]] == ["node-2"]
    assert repaired["weights_sha256"] == clean["weights_sha256"]


def test_a_quarantine_is_returned_by_exec_and_names_where_to_go_on(home: Path, quarantined: Ended) -> None:
    assert quarantined.code == 11, quarantined.everything
    assert quarantined.json["command_exit_code"] == 1  # what torchrun makes of it
    outcome = quarantined.json["outcome"]
    assert outcome["verdict"]["kind"] == "PERSISTENT"
    assert list(excluded_nodes(home / "quarantined")) == ["node-2"]
    assert Path(outcome["resume_from"]) == home / "quarantined" / "checkpoints" / "step-00000002"
    assert verify(outcome["resume_from"]) == []


def test_the_ledger_says_who_was_taken_out(home: Path, quarantined: Ended) -> None:
    (run,) = read_directory(home / "ledger").runs
    assert (run.exit_code, run.directory) == (quarantined.code, str(home / "quarantined"))
    assert {device.node for found in run.found for device in found.devices} == {"node-2"}


def test_the_nodes_that_are_left_go_on_from_there(home: Path, quarantined: Ended) -> None:
    resumed = under_torchrun(home / "quarantined", "--steps", "4", "--nodes-imitated", "2", ranks=2)
    assert resumed.code == 0, resumed.everything
    # Not from step 4: that checkpoint is distrusted.
    assert any("resumed from" in line and "2 steps are done" in line for line in resumed.said), resumed.said
    assert resumed.json["outcome"]["step"] == 4


def test_a_node_that_was_taken_out_does_not_come_back(home: Path, quarantined: Ended) -> None:
    refused = alone(home / "quarantined", "--node", "node-2")
    assert refused.code == 2
    assert len(refused.said) == 1
    assert "node-2 is to be left out" in refused.said[0]


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(home: Path) -> None:
    """One process, where nothing depends on how buckets were laid out; weights, moments, rate and data all count."""
    whole = alone(home / "whole", "--steps", "4", "--accumulate", "2", "--save-every", "2")
    resumed_from = home / "half" / "checkpoints" / "step-00000002"
    resumed_from.parent.mkdir(parents=True)
    (home / "whole" / "checkpoints" / "step-00000002").rename(resumed_from)
    half = alone(home / "half", "--steps", "4", "--accumulate", "2")
    assert whole.code == half.code == 0, whole.everything + half.everything
    assert half.json["resumed_from"] == 2
    assert half.json["weights_sha256"] == whole.json["weights_sha256"]
    notices = [event.fields["text"] for event in read(home / "half").events if event.kind == "notice"]
    assert any("resumed from" in text for text in notices)


def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(home: Path, clean: dict[str, Any]) -> None:
    refused = alone(home / "clean", "--preset", "25m")
    assert refused.code == 2, refused.everything
    assert "is of another model" in refused.said[-1]
    record = read_exit(home / "clean")
    assert record is not None
    assert record["exit_code"] == 2


def test_too_few_nodes_are_refused_once_by_all_ranks(home: Path) -> None:
    refused = under_torchrun(home / "two", "--require-localization", "--nodes-imitated", "2", ranks=2)
    assert refused.code == 2, refused.everything
    assert refused.said == ["unsilent: require_localization needs at least 3 nodes, and this run has 2: node-0, node-1"]


def test_a_fault_in_no_such_module_is_refused(home: Path) -> None:
    fault = home / "nowhere.toml"
    fault.write_text(NOWHERE)
    refused = alone(home / "nowhere", "--fault", str(fault))
    assert refused.code == 2, refused.everything
    assert len(refused.said) == 1
    assert "no module 'model.layers.9.mlp': did you mean 'model.layers.3.mlp'" in refused.said[0]
