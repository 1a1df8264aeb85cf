"""A campaign's specification: a TOML file to frozen data. Whatever is wrong with it is said with its line, and nothing runs.

A trial is one fault at one site, in one job under one set of checks:

    name = "quick"

    [job]
    steps = 10                            # of each trial
    seeds = 2                             # each trial so often, with other weights, other data and another place
    parallelism = ["ddp-3", "ddp-4-on-3"] # DDP on 3 ranks, each a node of its own; on 4 ranks of 3 nodes

    [checks.default]                      # options of GuardConfig; 0 switches a period off
    audit_every = 4

    [sites.forward]                       # where: options of a fault; its site is the table's name unless it says another
    target = ["blocks.*.ffn.*"]           # patterns of names in the model

    [faults.zeroed]                       # how and when: the other options of a fault
    pattern = "zero"
    step = [3, 4, 5]
    sites = ["forward"]                   # which of the sites; all of them if left out

There may be a line ``units = [1, 10, 11]`` above: trials in which one rank's device is such a simulated sick unit.
Every fault meets every site, parallelism, set of checks and seed. Of a list one value is drawn for each trial, by the
trial's name. A rank that is left out is drawn from the job's, except for a wrong sum of a reduction, which has none.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from unsilent.checks.audit import AuditConfig
from unsilent.checks.finite import FiniteConfig
from unsilent.checks.update import UpdateConfig
from unsilent.config import GuardConfig
from unsilent.errors import UsageError
from unsilent.lab.studies.llama import shape_of
from unsilent.lab.units import unit

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_RANKS = 8
_SHARDED = ("fsdp", "hsdp", "tp", "pp", "cp", "ep", "zero")
_LATER = "sharded jobs come in a later part of the lab; now there is ddp-RANKS and ddp-RANKS-on-NODES"

# What the campaign sets itself in every trial, or has no use for.
_OWN = frozenset(
    {"directory", "ledger", "node", "timeout_s", "total_steps", "save_every", "evidence", "keep_checkpoints",
     "replicated_buffers", "require_localization"}
)  # fmt: skip
_CONFIGS: dict[str, type] = {"audit": AuditConfig, "finite": FiniteConfig, "update": UpdateConfig}
_MAY_BE_OFF = frozenset({"audit_every", "replicas_every", "snapshot_every"})
_NUMBERS = {"int": "a whole number", "int | None": "a whole number", "float": "a number"}


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """DDP on ``ranks`` ranks that are spread evenly over ``nodes`` nodes, neighbours together."""

    name: str
    ranks: int
    nodes: int

    def node(self, rank: int) -> str:
        """The name of the node that ``rank`` runs on."""
        return f"node-{rank * self.nodes // self.ranks}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every trial trains.

    Attributes:
        model: one of the lab's shapes.
        samples, length: of each rank in each step: samples, and tokens of each.
        steps: of each trial.
        seeds: how many jobs that differ by their seed.
    """

    model: str = "small"
    samples: int = 2
    length: int = 32
    steps: int = 10
    seeds: int = 1
    parallelism: tuple[Parallelism, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A whole specification.

    Attributes:
        checks: a name and what the guard is told.
        sites, faults: a name and the options of a fault; those of a fault leave out ``sites``.
        sites_of: the sites that a fault meets.
        units: numbers of simulated sick units.
        digest: of the text, so that results of another one are not taken for its own.
        places: where each table and key stands in the text.
    """

    name: str
    job: Job
    checks: Mapping[str, GuardConfig]
    sites: Mapping[str, Mapping[str, Any]]
    faults: Mapping[str, Mapping[str, Any]]
    sites_of: Mapping[str, tuple[str, ...]]
    units: tuple[int, ...]
    digest: str
    places: Places


@dataclass(frozen=True, kw_only=True)
class Places:
    """Finds the lines of tables and keys in a TOML text, which its parser does not tell."""

    path: str
    text: str = field(repr=False)

    def line(self, table: str, key: str = "") -> int:
        """The line of ``key`` in ``table`` (or of the table that it is), else of the table's head, else the first.
        Counted from 1."""
        head, here = 1, ""
        table, itself = _bare(table), _bare(f"{table}.{key}" if table else key)
        for number, line in enumerate(self.text.splitlines(), start=1):
            found = re.match(r"\s*\[+([^\]]*)\]", line)
            if found is not None:
                here = _bare(found[1])
                if key and f"{here}.".startswith(f"{itself}."):
                    return number
                head = number if here == table else head
            elif here == table and key and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
                return number
        return head

    def error(self, table: str, key: str, reason: str) -> UsageError:
        """An error that names the line."""
        return UsageError(f"{self.path}, line {self.line(table, key)}: {reason}")

    def blame(self, tables: Mapping[str, Mapping[str, Any]], reason: str) -> UsageError:
        """An error about options that stand in several tables: at the first option that the reason names."""
        for table, options in tables.items():
            for key in options:
                if re.search(rf"\b{re.escape(key)}\b", reason):
                    return self.error(table, key, reason)
        return self.error(next(iter(tables)), "", reason)


def read_spec(path: str | Path) -> Spec:
    """The specification in a TOML file.

    Raises:
        UsageError: it cannot be read, or something in it is wrong; the message names the line.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the campaign {path}: {error}") from error
    return spec_from(text, path=str(path))


def spec_from(text: str, *, path: str) -> Spec:
    """The specification in a TOML text; ``path`` is what its errors call it."""
    places = Places(path=path, text=text)
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    _only(places, "", document, ("name", "units", "job", "checks", "sites", "faults"))
    sites = _tables(places, document, "sites")
    faults = _tables(places, document, "faults")
    name = document.get("name", Path(path).stem)
    if not isinstance(name, str) or not name:
        raise places.error("", "name", f"name must be a string, not {name!r}")
    job = _job(places, document.get("job", {}))
    return Spec(
        name=name,
        job=job,
        checks={name: _checks(places, name, table) for name, table in _tables(places, document, "checks").items()},
        sites={name: {"site": name, **table} for name, table in sites.items()},
        faults={name: {k: v for k, v in table.items() if k != "sites"} for name, table in faults.items()},
        sites_of={name: _sites_of(places, name, table, sites) for name, table in faults.items()},
        units=_units(places, document.get("units", []), job),
        digest=sha256(text.encode()).hexdigest()[:16],
        places=places,
    )


def _job(places: Places, table: Any) -> Job:
    if not isinstance(table, dict):
        raise places.error("", "job", "job must be a table: [job]")
    _only(places, "job", table, [f.name for f in fields(Job)])
    for key in ("samples", "length", "steps", "seeds"):
        value = table.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise places.error("job", key, f"{key} must be a whole number from 1, not {value!r}")
    try:
        shape_of(str(table.get("model", Job.model)))
    except UsageError as error:
        raise places.error("job", "model", str(error)) from error
    names = table.get("parallelism", [])
    if not isinstance(names, list) or not names:
        raise places.error("job", "parallelism", 'parallelism must be a list, such as ["ddp-3", "ddp-4-on-3"]')
    if any(names.count(name) > 1 for name in names):
        raise places.error("job", "parallelism", "parallelism names a job twice")
    try:
        parallelism = tuple(parallelism_from(name) for name in names)
    except UsageError as error:
        raise places.error("job", "parallelism", str(error)) from error
    return Job(**{**table, "parallelism": parallelism})


def parallelism_from(name: Any) -> Parallelism:
    """``ddp-4`` is DDP on 4 nodes with a rank each, ``ddp-4-on-3`` on 4 ranks of 3 nodes."""
    found = re.fullmatch(r"ddp-(\d+)(?:-on-(\d+))?", name) if isinstance(name, str) else None
    if found is None:
        sharded = isinstance(name, str) and name.lower().startswith(_SHARDED)
        raise UsageError(f"parallelism {name!r} cannot be run: {_LATER}" if sharded else
                         f"unknown parallelism {name!r}: ddp-RANKS or ddp-RANKS-on-NODES, such as ddp-3")  # fmt: skip
    ranks, nodes = int(found[1]), int(found[2] or found[1])
    if not 2 <= ranks <= MOST_RANKS or not 1 <= nodes <= ranks:
        raise UsageError(f"parallelism {name!r}: 2 to {MOST_RANKS} ranks on at most as many nodes can be run")
    return Parallelism(name=name, ranks=ranks, nodes=nodes)


def _checks(places: Places, name: str, table: dict[str, Any]) -> GuardConfig:
    """What the guard is told; nodes are taken out without asking, unless the table says otherwise."""
    here = f"checks.{name}"
    _only(places, here, table, [f.name for f in fields(GuardConfig) if f.name not in _OWN], what="check option")
    options: dict[str, Any] = {"quarantine": "auto"}
    types = {f.name: str(f.type) for f in fields(GuardConfig)}
    for key, value in table.items():
        expected = _NUMBERS.get(types[key])
        if expected and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise places.error(here, key, f"{key} must be {expected}, not {value!r}")
        if key in _CONFIGS:
            options[key] = _config(places, here, key, value)
        else:
            options[key] = None if key in _MAY_BE_OFF and value == 0 else value
    try:
        return GuardConfig(**options)
    except UsageError as error:
        raise places.blame({here: table}, str(error)) from error


def _config(places: Places, here: str, key: str, value: Any) -> Any:
    kind = _CONFIGS[key]
    if not isinstance(value, dict):
        raise places.error(here, key, f"{key} must be a table, such as {key} = {{ {fields(kind)[0].name} = … }}")
    _only(places, here, value, [f.name for f in fields(kind)], what=f"option of {key}", at=key)
    try:
        return kind(**value)
    except (UsageError, TypeError) as error:
        raise places.error(here, key, str(error)) from error


def _units(places: Places, numbers: Any, job: Job) -> tuple[int, ...]:
    if not isinstance(numbers, list):
        raise places.error("", "units", "units must be a list of numbers, such as [1, 10, 11]")
    for number in numbers:
        if numbers.count(number) > 1:
            raise places.error("", "units", f"units names {number} twice")
        try:
            first = unit(number).from_step
        except (UsageError, TypeError) as error:
            raise places.error("", "units", str(error)) from error
        if first >= job.steps:
            raise places.error(
                "", "units", f"unit {number} errs from step {first} on, and a trial has steps 0 to {job.steps - 1}"
            )
    return tuple(numbers)


def _sites_of(
    places: Places, name: str, table: Mapping[str, Any], sites: Mapping[str, Mapping[str, Any]]
) -> tuple[str, ...]:
    wanted = table.get("sites", list(sites))
    if not isinstance(wanted, list) or not wanted or not all(isinstance(one, str) for one in wanted):
        raise places.error(f"faults.{name}", "sites", "sites must be a list of names of [sites.NAME] tables")
    for one in wanted:
        if wanted.count(one) > 1:
            raise places.error(f"faults.{name}", "sites", f"sites names {one!r} twice")
        if one not in sites:
            reason = f"there is no [sites.{one}]{_suggest(one, sites)}"
            raise places.error(f"faults.{name}", "sites", reason)
        both = [key for key in table if key in sites[one]]
        if both:
            reason = f"{both[0]} is given here and by [sites.{one}] (line {places.line(f'sites.{one}', both[0])})"
            raise places.error(f"faults.{name}", both[0], reason)
    return tuple(wanted)


def _tables(places: Places, document: Mapping[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    tables = document.get(kind)
    if not isinstance(tables, dict) or not tables:
        raise places.error("", kind, f"a campaign needs at least one table [{kind}.NAME]")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise places.error(kind, name, f"{kind}.{name} must be a table: [{kind}.{name}]")
    return tables


def _only(
    places: Places, table: str, given: Iterable[str], known: Collection[str], *, what: str = "key", at: str = ""
) -> None:
    """``at``: the key whose line is named, where ``given`` are keys of an inline table."""
    for key in given:
        if key not in known:
            reason = f"there is no {what} {key!r}{_suggest(key, known)} (there are: {', '.join(known)})"
            raise places.error(table, at or key, reason)


def _bare(name: str) -> str:
    """A table's name without quotes and spaces."""
    return re.sub(r"[\"'\s]", "", name)


def _suggest(given: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(known), n=1)
    return f": did you mean {close[0]!r}?" if close else ""
