"""From a tensor to lanes: flat unsigned integers of at most 32 bits, with the global positions at which they count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unsilent.errors import UsageError

# What is copied at a time from a tensor whose memory is not in row-major order (elements).
COPIED_ON_CPU = 1 << 20
COPIED_ON_DEVICE = 1 << 24

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


class Job(NamedTuple):
    """Lanes to add to one row of the result.

    ``lanes`` (uint8, uint16 or uint32, flat, contiguous) are runs of ``run`` lanes; run r counts from global lane
    position ``bases[r]`` (int64, on the host) onwards.
    """

    lanes: Tensor
    run: int
    bases: np.ndarray
    row: int


def check(tensor: Tensor) -> None:
    """Raise UsageError where a tensor has no dense bits of its own to read."""
    if not isinstance(tensor, Tensor):
        raise UsageError(f"a fingerprint needs a torch.Tensor, not {type(tensor).__name__}")
    if tensor.is_nested:
        problem = "nested; fingerprint each of tensor.unbind()"
    elif tensor.layout is not torch.strided:
        problem = f"of layout {tensor.layout}; fingerprint its indices and its values, or tensor.to_dense()"
    elif tensor.is_quantized:
        problem = "quantized; fingerprint tensor.int_repr() and its scales"
    elif tensor.is_meta:
        problem = "on the meta device and holds no data"
    elif hasattr(tensor, "to_local"):
        problem = "distributed; fingerprint tensor.to_local() with sums_of_shard"
    else:
        return
    raise UsageError(f"cannot fingerprint this tensor: it is {problem}")


def in_order(tensor: Tensor) -> bool:
    """Whether the bits in memory are the tensor's own, in row-major order, so that nothing need be copied."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def jobs(tensor: Tensor, global_shape: Sequence[int], start: Sequence[int], offset: int, row: int) -> Iterator[Job]:
    """Jobs that together cover ``tensor`` as the block at ``start`` of a tensor of ``global_shape``, at ``offset``.

    All of start, shape and offset count elements. A contiguous tensor that is one run is read where it lies; others
    are cut in pieces, so that neither a copy nor the list of runs grows with the tensor.
    """
    if tensor.numel() == 0:
        return
    run, bases = _runs(tensor.shape, global_shape, start, offset)
    limit = COPIED_ON_CPU if tensor.device.type == "cpu" else COPIED_ON_DEVICE
    if tensor.numel() <= limit or (in_order(tensor) and run == tensor.numel()):
        lanes, per_element = _lanes(tensor)
        yield Job(lanes, run * per_element, bases() * per_element, row)
        return
    # Cut along the first dimension that is longer than 1, into as few pieces as the limit allows.
    dim = next(d for d, size in enumerate(tensor.shape) if size > 1)
    step = max(1, limit * tensor.shape[dim] // tensor.numel())
    for at in range(0, tensor.shape[dim], step):
        piece = tensor.narrow(dim, at, min(step, tensor.shape[dim] - at))
        piece_start = [s + at if d == dim else s for d, s in enumerate(start)]
        yield from jobs(piece, global_shape, piece_start, offset, row)


def _lanes(tensor: Tensor) -> tuple[Tensor, int]:
    """The lanes of all elements in row-major order, and how many lanes an element has."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    # A single element may have any stride and still count as contiguous, but view(dtype) wants 1.
    flat = flat.as_strided((flat.numel(),), (1,))
    lanes = flat.view(_UNSIGNED[min(flat.element_size(), 4)])
    return lanes, lanes.numel() // tensor.numel()


def _runs(
    shape: Sequence[int], global_shape: Sequence[int], start: Sequence[int], offset: int
) -> tuple[int, Callable[[], np.ndarray]]:
    """The length of the block's runs of consecutive global positions, and a function that lists their first ones."""
    # Full dimensions at the end, and the one before them, are consecutive.
    outer = len(shape)
    run = 1
    while outer:
        outer -= 1
        run *= shape[outer]
        if shape[outer] != global_shape[outer]:
            break

    def bases() -> np.ndarray:
        strides = [math.prod(global_shape[d + 1 :]) for d in range(len(shape))]
        first = offset + sum(s * stride for s, stride in zip(start, strides, strict=True))
        positions = np.full(1, first, dtype=np.int64)
        for size, stride in zip(shape[:outer], strides[:outer], strict=True):
            positions = (positions[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return positions

    return run, bases
