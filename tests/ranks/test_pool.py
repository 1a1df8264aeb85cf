"""A pool whose rank has died, during a trial or between two, says so and is whole again for the next one."""

from __future__ import annotations

import os
import signal
import time

import pytest

from unsilent.lab.pool import PoolDied, RankPool


def rank_of(rank: int, size: int) -> int:
    return rank


def die_on_one(rank: int, size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def test_a_pool_that_lost_a_rank_is_started_again() -> None:
    with RankPool(2) as pool:
        with pytest.raises(PoolDied, match="rank 1 ended"):
            pool.results(die_on_one)
        assert pool.results(rank_of) == [0, 1]
        os.kill(pool.pids[0], signal.SIGKILL)
        time.sleep(0.5)  # dead before it is given work
        with pytest.raises(PoolDied, match="rank 0 ended"):
            pool.results(rank_of)
        assert pool.results(rank_of) == [0, 1]
        assert pool.restarts == 2
