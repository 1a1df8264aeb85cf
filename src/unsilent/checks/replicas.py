"""Check ``replicas``: what all ranks must hold alike, they hold alike, bit for bit.

Weights, optimizer state, declared buffers and the reduced gradient are read before the update, so that a value that
was wrong when this step used it costs only this step. Step, learning rate and scaler are compared in every step: they
are compared first, since a difference there is software and explains all others.

Cost. Time: on a step of the vote, one pass over weights, optimizer state, declared buffers and reduced gradients; on
every step a hash of a few numbers on the host; on rank 0, after a clean vote, a line of the log. Memory: 16 bytes per
tensor. Traffic: none beyond the agreed vector, in which five digests ride, and where the state is sharded one small message
from every rank on a step of the vote; on an alarm, the fingerprints of all tensors
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
from unsilent.fingerprints import combine, sums_of_gradients
from unsilent.inventory import Entry, Inventory
from unsilent.records import CounterEvidence, Site, VoteEvidence
from unsilent.reduction import Bucket

_MASK = 0x7FFFFFFFFFFFFFFF


#: what a rank holds of each site: the ranks that must hold the same, and one number over it
_Shares = dict[str, list[tuple[tuple[int, ...], int]]]


@dataclass(frozen=True)
class _Table:
    """The fingerprints of one site: a row for each entry, and which ranks must hold the same (None: all).

    ``called`` are the names under which ranks compare them, mostly ``names`` themselves.
    """

    names: tuple[str, ...]
    called: tuple[str, ...]
    rows: torch.Tensor
    copies: tuple[tuple[int, ...] | None, ...]

    def digest(self) -> torch.Tensor:
        """One int64 on the device over names and rows."""
        names = zlib.crc32("\n".join(self.called).encode())
        return combine(self.rows) ^ names if self.names else torch.zeros((), dtype=torch.int64)

    def only(self, copies: tuple[int, ...] | None) -> _Table:
        """The entries that these ranks must hold alike."""
        at = [i for i, ranks in enumerate(self.copies) if ranks == copies]
        if copies is not None:  # ranks that hold them under other names may list them in another order
            at.sort(key=self.called.__getitem__)
        return _Table(
            names=tuple(self.names[i] for i in at),
            called=tuple(self.called[i] for i in at),
            rows=self.rows[at],
            copies=(copies,) * len(at),
        )


class Replicas:
    """See the module's text.

    Args:
        inventory: of the inner module and the optimizer.
        counters: gives the values that must be equal, by name.
        period: compare tensors every so many steps, and whenever forced.
        exchange: where the state is sharded: gives every rank what all ranks gave, in order.
        alone: no rank holds what another holds, so that shards are not compared.
        partly_alone: the same of some shards.
        partitioned: every rank holds the whole of the weights, and a part of the optimizer state that no other has.
        averaged: only weights are alike, and only in the steps in which votes are due.
    """

    name = "replicas"
    sites: tuple[Site, ...] = (Site.WEIGHTS, Site.OPTIMIZER_STATE, Site.REDUCTION, Site.OPTIMIZER)

    def __init__(
        self,
        inventory: Inventory,
        counters: Callable[[], dict[str, str]],
        *,
        period: int,
        reduces: bool,
        exchange: Callable[[Any], list[Any]] | None = None,
        alone: bool = False,
        partly_alone: bool = False,
        partitioned: bool = False,
        averaged: bool = False,
    ) -> None:
        self._partitioned, self._averaged = partitioned, averaged
        self.period = period
        self._exchange, self._alone, self._partly_alone = exchange, alone, partly_alone
        self._mine: _Shares = {}
        self._unlike = frozenset[str]()  # sites whose shards differ between ranks that must hold the same
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
        if self._averaged:
            return (*self._coverage_of_averages(), counters)
        if self._exchange is not None and not self._partitioned:
            return (*self._coverage_of_shards(when), counters)
        state = Coverage(
            site="optimizer_state", check=self.name, how="bitwise vote over all ranks", when=when,
            blind="the same error on a majority; with 2 ranks nobody is named",
        ) if not self._partitioned else _with_single_owner("optimizer_state")  # fmt: skip
        return (
            Coverage(
                site="weights", check=self.name, how="bitwise vote over all ranks", when=when,
                blind="the same error on a majority; with 2 ranks nobody is named",
            ),
            state,
            Coverage(
                site="reduction", check=self.name, how="bitwise vote over the reduced gradients", when=when,
                blind="an error inside the reduction that reaches all ranks alike",
            ),
            counters,
        )  # fmt: skip

    def _coverage_of_averages(self) -> tuple[Coverage, ...]:
        return (
            Coverage(
                site="weights", check=self.name, how="bitwise vote over all ranks",
                when=f"every {self.period} steps, after they were averaged",
                blind="what goes wrong between two averages: the next one gives it to all ranks",
            ),
            Coverage(
                site="optimizer_state", check="-", how="", when="",
                blind="every rank has its own, so no other has a copy to compare it with",
            ),
        )  # fmt: skip

    def _coverage_of_shards(self, when: str) -> tuple[Coverage, ...]:
        if self._alone:
            return tuple(_with_single_owner(site) for site in ("weights", "optimizer_state"))
        blind = "the same error on a majority of a shard's copies; with 2 copies nobody is named"
        if self._partly_alone:
            blind += "; shards with a single owner"
        how = "bitwise vote over the copies of each shard"
        rows = (("weights", how), ("optimizer_state", how), ("reduction", f"{how} of the reduced gradients"))
        return tuple(Coverage(site=s, check=self.name, how=how, when=when, blind=blind) for s, how in rows)

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
        if self.name in moment.due:
            self.read(gradients=self._reduces)
        else:
            self._values = self._counters()

    def read(self, *, gradients: bool, state: bool = True) -> None:
        """Take the fingerprints of everything that must be equal; where the state is sharded all ranks call it together.

        Args:
            gradients: those too.
            state: weights and optimizer state too; without it what was read of them last in this step still holds.
        """
        self._mine = {}
        try:
            self._take(gradients=gradients, state=state)
            self._mine = self._shares() if self._exchange is not None else {}
        finally:  # the others wait for this rank, also where it could not read its own state
            if self._exchange is not None:
                self._unlike = _unlike(self._exchange(self._mine))

    def _take(self, *, gradients: bool, state: bool) -> None:
        self._values = self._counters()
        if state or not self._tables:
            self._tables = {
                "weights": _table(self._inventory.weights()),
                "optimizer_state": _table([] if self._averaged else self._inventory.optimizer_state()),
            }
        compared = (
            [e for e in self._inventory.gradients() if e.copies is None or len(e.copies) > 1] if gradients else []
        )
        self._tables["gradient"] = _table(compared)
        alike = [e for e in self._inventory.buffers() if e.replicated and not self._averaged]
        self._tables["buffers"] = _table(alike)

    def _shares(self) -> _Shares:
        """By site, one number for each set of ranks that must hold the same shards as this one."""
        return {
            site: [(c, int(table.only(c).digest()) & _MASK) for c in dict.fromkeys(table.copies) if c is not None]
            for site, table in self._tables.items()
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
            if any(copies is not None for copies in table.copies):  # one rank's shards say nothing of the others'
                continue
            order = sorted(range(len(table.names)), key=table.names.__getitem__)
            names = tuple(table.names[i] for i in order)
            ordered = _Table(names=names, called=names, rows=table.rows[order], copies=(None,) * len(names))
            found[site] = f"{int(ordered.digest()):016x}" if order else None
        return found

    def weights_digest(self, rows: torch.Tensor | None) -> int:
        """One number over this rank's weights, or its shards of them, for a pair of ranks to compare before an audit.

        Args:
            rows: the sums of all parameters, where somebody has taken them already.
        """
        weights = self._inventory.weights()
        if rows is None:
            return int(_table(weights).digest()) & _MASK
        names = tuple(e.name for e in weights)
        return int(_Table(names=names, called=names, rows=rows, copies=(None,) * len(names)).digest()) & _MASK

    def fill(self) -> tuple[dict[str, bool], dict[str, int]]:
        digests = {"counters": _number(repr(sorted(self._values.items())))}
        if self._tables:
            device = next((t.rows.device for t in self._tables.values() if t.names), torch.device("cpu"))
            common = [t if self._exchange is None else t.only(None) for t in self._tables.values()]
            scalars = torch.stack([t.digest().to(device) for t in common])
            digests |= {key: value & _MASK for key, value in zip(self._tables, scalars.tolist(), strict=True)}
            for site in self._unlike & self._tables.keys():
                digests[site] = _number(repr((digests[site], self._mine.get(site))))
        return {}, digests

    def alarm(self, agreed: Agreed) -> bool:
        return any(agreed.differs(self.name, digest) for digest in self.declares().digests)

    def details(self) -> tuple[dict[str, str], dict[str, dict[tuple[str, tuple[int, ...]], list[int]]]]:
        """(counters, {site: {(name, the ranks that must hold the same, () for all): fingerprint}})."""
        return self._values, {
            site: {
                (name, copies or ()): row
                for name, copies, row in zip(table.called, table.copies, table.rows.tolist(), strict=True)
            }
            for site, table in self._tables.items()
        }

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
            tables = [tables.get(key, {}) for _, tables in details]
            for name, copies in dict.fromkeys(entry for table in tables for entry in table):
                voters = [tables[rank] for rank in copies] if copies else tables
                digests = tuple(_hex(table.get((name, copies))) for table in voters)
                votes.append(VoteEvidence(step=step, site=site, tensor=name, digests=digests, ranks=copies))
        # The judge also needs the tensors that agree: one that differs alone is a flip, all of them are no flip.
        disagreement = any(len(set(vote.digests)) > 1 for vote in votes)
        return (*found, *votes) if disagreement else tuple(found)

    def after_update(self, moment: Moment, *, skipped: bool) -> None:
        return


def _with_single_owner(site: str) -> Coverage:
    blind = "every shard has a single owner: no rank holds a second copy of it, so nothing at rest is compared"
    return Coverage(site=site, check="-", how="", when="", blind=blind)


def _table(entries: list[Entry]) -> _Table:
    names = tuple(entry.name for entry in entries)
    rows = sums_of_gradients([e.tensor for e in entries]) if entries else torch.zeros(0, 2, dtype=torch.int64)
    return _Table(
        names=names,
        called=tuple(entry.called or entry.name for entry in entries),
        rows=rows,
        copies=tuple(entry.copies for entry in entries),
    )


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") & _MASK


def _unlike(shares: Sequence[_Shares]) -> frozenset[str]:
    """The sites at which ranks that must hold the same shards do not; the same on all ranks."""
    return frozenset(
        site
        for mine in shares
        for site, held in mine.items()
        for copies, digest in held
        if any((copies, digest) not in shares[other].get(site, ()) for other in copies)
    )


def _hex(row: list[int] | None) -> str | None:
    return None if row is None else "".join(f"{word & 0xFFFFFFFFFFFFFFFF:016x}" for word in row)
