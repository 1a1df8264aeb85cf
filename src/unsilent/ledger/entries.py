"""The lines of a ledger file as data: what each kind must hold, and why one that does not is left out.

Every line has ``schema, kind, run, time, step, worked, passed``: the format's version, one of the kinds below, the run's
id, seconds since the epoch, updates completed before the step, steps that this run has begun so far, and clean audits
of every rank so far.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, cast, get_args

from unsilent.records import Kind, Site

SCHEMA_VERSION = 1

EntryKind = Literal["run_started", "verdict", "progress", "approved", "run_ended"]
_KINDS = frozenset(get_args(EntryKind))
_MOST = 2**63 - 1
#: the end of the year 9999, the last that a date can be written of
_LAST_TIME = 253_402_300_799


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line that was understood; ``body`` is the whole of it. ``newer``: of a version later than this one knows."""

    kind: str
    run: str
    time: float
    step: int
    worked: int
    passed: int
    body: Mapping[str, Any]
    newer: bool = False


def parse(line: bytes | str) -> Entry:
    """One line of a ledger file.

    Raises:
        ValueError: it cannot be understood; the message says why.
    """
    try:
        raw: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(raw, dict):
        raise ValueError("it is not a JSON object")
    body = cast(dict[str, Any], raw)
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # half of a pair of surrogates, which JSON can write and nothing else
        raise ValueError("it holds text that is none") from None
    schema, when, step = body.get("schema"), body.get("time"), body.get("step")
    if not is_count(schema):
        raise ValueError("it has no schema version")
    if not isinstance(when, int | float) or isinstance(when, bool) or not 0 <= when < math.inf:
        raise ValueError("its time is not a number")
    if when > _LAST_TIME:
        raise ValueError("its time lies beyond the year 9999")
    for name in ("kind", "run"):
        if not isinstance(body.get(name), str):
            raise ValueError(f"its {name} is not a text")
    for name in ("worked", "passed"):
        if not is_count(body.get(name)):
            raise ValueError(f"its {name} is not a count")
    if step != -1 and not is_count(step):
        raise ValueError("its step is not a whole number")
    newer = schema > SCHEMA_VERSION
    if body["kind"] not in _KINDS and not newer:
        raise ValueError(f"its kind {body['kind']!r} is unknown")
    _check(body)
    return Entry(
        kind=body["kind"],
        run=body["run"],
        time=float(when),
        step=int(step),
        worked=body["worked"],
        passed=body["passed"],
        body=body,
        newer=newer,
    )


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a JSON value is a whole number of at least 0, and of a size that can be stored."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


def items(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects in a line that :func:`parse` has accepted."""
    return cast(list[dict[str, Any]], body.get(name) or [])


def _check(body: Mapping[str, Any]) -> None:
    """What the kind must hold besides."""
    kind = body["kind"]
    if kind == "run_started":
        _each(body, "places", texts=("node", "device"))
    elif kind == "verdict":
        if body.get("verdict") not in [one.value for one in Kind]:
            raise ValueError(f"its verdict {body.get('verdict')!r} is unknown")
        if body.get("site") not in [one.value for one in Site]:
            raise ValueError(f"its site {body.get('site')!r} is unknown")
        if not isinstance(body.get("check"), str):
            raise ValueError("its check is not a text")
        _each(body, "suspects", texts=("node", "device"))
        acquits = body.get("acquits", [])
        if not isinstance(acquits, list) or not all(isinstance(one, str) for one in cast(list[Any], acquits)):
            raise ValueError("its acquits are not a list of texts")
    elif kind == "approved":
        if not isinstance(body.get("node"), str):
            raise ValueError("its node is not a text")
    elif kind == "run_ended":
        code = body.get("exit_code")
        if code is not None and not is_count(code):
            raise ValueError("its exit_code is not a count")


def _each(body: Mapping[str, Any], name: str, *, texts: tuple[str, ...]) -> None:
    found = body.get(name)
    if not isinstance(found, list):
        raise ValueError(f"its {name} are not a list")
    for item in cast(list[Any], found):
        fields = cast(dict[str, Any], item) if isinstance(item, dict) else {}
        if not is_count(fields.get("rank")) or any(not isinstance(fields.get(text), str) for text in texts):
            raise ValueError(f"one of its {name} has no rank, {' or '.join(texts)}")
