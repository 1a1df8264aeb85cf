"""Whose turn it is. Pure: the same answer on all ranks, from the step number alone."""

from __future__ import annotations

from collections.abc import Mapping


class Schedule:
    """Staggers checks with a period, so that no two expensive ones fall on one step.

    A check with period 1 runs in every step and counts as cheap. Each other check runs once in ``period`` steps, the
    first one named when ``(step + 1)`` is a multiple of its period, later ones shifted to a remainder that the others
    leave free; where the periods leave none free (they have no common divisor), they sometimes fall together.

    Args:
        periods: steps between two runs of each check, in order of priority.
        first_steps: each runs in the first step of its period instead, whatever the others do, and cannot be forced.
    """

    def __init__(self, periods: Mapping[str, int], *, first_steps: bool = False) -> None:
        self.periods = dict(periods)
        self._first_steps = first_steps
        self.offsets: dict[str, int] = {}
        for name, period in self.periods.items():
            taken = [(self.periods[n], o) for n, o in self.offsets.items() if self.periods[n] > 1]
            free = (o for o in range(period) if not any(_meet(period, o, p, q) for p, q in taken))
            self.offsets[name] = next(free, 0) if period > 1 else 0

    def due(self, step: int, *, forced: bool = False) -> frozenset[str]:
        """The checks that run in this step; ``forced`` (saving, last step) runs all."""
        if self._first_steps:
            return frozenset(name for name, period in self.periods.items() if step % period == 0)
        if forced:
            return frozenset(self.periods)
        return frozenset(n for n, period in self.periods.items() if (step + 1) % period == self.offsets[n])


def _meet(period: int, offset: int, other: int, other_offset: int) -> bool:
    """Whether two periodic checks ever fall on one step: by the remainder theorem, when the offsets agree modulo the
    greatest common divisor."""
    from math import gcd

    return (offset - other_offset) % gcd(period, other) == 0
