"""What a run's log says of its values: the fingerprints of each start, and the first one that two logs differ in. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from unsilent.records import Event

STATE = ("weights", "optimizer_state", "buffers")
GRADIENT = "gradient"


@dataclass
class Start:
    """One start of a run.

    Attributes:
        run: the id that its events carry.
        first: the updates completed when it began, since the first step of a start holds a vote; None when it has none.
        states: by updates completed, the digest of each site; under ``gradient`` the reduced one of the step that began
            there.
        kernels: the steps that did not run with the default ones.
        unsteady: why its work may not repeat, "" where calibration found that it does.
        verdicts: what was found, in words.
    """

    run: str
    first: int | None = None
    states: dict[int, dict[str, str]] = field(default_factory=dict[int, dict[str, str]])
    kernels: dict[int, str] = field(default_factory=dict[int, str])
    unsteady: str = ""
    verdicts: list[str] = field(default_factory=list[str])

    def tells_of(self, first: int, last: int) -> bool:
        """Whether anything that these steps computed is on record: a gradient, or a state that they led to."""
        states = self.states.items()
        return any(first < n <= last + 1 or (first <= n <= last and GRADIENT in state) for n, state in states)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place in which two logs differ.

    Attributes:
        sites: what differs there.
        after: so many updates were completed.
        equal: the last number of updates at which all was equal.
    """

    sites: tuple[str, ...]
    after: int
    equal: int

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step that can have come out otherwise."""
        if self.sites == (GRADIENT,):
            return (self.after, self.after)
        return (self.equal, max(self.after - 1, self.equal))

    def __str__(self) -> str:
        first, last = self.steps
        what = " and ".join(self.sites)
        if self.sites == (GRADIENT,):
            return f"the reduced gradient of step {self.after}"
        where = f"step {first}" if first == last else f"a step from {first} to {last}"
        return f"{what} after {self.after} updates, so {where}"


def starts_of(events: Iterable[Event]) -> list[Start]:
    """The starts of a run in the order in which they began."""
    starts: dict[str, Start] = {}
    for event in events:
        run = str(event.fields.get("run") or "")
        start = starts.setdefault(run, Start(run=run)) if event.kind in _READ else None
        if start is not None:
            _READ[event.kind](start, event)
    return list(starts.values())


def compare(logged: Start, again: Start, *, begin: int, last: int) -> tuple[tuple[int, ...], Difference | None]:
    """(numbers of updates at which the states were compared, the first difference), up to the end of step ``last``.

    Both are taken to hold the same state after ``begin`` updates, whether or not the log has it.
    """
    compared: list[int] = []
    equal = begin
    for after in sorted(logged.states.keys() & again.states.keys()):
        if not begin <= after <= last + 1:
            continue
        one, other = logged.states[after], again.states[after]
        differing = tuple(site for site in STATE if _differ(one, other, site))
        compared.append(after)
        if differing:
            return tuple(compared), Difference(sites=differing, after=after, equal=equal)
        if after <= last and _differ(one, other, GRADIENT):
            return tuple(compared), Difference(sites=(GRADIENT,), after=after, equal=equal)
        equal = after
    return tuple(compared), None


def _differ(one: Mapping[str, str], other: Mapping[str, str], site: str) -> bool:
    return site in one and site in other and one[site] != other[site]


def _read_fingerprints(start: Start, event: Event) -> None:
    after = event.fields.get("steps")
    if not isinstance(after, int):
        return
    start.first = after if start.first is None else start.first
    undone_after = event.fields.get("undone_after")
    if isinstance(undone_after, int):  # the run has gone back to there, and what it had come to since holds no more
        start.states = {n: state for n, state in start.states.items() if n <= undone_after}
    found = {site: event.fields[site] for site in (*STATE, GRADIENT) if isinstance(event.fields.get(site), str)}
    # A vote when saving reads no gradient; the next step's vote, over the same state, does.
    start.states[after] = {**start.states.get(after, {}), **found}
    switched = event.fields.get("switched")
    for kernels, steps in cast(dict[str, Any], switched).items() if isinstance(switched, dict) else ():
        start.kernels.update(dict.fromkeys(cast(list[int], steps), kernels))


def _read_strength(start: Start, event: Event) -> None:
    strength = event.fields.get("strength")
    if event.fields.get("check") == "audit" and strength not in (None, "bitwise"):
        start.unsteady = f"the run's own calibration let audits compare only: {strength}"


def _read_verdict(start: Start, event: Event) -> None:
    verdict = cast(dict[str, Any], event.fields.get("verdict") or {})
    start.verdicts.append(f"step {event.step}, {verdict.get('kind')}: {verdict.get('reason')}")


_READ = {
    "fingerprints": _read_fingerprints,
    "calibration": _read_strength,
    "check_degraded": _read_strength,
    "verdict": _read_verdict,
}
