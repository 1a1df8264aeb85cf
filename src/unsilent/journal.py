"""What one rank of a run puts on disk and on the screen: events, evidence, and how the run ended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from unsilent.errors import EXIT_INTERNAL, EXIT_OK, CorruptionError, RankFailure
from unsilent.events import EXIT_FILE, EventKind, EventLog, write_exit
from unsilent.evidence import EvidenceStore, device_counters
from unsilent.ledger import RunLedger
from unsilent.records import Verdict
from unsilent.screen import show


class Journal:
    """Rank 0 writes what all ranks know; any rank may have to write that another one failed.

    Args:
        directory: the run directory, None to keep nothing on disk.
        ledger: the directory that many runs share, None to leave nothing there.
    """

    def __init__(
        self,
        directory: str | Path | None,
        *,
        rank: int,
        run_id: str,
        evidence: str,
        device: str | None,
        ledger: str | Path | None = None,
    ) -> None:
        self.directory = None if directory is None else Path(directory)
        self.rank = rank
        self.run_id = run_id
        self.step = 0
        self._log = EventLog(directory, rank=rank, run_id=run_id)
        counters = (lambda: device_counters(device)) if device is not None else None
        self._evidence = EvidenceStore(directory, rank=rank, level=evidence, counters=counters)
        self._ledger: RunLedger | None = None
        if ledger is not None and rank == 0:
            self._ledger = RunLedger(ledger, run_id=run_id, say=self.say)

    def write(self, kind: EventKind, step: int, **fields: Any) -> None:
        """One event, written by rank 0."""
        if self.rank == 0:
            event = self._log.write(kind, step, **fields)
            if self._ledger is not None:
                self._ledger.note(event)

    def begin_step(self, step: int) -> None:
        """A step begins; what is written from now on is of this step."""
        self.step = step
        if self._ledger is not None:
            self._ledger.worked += 1

    def audit_passed(self) -> None:
        """Every rank has passed an audit."""
        if self._ledger is not None:
            self._ledger.passed += 1

    def say(self, text: str) -> None:
        """One line on the screen, from rank 0."""
        if self.rank == 0:
            show(f"unsilent: {text}")

    def keep(self, step: int, verdict: Verdict, record: dict[str, Any], **more: Any) -> None:
        """An evidence bundle, written by rank 0 and by every suspect rank."""
        if self.keeps(verdict):
            self._evidence.save(step, verdict.check, record, **more)

    def keeps(self, verdict: Verdict) -> bool:
        """Whether this rank keeps evidence of that finding."""
        return self.rank == 0 or any(s.rank == self.rank for s in verdict.suspects)

    def rank_failed(self, failure: RankFailure) -> None:
        """Put another rank's failure on disk: exactly one survivor writes, the others wait until it stands there."""
        if self._ledger is not None:
            self._ledger.end(self.step, exit_code=EXIT_INTERNAL)
        if self.directory is None:
            return
        record = {
            "schema": 1,
            "exit_code": EXIT_INTERNAL,
            "step": self.step,
            "verdict": None,
            "time": round(time.time(), 6),
            "rank_failure": {"rank": failure.rank, "error": failure.error},
        }
        draft = self.directory / f".exit-{self.rank}.json"
        final = self.directory / EXIT_FILE
        try:
            # A hard link fails when the name is taken: the first survivor wins, whoever else is still alive.
            with draft.open("w") as file:
                file.write(json.dumps(record))
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, final)
        except FileExistsError:
            pass
        except OSError:
            write_exit(self.directory, EXIT_INTERNAL, self.step, rank_failure=record["rank_failure"])
        else:
            self._log.write("rank_failure", self.step, failed_rank=failure.rank, error=failure.error)
        finally:
            draft.unlink(missing_ok=True)

    def started(self) -> None:
        """A run begins: what an earlier run in this directory ended with no longer holds."""
        if self.directory is not None and self.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / EXIT_FILE).unlink(missing_ok=True)

    def wait_for_exit(self, seconds: float) -> None:
        """Give the survivors time to put this rank's failure on disk before it leaves."""
        if self.directory is None:
            return
        deadline = time.monotonic() + seconds
        while not (self.directory / EXIT_FILE).exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    def ended(self, error: CorruptionError, step: int, *, tally: dict[str, Any]) -> None:
        """The run was stopped by a verdict; on disk before any rank leaves."""
        if self._ledger is not None:
            self._ledger.end(step, exit_code=error.exit_code, checks=tally)
        if self.directory is not None and self.rank == 0:
            written = write_exit(
                self.directory, error.exit_code, step, error.verdict, message=str(error), resume_from=error.resume_from
            )
            if not written:
                path = self.directory / EXIT_FILE
                self.say(f"{path} could not be written: the exit code {error.exit_code} stands alone")

    def finished(self, step: int, *, tally: dict[str, Any]) -> None:
        """The run came to its end."""
        self.write("finished", step, steps=step, exit_code=EXIT_OK, tally=tally)
        if self.directory is not None and self.rank == 0 and not (self.directory / EXIT_FILE).exists():
            write_exit(self.directory, 0, step)

    def close(self) -> None:
        self._log.close()
        if self._ledger is not None:
            self._ledger.close(self.step)
