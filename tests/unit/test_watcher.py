"""A rank that fails tells the others why, also when its own watcher looks at the same moment."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unsilent.watcher import Watcher

TIMEOUT_S = 4.0


class SlowStore:
    """A store whose counter is seen by others long before ``add`` comes back; both threads share its one connection."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def add(self, key: str, amount: int) -> int:
        count = self._store.add(key, amount)
        if amount:
            time.sleep(0.5)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_failing_rank_is_not_kept_from_writing_its_reason_by_its_own_watcher() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=TIMEOUT_S))
    watcher = Watcher(SlowStore(store), rank=0, size=2, pids=[None, None], timeout_s=60.0)
    try:
        begin = time.monotonic()
        watcher.post("the reason")
        assert time.monotonic() - begin < TIMEOUT_S / 2
        assert b"the reason" in store.get("unsilent/failure")
    finally:
        watcher.close(together=True)


def test_the_first_reason_stays() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=TIMEOUT_S))
    watcher = Watcher(store, rank=0, size=1, pids=[None], timeout_s=60.0)
    watcher.post("the first")
    watcher.post("the second")
    assert b"the first" in store.get("unsilent/failure")
    watcher.close(together=True)
