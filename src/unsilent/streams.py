"""Independent pieces of a recovery on several CUDA streams, so that small kernels of one fill the gaps of another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


class Streams:
    """``count`` side streams of a CUDA device, taken in turn; elsewhere pieces simply run one after the other.

    Host code still runs in order: only the device's work overlaps, so that generators and module state are set and read
    in the same order as without streams.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []

    @contextlib.contextmanager
    def turn(self, piece: int) -> Iterator[None]:
        """Run the device's work of this piece on its stream, after all that was asked for before."""
        if not self._streams:
            yield
            return
        stream = self._streams[piece % len(self._streams)]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def join(self, results: Iterable[torch.Tensor]) -> None:
        """The current stream waits for all pieces; ``results`` were made on side streams and are used on it from now on."""
        if not self._streams:
            return
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            current.wait_stream(stream)
        for tensor in results:
            tensor.record_stream(current)
