"""The run log: what happened, one JSON line each, and the few small files that other programs read.

A run directory holds ``events.jsonl`` (this log), ``exit.json`` (how it ended), ``exclude.json`` (nodes to leave out
on restart), ``approved.json`` (nodes that a person has given leave to take out) and, of ``unsilent train``,
``run.json`` (how each start was made, so that it can be rerun). All ranks append to one log. No
function that a training process calls here raises because of a disk: what could not be written is counted and said in
the next line that can. Only `approve` and `read`, which people call, raise, and then one clear sentence.
"""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, cast

from unsilent.errors import UsageError
from unsilent.lines import LineFile
from unsilent.records import Action, Event, Site, Suspect, Verdict

SCHEMA_VERSION = 1
EVENTS_FILE = "events.jsonl"
EXIT_FILE = "exit.json"
EXCLUDE_FILE = "exclude.json"
APPROVED_FILE = "approved.json"
RUN_FILE = "run.json"

EventKind = Literal[
    "run_started",
    "coverage",
    "calibration",
    "check_degraded",
    "check_disabled",
    "verdict",
    "action",
    "checkpoint",
    "checkpoint_refused",
    "trust_withdrawn",
    "rank_failure",
    "guard_error",
    "needs_human",
    "ask",
    "approved",
    "quarantine",
    "finished",
    "notice",
    "fingerprints",
    "spike_confirmed",
]

# These may be the last thing a process does, so they are on disk before the call returns.
_DURABLE = frozenset({"verdict", "trust_withdrawn", "rank_failure", "needs_human", "ask", "quarantine", "finished"})
_RESERVED = frozenset({"schema", "time", "rank", "run", "lost_before"})


class EventLog:
    """Appends events of one rank to ``directory/events.jsonl``; usable from several threads.

    Args:
        directory: the run directory, created when absent; None keeps no log.
        rank: the writer's global rank, None for a command that belongs to no rank.
        run_id: the same for all ranks of one start, so that lines of a resumed run can be told apart.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        rank: int | None,
        run_id: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.rank = rank
        self.run_id = run_id
        self._clock = clock
        self._file = None if directory is None else LineFile(Path(directory) / EVENTS_FILE)
        if self._file is not None:
            self._file.open()

    @property
    def lost(self) -> int:
        """How many events could not be written."""
        return 0 if self._file is None else self._file.lost

    @property
    def problem(self) -> str:
        """Why the last one could not, "" when nothing is wrong."""
        return "" if self._file is None else self._file.problem

    def write(
        self,
        kind: EventKind,
        step: int,
        *,
        check: str | None = None,
        site: Site | str | None = None,
        verdict: Verdict | None = None,
        suspects: Iterable[Suspect] | None = None,
        action: Action | str | None = None,
        seconds: float | None = None,
        **fields: Any,
    ) -> Event:
        """Append one event and return it; check, site and suspects default to the verdict's."""
        if clash := _RESERVED & fields.keys():
            raise TypeError(f"event fields with a meaning of their own: {', '.join(sorted(clash))}")
        if verdict is not None:
            check = verdict.check if check is None else check
            site = verdict.site if site is None else site
            suspects = verdict.suspects if suspects is None else suspects
        now = self._clock()
        body: dict[str, Any] = {
            "check": check,
            "site": plain(site),
            "verdict": None if verdict is None else verdict.to_json(),
            "suspects": [asdict(suspect) for suspect in suspects or ()],
            "action": plain(action),
            "seconds": seconds,
            **fields,
        }
        body = {key: plain(value) for key, value in body.items()}
        if self._file is not None:
            head = {"schema": SCHEMA_VERSION, "time": round(now, 6), "rank": self.rank, "run": self.run_id}
            self._file.append({**head, "step": step, "kind": kind, **body}, durable=kind in _DURABLE)
        return Event(kind=kind, step=step, time=now, fields={"rank": self.rank, "run": self.run_id, **body})

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True, kw_only=True)
class ReadLog:
    """A log that was read: its events in the order of writing, and how many lines could not be understood.

    ``newer`` counts lines of a later schema version than this one knows; they are among the events all the same.
    """

    events: tuple[Event, ...]
    unreadable: int = 0
    torn: bool = False
    newer: int = 0


