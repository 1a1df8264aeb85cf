"""Reads ledger files: lines in, runs out; whatever cannot be understood is named and left out."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from unsilent.errors import UsageError
from unsilent.ledger.entries import Entry, is_count, items, parse
from unsilent.records import Kind, Site


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something in a ledger that was left out. ``line`` counts from 1; 0 stands for the whole file."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        where = f"{self.file}, line {self.line}" if self.line else self.file
        return f"{where}: left out, {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device that took part in a run, or is suspected there. ``host_known``: its node could be judged as well."""

    node: str
    device: str
    rank: int = field(compare=False)
    host_known: bool = field(default=True, compare=False)

    @property
    def words(self) -> str:
        """As :func:`unsilent.recurrence.device_of` says it."""
        return f"{self.node} {self.device}" if self.host_known else self.device


@dataclass(frozen=True, kw_only=True)
class Found:
    """One verdict of a run.

    Attributes:
        acted_on: what it called for was done, or nothing had to be.
        acquits: devices, in words, that this step was blamed on before, wrongly.
    """

    kind: Kind
    site: Site
    check: str
    step: int
    time: float
    worked: int
    devices: tuple[Device, ...]
    acted_on: bool
    acquits: tuple[str, ...] = ()

    @property
    def blames(self) -> bool:
        """Whether it names a device as the source."""
        return self.kind in (Kind.TRANSIENT, Kind.PERSISTENT) and bool(self.devices)


@dataclass(kw_only=True)
class Run:
    """One start of a guarded run.

    Attributes:
        directory: its run directory, "" when it kept none; starts of one job share it.
        worked: steps that it began.
        passed: steps in which every rank passed an audit.
        exit_code: None while it goes on, or when it left without saying how it ended.
    """

    run: str
    started: float
    last: float
    directory: str = ""
    mode: str = ""
    versions: dict[str, Any] = field(default_factory=dict[str, Any])
    places: tuple[Device, ...] = ()
    worked: int = 0
    passed: int = 0
    found: list[Found] = field(default_factory=list[Found])
    approved: set[str] = field(default_factory=set[str])
    checks: dict[str, Any] = field(default_factory=dict[str, Any])
    left_out: int = 0
    ended: bool = False
    exit_code: int | None = None


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a ledger holds: its runs, the earliest first, and what could not be read."""

    runs: tuple[Run, ...]
    problems: tuple[Problem, ...] = ()
    newer: int = 0


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a ledger file that was understood."""

    file: str
    number: int
    text: str
    entry: Entry


def read_directory(directory: str | Path, *, since: float = 0.0, within_s: float | None = None) -> Contents:
    """All runs of a ledger directory.

    Args:
        since: files that nobody has written to after this time (seconds since the epoch) are not opened.
        within_s: no file is opened after so many seconds, the newest come first; what is left becomes a problem.

    Raises:
        UsageError: there is no such directory, or it cannot be listed.
    """
    problems: list[Problem] = []
    found = read_lines(directory, problems, since=since, within_s=within_s)
    return fold([line.entry for line in found], problems)


def read_lines(
    directory: str | Path, problems: list[Problem], *, since: float = 0.0, within_s: float | None = None
) -> Iterator[Line]:
    """The lines of all files of a ledger, as :func:`read_directory` does; what is left out is added to ``problems``."""
    paths = _files(Path(directory), since)
    deadline = None if within_s is None else time.monotonic() + within_s
    for i, path in enumerate(paths):
        if deadline is not None and time.monotonic() > deadline:
            reason = f"{len(paths) - i} of {len(paths)} files: {within_s:g} seconds were not enough to read them"
            problems.append(Problem(file=str(directory), line=0, reason=reason))
            return
        try:
            data = path.read_bytes()
        except OSError as error:
            problems.append(Problem(file=path.name, line=0, reason=f"it cannot be read ({error.strerror or error})"))
            continue
        *whole, rest = data.split(b"\n")
        for number, raw in enumerate(whole, 1):
            line = _line(path.name, number, raw, problems)
            if line is not None:
                yield line
        if rest:
            reason = "it is cut off (the run was killed, or is writing it just now)"
            problems.append(Problem(file=path.name, line=len(whole) + 1, reason=reason))


def fold(entries: Iterable[Entry], problems: Iterable[Problem] = ()) -> Contents:
    """The runs that these lines tell of."""
    runs: dict[str, Run] = {}
    newer = 0
    for entry in sorted(entries, key=lambda entry: entry.time):
        newer += entry.newer
        run = runs.setdefault(entry.run, Run(run=entry.run, started=entry.time, last=entry.time))
        _add(entry, run)
    return Contents(runs=tuple(runs.values()), problems=tuple(problems), newer=newer)


def _files(directory: Path, since: float) -> list[Path]:
    """The newest first."""
    if not directory.is_dir():
        raise UsageError(f"{directory}: there is no such ledger directory")
    found: list[tuple[float, str]] = []
    try:
        with os.scandir(directory) as listing:
            for one in listing:
                if not one.name.startswith("run-") or not one.name.endswith(".jsonl"):
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    changed = one.stat().st_mtime
                    if changed >= since:
                        found.append((changed, one.name))
    except OSError as error:
        raise UsageError(f"{directory}: the ledger cannot be listed ({error.strerror or error})") from None
    return [directory / name for _, name in sorted(found, reverse=True)]


def _line(file: str, number: int, raw: bytes, problems: list[Problem]) -> Line | None:
    if not raw.strip():
        return None
    try:
        text = raw.decode()
        return Line(file=file, number=number, text=text, entry=parse(text))
    except UnicodeDecodeError:
        reason = "it is not text"
    except ValueError as error:
        reason = str(error)
    problems.append(Problem(file=file, line=number, reason=reason))
    return None


def _add(entry: Entry, run: Run) -> None:
    body = entry.body
    run.last = max(run.last, entry.time)
    run.worked, run.passed = max(run.worked, entry.worked), max(run.passed, entry.passed)
    if entry.kind == "run_started":
        run.directory, run.mode = str(body.get("directory") or ""), str(body.get("mode") or "")
        run.places = tuple(_device(place) for place in items(body, "places"))
        versions = body.get("versions")
        run.versions = cast(dict[str, Any], versions) if isinstance(versions, dict) else {}
    elif entry.kind == "verdict":
        idle = body.get("action") in (None, "CONTINUE") and body.get("would") not in (None, "CONTINUE")
        run.found.append(
            Found(
                kind=Kind(body["verdict"]),
                site=Site(body["site"]),
                check=body["check"],
                step=entry.step,
                time=entry.time,
                worked=entry.worked,
                devices=tuple(_device(suspect) for suspect in items(body, "suspects")),
                acted_on=not idle,
                acquits=tuple(body.get("acquits", ())),
            )
        )
    elif entry.kind == "approved":
        run.approved.add(body["node"])
    elif entry.kind == "run_ended":
        run.ended, run.exit_code = True, body.get("exit_code")
        checks = body.get("checks")
        run.checks = cast(dict[str, Any], checks) if isinstance(checks, dict) else {}
        run.left_out = body["left_out"] if is_count(body.get("left_out")) else 0


def _device(item: dict[str, Any]) -> Device:
    known = item.get("host_known") is not False
    return Device(node=item["node"], device=item["device"], rank=item["rank"], host_known=known)
