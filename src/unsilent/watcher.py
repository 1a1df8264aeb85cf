"""Notices within a second or two that another rank failed, and wakes this one.

A rank that raises or is killed leaves its peers in the job's collective until that group's timeout, half an hour by
default. A thread of our own, with its own connection to the store, posts and reads failures and heartbeats; it then
completes the futures that this rank's backward waits for, so that the main thread gets an exception and not silence.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unsilent.errors import EXIT_INTERNAL, RankFailure

_POLL_S = 0.1
_HEARTBEAT_STALE_S = 20.0
_MISSED_POLLS = 15  # so often in a row, this rank waits while another has left alone: it waits in vain


class Watcher:
    """Watches the other ranks of one run.

    Args:
        store: a ``torch.distributed`` store connection that nobody else uses, or None without a process group.
        rank, size: of this process, and the number of ranks.
        pids: the process id of every rank that runs in this machine's process-id namespace, None for the others.
        timeout_s: how long the main thread may stay blocked after a failure before the process leaves with code 70.
    """

    def __init__(self, store: Any, *, rank: int, size: int, pids: list[int | None], timeout_s: float) -> None:
        self._store = store
        self._rank, self._size, self._pids, self._timeout_s = rank, size, pids, timeout_s
        self._lock = threading.Lock()
        self._on_failure: list[Callable[[RankFailure], None]] = []
        self._record: Callable[[RankFailure], None] = lambda failure: None
        self._closed = threading.Event()
        self._main_is_awake = threading.Event()
        self.failure: RankFailure | None = None
        self.posted = False  # this rank has told the others that it failed: they wait for it no longer
        self.waiting = False  # the main thread waits for the others, or for news of them
        self._waits: list[Callable[[], bool]] = []
        self._missed = 0
        self._peer_seen: tuple[bytes, float] = (b"", time.monotonic())
        self._thread: threading.Thread | None = None
        if store is not None and size > 1:
            self._thread = threading.Thread(target=self._run, name="unsilent-watcher", daemon=True)
            self._thread.start()

    def on_failure(self, wake: Callable[[RankFailure], None]) -> None:
        """Call ``wake`` (from the watcher's thread) when another rank has failed."""
        with self._lock:
            self._on_failure.append(wake)

    def on_wait(self, waits: Callable[[], bool]) -> None:
        """Ask ``waits`` too whether this rank waits for the others."""
        self._waits.append(waits)

    def set_record(self, record: Callable[[RankFailure], None]) -> None:
        """Call ``record`` (from the watcher's thread) before anyone is woken, to put the failure on disk."""
        self._record = record

    def post(self, error: str) -> None:
        """Tell all ranks that this one failed. Never raises: the store may be gone already."""
        if self._store is None or self._closed.is_set():
            return
        self.posted = True
        try:
            self._tell("unsilent/failure", json.dumps({"rank": self._rank, "error": error}), "unsilent/failed")
        except Exception:  # noqa: BLE001 - the store's host may be the rank that died; heartbeats tell the rest
            return

    def raise_if_failed(self) -> None:
        """Raise the failure of another rank, if one is known."""
        if self.failure is not None:
            self._main_is_awake.set()
            raise RankFailure(self.failure.rank, self.failure.error)

    def wait_for_failure(self, seconds: float) -> RankFailure | None:
        """Wait until a failure is known, at most ``seconds``; used when a collective broke for a reason unknown."""
        deadline = time.monotonic() + seconds
        before, self.waiting = self.waiting, True
        while self.failure is None and self._thread is not None and time.monotonic() < deadline:
            time.sleep(0.02)
        self.waiting = before
        return self.failure

    def close(self, *, together: bool = True) -> None:
        """Stop watching; peers learn that this rank left in order, and whether it left without them."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            try:
                self._store.set(f"unsilent/closed/{self._rank}", "1")
                if not together:
                    self._tell("unsilent/left alone", str(self._rank), "unsilent/alone")
            except Exception:  # noqa: BLE001 - leaving anyway
                return

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def _tell(self, key: str, text: str, counter: str) -> None:
        """Put ``text`` where all can read it, the first one only, and then count it. In this order: who has seen the count waits
        for the text, and in this process that would be the thread whose connection the text must take."""
        self._store.compare_set(key, "", text)
        self._store.add(counter, 1)

    def _run(self) -> None:
        beat = 0
        while not self._closed.wait(_POLL_S):
            beat += 1
            failure = self._look(beat)
            if failure is not None and not self._closed.is_set():
                self._fail(failure)
                return

    def _look(self, beat: int) -> RankFailure | None:
        """One round: own heartbeat, posted failures first (they carry the reason), then who is gone."""
        store_error = ""
        try:
            self._store.set(f"unsilent/heartbeat/{self._rank}", str(beat))
            posted = self._posted()
        except Exception as error:  # noqa: BLE001 - any store error means: ask the process table
            posted, store_error = None, f"{type(error).__name__}"
        if posted is not None:
            return posted if posted.rank != self._rank else None
        for rank, pid in enumerate(self._pids):
            if rank != self._rank and pid is not None and not _alive(pid) and not self._left_in_order(rank):
                # It may have posted why just before it went.
                return self._posted_quietly() or RankFailure(rank, f"its process {pid} is gone (killed or crashed)")
        if store_error:
            return self._store_is_gone(store_error)
        return self._stale_heartbeat() or self._waits_in_vain()

    def _posted(self) -> RankFailure | None:
        if self._store.add("unsilent/failed", 0) == 0:
            return None
        record = json.loads(self._store.get("unsilent/failure"))
        return RankFailure(int(record["rank"]), str(record["error"]))

    def _posted_quietly(self) -> RankFailure | None:
        try:
            return self._posted()
        except Exception:  # noqa: BLE001 - the store went with the rank
            return None

    def _left_in_order(self, rank: int) -> bool:
        try:
            return bool(self._store.check([f"unsilent/closed/{rank}"]))
        except Exception:  # noqa: BLE001 - without a store nobody can say so
            return False

    def _store_is_gone(self, error: str) -> RankFailure | None:
        """Without an agent's store, rank 0 hosts it: when the store goes, rank 0 went."""
        return RankFailure(0, f"the store that it hosts does not answer ({error})")

    def _stale_heartbeat(self) -> RankFailure | None:
        """Each rank watches its successor only, so the load on the store grows with W and not with W squared."""
        peer = (self._rank + 1) % self._size
        key = f"unsilent/heartbeat/{peer}"
        now = time.monotonic()
        try:
            value = self._store.get(key) if self._store.check([key]) else b""
        except Exception:  # noqa: BLE001 - the next round decides
            return None
        if value != self._peer_seen[0]:
            self._peer_seen = (value, now)
        elif now - self._peer_seen[1] > _HEARTBEAT_STALE_S and not self._left_in_order(peer):
            return RankFailure(peer, f"no heartbeat for {_HEARTBEAT_STALE_S:.0f} s")
        return None

    def _waits_in_vain(self) -> RankFailure | None:
        """A rank that left without closing its guard (``sys.exit``, say) is no loss until this one waits for it."""
        if not self.waiting and not any(waits() for waits in self._waits):
            self._missed = 0
            return None
        try:
            self._missed = self._missed + 1 if self._store.add("unsilent/alone", 0) else 0
            if self._missed < _MISSED_POLLS:
                return None
            rank = int(self._store.get("unsilent/left alone"))
        except Exception:  # noqa: BLE001 - the next round decides
            return None
        return RankFailure(rank, "it ended without closing its guard (sys.exit, say) while others wait for it")

    def _fail(self, failure: RankFailure) -> None:
        self.failure = failure
        try:
            # Pass the news on: only this rank may see that process.
            record = json.dumps({"rank": failure.rank, "error": failure.error})
            self._tell("unsilent/failure", record, "unsilent/failed")
        except Exception:  # noqa: BLE001 - the others look for themselves
            pass
        try:
            self._record(failure)
        finally:
            with self._lock:
                wakers = list(self._on_failure)
            for wake in wakers:
                wake(failure)
        if not self._main_is_awake.wait(self._timeout_s) and not self._closed.is_set():
            os._exit(EXIT_INTERNAL)


def _alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return stat.rsplit(")", 1)[1].split()[0] not in ("Z", "X")
