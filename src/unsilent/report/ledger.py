"""The report over many runs: which host and device come back, what is held against them, how each check has done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unsilent.ledger.history import CONFIDENCE, Precision, Record, device_records, host_records, precision
from unsilent.ledger.reading import Contents
from unsilent.recurrence import COMES_BACK, HALF_LIFE_DAYS, HALF_LIFE_STEPS

_MOST_ROWS = 50
_MOST_PROBLEMS = 20
_BY = {"again": "in another step or run", "person": "by a person", "replays": "in its own replays"}


def render(contents: Contents, *, source: str, now: float) -> RenderableType:
    """The report, for a rich console.

    Args:
        source: what was read, for the heading.
        now: seconds since the epoch; strikes fade until then.
    """
    runs = contents.runs
    hosts, devices = host_records(runs, now), device_records(runs, now)
    parts = [
        _header(contents, source),
        _records("Hosts", hosts),
        _records("Devices", devices),
        _checks(precision(runs)),
        _problems(contents),
    ]
    return Group(*(part for part in parts if part is not None))


def as_json(contents: Contents, *, source: str, now: float) -> dict[str, Any]:
    """The same as plain JSON values."""
    runs = contents.runs
    return {
        "ledger": source,
        "time": now,
        "runs": len(runs),
        "hosts": [asdict(record) for record in host_records(runs, now)],
        "devices": [asdict(record) for record in device_records(runs, now)],
        "checks": [asdict(check) for check in precision(runs)],
        "half_life": {"days": HALF_LIFE_DAYS, "steps": HALF_LIFE_STEPS},
        "confidence": CONFIDENCE,
        "problems": [asdict(problem) for problem in contents.problems],
        "newer": contents.newer,
    }


def _header(contents: Contents, source: str) -> RenderableType:
    runs = contents.runs
    lines = [Text(f"Ledger {source}", style="bold")]
    if not runs:
        lines.append(Text("It holds no run."))
        return Group(*lines)
    first, last = min(run.started for run in runs), max(run.last for run in runs)
    steps = sum(run.worked for run in runs)
    open_ones = sum(not run.ended for run in runs)
    lines.append(Text(f"{_count(len(runs), 'run')}, {steps:,} steps, from {_date(first)} to {_date(last)}."))
    if open_ones:
        lines.append(Text(f"{_count(open_ones, 'run')} did not say how it ended: it goes on, or it was killed."))
    left_out = sum(run.left_out for run in runs)
    if left_out:
        lines.append(Text(f"{left_out:,} verdicts were counted only, after the most that one run may write."))
    return Group(*lines)


def _records(title: str, records: Sequence[Record]) -> RenderableType:
    named = [record for record in records if record.named_in]
    others = len(records) - len(named)
    if not named:
        return Text(f"\n{title}: {len(records)}, none of them was ever named.")
    hosts = title == "Hosts"
    table = Table(
        title=f"\n{title} that were named ({len(named)} of {len(records)})",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in ("host",) if hosts else ("host", "device"):
        table.add_column(column, overflow="fold", min_width=6)
    for column in ("runs", "strikes", "PERSISTENT", "TRANSIENT", "last named", "" if hosts else "audits"):
        table.add_column(column, no_wrap=True)
    for record in named[:_MOST_ROWS]:
        cells = (
            *((record.node,) if hosts else (record.node, record.device)),
            f"{record.named_in:,} of {record.runs:,}",
            f"{record.strikes:.2f}",
            f"{record.persistent:,}",
            f"{record.transient:,}",
            "" if record.last_named is None else _date(record.last_named)[:10],
            _words(record) if hosts else f"{record.passed:,}",
        )
        table.add_row(*(Text(cell) for cell in cells))
    note = (
        "runs: how many it was named in, of those it took part in. audits: those that every rank passed. "
        f"A strike is a PERSISTENT verdict, a third of one a TRANSIENT verdict, at most one for each run; it halves with "
        f"each {HALF_LIFE_DAYS:g} days and with each {HALF_LIFE_STEPS:,} steps that the device has worked since. Clean "
        "audits take none away."
    )
    lines = [] if hosts else [Text(note, style="dim")]
    if len(named) > _MOST_ROWS:
        lines.append(Text(f"... and {len(named) - _MOST_ROWS} more that were named."))
    if others:
        lines.append(Text(f"{_count(others, title.lower().removesuffix('s'))} never named."))
    return Group(table, *lines)


def _words(record: Record) -> str:
    if record.named_in > 1:
        return "comes back"
    return "on watch" if record.strikes >= COMES_BACK else ""


def _checks(checks: Sequence[Precision]) -> RenderableType:
    if not checks:
        return Text("\nNo check has raised an alarm so far.")
    lines = [Text("\nHow each check has done so far", style="bold")]
    for check in checks:
        lines.append(Text(f"{check.check}: {_precision(check)}"))
        rest = check.named - check.confirmed - check.refuted
        told = [
            f"{check.refuted} refuted (the same step then failed on another device)" if check.refuted else "",
            f"{rest} still open" if rest else "",
            f"{check.software:,} of its {check.alarms:,} verdicts said SOFTWARE" if check.software else "",
            f"{check.inconclusive:,} INCONCLUSIVE" if check.inconclusive else "",
        ]
        if any(told):
            lines.append(Text(f"  {'; '.join(one for one in told if one)}"))
    lines.append(
        Text(
            "Counted is one case for each device and run; the lower bound counts each device once. That a fault was seen again is no proof that it was one: a "
            "check that errs in the same way twice reproduces, too; a person's approval is independent.",
            style="dim",
        )
    )
    return Group(*lines)


def _precision(check: Precision) -> str:
    if not check.named:
        return "it has named no device"
    by = ", ".join(f"{number} {_BY[how]}" for how, number in check.by.items())
    told = f"{check.confirmed} of {check.named} cases in which it named a device were confirmed"
    bound = f"{CONFIDENCE:.0%} lower bound {check.lower_bound:.0%}, from {_count(check.devices, 'device')}"
    return f"{told}{f' ({by})' if by else ''}; {bound}"


def _problems(contents: Contents) -> RenderableType | None:
    lines = [Text(str(problem), style="yellow") for problem in contents.problems[:_MOST_PROBLEMS]]
    if len(contents.problems) > _MOST_PROBLEMS:
        lines.append(Text(f"... and {len(contents.problems) - _MOST_PROBLEMS:,} more", style="yellow"))
    if contents.newer:
        lines.append(Text(f"{_count(contents.newer, 'line')} of a newer version may hold more than is shown."))
    return Group(Text("\nNot understood", style="bold"), *lines) if lines else None


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
