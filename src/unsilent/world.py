"""Who takes part: ranks, nodes and devices, our own process group, and the few ways in which ranks talk.

All traffic of the guard runs on a gloo group of its own, started from one thread, so that it can never pair with a
collective of the job. Every message begins with a fixed header (step, tag, length); ranks that are not in the same
place get a clear error instead of each other's numbers.
"""

from __future__ import annotations

import math
import os
import pickle
import queue
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from unsilent.environment import device_name, machine_identity, node_name, read_environment
from unsilent.errors import RankFailure
from unsilent.records import Place
from unsilent.teams import Teams
from unsilent.watcher import Watcher

_HEADER_MAGIC = 0x5D1E


class _Waiter:
    """Waits for collectives in a thread, so that the main thread can watch for failures meanwhile."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Any, threading.Event, list[BaseException]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="unsilent-waiter", daemon=True).start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done, errors = job
            try:
                work.wait()
            except BaseException as error:  # noqa: BLE001 - handed to the main thread, which raises it
                errors.append(error)
            done.set()

    def wait(self, work: Any, watcher: Watcher, patience_s: float) -> None:
        done, errors = threading.Event(), list[BaseException]()
        self._jobs.put((work, done, errors))
        deadline = time.monotonic() + patience_s
        watcher.waiting = True
        try:
            while not done.wait(0.05):
                watcher.raise_if_failed()
                if time.monotonic() > deadline:
                    raise TimeoutError
        finally:
            watcher.waiting = False
        if errors:
            watcher.raise_if_failed()
            raise errors[0]

    def close(self) -> None:
        self._jobs.put(None)


class World:
    """The ranks of one run; works without a process group too, as a world of one.

    Args:
        device: where this rank computes.
        group: the job's (data-parallel) process group, None for the default group.
        node: the name of this host; see :func:`unsilent.environment.node_name`.
        timeout_s: bound on how long a rank may stay blocked once another has failed.
        teams: the ranks that compute one batch together; None where each computes by itself.

    Attributes:
        rank, size: in the job.
        places: where every rank runs; ``places[rank]`` is this one.
        peers: the ranks that do what this one does on other batches, this one among them.
        watcher: tells when another rank has failed.
        patience_s, impatience: after how long a wait for the others raises, and what it says then. Live ranks may take
            their time, so there is no bound unless this rank knows a reason why the others may never come.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None = None,
        node: str | None = None,
        timeout_s: float = 60.0,
        teams: Teams | None = None,
    ) -> None:
        self.device = device
        self.timeout_s = timeout_s
        self.patience_s, self.impatience = math.inf, ""
        self.environment = read_environment(device)
        self.job_group = group
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1
        self.teams = Teams.of_one(self.size) if teams is None else teams
        self.peers = self.teams.peers(self.rank)
        self.group: Any = None
        self._peer_group: Any = None
        store: Any = None
        if self.distributed:
            # Slow is not failed: a live rank may take its time (an evaluation, a slow disk), so this bound is long;
            # the watcher, not this timeout, decides who is gone.
            self.group = dist.new_group(backend="gloo", timeout=timedelta(hours=24))
            self._peer_group = self._new_peer_group()
            number = self.group.group_name
            store = c10d.PrefixStore(f"unsilent/{number}", c10d._get_default_store().clone())  # type: ignore[attr-defined]
        self._waiter = _Waiter() if self.distributed else None
        self.watcher = Watcher(None, rank=self.rank, size=self.size, pids=[], timeout_s=timeout_s)
        mine = (node_name(node), device_name(device), self.environment.digest, machine_identity(), os.getpid())
        try:
            everyone: list[tuple[str, str, str, str, int]] = self.gather(mine, step=0, tag=1)
        except BaseException:
            if self._waiter is not None:
                self._waiter.close()
            raise
        self.places = tuple(
            Place(rank=r, node=n, device=d, environment=e) for r, (n, d, e, _, _) in enumerate(everyone)
        )
        here = mine[3]
        pids = [pid if identity == here else None for (_, _, _, identity, pid) in everyone]
        if self.distributed:
            self.watcher = Watcher(store, rank=self.rank, size=self.size, pids=pids, timeout_s=timeout_s)

    def _new_peer_group(self) -> Any:
        """A group of this rank and its peers; every rank makes those of all positions, in the same order."""
        if self.teams.alone:
            return self.group
        mine = None
        for rank in self.teams.members[0]:
            ranks = list(self.teams.peers(rank))
            group = dist.new_group(ranks, backend="gloo", timeout=timedelta(hours=24))
            mine = group if self.rank in ranks else mine
        return mine

    @property
    def team_places(self) -> tuple[Place, ...]:
        """A place for each team, as those see it who judge audits."""
        return self.teams.places(self.places)

    @property
    def place(self) -> Place:
        return self.places[self.rank]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted({place.node for place in self.places}))

    def reduce_max(self, vector: torch.Tensor) -> torch.Tensor:
        """All-reduce an int64 host vector with MAX, in place; blocks until all ranks came or one failed."""
        if self.size > 1:
            self.wait(dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
        return vector

    def gather(self, value: Any, *, step: int, tag: int) -> list[Any]:
        """Give every rank the values of all ranks, in rank order. ``value`` is anything that pickles."""
        if self.size == 1 or self.group is None:
            return [value]
        data = _to_bytes(value)
        header = torch.tensor([_HEADER_MAGIC, step, tag, data.numel()], dtype=torch.int64)
        headers = [torch.empty_like(header) for _ in range(self.size)]
        self.wait(dist.all_gather(headers, header, group=self.group, async_op=True))
        for rank, other in enumerate(headers):
            self._same_place(header, other, rank)
        longest = max(int(h[3]) for h in headers)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self.wait(dist.all_gather(parts, padded, group=self.group, async_op=True))
        return [_from_bytes(part[: int(h[3])]) for part, h in zip(parts, headers, strict=True)]

    def exchange(
        self, sends: Sequence[tuple[int, Any]], receives: Sequence[int], *, step: int, tag: int
    ) -> dict[int, Any]:
        """Send one value to each rank named and receive one from each; both sides must name each other.

        Returns the received values by rank. A rank named twice in one direction is an error of the caller.
        """
        outgoing = [(to, _to_bytes(value)) for to, value in sends]
        headers_out = [torch.tensor([_HEADER_MAGIC, step, tag, d.numel()], dtype=torch.int64) for _, d in outgoing]
        headers_in = {rank: torch.empty(4, dtype=torch.int64) for rank in receives}
        works = [dist.isend(h, to, group=self.group) for (to, _), h in zip(outgoing, headers_out, strict=True)]
        works += [dist.irecv(h, rank, group=self.group) for rank, h in headers_in.items()]
        self.wait(*works)
        expected = torch.tensor([_HEADER_MAGIC, step, tag, 0], dtype=torch.int64)
        for rank, header in headers_in.items():
            self._same_place(expected, header, rank)
        parts = {rank: torch.empty(int(h[3]), dtype=torch.uint8) for rank, h in headers_in.items()}
        works = [dist.isend(data, to, group=self.group) for to, data in outgoing]
        works += [dist.irecv(part, rank, group=self.group) for rank, part in parts.items()]
        self.wait(*works)
        return {rank: _from_bytes(part) for rank, part in parts.items()}

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor's bits to one rank, which calls :meth:`receive` with a tensor of the same size and dtype."""
        host = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu() if tensor.numel() else None
        if host is not None:
            self.wait(dist.isend(host, to, group=self.group))

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor`` with the bits that ``source`` sends."""
        if tensor.numel() == 0:
            return
        host = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        self.wait(dist.irecv(host, source, group=self.group))
        with torch.no_grad():
            tensor.copy_(host.view(tensor.dtype).view(tensor.shape))

    def scatter(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """Spread the bits of ``values`` on rank ``source`` over its peers: uint8[chunk], in host memory.

        All its peers call it, with tensors of the same size and dtype; what the others hold does not matter.
        """
        size = -(-values.numel() * values.element_size() // len(self.peers))
        chunk = torch.empty(size, dtype=torch.uint8)
        parts = None
        if self.rank == source:
            padded = torch.zeros(size * len(self.peers), dtype=torch.uint8)
            bits = values.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
            padded[: bits.numel()] = bits
            parts = list(padded.chunk(len(self.peers)))
        self.wait(dist.scatter(chunk, parts, src=source, group=self._peer_group, async_op=True))
        return chunk

    def collect(self, chunk: torch.Tensor, values: torch.Tensor, to: int) -> None:
        """The inverse of :meth:`scatter`: overwrite ``values`` on rank ``to`` with the chunks of all its peers."""
        parts = [torch.empty_like(chunk) for _ in self.peers] if self.rank == to else None
        self.wait(dist.gather(chunk, parts, dst=to, group=self._peer_group, async_op=True))
        if parts is not None:
            bits = torch.cat(parts)[: values.numel() * values.element_size()]
            with torch.no_grad():
                values.copy_(bits.view(values.dtype).view(values.shape))

    def reduce_in_job(self, buffer: torch.Tensor) -> None:
        """Sum ``buffer`` over the job's own group, exactly as the job reduces its gradients."""
        if self.size > 1:
            self.wait(dist.all_reduce(buffer, group=self.job_group, async_op=True))

    def job_traffic(self) -> int:
        """How many collectives the job's group has begun so far on this rank."""
        if self.size == 1:
            return 0
        group: Any = self.job_group if self.job_group is not None else dist.group.WORLD
        return int(group._get_sequence_number_for_group())

    def close(self, *, together: bool = True) -> None:
        """Leave. ``together`` (every rank calls it) waits for all, so that no rank takes an early leaver for a loss."""
        if self.watcher.closed:
            return
        self.watcher.close(together=together)
        if together and self.size > 1 and self.watcher.failure is None:
            self.wait(dist.barrier(group=self.group, async_op=True))
            # Seven descriptors and three threads at 3 ranks: a process that makes many guards would run out of them.
            if self._peer_group is not self.group:
                dist.destroy_process_group(self._peer_group)
            dist.destroy_process_group(self.group)
            self.group = self._peer_group = None
        if self._waiter is not None:
            self._waiter.close()

    def wait(self, *works: Any) -> None:
        """Wait for collectives that were begun with ``async_op=True``; raises when another rank has failed meanwhile."""
        self.watcher.raise_if_failed()
        for work in works:
            if work is None:  # this rank is not in the group
                continue
            assert self._waiter is not None
            try:
                self._waiter.wait(work, self.watcher, self.patience_s)
                if self.device.type == "cuda":
                    work.wait()  # it is over: this makes our stream, and not the waiting thread's, come after it
            except RankFailure:
                raise
            except TimeoutError:
                raise RuntimeError(self.impatience) from None
            except Exception:
                # A connection that broke means a peer went away: the watcher finds out which one.
                if self.watcher.wait_for_failure(10.0) is not None:
                    self.watcher.raise_if_failed()
                raise

    def _same_place(self, mine: torch.Tensor, other: torch.Tensor, rank: int) -> None:
        if mine[:3].tolist() != other[:3].tolist():
            raise RuntimeError(
                f"rank {self.rank} is at step {int(mine[1])}, message {int(mine[2])}, but rank {rank} is at step "
                f"{int(other[1])}, message {int(other[2])}"
            )


def _to_bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())  # noqa: S301 - from a rank of the same job, as with all_gather_object
