"""What one run adds to a ledger: a file of its own, so that no two writers ever share one.

A ledger is a directory, often on a network file system that many jobs share. No lock is taken there, and no call raises
because of the disk: what could not be written is said once, and training goes on without it.
"""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import unsilent
from unsilent.events import plain, read
from unsilent.ledger.entries import SCHEMA_VERSION, EntryKind
from unsilent.lines import LineFile
from unsilent.records import Event

#: A device that is wrong in every step of a long run must not fill the disk: later verdicts are counted only.
MOST_VERDICTS = 1_000
_MODE = 0o666  # jobs of other people read it too, where the umask lets them
_DURABLE: frozenset[EntryKind] = frozenset({"run_started", "verdict", "approved", "run_ended"})


class RunLedger:
    """The ledger's file of one run, written by rank 0.

    Args:
        directory: the ledger.
        run_id: of this start of the run; unlike all others in the ledger.
        say: told once when something could not be written.
        clock: seconds since the epoch.

    Attributes:
        worked: steps that this run has begun.
        passed: steps in which every rank passed an audit.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        run_id: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = Path(directory)
        self.worked = self.passed = 0
        self._run, self._say, self._clock = run_id, say, clock
        self._file = LineFile(self.directory / f"run-{run_id}.jsonl", mode=_MODE)
        self._places: Sequence[Mapping[str, Any]] = ()
        self._verdicts = 0
        self._ended = self._told = False

    def note(self, event: Event) -> None:
        """Keep what an event of the run says about its devices; most events say nothing."""
        fields = event.fields
        if event.kind == "run_started":
            self._start(event)
        elif event.kind == "verdict":
            self._verdict(event)
        elif event.kind == "checkpoint":
            self._write("progress", event.step)
        elif event.kind == "finished":
            self.end(event.step, exit_code=fields["exit_code"], checks=fields["tally"])

    def end(self, step: int, *, exit_code: int | None, checks: Mapping[str, Any] | None = None) -> None:
        """The run is over; the first call counts.

        Args:
            exit_code: None where the run left without saying how it ended.
            checks: per check, how often it ran and how often it raised an alarm.
        """
        if self._ended:
            return
        self._ended = True
        left_out = max(0, self._verdicts - MOST_VERDICTS)
        self._write("run_ended", step, exit_code=exit_code, checks=plain(checks or {}), left_out=left_out)

    def close(self, step: int) -> None:
        """Leave; a run that has not said how it ended says that it left."""
        if self._places:
            self.end(step, exit_code=None)
        self._file.close()

    def _start(self, event: Event) -> None:
        self._places = cast(Sequence[Mapping[str, Any]], event.fields["places"])
        self._write(
            "run_started",
            event.step,
            places=list(self._places),
            mode=event.fields.get("mode"),
            directory=event.fields.get("directory"),
            versions={
                "unsilent": unsilent.__version__,
                "python": platform.python_version(),
                "torch": _version("torch"),
            },
        )

    def _verdict(self, event: Event) -> None:
        self._verdicts += 1
        if self._verdicts > MOST_VERDICTS:
            return
        verdict = cast(Mapping[str, Any], event.fields["verdict"])
        self._write(
            "verdict",
            event.step,
            verdict=verdict["kind"],
            check=verdict["check"],
            site=verdict["site"],
            reason=verdict["reason"],
            suspects=[self._suspect(one) for one in verdict["suspects"] if one["device"] is not None],
            action=event.fields.get("action"),
            would=event.fields.get("would"),
            **({"acquits": list(verdict["acquits"])} if verdict.get("acquits") else {}),
        )

    def _suspect(self, suspect: Mapping[str, Any]) -> dict[str, Any]:
        """A device with its node; ``host_known`` is False where the device is blamed and its host could not be judged."""
        places = {place["rank"]: place["node"] for place in self._places}
        node = suspect["node"] if suspect["node"] is not None else places.get(suspect["rank"], "")
        return {
            "rank": suspect["rank"],
            "node": node,
            "device": suspect["device"],
            "host_known": suspect["node"] is not None,
        }

    def _write(self, kind: EntryKind, step: int, **fields: Any) -> None:
        head = {
            "schema": SCHEMA_VERSION,
            "kind": kind,
            "run": self._run,
            "time": round(self._clock(), 6),
            "step": step,
            "worked": self.worked,
            "passed": self.passed,
        }
        self._file.append({**head, **fields}, durable=kind in _DURABLE)
        if self._file.problem and not self._told:
            self._told = True
            self._say(
                f"the ledger in {self.directory} cannot be written ({self._file.problem}): this run is missing from it "
                "as long as that lasts; training goes on"
            )


def note_approval(run_directory: str | os.PathLike[str], node: str) -> str:
    """Leave a person's approval in the ledger of the run that asked for it, in a file of its own.

    Returns:
        Why it could not be written; "" when it was, or when that run keeps no ledger.

    Raises:
        UsageError: there is no run in that directory.
    """
    events = read(run_directory).events
    runs = [event.fields.get("run") for event in events if event.kind == "ask" and _names(event, node)]
    started = [e for e in events if e.kind == "run_started" and runs and e.fields.get("run") == runs[-1]]
    ledger = started[-1].fields.get("ledger") if started else None
    if not isinstance(ledger, str):
        return ""
    file = LineFile(Path(ledger) / f"run-{runs[-1]}.approved-{secrets.token_hex(4)}.jsonl", mode=_MODE)
    line = {
        "schema": SCHEMA_VERSION,
        "kind": "approved",
        "run": runs[-1],
        "time": round(time.time(), 6),
        "step": -1,
        "worked": 0,
        "passed": 0,
        "node": node,
    }
    file.append(line, durable=True)
    file.close()
    return file.problem


def _names(event: Event, node: str) -> bool:
    suspects = cast(list[Mapping[str, Any]], event.fields.get("suspects") or [])
    return any(suspect.get("node") == node for suspect in suspects)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
