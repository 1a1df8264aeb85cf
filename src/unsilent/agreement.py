"""The one small vector on which all ranks agree before anyone acts.

It has a fixed size of 128 int64 (1 KB), whatever the model and the number of ranks, and travels in one all-reduce with
MAX. A value and its bitwise complement ride side by side, so that one MAX gives the maximum and the minimum: equal
means that all ranks hold the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from unsilent.errors import UsageError

WORDS = 128
_MAGIC = 0x756E73696C656E74 & 0x7FFFFFFFFFFFFFFF
_HEADER = 4  # magic, step, phase, length of the declared part; each with its complement


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a check puts into the vector: ``flags`` (any rank raises it) and ``digests`` (must be equal everywhere)."""

    flags: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks now know: which flags at least one rank raised, which digests differ between ranks."""

    flags: frozenset[tuple[str, str]]
    differing: frozenset[tuple[str, str]]

    def raised(self, check: str, flag: str) -> bool:
        return (check, flag) in self.flags

    def differs(self, check: str, digest: str) -> bool:
        return (check, digest) in self.differing


@dataclass
class Agreement:
    """Lays the declared parts out in the vector; made once, the same on all ranks."""

    declarations: Mapping[str, Declaration]
    _flags: list[tuple[str, str]] = field(init=False)
    _digests: list[tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self._flags = [(name, flag) for name, d in self.declarations.items() for flag in d.flags]
        self._digests = [(name, digest) for name, d in self.declarations.items() for digest in d.digests]
        if self.words > WORDS:
            raise UsageError(f"the checks declare {self.words} words for the agreed vector, and it holds {WORDS}")

    @property
    def words(self) -> int:
        return 2 * _HEADER + len(self._flags) + 2 * len(self._digests)

    def pack(
        self,
        *,
        step: int,
        phase: int,
        flags: Mapping[tuple[str, str], bool],
        digests: Mapping[tuple[str, str], int],
    ) -> torch.Tensor:
        """The vector of this rank, int64[128]; absent flags are down, absent digests are 0."""
        header = [_MAGIC, step, phase, self.words]
        values = [digests.get(key, 0) for key in self._digests]
        words = [w for value in header for w in (value, ~value)]
        words += [int(flags.get(key, False)) for key in self._flags]
        words += [w for value in values for w in (value, ~value)]
        return torch.tensor(words + [0] * (WORDS - len(words)), dtype=torch.int64)

    def unpack(self, vector: torch.Tensor) -> Agreed:
        """Read the reduced vector.

        Raises:
            RuntimeError: the ranks did not send the same header: they are not in the same place of the same step.
        """
        words: list[int] = vector.tolist()
        for i, name in enumerate(("protocol", "step", "phase", "length")):
            high, low = words[2 * i], ~words[2 * i + 1]
            if high != low:
                raise RuntimeError(f"the ranks are not in the same place: {name} is {low} on one and {high} on another")
        at = 2 * _HEADER
        flags = frozenset(key for i, key in enumerate(self._flags) if words[at + i])
        at += len(self._flags)
        differing = frozenset(key for i, key in enumerate(self._digests) if words[at + 2 * i] != ~words[at + 2 * i + 1])
        return Agreed(flags=flags, differing=differing)
