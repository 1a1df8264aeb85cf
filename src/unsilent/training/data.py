"""Byte-level text whose every batch can be asked for again.

The order of samples is one endless sequence that depends on the text, the sequence length and the seed only: epoch
after epoch, all windows of the text in a seeded order. Step t takes the next ``global_batch`` of them, and the ranks
share those out in order. So a run on another number of ranks sees the same samples in the same steps.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from unsilent.errors import UsageError

Bytes = npt.NDArray[np.uint8]

DEFAULT_LIMIT = 8_000_000
"""Bytes of the standard library that are read by default: enough for all that a demonstration trains."""
HELD_OUT = 0.05
_NOT_TEXT_OF_THE_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def standard_library_text(limit: int = DEFAULT_LIMIT) -> bytes:
    """Sources of this Python's own standard library, one after another."""
    parts: list[bytes] = []
    size = 0
    for path in standard_library_files().values():
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    return b"".join(parts)[:limit]


def standard_library_files() -> dict[str, Path]:
    """The files of it by their relative paths, in the order of those; no tests, no installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return dict(sorted((path.relative_to(root).as_posix(), path) for path in _sources(root)))


def file_text(path: str | Path) -> bytes:
    """The bytes of a file."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the training text {path}: {error.strerror or error}") from error


class TextData:
    """Batches of bytes for each step and rank, and one batch that is never trained on.

    Args:
        text: the bytes; the last twentieth is held out for evaluation.
        sequence_length: tokens that the model reads per sample; a sample has one more, the last target.
        global_batch: samples per step over all ranks.
        world_size: ranks that share them; where it does not divide ``global_batch``, the first ranks get one more each.
    """

    def __init__(
        self, text: bytes, *, sequence_length: int, global_batch: int, world_size: int = 1, seed: int = 0
    ) -> None:
        if sequence_length < 1 or global_batch < 1 or world_size < 1 or seed < 0:
            raise UsageError("sequence_length, global_batch and world_size must be at least 1, and the seed at least 0")
        if global_batch < world_size:
            raise UsageError(f"a batch of {global_batch} samples leaves some of the {world_size} ranks without any")
        # copy(): np.frombuffer gives a read-only view, and torch warns of those.
        everything = np.frombuffer(text, dtype=np.uint8).copy()
        cut = len(everything) - max(int(len(everything) * HELD_OUT), sequence_length + 1)
        if cut < sequence_length + 1:
            raise UsageError(
                f"the text has {len(text)} bytes, but samples of {sequence_length} tokens need at least "
                f"{2 * (sequence_length + 1)}: take a longer text or shorter samples"
            )
        self._training: Bytes = everything[:cut]
        self._held_out: Bytes = everything[cut:]
        self.digest = hashlib.sha256(text).hexdigest()
        self.sequence_length = sequence_length
        self.global_batch = global_batch
        self.world_size = world_size
        self.seed = seed
        self.windows = (cut - 1) // sequence_length
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def batch(self, step: int, rank: int = 0) -> torch.Tensor:
        """The samples of ``rank`` in ``step``: int64, shape (samples, sequence_length + 1)."""
        if step < 0 or not 0 <= rank < self.world_size:
            raise UsageError(f"there is no batch for step {step}, rank {rank} of {self.world_size}")
        first = step * self.global_batch + sum(self.count(before) for before in range(rank))
        starts = [self._window(n) * self.sequence_length for n in range(first, first + self.count(rank))]
        return self._samples(self._training, starts)

    def count(self, rank: int) -> int:
        """How many samples of each step are this rank's."""
        share, extra = divmod(self.global_batch, self.world_size)
        return share + (rank < extra)

    def divides_into(self, micro_batch: int) -> bool:
        """Whether all ranks have the same number of micro-batches of this size, and nothing is left over."""
        return self.global_batch % (self.world_size * min(micro_batch, self.count(0))) == 0

    def evaluation_batch(self, samples: int = 32) -> torch.Tensor:
        """The same samples at every call and on every rank, spread over the held-out part."""
        last = len(self._held_out) - self.sequence_length - 1
        starts = np.unique(np.linspace(0, last, samples, dtype=np.int64))
        return self._samples(self._held_out, starts.tolist())

    def _window(self, n: int) -> int:
        """Which window of the training text the n-th sample of the run is."""
        epoch, i = divmod(n, self.windows)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.windows)
            self._epoch = epoch
        return int(self._order[i])

    def _samples(self, text: Bytes, starts: list[int]) -> torch.Tensor:
        rows = [text[start : start + self.sequence_length + 1] for start in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def _sources(root: Path) -> Iterator[Path]:
    """Walks by hand: rglob would descend into site-packages, which may hold a hundred thousand files."""
    for path in root.iterdir():
        if path.name in _NOT_TEXT_OF_THE_LIBRARY:
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _sources(path)
        elif path.suffix == ".py" and path.is_file():
            yield path