def read(directory: str | os.PathLike[str]) -> ReadLog:
    """Read ``events.jsonl``; a torn last line is passed over, other unreadable lines are counted.

    Raises:
        UsageError: there is no such directory, or no log in it.
    """
    path = Path(directory) / EVENTS_FILE
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: there is no such run directory")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path.parent}: this is not a run directory, it holds no {EVENTS_FILE}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    events: list[Event] = []
    unreadable = newer = 0
    torn = False
    *lines, rest = data.split(b"\n")
    for last, line in [*((False, line) for line in lines), (True, rest)]:
        if not line.strip():
            continue
        event = _parse(line)
        if event is not None:
            newer += event.fields["schema"] > SCHEMA_VERSION
            events.append(event)
        elif last:
            torn = True
        else:
            unreadable += 1
    return ReadLog(events=tuple(events), unreadable=unreadable, torn=torn, newer=newer)


def write_exit(
    directory: str | os.PathLike[str],
    exit_code: int,
    step: int,
    verdict: Verdict | None = None,
    **more: Any,
) -> bool:
    """Write ``exit.json``, the outcome that torchrun's own exit code cannot carry; True when it is on disk."""
    record = {
        "schema": SCHEMA_VERSION,
        "exit_code": exit_code,
        "step": step,
        "verdict": None if verdict is None else verdict.to_json(),
        "time": round(time.time(), 6),
        **more,
    }
    return write_whole(Path(directory) / EXIT_FILE, record)


