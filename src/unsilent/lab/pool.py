"""A warm pool of gloo ranks on this machine: started once, given many trials, since a spawn per trial costs seconds.

Workers leave by ``os._exit``: gloo with DDP aborts at a normal interpreter exit in about one run of eight.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


@dataclass(frozen=True)
class Failed:
    """A trial that raised on one rank: the error's type, text and traceback."""

    kind: str
    text: str
    trace: str


class PoolDied(RuntimeError):
    """A worker ended or did not answer in time; the pool must be restarted."""


class RankPool:
    """Ranks 0 … size-1 of one process group, each a process that runs functions it is given.

    Args:
        size: number of ranks.
        threads: torch threads of each rank.
        environment: variables for all ranks, or ``{rank: {name: value}}`` for some, set before torch is imported.
    """

    def __init__(self, size: int, *, threads: int = 1, environment: dict[int, dict[str, str]] | None = None) -> None:
        self.size, self.threads, self.environment = size, threads, environment or {}
        self.restarts = -1
        self._workers: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self.restart()

    @property
    def pids(self) -> list[int]:
        return [worker.pid or 0 for worker in self._workers]

    def restart(self) -> None:
        """End the workers, if any, and start new ones in a new process group."""
        self.close()
        self.restarts += 1
        context: Any = multiprocessing.get_context("spawn")
        if not self.environment:
            # Forked from a process that has imported torch and done nothing else: seconds less for each rank. Variables
            # that must be set before that import need new interpreters.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch", "torch.distributed", "torch.nn.parallel", "unsilent.guard"])
        port = _free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, port, self.threads, self.environment.get(rank, {}), theirs)
            worker = context.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        self._collect(time.monotonic() + 120.0)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``function(rank, size, *arguments)`` on every rank and return the results in rank order.

        ``function`` must be importable by the workers. A rank on which it raised gives :class:`Failed`.

        Raises:
            PoolDied: a worker ended or did not answer; the pool has been restarted.
        """
        message = pickle.dumps((function, arguments))
        try:
            self._send(message)
            return self._collect(time.monotonic() + timeout)
        except PoolDied:
            self.restart()
            raise

    def results(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
        """Like :meth:`run`, but raises where a rank failed."""
        answers = self.run(function, *arguments, timeout=timeout)
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failed):
                self.restart()
                raise RuntimeError(f"rank {rank}: {answer.kind}: {answer.text}\n{answer.trace}")
        return answers

    def run_until_death(self, function: Callable[..., Any], *arguments: Any, timeout: float = 90.0) -> list[Any]:
        """Run a trial in which ranks die or leave: None for a rank that ended without an answer. Restarts the pool."""
        message = pickle.dumps((function, arguments))
        try:
            self._send(message)
        except PoolDied:
            self.restart()
            raise
        answers: list[Any] = [None] * self.size
        open_ranks = set(range(self.size))
        deadline = time.monotonic() + timeout
        while open_ranks and time.monotonic() < deadline:
            for rank in sorted(open_ranks):
                try:
                    if self._pipes[rank].poll(0.02):
                        answers[rank] = pickle.loads(self._pipes[rank].recv_bytes())  # noqa: S301 - our own worker
                        open_ranks.discard(rank)
                except (EOFError, OSError):
                    open_ranks.discard(rank)
        self.restart()
        if open_ranks:
            raise PoolDied(f"ranks {sorted(open_ranks)} did not end within {timeout:.0f} s")
        return answers

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join(10.0)
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _send(self, message: bytes) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError as error:
                raise PoolDied(f"rank {rank} ended before it was given work: {self._workers[rank].exitcode}") from error

    def _collect(self, deadline: float) -> list[Any]:
        answers: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise PoolDied(f"rank {rank} did not answer in time")
                answers.append(pickle.loads(pipe.recv_bytes()))  # noqa: S301 - from our own worker
            except (EOFError, OSError) as error:
                raise PoolDied(f"rank {rank} ended: {self._workers[rank].exitcode}") from error
        return answers


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _work(rank: int, size: int, port: int, threads: int, environment: dict[str, str], pipe: Connection) -> None:
    """One worker: join the group, then run what comes through the pipe until it closes."""
    os.environ.update(environment)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    faulthandler.enable()  # a rank that ends in native code says where it was
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=120))
    # Shorter than the tests' own bound, longer than any trial: a hang shows as an error, with a name.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=30))
    pipe.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            _leave()
            return
        try:
            function, arguments = pickle.loads(message)  # noqa: S301 - from our own parent
            answer = function(rank, size, *arguments)
            data = pickle.dumps(answer)
        except BaseException as error:  # noqa: BLE001 - the parent decides what a failure means
            data = pickle.dumps(Failed(type(error).__name__, str(error), traceback.format_exc()))
        pipe.send_bytes(data)


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
