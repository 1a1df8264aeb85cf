"""The fingerprint of CPU tensors as one loop compiled by numba: optional, and at the speed of memory.

Threads are our own (a pool, with numba releasing the interpreter lock) and not numba's: its OpenMP layer shares
torch's runtime, so setting its thread count changes torch's, and it aborts in a forked child; its own layer aborts
when two threads call it. ``torch.get_num_threads()`` is obeyed and never set.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from unsilent.fingerprints.lanes import Job
from unsilent.fingerprints.weights import column_weights

# Below this many lanes per thread, handing work to a thread costs more than it saves.
LANES_PER_THREAD = 1 << 17


@functools.cache
def available() -> bool:
    """Whether numba can be imported; asked once."""
    try:
        _loop()
    except ImportError:
        return False
    return True


@functools.cache
def _loop() -> Callable[..., None]:
    from unsilent.fingerprints.cpu_loop import add_lanes

    return add_lanes


def add(out: Tensor, work: Iterable[Job]) -> None:
    """Add the two sums of each job's lanes to its row of ``out`` (int64[n, 2], on the CPU)."""
    # numba compiles it at the first use of each lane width, in a fraction of a second.
    kernel = _loop()
    totals = out.numpy().view(np.uint64)
    for job in work:
        lanes, columns = job.lanes.numpy(), column_weights()
        threads = min(torch.get_num_threads(), lanes.size // LANES_PER_THREAD)
        if threads <= 1:
            kernel(lanes, 0, lanes.size, job.run, job.bases, columns, totals, job.row)
            continue
        parts = np.zeros((threads, 2), dtype=np.uint64)
        edges = [lanes.size * t // threads for t in range(threads + 1)]
        waiting = [
            _pool(threads).submit(kernel, lanes, low, high, job.run, job.bases, columns, parts, t)
            for t, (low, high) in enumerate(itertools.pairwise(edges[1:]), start=1)
        ]
        kernel(lanes, 0, edges[1], job.run, job.bases, columns, parts, 0)
        for part in waiting:
            part.result()
        totals[job.row] += parts.sum(0)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=threads - 1, thread_name_prefix="unsilent-fingerprint")


# A forked child inherits the pool but not its threads, so it must make its own.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