def read_exit(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What ``exit.json`` says; None when there is none, or none that can be understood."""
    record = _load(Path(directory) / EXIT_FILE)
    return record if record is not None and isinstance(record.get("exit_code"), int) else None


def write_exclude(directory: str | os.PathLike[str], nodes: Iterable[str], reason: str) -> bool:
    """Add nodes to ``exclude.json``, with the reason, keeping those already there; one rank calls it.

    A file that cannot be understood is kept beside it as ``exclude.json.unreadable``. True when it is on disk.
    """
    path = Path(directory) / EXCLUDE_FILE
    known = _reasons(path)
    if known is None:
        try:
            path.replace(path.with_name(path.name + ".unreadable"))
        except OSError:
            return False
        known = {}
    merged = {**known, **dict.fromkeys(nodes, reason)}
    return write_whole(path, {"schema": SCHEMA_VERSION, "nodes": sorted(merged), "reasons": merged})


def excluded_nodes(directory: str | os.PathLike[str]) -> dict[str, str]:
    """The nodes of ``exclude.json``, each with its reason.

    Raises:
        UsageError: the file is there and cannot be understood: to ignore it would bring a bad node back.
    """
    path = Path(directory) / EXCLUDE_FILE
    reasons = _reasons(path)
    if reasons is None:
        raise UsageError(f"{path}: cannot be understood; repair it or remove it")
    return reasons


def add_start(directory: str | os.PathLike[str], start: Mapping[str, Any]) -> bool:
    """Add how this start of the run was made to ``run.json``; one rank calls it. True when it is on disk.

    Args:
        start: ``run`` (the id that its events carry), ``command``, ``options``, ``world_size``, ``environment``.
    """
    starts = [*read_starts(directory), dict(start)]
    return write_whole(Path(directory) / RUN_FILE, {"schema": SCHEMA_VERSION, "starts": starts})


def read_starts(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The starts in ``run.json``, the oldest first; none when there is no such file or it cannot be understood."""
    record = _load(Path(directory) / RUN_FILE)
    starts = None if record is None else record.get("starts")
    found = cast(list[Any], starts) if isinstance(starts, list) else []
    return [cast(dict[str, Any], start) for start in found if isinstance(start, dict)]


def approve(directory: str | os.PathLike[str], node: str) -> None:
    """A person's leave to take a node out; the run sees it at its next step.

    Raises:
        UsageError: the run has not asked about this node, or the answer cannot be written.
    """
    asked = asked_nodes(read(directory).events)
    if node not in asked:
        about = f"it asked about {', '.join(asked)}" if asked else "it has asked about no node"
        raise UsageError(f"{directory}: the run did not ask about node {node!r}; {about}")
    path = Path(directory) / APPROVED_FILE
    nodes = dict(_approvals(path))
    nodes.setdefault(node, time.time())
    if not write_whole(path, {"schema": SCHEMA_VERSION, "nodes": nodes}):
        raise UsageError(f"{path}: cannot be written")
    log = EventLog(directory, rank=None, run_id="")
    log.write("approved", -1, node=node)
    log.close()


def approved_nodes(directory: str | os.PathLike[str]) -> frozenset[str]:
    """The nodes that a person has approved; empty when nobody answered or the file cannot be understood."""
    return frozenset(_approvals(Path(directory) / APPROVED_FILE))


def asked_nodes(events: Iterable[Event]) -> tuple[str, ...]:
    """The nodes that ``ask`` events name, in the order of asking."""
    nodes: dict[str, None] = {}
    for event in events:
        if event.kind == "ask":
            for node in suspect_nodes(event):
                nodes.setdefault(node)
    return tuple(nodes)


def suspect_nodes(event: Event) -> tuple[str, ...]:
    """The nodes among the suspects of an event."""
    suspects = event.fields.get("suspects")
    if not isinstance(suspects, list):
        return ()
    found = [cast(dict[str, Any], s).get("node") for s in cast(list[Any], suspects) if isinstance(s, dict)]
    return tuple(node for node in found if isinstance(node, str))


def plain(value: Any) -> Any:
    """JSON values of what a caller hands over.

    NaN and infinities become words, since JSON has none; a tensor becomes its shape and dtype, so that no log ever
    holds its values.
    """
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v) for k, v in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in cast(frozenset[Any], value)), key=str)
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(list[Any], value)]
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return {"shape": [int(n) for n in shape], "dtype": str(dtype)}
    return str(value)


def _parse(line: bytes) -> Event | None:
    try:
        raw: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict):
        return None
    fields = cast(dict[str, Any], raw)
    kind, step, when = fields.get("kind"), fields.get("step"), fields.get("time")
    if not (isinstance(kind, str) and isinstance(step, int) and isinstance(when, int | float)):
        return None
    if not isinstance(fields.get("schema"), int):
        return None
    rest = {key: value for key, value in fields.items() if key not in ("kind", "step", "time")}
    return Event(kind=kind, step=step, time=float(when), fields=rest)


def _load(path: Path) -> dict[str, Any] | None:
    try:
        raw: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return cast(dict[str, Any], raw) if isinstance(raw, dict) else None


def _reasons(path: Path) -> dict[str, str] | None:
    """The content of ``exclude.json``: empty when there is no file, None when it cannot be understood."""
    if not path.exists():
        return {}
    record = _load(path)
    reasons = None if record is None else record.get("reasons")
    if not isinstance(reasons, dict):
        return None
    return {str(node): str(reason) for node, reason in cast(dict[Any, Any], reasons).items()}


def _approvals(path: Path) -> dict[str, Any]:
    record = _load(path)
    nodes = None if record is None else record.get("nodes")
    return cast(dict[str, Any], nodes) if isinstance(nodes, dict) else {}


def write_whole(path: Path, record: Mapping[str, Any]) -> bool:
    """Write a file so that a reader sees the old one or the new one, whole; False when the disk would not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = (json.dumps(plain(record), indent=2, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        return False
    return True
