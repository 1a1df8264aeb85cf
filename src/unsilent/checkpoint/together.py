"""All ranks learn of a failure on one of them before any of them goes on; the same code without a group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from unsilent.errors import CheckpointError, UsageError

T = TypeVar("T")


class FailedOn(Exception):
    """An error that this rank was told of and that happened on another one."""

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(str(error))
        self.rank = rank
        self.error = error


@dataclass(frozen=True)
class _Failure:
    # Text and numbers only: an exception of the user's need not survive a journey by pickle.
    rank: int
    kind: str
    reason: str
    errno: int | None = None

    @staticmethod
    def of(error: BaseException, rank: int) -> _Failure:
        if isinstance(error, FailedOn):
            return _Failure.of(error.error, error.rank)
        if isinstance(error, UsageError):
            return _Failure(rank, "usage", str(error))
        if isinstance(error, OSError):
            reason = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
            return _Failure(rank, "os", reason, error.errno)
        reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return _Failure(rank, "checkpoint", reason)

    def error(self, doing: str) -> Exception:
        if self.kind == "usage":
            return UsageError(self.reason)
        message = f"rank {self.rank} could not {doing}: {self.reason}"
        if self.kind == "os":
            return OSError(self.errno, message) if self.errno is not None else OSError(message)
        return CheckpointError(message)


class Together:
    """The ranks of one group. Every method is called by all of them, in the same order.

    Raises:
        UsageError: there is more than one rank, and no group.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world_size: int) -> None:
        if group is None and world_size > 1:
            raise UsageError(f"a checkpoint store for {world_size} ranks needs their process group: pass group=")
        self.group = group
        self.rank = rank
        self.world_size = world_size

    def gather(self, value: T) -> list[T]:
        """What each rank gave, in the order of ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def unlike(self, value: T) -> list[T] | None:
        """What each rank gave where they differ, None where all gave the same; only then do the values travel.

        Args:
            value: made of numbers, text, tuples and lists.
        """
        digest = hashlib.sha256(repr(value).encode()).digest()
        return None if len(set(self.gather(digest))) == 1 else self.gather(value)

    def add(self, rows: torch.Tensor) -> None:
        """Add up the ranks' rows (int64, on the host), in place, modulo 2^64."""
        if self.group is not None:
            dist.all_reduce(rows, group=self.group)

    def numbers(self, ranks: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Global ranks as this group counts them, in order; None, which stands for all, stays so.

        Raises:
            UsageError: one of them is not in the group.
        """
        if ranks is None:
            return None
        if self.group is None:
            return (self.rank,)
        try:
            return tuple(sorted(dist.get_group_rank(self.group, rank) for rank in ranks))
        except ValueError as error:
            raise UsageError(f"a tensor lies on ranks {list(ranks)}, which are not all in the store's group") from error

    def each(self, doing: str, work: Callable[[], T]) -> list[T]:
        """Every rank does its work; all get all results, or all raise the failure of the lowest rank that failed.

        Raises:
            UsageError, OSError, CheckpointError: as the work did, naming the rank ("rank 2 could not ...").
        """
        result, cause = self._try(work)
        results = self.gather(result)
        self._raise_first(doing, results, cause)
        return cast("list[T]", results)

    def first(self, doing: str, work: Callable[[], T]) -> T:
        """Rank 0 does the work; all get its result, or all raise its failure.

        Raises:
            UsageError, OSError, CheckpointError: as the work did.
        """
        result, cause = self._try(work) if self.rank == 0 else (None, None)
        box: list[Any] = [result]
        if self.group is not None:
            dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, 0), group=self.group)
        self._raise_first(doing, box, cause)
        return box[0]

    # CheckpointException is a BaseException, so it is named here.
    def _try(self, work: Callable[[], T]) -> tuple[T | _Failure, BaseException | None]:
        try:
            return work(), None
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - told to all ranks, which raise it
            return _Failure.of(error, self.rank), error

    def _raise_first(self, doing: str, results: list[Any], cause: BaseException | None) -> None:
        for result in results:
            if isinstance(result, _Failure):
                raise result.error(doing) from cause
