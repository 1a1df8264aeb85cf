"""What comes back over steps and runs: strikes that fade, and what a verdict means in the light of earlier ones. Pure.

A verdict that names a device is a strike against it, whole when PERSISTENT, a third when TRANSIENT. A clean re-test
takes none away; what makes a strike fade is time, and work that the device has done since. What a device did in one run
counts for at most one strike, however often it was seen there. A device with half a strike or more against it that errs
again has come back: then even a TRANSIENT verdict is PERSISTENT, so that the third one on a marginal device is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from unsilent.records import STATE_SITES, Kind, Site, Suspect, Verdict

#: A strike halves with each 30 days, and with each 10,000 steps that the device has worked since.
HALF_LIFE_DAYS = 30.0
HALF_LIFE_STEPS = 10_000
#: From this many strikes on a device that errs has come back.
COMES_BACK = 0.5

#: Of each run, so many strikes on a device are remembered, the newest; more would not make one strike.
REMEMBERED = 16

_DAY = 86_400.0
_WEIGHTS = {Kind.PERSISTENT: 1.0, Kind.TRANSIENT: 1 / 3}


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One verdict that named a device.

    Attributes:
        run: tells runs apart.
        kind: PERSISTENT or TRANSIENT.
        step: on a clock of the steps that the device has worked: those of earlier runs lie before the present run's.
        time: seconds since the epoch.
    """

    run: str
    kind: Kind
    step: int
    time: float


def strikes(history: Iterable[Strike], now_step: int, now_time: float) -> float:
    """What is held against one device now; at most one strike for each run.

    Args:
        history: its strikes, in any order.
        now_step: on the clock of the strikes' ``step``.
        now_time: seconds since the epoch.
    """
    by_run: dict[str, float] = {}
    for strike in history:
        days, steps = (now_time - strike.time) / _DAY, now_step - strike.step
        halvings = max(0.0, days) / HALF_LIFE_DAYS + max(0, steps) / HALF_LIFE_STEPS
        weight = _WEIGHTS.get(strike.kind, 0.0) * 0.5**halvings
        by_run[strike.run] = by_run.get(strike.run, 0.0) + weight
    return sum(min(1.0, weight) for weight in by_run.values())


def newest(history: Iterable[Strike]) -> tuple[Strike, ...]:
    """As many strikes of each run as are worth remembering."""
    by_run: dict[str, list[Strike]] = {}
    for strike in history:
        by_run.setdefault(strike.run, []).append(strike)
    kept = (sorted(own, key=lambda strike: strike.step)[-REMEMBERED:] for own in by_run.values())
    return tuple(strike for own in kept for strike in own)


def device_of(suspect: Suspect) -> str:
    """The device that a suspect stands for, in words; "" for a suspect that is none, such as a batch."""
    if suspect.device is None:
        return ""
    return suspect.device if suspect.node is None else f"{suspect.node} {suspect.device}"


def blames_a_device(verdict: Verdict) -> bool:
    """Whether some device is named as the source, so that it gets a strike."""
    return verdict.kind in _WEIGHTS and any(device_of(suspect) for suspect in verdict.suspects)


def seen_again(kind: Kind, site: Site, *, acted_on: bool) -> bool:
    """Whether the next vote will find the same once more: nobody has put a replica that differs right."""
    return kind in _WEIGHTS and site in STATE_SITES and not acted_on


def in_hindsight(verdict: Verdict, *, strikes: float, blamed_before: Collection[str]) -> Verdict:
    """The verdict with what was found before taken into account.

    Args:
        strikes: held against the device that it names, from before.
        blamed_before: devices, in words, that this very step was blamed on when it ran before: before the run went back
            to an earlier state, or before a restart.
    """
    if not blames_a_device(verdict):
        return verdict
    now = {device for suspect in verdict.suspects if (device := device_of(suspect))}
    if blamed_before and not now & set(blamed_before):
        return replace(
            verdict,
            kind=Kind.SOFTWARE,
            suspects=(),
            acquits=tuple(sorted(blamed_before)),
            reason=f"step {verdict.step} was blamed on {', '.join(sorted(blamed_before))} when it ran before, and now on "
            f"{', '.join(sorted(now))}: it fails on whatever device runs it, so it is the code, the data or the state, "
            f"and no device is blamed (now: {verdict.reason})",
        )
    if verdict.kind is Kind.TRANSIENT and strikes >= COMES_BACK:
        return replace(
            verdict,
            kind=Kind.PERSISTENT,
            reason=f"{verdict.reason}; but {strikes:.1f} strikes are held against this device from before: it comes back",
        )
    return verdict
