"""Check ``replicas``: what all ranks must hold alike, they hold alike, bit for bit.

Weights, optimizer state, declared buffers and the reduced gradient are read before the update, so that a value that
was wrong when this step used it costs only this step. Step, learning rate and scaler are compared in every step: they
are compared first, since a difference there is software and explains all others.

Cost. Time: on a step of the vote, one pass over weights, optimizer state, declared buffers and reduced gradients; on
every step a hash of a few numbers on the host; on rank 0, after a clean vote, a line of the log. Memory: 16 bytes per
tensor. Traffic: none beyond the agreed vector, in which five digests ride; on an alarm, the fingerprints of all tensors
(16 bytes and a name each) from every rank.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unsilent.agreement import Agreed, Declaration
from unsilent.checks.protocol import Coverage, Moment
from unsilent.fingerprints import combine, sums_many
from unsilent.inventory import Entry, Inventory
from unsilent.records import CounterEvidence, Site, VoteEvidence
from unsilent.reduction import Bucket

_MASK = 0x7FFFFFFFFFFFFFFF


@dataclass(frozen=True)
class _Table:
    """The fingerprints of one site: a row for each entry."""

    names: tuple[str, ...]
    rows: torch.Tensor

    def digest(self) -> torch.Tensor:
        """One int64 on the device over names and rows."""
        names = zlib.crc32("\n".join(self.names).encode())
        return combine(self.rows) ^ names if self.names else torch.zeros((), dtype=torch.int64)


class Replicas:
    """See the module's text.

    Args:
        inventory: of the inner module and the optimizer.
        counters: gives the values that must be equal, by name.
        period: compare tensors every so many steps, and whenever forced.
    """

    name = "replicas"
    sites: tuple[Site, ...] = (Site.WEIGHTS, Site.OPTIMIZER_STATE, Site.REDUCTION, Site.OPTIMIZER)

    def __init__(
        self, inventory: Inventory, counters: Callable[[], dict[str, str]], *, period: int, reduces: bool
    ) -> None:
        self.period = period
        self._inventory, self._counters, self._reduces = inventory, counters, reduces
        self._tables: dict[str, _Table] = {}
        self._values: dict[str, str] = {}

    def coverage(self) -> tuple[Coverage, ...]:
        when = "every step" if self.period == 1 else f"every {self.period} steps, when saving, at the end"
        counters = Coverage(
            site="optimizer", check=self.name, how="step, learning rate, other settings and loss scale equal on all ranks",
            when="every step", blind="settings that are wrong on all ranks alike, and what the update computes",
        )  # fmt: skip
        if not self.period:  # no votes: the counters are compared all the same
            return (counters,)
        return (
            Coverage(
                site="weights", check=self.name, how="bitwise vote over all ranks", when=when,
                blind="the same error on a majority; with 2 ranks nobody is named",
            ),
            Coverage(
                site="optimizer_state", check=self.name, how="bitwise vote over all ranks", when=when,
                blind="the same error on a majority; with 2 ranks nobody is named",
            ),
            Coverage(
                site="reduction", check=self.name, how="bitwise vote over the reduced gradients", when=when,
                blind="an error inside the reduction that reaches all ranks alike",
            ),
            counters,
        )  # fmt: skip

    def declares(self) -> Declaration:
        return Declaration(digests=("counters", "weights", "optimizer_state", "gradient", "buffers"))

    def wants(self, step: int, micro_batch: int) -> frozenset[str]:
        return frozenset()

    def begin(self, moment: Moment) -> None:
        self._tables = {}
        self._values = {}

    def before_reduction(self, bucket: Bucket) -> None:
        return

    def before_update(self, moment: Moment) -> None:
        self._values = self._counters()
        if self.name in moment.due:
            self.read(gradients=self._reduces)

    def read(self, *, gradients: bool) -> None:
        """Take the fingerprints of everything that must be equal."""
        self._values = self._counters()
        buffers = [e for e in self._inventory.buffers() if e.replicated]
        self._tables = {
            "weights": _table(self._inventory.weights()),
            "optimizer_state": _table(self._inventory.optimizer_state()),
            "gradient": _table(self._inventory.gradients() if gradients else []),
            "buffers": _table(buffers),
        }

    def rows(self) -> dict[str, torch.Tensor]:
        """What the last vote of this step has read of weights and optimizer state: the sums, int64[2], by name."""
        tables = [self._tables[site] for site in ("weights", "optimizer_state") if site in self._tables]
        return {name: row for table in tables for name, row in zip(table.names, table.rows, strict=True)}

    def fingerprints(self) -> dict[str, str | None]:
        """What was read last, a digest of 16 hex digits for each site; None where nothing was read. It waits for the device.

        They do not depend on the order of the tensors: an optimizer that was loaded may list its state otherwise.
        """
        found: dict[str, str | None] = {}
        for site, table in self._tables.items():
            order = sorted(range(len(table.names)), key=table.names.__getitem__)
            ordered = _Table(names=tuple(table.names[i] for i in order), rows=table.rows[order])
            found[site] = f"{int(ordered.digest()):016x}" if order else None
        return found

    def weights_digest(self, rows: torch.Tensor | None) -> int:
        """One number over this rank's weights, for a pair of ranks to compare before an audit.

        Args:
            rows: the sums of all parameters, where somebody has taken them already.
        """
        weights = self._inventory.weights()
        table = _table(weights) if rows is None else _Table(names=tuple(e.name for e in weights), rows=rows)
        return int(table.digest()) & _MASK

    def fill(self) -> tuple[dict[str, bool], dict[str, int]]:
        text = repr(sorted(self._values.items())).encode()
        digests = {"counters": int.from_bytes(hashlib.sha256(text).digest()[:8], "big") & _MASK}
        if self._tables:
            device = next((t.rows.device for t in self._tables.values() if t.names), torch.device("cpu"))
            scalars = torch.stack([t.digest().to(device) for t in self._tables.values()])
            digests |= {key: value & _MASK for key, value in zip(self._tables, scalars.tolist(), strict=True)}
        return {}, digests

    def alarm(self, agreed: Agreed) -> bool:
        return any(agreed.differs(self.name, digest) for digest in self.declares().digests)

    def details(self) -> tuple[dict[str, str], dict[str, tuple[tuple[str, ...], list[list[int]]]]]:
        """(counters, {site: (names, fingerprint rows)})."""
        return self._values, {key: (table.names, table.rows.tolist()) for key, table in self._tables.items()}

    def evidence(self, step: int, details: Sequence[Any]) -> tuple[CounterEvidence | VoteEvidence, ...]:
        """Counters that differ, and the votes over all tensors when one of them differs or is missing on a rank."""
        found: list[CounterEvidence] = []
        votes: list[VoteEvidence] = []
        for name in sorted({name for values, _ in details for name in values}):
            values = tuple(values.get(name, "absent") for values, _ in details)
            if len(set(values)) > 1:
                found.append(CounterEvidence(step=step, name=name, values=values))
        sites = {
            "weights": Site.WEIGHTS,
            "buffers": Site.WEIGHTS,
            "optimizer_state": Site.OPTIMIZER_STATE,
            "gradient": Site.REDUCTION,
        }
        for key, site in sites.items():
            tables = [dict(zip(*tables.get(key, ((), ())), strict=True)) for _, tables in details]
            for name in dict.fromkeys(name for table in tables for name in table):
                digests = tuple(_hex(table.get(name)) for table in tables)
                votes.append(VoteEvidence(step=step, site=site, tensor=name, digests=digests))
        # The judge also needs the tensors that agree: one that differs alone is a flip, all of them are no flip.
        disagreement = any(len(set(vote.digests)) > 1 for vote in votes)
        return (*found, *votes) if disagreement else tuple(found)

    def after_update(self, moment: Moment, *, skipped: bool) -> None:
        return


def _table(entries: list[Entry]) -> _Table:
    names = tuple(entry.name for entry in entries)
    rows = sums_many([e.tensor for e in entries]) if entries else torch.zeros(0, 2, dtype=torch.int64)
    return _Table(names=names, rows=rows)


def _hex(row: list[int] | None) -> str | None:
    return None if row is None else "".join(f"{word & 0xFFFFFFFFFFFFFFFF:016x}" for word in row)
