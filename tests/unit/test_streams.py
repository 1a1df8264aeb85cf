"""Recovery on several CUDA streams: the order of waits, with a fake of torch.cuda; the values, without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from unsilent.determinism import Kernels
from unsilent.generators import read_generators
from unsilent.replay import MicroBatch, Replayer, Work
from unsilent.streams import Streams


class FakeCuda:
    """Notes who waits for whom; stream 0 is the current one outside of any turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.now = self.main = self.stream("main")
        made = iter(range(9))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.stream(f"side {next(made)}"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "stream", self.inside)

    def stream(self, name: str) -> Any:
        log = self.log

        class Stream:
            def wait_stream(self, other: Any) -> None:
                log.append(f"{self} waits for {other}")

            def __str__(self) -> str:
                return name

        return Stream()

    @contextlib.contextmanager
    def inside(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


def test_each_piece_comes_after_what_was_asked_for_and_everything_after_the_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    streams = Streams(2, torch.device("cuda"))
    for piece in range(3):
        with streams.turn(piece):
            cuda.log.append(f"piece {piece} on {cuda.now}")

    class Result:
        def record_stream(self, stream: Any) -> None:
            cuda.log.append(f"kept for {stream}")

    streams.join([Result()])  # type: ignore[list-item]
    assert cuda.log == [
        "side 0 waits for main", "piece 0 on side 0", "side 1 waits for main", "piece 1 on side 1",
        "side 0 waits for main", "piece 2 on side 0", "main waits for side 0", "main waits for side 1", "kept for main",
    ]  # fmt: skip
    assert cuda.now is cuda.main


def test_without_a_gpu_pieces_run_in_order() -> None:
    streams = Streams(3, torch.device("cpu"))
    with streams.turn(0):
        value = torch.ones(1)
    streams.join([value])


@pytest.mark.parametrize("buffers", [False, True])
def test_micro_batches_that_write_no_buffers_are_spread_and_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, buffers: bool
) -> None:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [torch.nn.Linear(8, 8), torch.nn.Dropout(0.3)]
    model = torch.nn.Sequential(*layers, *([torch.nn.BatchNorm1d(8)] if buffers else []))
    captured = {n: b.clone() for n, b in model.named_buffers()}
    parts = [MicroBatch(torch.randn(4, 8), read_generators(), dict(captured)) for _ in range(3)]
    turns: list[int] = []

    class Noted(Streams):
        @contextlib.contextmanager
        def turn(self, piece: int) -> Iterator[None]:
            turns.append(piece)
            with super().turn(piece):
                yield

    work = Work(step=0, micro_batches=tuple(parts), divide_by=3)
    replayer = Replayer(
        model, lambda m, x: m(x).square().mean(), scale_loss=lambda x: x, scale=1.0, written={},
        streams=Noted(2, torch.device("cpu")),
    )  # fmt: skip
    alone = replayer.run(work, kernels=Kernels.DEFAULT)
    assert turns == []
    spread = replayer.run(work, kernels=Kernels.DEFAULT, spread=True)
    assert turns == ([] if buffers else [0, 1, 2])
    assert alone.reading.digest == spread.reading.digest
