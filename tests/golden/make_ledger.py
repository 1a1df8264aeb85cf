"""The calls that made ``ledger-v1.jsonl``: one line of each kind. The file is frozen; a new version gets a new file.

Versions of packages are those of the machine, so they are set to fixed ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from unittest import mock

from tests.golden.make_events import LATER, VERDICT
from unsilent.events import EventLog
from unsilent.ledger import RunLedger, note_approval
from unsilent.ledger import writing as ledger_writing
from unsilent.records import Action, Kind, Place, Site, Verdict

PLACES = [asdict(Place(rank=rank, node=f"node{rank}", device="cpu:0", environment="5f3a")) for rank in range(4)]
BATCH = Verdict(
    kind=Kind.SOFTWARE, site=Site.GRADIENT, step=8, reason="the neighbour got the same bits", check="finite"
)
TALLY = {"finite": {"ran": 48, "alarms": 1}, "audit": {"ran": 16, "alarms": 2}}


def make(directory: Path, ledger: Path) -> None:
    """A run of twelve steps in ``directory`` that leaves its lines in ``ledger``, one second apart."""
    seconds = count(1_700_000_000)
    clock: Callable[[], float] = lambda: float(next(seconds))  # noqa: E731
    log = EventLog(directory, rank=0, run_id="run-1", clock=lambda: 0.0)
    kept = RunLedger(ledger, run_id="run-1", say=print, clock=clock)
    with (
        mock.patch.object(ledger_writing.metadata, "version", return_value="2.13.0"),
        mock.patch.object(ledger_writing.platform, "python_version", return_value="3.11.7"),
        mock.patch.object(ledger_writing.unsilent, "__version__", "0.1.0"),
    ):
        kept.note(log.write("run_started", 0, places=PLACES, mode="act", directory="/runs/1", ledger=str(ledger)))
    kept.worked, kept.passed = 8, 6
    kept.note(log.write("verdict", 7, verdict=VERDICT, action=Action.REPAIR, would=Action.REPAIR.value))
    kept.note(log.write("action", 7, verdict=VERDICT, action=Action.REPAIR))
    kept.worked, kept.passed = 9, 7
    kept.note(log.write("verdict", 8, verdict=BATCH, action=Action.CONTINUE, would=Action.CONTINUE.value))
    kept.note(log.write("checkpoint", 9, steps=9, path="checkpoints/9", status="candidate"))
    kept.worked = 10
    kept.note(log.write("verdict", 9, verdict=LATER, action=Action.REPAIR, would=Action.REPAIR.value))
    kept.note(log.write("ask", 9, verdict=LATER, action=Action.QUARANTINE))
    kept.worked = 12
    kept.note(log.write("finished", 12, steps=12, exit_code=0, tally=TALLY))
    kept.close(12)
    log.close()


def approve(directory: Path) -> None:
    """A person's leave to take node2 out."""
    with (
        mock.patch.object(ledger_writing.secrets, "token_hex", return_value="0a1b2c3d"),
        mock.patch.object(ledger_writing.time, "time", return_value=1_700_000_060.0),
    ):
        assert note_approval(directory, "node2") == ""
