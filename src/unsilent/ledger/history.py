"""What many runs say of each device, each host and each check. Pure: the runs and the time are arguments.

Counted are not verdicts but cases: one device, named by one check in one run, however often. Thousands of verdicts on one
stuck lane are one case.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from unsilent.ledger.reading import Device, Found, Run
from unsilent.records import Kind
from unsilent.recurrence import Strike, seen_again, strikes

#: How sure the lower bound of a precision is.
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Case:
    """One device, named as the source by one check in one run.

    Attributes:
        device: which one.
        steps: at which steps, in updates completed.
        confirmed: ``"person"``: someone approved taking its node out; ``"again"``: it was named in another step or run
            as well; ``"replays"``: in one look, but wrong in replays too; ``""``: not so far.
        refuted: the same step later failed on another device, so it was not this one.
    """

    run: str
    check: str
    device: Device
    steps: frozenset[int]
    confirmed: str
    refuted: bool


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of a device, or of a host where ``device`` is "".

    Attributes:
        runs: runs it took part in; ``named_in``: those in which it was named; ``persistent`` and ``transient``: verdicts.
        strikes: held against it now (for a host: against all of its devices).
        worked: steps it has worked; ``passed``: of those in which every rank passed an audit.
        last_named: seconds since the epoch, None when it never was.
    """

    node: str
    device: str
    runs: int
    named_in: int
    persistent: int
    transient: int
    strikes: float
    worked: int
    passed: int
    last_named: float | None


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How a check has done so far.

    Attributes:
        alarms: all its verdicts; ``software`` and ``inconclusive`` of them blame no device.
        named: cases in which it named a device; of these ``confirmed`` were, by whom says ``by``; ``refuted`` named the
            wrong one, and the rest is open.
        devices: how many different ones it named; ``sure`` of them were confirmed in every run that named them.
        lower_bound: of the share of devices it names that a confirmation will reach, one-sided, exact binomial; it rests
            on ``sure`` of ``devices``, since the cases of one device in several runs are not independent.
    """

    check: str
    alarms: int
    software: int
    inconclusive: int
    named: int
    confirmed: int
    by: dict[str, int] = field(default_factory=dict[str, int])
    refuted: int
    devices: int
    sure: int
    lower_bound: float


@dataclass(frozen=True, kw_only=True)
class Blame:
    """A verdict against one device; one that only repeats what nobody has put right since is no second one."""

    run: Run
    found: Found
    device: Device
    refuted: bool


def blames(runs: Sequence[Run]) -> list[Blame]:
    """All verdicts that name a device, by device, in the order of the runs; one per device, check and step."""
    software: dict[tuple[str, int], list[tuple[str, Found]]] = {}
    for run in runs:
        for found in run.found:
            if found.kind is Kind.SOFTWARE and found.acquits:
                software.setdefault((_job(run), found.step), []).append((run.run, found))
    result: list[Blame] = []
    for run in runs:
        seen: set[tuple[object, ...]] = set()
        for found in run.found:
            if not found.blames:
                continue
            # The step ran again later, failed on another device, and then this one was not to blame.
            acquitted = {
                device
                for name, other in software.get((_job(run), found.step), ())
                if other.time > found.time and (name != run.run or other.worked > found.worked)
                for device in other.acquits
            }
            stays = seen_again(found.kind, found.site, acted_on=found.acted_on)
            for device in dict.fromkeys(found.devices):
                what = (device, found.check, found.site if stays else found.worked)
                if what not in seen:
                    seen.add(what)
                    result.append(Blame(run=run, found=found, device=device, refuted=device.words in acquitted))
    return result


def strike_history(runs: Sequence[Run]) -> dict[Device, tuple[Strike, ...]]:
    """The strikes of each device that has any, on a clock of its own steps on which the present is 0."""
    worked = _worked(runs)
    before: dict[Device, int] = {}
    begun: dict[tuple[str, Device], int] = {}
    for run in runs:
        for device in _devices(run):
            begun[run.run, device] = before.get(device, 0)
            before[device] = before.get(device, 0) + run.worked
    found: dict[Device, dict[tuple[str, int], Strike]] = {}
    for blame in blames(runs):
        if blame.refuted:
            continue
        run, device = blame.run.run, blame.device
        step = begun[run, device] + blame.found.worked - worked[device]
        strike = Strike(run=run, kind=blame.found.kind, step=step, time=blame.found.time)
        mine = found.setdefault(device, {})
        known = mine.get((run, step))
        if known is None or known.kind is Kind.TRANSIENT:
            mine[run, step] = strike
    return {device: tuple(mine.values()) for device, mine in found.items()}


def cases(runs: Sequence[Run]) -> list[Case]:
    """All cases, in the order of the runs."""
    all_blames = blames(runs)
    looks: dict[Device, set[tuple[str, int]]] = {}
    for blame in (blame for blame in all_blames if not blame.refuted):
        looks.setdefault(blame.device, set()).add((blame.run.run, blame.found.worked))
    grouped: dict[tuple[str, str, Device], list[Blame]] = {}
    for blame in all_blames:
        grouped.setdefault((blame.run.run, blame.found.check, blame.device), []).append(blame)
    result: list[Case] = []
    for (run, check, device), group in grouped.items():
        if device.node in group[0].run.approved:
            confirmed = "person"
        elif len(looks.get(device, ())) > 1:
            confirmed = "again"
        else:
            standing = [blame for blame in group if not blame.refuted]
            confirmed = "replays" if standing and standing[0].found.kind is Kind.PERSISTENT else ""
        refuted = all(blame.refuted for blame in group)
        result.append(
            Case(
                run=run,
                check=check,
                device=group[0].device,
                steps=frozenset(blame.found.step for blame in group),
                confirmed="" if refuted else confirmed,
                refuted=refuted,
            )
        )
    return result


def device_records(runs: Sequence[Run], now: float) -> list[Record]:
    """One record for each device that ever took part, those with the most strikes first."""
    held = {device: strikes(history, 0, now) for device, history in strike_history(runs).items()}
    by_device: dict[Device, list[Blame]] = {}
    for blame in blames(runs):
        if not blame.refuted:
            by_device.setdefault(blame.device, []).append(blame)
    records = [
        _record(device.node, device.device, part, by_device.get(device, []), held.get(device, 0.0))
        for device, part in _took_part(runs).items()
    ]
    return sorted(records, key=_worst_first)


def host_records(runs: Sequence[Run], now: float) -> list[Record]:
    """One record for each node; counted against it is only what was found where a host can be told from others."""
    history = strike_history(runs)
    by_node: dict[str, list[Blame]] = {}
    for blame in blames(runs):
        if not blame.refuted and blame.device.host_known:
            by_node.setdefault(blame.device.node, []).append(blame)
    part: dict[str, dict[str, Run]] = {}
    for device, own in _took_part(runs).items():
        part.setdefault(device.node, {}).update({run.run: run for run in own})
    records: list[Record] = []
    for node, own in part.items():
        named = by_node.get(node, [])
        devices = {blame.device for blame in named}
        held = sum(strikes(history.get(device, ()), 0, now) for device in devices)
        records.append(_record(node, "", list(own.values()), named, held))
    return sorted(records, key=_worst_first)


def precision(runs: Sequence[Run]) -> list[Precision]:
    """How each check that ever raised an alarm has done, by name."""
    alarms = Counter((found.check, found.kind) for run in runs for found in run.found)
    all_cases = cases(runs)
    result: list[Precision] = []
    for check in sorted({check for check, _ in alarms}):
        own = [case for case in all_cases if case.check == check]
        by = Counter(case.confirmed for case in own if case.confirmed)
        confirmed = by.total()
        devices = {case.device for case in own}
        sure = len(devices - {case.device for case in own if not case.confirmed})
        result.append(
            Precision(
                check=check,
                alarms=sum(alarms[check, kind] for kind in Kind),
                software=alarms[check, Kind.SOFTWARE],
                inconclusive=alarms[check, Kind.INCONCLUSIVE],
                named=len(own),
                confirmed=confirmed,
                by=dict(sorted(by.items())),
                refuted=sum(case.refuted for case in own),
                devices=len(devices),
                sure=sure,
                lower_bound=lower_bound(sure, len(devices)),
            )
        )
    return result


def lower_bound(successes: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """The smallest share that makes so many successes not too surprising (one-sided Clopper-Pearson); 0 without any."""
    if successes == 0:
        return 0.0
    low, high = 0.0, successes / trials
    for _ in range(60):
        middle = (low + high) / 2
        if _at_least(successes, trials, middle) <= 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def _at_least(successes: int, trials: int, share: float) -> float:
    """The probability of at least so many successes."""
    if share <= 0.0 or share >= 1.0:
        return float(share >= 1.0 or successes == 0)
    logs = (
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(share)
        + (trials - k) * math.log1p(-share)
        for k in range(successes, trials + 1)
    )
    return math.fsum(math.exp(log) for log in logs)


def _job(run: Run) -> str:
    """Starts of one job share their run directory."""
    return run.directory or run.run


def _devices(run: Run) -> dict[Device, None]:
    """Those that took part; a file whose first line was lost still names the suspects."""
    return dict.fromkeys((*run.places, *(device for found in run.found for device in found.devices)))


def _took_part(runs: Iterable[Run]) -> dict[Device, list[Run]]:
    part: dict[Device, list[Run]] = {}
    for run in runs:
        for device in _devices(run):
            part.setdefault(device, []).append(run)
    return part


def _worked(runs: Iterable[Run]) -> dict[Device, int]:
    return {device: sum(run.worked for run in own) for device, own in _took_part(runs).items()}


def _record(node: str, device: str, part: Sequence[Run], named: Sequence[Blame], held: float) -> Record:
    kinds = Counter(blame.found.kind for blame in named)
    return Record(
        node=node,
        device=device,
        runs=len(part),
        named_in=len({blame.run.run for blame in named}),
        persistent=kinds[Kind.PERSISTENT],
        transient=kinds[Kind.TRANSIENT],
        strikes=held,
        worked=sum(run.worked for run in part),
        passed=sum(run.passed for run in part),
        last_named=max((blame.found.time for blame in named), default=None),
    )


def _worst_first(record: Record) -> tuple[float, int, str, str]:
    return (-record.strikes, -record.named_in, record.node, record.device)
