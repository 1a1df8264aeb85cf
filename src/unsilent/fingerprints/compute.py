"""Sums of tensors, shards and lists of tensors, and one digest of many: which implementation runs is decided here."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from unsilent.errors import UsageError
from unsilent.fingerprints import cpu, cuda, reference
from unsilent.fingerprints.lanes import Job, check, in_order, jobs
from unsilent.fingerprints.weights import mix


def sums(tensor: Tensor, *, offset: int = 0) -> Tensor:
    """The two sums of a tensor: int64[2] on its device, (plain, weighted), each modulo 2^64 in two's complement.

    Args:
        tensor: any strided tensor of any dtype up to 64 bits per real number. It is read, never changed.
        offset: position of its first element in a larger flat tensor, so that
            ``sums(full) == sums(a) + sums(b, offset=a.numel())`` where ``full`` is ``a`` followed by ``b``.

    Raises:
        UsageError: the tensor is sparse, quantized, nested, distributed or on the meta device, or offset < 0.
    """
    check(tensor)
    return _sums_of_block(tensor, tensor.shape, [0] * tensor.ndim, _non_negative("offset", offset))


def sums_of_shard(local: Tensor, *, global_shape: Sequence[int], start: Sequence[int]) -> Tensor:
    """The part of ``sums(full)`` that the block ``full[start[0]:start[0] + local.shape[0], ...]`` contributes.

    The blocks of any partition, uneven and empty ones included, add up to ``sums(full)`` exactly; replicas count once.

    Args:
        local: the block, shape at most ``global_shape`` in every dimension.
        global_shape: shape of the whole tensor.
        start: index of the block's first element in each dimension.

    Raises:
        UsageError: as for ``sums``, or the block does not lie inside the whole tensor.
    """
    check(local)
    whole = [_non_negative("global_shape", size) for size in global_shape]
    at = [_non_negative("start", index) for index in start]
    if not local.ndim == len(whole) == len(at):
        raise UsageError(f"local has {local.ndim} dimensions, global_shape {len(whole)} and start {len(at)}")
    # An empty shard counts nothing wherever it is said to start, even past the end.
    if local.numel() and any(a + n > g for a, n, g in zip(at, local.shape, whole, strict=True)):
        raise UsageError(f"a block {tuple(local.shape)} at {tuple(at)} does not fit in {tuple(whole)}")
    return _sums_of_block(local, whole, at, 0)


def sums_many(tensors: Sequence[Tensor]) -> Tensor:
    """``sums`` of each tensor: int64[n, 2] on the tensors' device (on the CPU if there are none).

    On CUDA it takes a few launches for all contiguous tensors together and does not wait for the device. Where tensors
    lie on several devices (optimizers keep step counters on the CPU), the rows are on the first that is not the CPU.

    Raises:
        UsageError: as for ``sums``.
    """
    for tensor in tensors:
        check(tensor)
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    if len(devices) > 1:
        return _sums_on_several(tensors, devices)
    device = devices[0] if devices else torch.device("cpu")
    with torch.no_grad():
        out = torch.zeros(len(tensors), 2, dtype=torch.int64, device=device)
        in_place: list[Job] = []
        for row, tensor in enumerate(tensors):
            work = jobs(tensor, tensor.shape, [0] * tensor.ndim, 0, row)
            if in_order(tensor):
                in_place.extend(work)
            else:
                # One at a time, so that only one copied piece is alive.
                for job in work:
                    _adder(device)(out, [job])
        if in_place:
            _adder(device)(out, in_place)
    return out


def _sums_on_several(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> Tensor:
    """Each device's tensors together, the rows brought to one device and back into order."""
    home = next((device for device in devices if device.type != "cpu"), devices[0])
    out = torch.zeros(len(tensors), 2, dtype=torch.int64, device=home)
    for device in devices:
        places = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        rows = sums_many([tensors[i] for i in places])
        for i, row in zip(places, rows.to(home, non_blocking=True), strict=True):
            out[i] = row
    return out


def combine(rows: Tensor) -> Tensor:
    """One digest of many rows of sums: int64[], on the rows' device, without waiting for it.

    It depends on every bit, on the order and on the number of rows. It is not linear: rows of shards must be added
    up before. The sign bit is cleared, so digests are in [0, 2^63) and can be compared between ranks by MAX and MIN
    reductions, with -1 free to mean "none".

    Args:
        rows: int64[n, 2], as from ``sums_many``.

    Raises:
        UsageError: the shape or dtype is another.
    """
    if rows.ndim != 2 or rows.shape[1] != 2 or rows.dtype != torch.int64:
        raise UsageError(f"combine needs int64[n, 2], not {rows.dtype} of shape {tuple(rows.shape)}")
    with torch.no_grad():
        plain, weighted = sums(rows).unbind()
        return mix(mix(mix(plain + rows.shape[0]) + weighted)) & ((1 << 63) - 1)


def _sums_of_block(tensor: Tensor, global_shape: Sequence[int], start: Sequence[int], offset: int) -> Tensor:
    with torch.no_grad():
        out = torch.zeros(1, 2, dtype=torch.int64, device=tensor.device)
        add = _adder(tensor.device)
        for job in jobs(tensor, global_shape, start, offset, 0):
            add(out, [job])
    return out[0]


@functools.cache
def _adder(device: torch.device) -> Callable[[Tensor, Iterable[Job]], None]:
    """The fastest implementation that this device and this installation have."""
    if device.type == "cpu" and cpu.available():
        return cpu.add
    if device.type == "cuda" and cuda.available():
        return cuda.add
    return reference.add


def _non_negative(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} must be made of whole numbers, not {value!r}") from None
    if number < 0:
        raise UsageError(f"{name} must not be negative, but is {number}")
    return number
