"""The text report: what people read, and what happens when there is nothing to read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.make_events import LATER, make
from unsilent.errors import UsageError
from unsilent.events import EventLog, approve, write_exclude, write_exit
from unsilent.records import Action, Kind, Site, Suspect, Verdict
from unsilent.report.text import render_text


def words(text: str) -> str:
    """The text with line breaks and table columns folded away."""
    return re.sub(r"\s+", " ", text)


def test_a_whole_run_is_told(tmp_path: Path) -> None:
    make(tmp_path)
    write_exit(tmp_path, 11, 10, LATER, resume_from="checkpoints/6")
    write_exclude(tmp_path, ["node2"], "persistent")
    text = words(render_text(tmp_path, width=200))
    for expected in (
        "4 ranks on 4 nodes: node0, node1, node2, node3.",
        "faults are repaired; a node is taken out after a person approved it",
        "reduction not covered finite wrong sums",
        "audit 3 2 4.50 degraded at step 3: gradients do not repeat here",
        "replicas not on record switched off at step 4",
        "What was found (1)",
        "TRANSIENT: did not come back rank 2, node2, cpu:0 exactly one execution of rank 2 differs",
        "7 REPAIR 0.50 the auditor holds the gradient",
        "A person was asked about 1 node and approved 0 of 1.",
        f"unsilent approve {tmp_path} node2",
        "Step 9 needs a person",
        "Left out on restart: node2 (persistent)",
        "8 no longer trusted checkpoints/8 rank 2 does not repeat",
        "Step 9: not written, rank 3 holds other weights.",
        "rank 1 failed: ValueError: no more data",
        "a checkpoint without a certificate was loaded",
        "How it ended: exit code 11 at step 10: stopped to leave a node out",
        "Node to leave out: node2. Resume from checkpoints/6.",
    ):
        assert expected in text


def test_an_approval_counts(tmp_path: Path) -> None:
    make(tmp_path)
    approve(tmp_path, "node2")
    text = words(render_text(tmp_path))
    assert "approved 1 of 1" in text
    assert "Waiting for an answer" not in text


def test_a_clean_run_is_not_called_correct(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=0, run_id="r")
    log.write("run_started", 0, mode="observe", world_size=1, nodes=["n0"])
    log.write("finished", 5, exit_code=0, tally={"finite": {"ran": 5, "alarms": 0}})
    text = words(render_text(tmp_path))
    assert "1 rank on 1 node" in text
    assert "Nothing was found by the checks that ran. That is not a proof" in text
    assert "nothing is changed" in text
    assert "exit code 0 at step 5: fine, or recovered" in text
    assert "correct" not in text


def test_counts_add_up_over_ranks_and_starts_and_a_finding_of_all_ranks_is_one(tmp_path: Path) -> None:
    verdict = Verdict(kind=Kind.SOFTWARE, site=Site.BATCH, step=2, reason="[red]layers[0][/red]", check="finite")
    for run in ("a", "b"):
        for rank in range(3):
            log = EventLog(tmp_path, rank=rank, run_id=run)
            log.write("verdict", 2, verdict=verdict)
            log.write(
                "checkpoint", 3, steps=3, path="c/3", status="candidate", tally={"finite": {"ran": 3, "alarms": 1}}
            )
            log.write("checkpoint", 4, steps=3, status="certified", tally={"finite": {"ran": 4, "alarms": 1}})
    text = words(render_text(tmp_path, width=160))
    assert "finite 24 6" in text
    assert "What was found (2)" in text
    assert "[red]layers[0][/red]" in text
    assert "nobody is blamed" in text
    assert "3 certified c/3" in text


def test_observe_mode_shows_what_would_be_done(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=0, run_id="r")
    verdict = Verdict(kind=Kind.TRANSIENT, site=Site.GRADIENT, step=1, reason="differs", check="audit")
    log.write("verdict", 1, verdict=verdict, action=Action.CONTINUE, would=Action.REPAIR)
    log.write("verdict", 2, verdict=verdict, action=Action.CONTINUE, would=Action.CONTINUE)
    text = words(render_text(tmp_path))
    assert "1 REPAIR (not done: observe mode) differs" in text
    assert "2 CONTINUE" not in text


def test_lost_and_broken_lines_are_owned_up_to(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=0, run_id="r")
    assert log._file is not None
    log._file._unsaid = 3
    log.write("notice", 0, text="hello")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("garbage\n{half")
    text = words(render_text(tmp_path))
    assert "1 event cannot be read" in text
    assert "3 events could not be written" in text
    assert "How it ended: not on record" in text


def test_a_suspect_may_be_a_path(tmp_path: Path) -> None:
    verdict = Verdict(
        kind=Kind.SOFTWARE, site=Site.BATCH, step=2, reason="NaN", check="finite", suspects=(Suspect(path="batch 17"),)
    )
    EventLog(tmp_path, rank=0, run_id="r").write("verdict", 2, verdict=verdict)
    assert "batch 17" in render_text(tmp_path)


def test_fields_of_unexpected_shape_do_not_stop_the_report(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=0, run_id="r")
    log.write("run_started", 0, nodes="?", world_size="?", mode=3)
    log.write("coverage", 0, rows=[1, {"site": None}])
    log.write("verdict", 1)
    log.write("checkpoint", 1, path=5, tally=[1])
    log.write("trust_withdrawn", 1, steps={"a": 1})
    log.write("finished", 1, exit_code="x", tally={"finite": 3})
    assert "Run " in render_text(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "holds no events.jsonl"), (b"", "is empty"), (b"\x00\x01\nno\n", "only lines that cannot be read")],
)
def test_nothing_to_report_is_one_sentence(tmp_path: Path, content: bytes | None, expected: str) -> None:
    if content is not None:
        (tmp_path / "events.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(expected)) as caught:
        render_text(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_directory_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such run directory"):
        render_text(tmp_path / "absent")


def test_a_report_imports_no_torch(tmp_path: Path) -> None:
    make(tmp_path)
    code = (
        "import sys; from unsilent.report.text import render_text; render_text(sys.argv[1]);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
