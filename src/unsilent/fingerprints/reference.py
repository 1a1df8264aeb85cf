"""The fingerprint in plain torch operations: for any device, without numba or Triton, and what the others must equal.

It works in chunks, so the int64 copies that torch needs are never large.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from unsilent.fingerprints.lanes import Job
from unsilent.fingerprints.weights import ROW, column_weights_on, row_weights

BLOCK_ROWS = 4096
# Rows at a time on a CPU: few enough to stay in the cache, and below the 32,768 elements from which torch splits an
# operation over its threads. Split, each of these short operations would end in a barrier, and where other processes
# use the same cores a barrier can wait for a time slice: 0.04 GB/s was measured.
CHUNK_ROWS_ON_CPU = 24
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


def _chunk_rows(lanes: Tensor) -> int:
    return CHUNK_ROWS_ON_CPU if lanes.device.type == "cpu" else BLOCK_ROWS


def _add_run(out: Tensor, lanes: Tensor, base: int) -> None:
    """One run: a part of a row, whole rows, a part of a row."""
    head = min(-base % ROW, lanes.numel())
    tail = head + (lanes.numel() - head) // ROW * ROW
    _add_part_of_row(out, lanes[:head], base)
    _add_rows(out, lanes[head:tail].view(-1, ROW), (base + head) // ROW)
    _add_part_of_row(out, lanes[tail:], base + tail)


def _add_part_of_row(out: Tensor, lanes: Tensor, base: int) -> None:
    if lanes.numel() == 0:
        return
    row, column = divmod(base, ROW)
    words = lanes.to(torch.int64)
    out[0] += words.sum()
    words *= column_weights_on(lanes.device)[column : column + words.numel()]
    out[1] += words.sum() * row_weights(torch.full((), row, dtype=torch.int64, device=lanes.device))


def _add_rows(out: Tensor, lanes: Tensor, first_row: int) -> None:
    columns = column_weights_on(lanes.device)
    chunk = _chunk_rows(lanes)
    # One buffer for all chunks: allocating it anew for each would cost as much as the sums.
    buffer = torch.empty(min(chunk, len(lanes)), ROW, dtype=torch.int64, device=lanes.device)
    for start in range(0, len(lanes), BLOCK_ROWS):
        block = lanes[start : start + BLOCK_ROWS]
        row = first_row + start
        plain = torch.empty(len(block), dtype=torch.int64, device=lanes.device)
        weighted = torch.empty_like(plain)
        for at in range(0, len(block), chunk):
            part = block[at : at + chunk]
            words = buffer[: len(part)].copy_(part)
            torch.sum(words, 1, out=plain[at : at + chunk])
            torch.sum(words.mul_(columns), 1, out=weighted[at : at + chunk])
        numbers = torch.arange(row, row + len(block), dtype=torch.int64, device=lanes.device)
        out[0] += plain.sum()
        out[1] += weighted.mul_(row_weights(numbers)).sum()


def _add_short_runs(out: Tensor, job: Job) -> None:
    device = job.lanes.device
    bases = torch.from_numpy(job.bases).to(device)
    chunk = _chunk_rows(job.lanes) * ROW
    for at in range(0, job.lanes.numel(), chunk):
        words = job.lanes[at : at + chunk].to(torch.int64)
        index = torch.arange(at, at + words.numel(), dtype=torch.int64, device=device)
        position = bases[index // job.run] + index % job.run
        weights = column_weights_on(device)[position % ROW] * row_weights(position // ROW)
        out[0] += words.sum()
        out[1] += (words * weights).sum()
