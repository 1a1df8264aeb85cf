"""Scale a gradient bucket, fingerprint its parts and see whether it is finite, in one pass over the memory.

On a CPU each pass over the gradients costs about the same, whatever it computes; three in one are a third of the price.
The bits are those of the three steps one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unsilent.fingerprints import cpu
from unsilent.fingerprints.weights import column_weights


def scale_and_sum(buffer: Tensor, scale: float, lengths: Sequence[int]) -> tuple[Tensor, bool] | None:
    """``buffer.mul_(scale)``, with the sums of its parts and whether all values are finite afterwards.

    Args:
        buffer: flat, contiguous; changed in place.
        lengths: of the parts that lie in it one after the other, in elements.

    Returns:
        (int64[n, 2] as from ``sums_many`` of the parts, finite), or None where there is no such loop (then nothing was
        done): other types than fp32, other devices than the CPU, several threads, or no numba.
    """
    if buffer.dtype != torch.float32 or buffer.device.type != "cpu" or not buffer.is_contiguous():
        return None
    if torch.get_num_threads() > 1 or not cpu.available():
        return None
    from unsilent.fingerprints.cpu_loop import INFINITE, scale_and_add

    out = torch.zeros(len(lengths), 2, dtype=torch.int64)
    totals, values, columns = out.numpy().view(np.uint64), buffer.detach().numpy(), column_weights()
    at, largest = 0, 0
    for row, length in enumerate(lengths):
        part = scale_and_add(values[at : at + length], np.float32(scale), columns, totals, row)
        largest = max(largest, int(part))
        at += length
    return out, largest < INFINITE
