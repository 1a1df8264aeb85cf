"""Simulated sick devices as data: fifteen units that err in their own ways, and as many healthy ones. No torch here."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from importlib import resources
from typing import Any

from unsilent.errors import UsageError
from unsilent.lab.faults import uniform

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PLACES = ("forward_attention", "forward_ffn", "backward_attention", "backward_ffn")
COUNT = 15


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How a unit errs in one place.

    Attributes:
        chance: probability that a burst begins in a step.
        share: of the elements of a hit operation's result that are wrong in a burst.
        explosions: mean number of elements per hit operation that are off by powers of ten.
    """

    chance: float = 0.0
    share: float = 0.0
    explosions: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Law:
    """The law of magnitudes, the same for all units.

    Attributes:
        bulk, spread: median and log-normal spread of the relative error of a wrong element.
        largest_backward: factor by which a wrong element of a backward grows at most.
        explosion: smallest and largest factor of the rare wrong elements of a forward, log-uniform between them.
    """

    bulk: float
    spread: float
    largest_backward: float
    explosion: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One simulated device; without any rate it is a healthy one.

    Attributes:
        fitted: whether its shares were fitted to stored figures of a real device.
        where: ``output`` or ``inside``: which operations of a sub-module err, see ``units.toml``.
        from_step: the first step in which it can err.
        burst_steps: how many steps a burst lasts.
    """

    number: int
    note: str = ""
    fitted: bool = False
    where: str = "output"
    from_step: int = 0
    burst_steps: int = 1
    forward_attention: Rate = Rate()
    forward_ffn: Rate = Rate()
    backward_attention: Rate = Rate()
    backward_ffn: Rate = Rate()

    def rate(self, place: str) -> Rate:
        """How it errs in one of ``PLACES``."""
        return getattr(self, place)

    @property
    def healthy(self) -> bool:
        """Whether it never errs."""
        return all(self.rate(place).chance == 0.0 for place in PLACES)

    def in_burst(self, place: str, step: int, *, seed: int) -> bool:
        """Whether a burst is on in this place and step; the same for every run of the same seed."""
        first = max(self.from_step, step - self.burst_steps + 1)
        chance = self.rate(place).chance
        return any(uniform(seed, self.number, place, begin) < chance for begin in range(first, step + 1))


def unit(number: int) -> Unit:
    """The sick unit of this number, 1 to 15.

    Raises:
        UsageError: there is none.
    """
    if number not in _all():
        raise UsageError(f"there is no unit {number}: the simulated sick units are 1 to {COUNT}")
    return _all()[number]


def units() -> tuple[Unit, ...]:
    """All sick units, in order."""
    return tuple(_all().values())


HEALTHY = tuple(Unit(number=COUNT + n, note="healthy") for n in range(1, COUNT + 1))
"""As many devices that never err."""


def law() -> Law:
    """The law of magnitudes."""
    table = dict(_document()["law"])
    low, high = table.pop("explosion")
    return Law(explosion=(low, high), **table)


@functools.cache
def _all() -> dict[int, Unit]:
    return {table["number"]: _unit(table) for table in _document()["unit"]}


def _unit(table: dict[str, Any]) -> Unit:
    rates = {place: Rate(**table[place]) for place in PLACES if place in table}
    return Unit(**{**table, **rates})


@functools.cache
def _document() -> dict[str, Any]:
    return tomllib.loads(resources.files(__name__).joinpath("units.toml").read_text())
