"""The fingerprint in plain torch operations: for any device, without numba or Triton, and what the others must equal.

It works in chunks that stay in the processor's cache, so the int64 copies that torch needs are never large.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from unsilent.fingerprint.lanes import Job
from unsilent.fingerprint.weights import ROW, column_weights_on, row_weights

CHUNK_ON_CPU = 1 << 17
CHUNK_ON_DEVICE = 1 << 22
# Shorter runs are cheaper with one weight looked up per lane than with one loop turn per run.
SHORT_RUN = 1 << 12


def add(out: Tensor, work: Iterable[Job]) -> None:
    """Add the two sums of each job's lanes to its row of ``out`` (int64[n, 2], same device)."""
    for job in work:
        if len(job.bases) == 1 or job.run >= SHORT_RUN:
            for number, base in enumerate(job.bases.tolist()):
                _add_run(out[job.row], job.lanes[number * job.run : (number + 1) * job.run], base)
        else:
            _add_short_runs(out[job.row], job)


def _chunk(lanes: Tensor) -> int:
    return CHUNK_ON_CPU if lanes.device.type == "cpu" else CHUNK_ON_DEVICE


def _add_run(out: Tensor, lanes: Tensor, base: int) -> None:
    """One run: a part of a row, whole rows, a part of a row."""
    # One buffer for all chunks: allocating it anew for each would cost as much as the sums.
    buffer = torch.empty(min(_chunk(lanes), lanes.numel()), dtype=torch.int64, device=lanes.device)
    at = 0
    while at < lanes.numel():
        row, column = divmod(base + at, ROW)
        left = lanes.numel() - at
        if column or left < ROW:
            size, rows = min(ROW - column, left), 1
        else:
            size = min(buffer.numel(), left) // ROW * ROW
            rows = size // ROW
        words = buffer[:size].copy_(lanes[at : at + size])
        out[0].add_(words.sum())
        by_row = words.view(rows, -1)
        by_row.mul_(column_weights_on(lanes.device)[column : column + by_row.shape[1]])
        numbers = torch.arange(row, row + rows, dtype=torch.int64, device=lanes.device)
        out[1].add_(by_row.sum(1).mul_(row_weights(numbers)).sum())
        at += size


def _add_short_runs(out: Tensor, job: Job) -> None:
    device = job.lanes.device
    bases = torch.from_numpy(job.bases).to(device)
    for at in range(0, job.lanes.numel(), _chunk(job.lanes)):
        words = job.lanes[at : at + _chunk(job.lanes)].to(torch.int64)
        index = torch.arange(at, at + words.numel(), dtype=torch.int64, device=device)
        position = bases[index // job.run] + index % job.run
        weights = column_weights_on(device)[position % ROW] * row_weights(position // ROW)
        out[0] += words.sum()
        out[1] += (words * weights).sum()
