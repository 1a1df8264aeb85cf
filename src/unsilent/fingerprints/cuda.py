"""The fingerprint of CUDA tensors as one Triton kernel for a whole list of them.

Additions modulo 2^64 commute exactly, so atomics give the same integers in whatever order they happen. Nothing here
waits for the device: the list of what to read travels from pinned memory, asynchronously.
With ``TRITON_INTERPRET=1`` set before the import the kernel runs on CPU tensors: so its values are tested without
a GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsilent.fingerprints.lanes import Job
from unsilent.fingerprints.weights import ROW, column_weights_on

TILE_ROWS = 4
# Programs per run at most: enough to fill the largest GPU, few enough that their atomics do not queue.
PROGRAMS = 1024
# No floating point is involved; saying so spares the user Triton's warning about its default.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


@functools.cache
def available() -> bool:
    """Whether Triton can be imported; asked once."""
    try:
        _kernel()
    except ImportError:
        return False
    return True


@functools.cache
def _kernel() -> Any:
    from unsilent.fingerprints.cuda_kernel import add_runs

    return add_runs


def add(out: Tensor, work: Iterable[Job]) -> None:
    """Add the two sums of each job's lanes to its row of ``out`` (int64[n, 2], same device)."""
    # One launch per lane width, and per whether wide loads are possible, so that one odd view does not slow all.
    launches: dict[tuple[int, bool], list[np.ndarray]] = {}
    for job in work:
        width = job.lanes.element_size()
        table = _table(job, width)
        aligned = bool((table[:, 0] % 16 == 0).all() and (table[:, 2] % ROW == 0).all())
        launches.setdefault((width, aligned), []).append(table)
    for (width, aligned), tables in launches.items():
        table = np.concatenate(tables)
        # Rows of the longest run, a partial one at each end included. Runs are the first dimension of the grid, whose
        # limit is 2^31 - 1; that of the second is 65535.
        rows = int(table[:, 1].max()) // ROW + 2
        grid = (len(table), min(PROGRAMS, -(-rows // TILE_ROWS)))
        with _on(out.device):
            runs = _to_device(table, out.device)
            columns = column_weights_on(out.device)
            _kernel()[grid](runs, columns, out, WIDTH=width, ALIGNED=aligned, ROWS=TILE_ROWS, **OPTIONS)


def _table(job: Job, width: int) -> np.ndarray:
    """One line per run: its address, its lanes, the global position of its first lane, the row of the result."""
    table = np.empty((len(job.bases), 4), dtype=np.int64)
    table[:, 0] = job.lanes.data_ptr() + np.arange(len(job.bases)) * (job.run * width)
    table[:, 1] = job.run
    table[:, 2] = job.bases
    table[:, 3] = job.row
    return table


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _to_device(table: np.ndarray, device: torch.device) -> Tensor:
    host = torch.from_numpy(table)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
