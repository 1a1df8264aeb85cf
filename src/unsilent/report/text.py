"""The text report of a run: what ran, what was checked, what was found, what was done, what can be trusted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from io import StringIO
from typing import Any, cast

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from unsilent.errors import (
    EXIT_BAD_CHECKPOINT,
    EXIT_INCONCLUSIVE,
    EXIT_INTEGRITY_LOST,
    EXIT_INTERNAL,
    EXIT_OK,
    EXIT_QUARANTINE,
    EXIT_USAGE,
    UsageError,
)
from unsilent.events import ReadLog, approved_nodes, asked_nodes, excluded_nodes, read, read_exit, suspect_nodes
from unsilent.records import Event

EXIT_WORDS = {
    EXIT_OK: "fine, or recovered",
    EXIT_USAGE: "asked for something that cannot be done",
    EXIT_INTEGRITY_LOST: "stopped: the state can no longer be trusted",
    EXIT_QUARANTINE: "stopped to leave a node out: restart without it",
    EXIT_INCONCLUSIVE: "stopped: nobody could tell the right value, and the configuration says to stop then",
    EXIT_BAD_CHECKPOINT: "a checkpoint failed verification",
    EXIT_INTERNAL: "an internal error, or a rank that failed",
}
KIND_WORDS = {
    "TRANSIENT": "did not come back",
    "PERSISTENT": "comes back",
    "SOFTWARE": "not the hardware: code, data, state or a library",
    "INCONCLUSIVE": "cannot be told",
}
_MOST_ROWS = 200


def render(directory: str | os.PathLike[str]) -> RenderableType:
    """The report of a run directory, for a rich console.

    Raises:
        UsageError: there is no run directory, or nothing in it can be read; the message is one sentence.
    """
    log = read(directory)
    if not log.events:
        why = "holds only lines that cannot be read" if log.unreadable or log.torn else "is empty"
        raise UsageError(f"{directory}: the run's log {why}, so there is nothing to report")
    events = log.events
    parts = [
        _header(directory, log),
        _calls_for_a_person(events),
        _coverage(events),
        _checks(events),
        _findings(events),
        _actions(events),
        _people(directory, events),
        _checkpoints(events),
        _notices(events),
        _ending(directory, events),
    ]
    return Group(*(part for part in parts if part is not None))


def render_text(directory: str | os.PathLike[str], *, width: int = 120) -> str:
    """The same report as plain text."""
    return as_text(render(directory), width=width)


def as_text(rendered: RenderableType, *, width: int = 120) -> str:
    """What a console would show, without colours."""
    out = StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(rendered)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _header(directory: str | os.PathLike[str], log: ReadLog) -> RenderableType:
    events = log.events
    starts = _of(events, "run_started")
    lines = [Text(f"Run {os.fspath(directory)}", style="bold")]
    first, last = min(e.time for e in events), max(e.time for e in events)
    when = datetime.fromtimestamp(first, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    runs = len({e.fields.get("run") for e in starts}) or 1
    again = f", started {runs} times" if runs > 1 else ""
    lines.append(Text(f"Began {when}, last word after {_duration(last - first)}{again}."))
    if starts:
        fields = starts[-1].fields
        nodes = list(dict.fromkeys(_str(node) for node in _list(fields.get("nodes"))))
        if nodes:
            shown = ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
            ranks = _int(fields.get("world_size"))
            lines.append(Text(f"{_count(ranks, 'rank')} on {_count(len(nodes), 'node')}: {shown}."))
        if fields.get("mode") == "observe":
            lines.append(Text("Mode observe: verdicts are recorded, nothing is changed."))
        elif fields.get("mode") == "act":
            taking = "on its own" if fields.get("quarantine") == "auto" else "after a person approved it"
            lines.append(Text(f"Mode act: faults are repaired; a node is taken out {taking}."))
    lost = sum(_int(e.fields.get("lost_before")) for e in events)
    for count, what in (
        (log.unreadable, "cannot be read and was left out"),
        (lost, "could not be written, probably because the disk was full"),
        (log.newer, "was written by a newer version and may hold more than is shown"),
    ):
        if count:
            lines.append(Text(f"Note: of the log, {_count(count, 'event')} {what}.", style="yellow"))
    return Group(*lines)


def _calls_for_a_person(events: Sequence[Event]) -> RenderableType | None:
    """What nobody but a person can judge, before everything else."""
    calls = _once(_of(events, "needs_human"))
    lines = [f"Step {event.step} needs a person: {_str(event.fields.get('reason'))}" for event in calls]
    return Text("\n".join(lines), style="bold red") if lines else None


def _coverage(events: Sequence[Event]) -> RenderableType | None:
    found = _of(events, "coverage")
    rows = _dicts(found[-1].fields.get("rows")) if found else []
    if not rows:
        return None
    table = _table("What is covered", "site", "check", "how", "when", "what it does not see")
    for row in sorted(rows, key=lambda row: not row.get("how")):  # what is not covered at the end, where it is seen
        cells = [_str(row.get(key)) for key in ("site", "check", "how", "when", "blind")]
        _row(table, *cells) if cells[2] else _row(table, cells[0], "not covered", "", "", cells[4])
    return table


def _checks(events: Sequence[Event]) -> RenderableType | None:
    # Each rank counts its own, and each start counts anew: the newest tally of every (run, rank) is added up.
    newest: dict[tuple[Any, Any], dict[str, Any]] = {}
    for event in events:
        tally = event.fields.get("tally")
        if isinstance(tally, dict):
            newest[event.fields.get("run"), event.fields.get("rank")] = cast(dict[str, Any], tally)
    ran: Counter[str] = Counter()
    alarms: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for tally in newest.values():
        for check, counts in tally.items():
            if isinstance(counts, dict):
                row = cast(dict[str, Any], counts)
                ran[check] += _int(row.get("ran"))
                alarms[check] += _int(row.get("alarms"))
                seconds[check] = seconds.get(check, 0.0) + _float(row.get("seconds"))
    states = {_str(e.fields.get("check")): _state(e) for e in events if e.kind in _STATES}
    if not ran and not states:
        return Text("\nHow often each check ran is not on record: the run did not get to its first save or its end.")
    table = _table("What was checked", "check", "times, all ranks", "alarms", "seconds", "state")
    for check in dict.fromkeys([*ran, *states]):
        counted = check in ran
        _row(
            table,
            check,
            f"{ran[check]:,}" if counted else "not on record",
            f"{alarms[check]:,}" if counted else "",
            f"{seconds[check]:.2f}" if counted else "",
            states.get(check, "as configured"),
        )
    return table


_STATES = frozenset({"calibration", "check_degraded", "check_disabled"})


def _state(event: Event) -> str:
    reason = _str(event.fields.get("reason"))
    because = f": {reason}" if reason else ""
    if event.kind == "check_disabled":
        return f"switched off at step {event.step}{because}"
    if event.kind == "check_degraded":
        return f"degraded at step {event.step}{because}"
    strength = _str(event.fields.get("strength"))
    words = {"bitwise": "compares bits", "loss only": "compares the loss only", "off": "off"}
    return f"calibrated at step {event.step}: {words.get(strength, strength)}{because}"


def _findings(events: Sequence[Event]) -> RenderableType:
    verdicts = _once(_of(events, "verdict"))
    if not verdicts:
        return Text("\nNothing was found by the checks that ran. That is not a proof that nothing was wrong.")
    table = _table(f"What was found ({len(verdicts)})", "step", "site", "verdict", "who", "why", "evidence")
    for event in verdicts[:_MOST_ROWS]:
        verdict = _dict(event.fields.get("verdict"))
        kind = _str(verdict.get("kind"))
        words = f"{kind}: {KIND_WORDS[kind]}" if kind in KIND_WORDS else kind
        who = _who(event)
        _row(
            table,
            str(event.step),
            _str(event.fields.get("site")),
            words,
            who or "nobody is blamed",
            _str(verdict.get("reason")),
            _str(event.fields.get("evidence")),
        )
    if len(verdicts) > _MOST_ROWS:
        _row(table, "…", "", f"and {len(verdicts) - _MOST_ROWS} more", "", "", "")
    return table


def _actions(events: Sequence[Event]) -> RenderableType | None:
    # A verdict that observe mode did not act upon stands here too, with what act mode would have done.
    actions = [e for e in _once(e for e in events if e.kind in ("action", "verdict")) if _done(e) or _would(e)]
    if not actions:
        return None
    table = _table("What was done", "step", "action", "seconds", "why")
    for event in actions[:_MOST_ROWS]:
        name = _done(event) or f"{_would(event)} (not done: observe mode)"
        seconds = event.fields.get("seconds")
        _row(
            table,
            str(event.step),
            name,
            f"{_float(seconds):.2f}" if seconds is not None else "",
            _str(event.fields.get("reason")) or _str(_dict(event.fields.get("verdict")).get("reason")),
        )
    if len(actions) > _MOST_ROWS:
        _row(table, "…", f"and {len(actions) - _MOST_ROWS} more", "", "")
    return table


def _done(event: Event) -> str:
    """The action that was carried out, "" when training simply went on."""
    action = _str(event.fields.get("action"))
    return "" if event.kind != "action" or action == "CONTINUE" else action


def _would(event: Event) -> str:
    """The action that act mode would have taken and observe mode did not."""
    would = _str(event.fields.get("would"))
    return would if event.fields.get("action") == "CONTINUE" and would != "CONTINUE" else ""


def _people(directory: str | os.PathLike[str], events: Sequence[Event]) -> RenderableType | None:
    lines: list[str] = []
    asked = asked_nodes(events)
    if asked:
        approved = [node for node in asked if node in approved_nodes(directory)]
        lines.append(
            f"A person was asked about {_count(len(asked), 'node')} and approved {len(approved)} of {len(asked)}."
            " This is the precision that people have confirmed so far; with few cases it says little."
        )
        lines += [
            f"Waiting for an answer: unsilent approve {os.fspath(directory)} {node}"
            for node in asked
            if node not in approved
        ]
    try:
        excluded = excluded_nodes(directory)
    except UsageError as error:
        lines.append(str(error))
        excluded = {}
    lines += [f"Left out on restart: {node} ({reason})" for node, reason in sorted(excluded.items())]
    return _section("People and nodes", lines)


def _checkpoints(events: Sequence[Event]) -> RenderableType | None:
    paths: dict[int, str] = {}
    trust: dict[int, tuple[str, str]] = {}
    refused: list[str] = []
    for event in events:
        reason = _str(event.fields.get("reason")) or _str(_dict(event.fields.get("verdict")).get("reason"))
        if event.kind == "checkpoint":
            steps = event.fields.get("steps")
            steps = steps if isinstance(steps, int) else event.step
            trust[steps] = (_str(event.fields.get("status")), reason)
            paths[steps] = _str(event.fields.get("path")) or paths.get(steps, "")
        elif event.kind == "checkpoint_refused":
            refused.append(f"Step {event.step}: not written, {reason or 'a check failed'}.")
        elif event.kind == "trust_withdrawn":
            for steps in _list(event.fields.get("steps")):
                trust[_int(steps)] = ("no longer trusted", reason)
    if not trust and not refused:
        return None
    parts: list[RenderableType] = []
    if trust:
        table = _table("Checkpoints", "updates", "trust", "path", "why")
        for steps, (word, reason) in sorted(trust.items()):
            _row(table, str(steps), word, paths.get(steps, ""), reason)
        parts.append(table)
    if refused:
        parts.append(Group(*(Text(line) for line in dict.fromkeys(refused))))
    return Group(*parts)


def _notices(events: Sequence[Event]) -> RenderableType | None:
    lines: list[str] = []
    for event in events:
        if event.kind == "rank_failure":
            who = event.fields.get("failed_rank")
            lines.append(f"Step {event.step}: rank {who} failed: {_str(event.fields.get('error'))}")
        elif event.kind == "guard_error":
            check = _str(event.fields.get("check")) or "the guard"
            lines.append(f"Step {event.step}: a fault in {check} itself: {_str(event.fields.get('error'))}")
        elif event.kind == "spike_confirmed":
            lines.append(f"Step {event.step}: a real spike, which stays: {_str(event.fields.get('reason'))}")
        elif event.kind == "notice":
            lines.append(_str(event.fields.get("text")))
    return _section("Also said", list(dict.fromkeys(lines)))


def _ending(directory: str | os.PathLike[str], events: Sequence[Event]) -> RenderableType:
    outcome = read_exit(directory)
    finished = _of(events, "finished")
    if outcome is None and finished and isinstance(finished[-1].fields.get("exit_code"), int):
        outcome = {"exit_code": finished[-1].fields["exit_code"], "step": finished[-1].step}
    if outcome is None:
        return Text(
            "\nHow it ended: not on record. The run goes on, or it was killed before it could say.", style="bold"
        )
    code = _int(outcome.get("exit_code"))
    words = EXIT_WORDS.get(code, "a code that this version does not know")
    line = f"\nHow it ended: exit code {code} at step {outcome.get('step')}: {words}."
    nodes = dict.fromkeys(node for event in _of(events, "quarantine") for node in suspect_nodes(event))
    if code == EXIT_QUARANTINE and nodes:
        line += f" Node to leave out: {', '.join(nodes)}."
    resume = outcome.get("resume_from")
    if isinstance(resume, str) and resume:
        line += f" Resume from {resume}."
    return Text(line, style="bold")


def _of(events: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in events if event.kind == kind]


def _once(events: Iterable[Event]) -> list[Event]:
    """Each finding once, although several ranks may have written it; what one rank says twice is two findings."""
    said: Counter[str] = Counter()
    seen: dict[tuple[str, int], Event] = {}
    for event in events:
        fields = event.fields
        words = repr([event.step, *(fields.get(k) for k in ("run", "check", "action", "verdict", "reason"))])
        by_rank = f"{fields.get('rank')} {words}"
        seen.setdefault((words, said[by_rank]), event)
        said[by_rank] += 1
    return list(seen.values())


def _who(event: Event) -> str:
    names: list[str] = []
    for suspect in _dicts(event.fields.get("suspects")):
        words = [f"rank {suspect['rank']}"] if suspect.get("rank") is not None else []
        words += [_str(suspect[key]) for key in ("node", "device", "path") if suspect.get(key)]
        names.append(", ".join(words))
    return "; ".join(name for name in names if name)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _row(table: Table, *cells: str) -> None:
    # As Text: a name such as layers[0] is not markup.
    table.add_row(*(Text(cell) for cell in cells))


def _section(title: str, lines: Sequence[str]) -> RenderableType | None:
    if not lines:
        return None
    return Group(Text(f"\n{title}", style="bold"), *(Text(line) for line in lines))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"


def _str(value: Any) -> str:
    return "" if value is None else str(value)


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [cast(dict[str, Any], item) for item in _list(value) if isinstance(item, dict)]
