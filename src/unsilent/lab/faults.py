"""Faults as data: where a value goes wrong, how, on which rank and when. No torch here.

When a fault fires
    ``step`` (with ``steps = n``): in the *live* execution of n consecutive steps; the first execution of the target in
    each of them, never a replay, and never twice for one step, even when the step is run again after a rollback.
    ``from_step``: in *every* execution of the target from that step on, replays included (``during_replay = "off"``
    leaves replays out), whichever rank's batch is being worked on: a sick device also spoils the replays that it makes
    for its neighbours.
    ``probability``: each execution that would fire does so with this probability only; alone it means from step 0 on.
    A weight or optimizer moment has one execution per step: the moment between its update and the next step.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from unsilent.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SITES = ("forward", "backward", "gradient", "reduction", "weight", "optimizer_state")

# Every pattern with the options that only it, or few others, understand.
_PATTERN_OPTIONS: dict[str, frozenset[str]] = {
    "bit_flip": frozenset({"bit", "count", "lane"}),
    "zero": frozenset({"count", "lane"}),
    "nan": frozenset({"count", "lane"}),
    "inf": frozenset({"count", "lane"}),
    "scale": frozenset({"factor", "count", "lane"}),
    "relative": frozenset({"relative", "count", "lane"}),
    "stuck_lane": frozenset({"relative", "add", "every"}),
    "random_bits": frozenset({"bit", "count", "lane"}),
}
PATTERNS = tuple(_PATTERN_OPTIONS)
REPLAY_MODES = ("keep", "off")

SMALL_ERROR = 2.5e-5
"""4.0001 where 4.0000 is right: what a marginal multiplier typically makes."""

_SMALLEST: dict[str, int] = {
    "element": 0,
    "bit": 0,
    "count": 1,
    "lane": 1,
    "every": 1,
    "rank": 0,
    "step": 0,
    "steps": 1,
    "from_step": 0,
    "seed": 0,
}
_NUMBERS = ("factor", "relative", "add", "probability")
_BOOLEANS = ("delivery",)
_STRINGS = ("site", "pattern", "target", "key", "node", "during_replay")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. Everything is checked when it is made; what needs the model is checked by the injector.

    Attributes:
        site: ``forward`` (a module's output), ``backward`` (the gradient of a module's output), ``gradient`` (a
            parameter's local gradient, before the reduction), ``reduction`` (the reduced values), ``weight``,
            ``optimizer_state``.
        target: name of a module (forward, backward) or of a parameter (gradient, weight, optimizer_state), as in
            ``named_modules`` / ``named_parameters`` of the inner model; empty for ``reduction``, where any reduction
            that is large enough is a target.
        key: which optimizer state of the parameter, e.g. ``exp_avg``.
        delivery: for ``reduction``: False, the sum itself is wrong, so all ranks get the same wrong value; True, the
            sum is right and only ``rank`` gets a wrong copy.
        pattern: ``bit_flip`` (``bit``), ``zero``, ``nan``, ``inf``, ``scale`` (times ``factor``), ``relative`` (times
            1 + ``relative``, and at least the next representable number), ``stuck_lane`` (every ``every``-th column of
            the last dimension gets ``add``, or the error ``relative``), ``random_bits`` (other bits at each execution,
            up to bit ``bit``; by default mantissa only, so that the value stays finite).
        element: flat index of the first wrong element (``stuck_lane``: of a wrong column); None chooses by ``seed``.
            The choice depends on the seed and the tensor's shape only: a defect stays where it is.
        count, lane: ``count`` groups of ``lane`` neighbouring elements each; with ``element`` the groups stand side by
            side from there, otherwise each is chosen by the seed.
        rank: the global rank that is wrong; left out only where the sum itself is wrong.
        node: in the place of ``rank``, the node whose ranks are wrong: the fault stays where it is when a run is
            started again on other nodes.
        step, steps, from_step, probability, during_replay: when; see the module.
        seed: same seed, same corrupted bits.
    """

    site: str
    pattern: str
    target: str = ""
    key: str = "exp_avg"
    delivery: bool = False
    element: int | None = None
    count: int = 1
    lane: int = 1
    bit: int | None = None
    factor: float | None = None
    relative: float | None = None
    add: float | None = None
    every: int = 32
    rank: int | None = None
    node: str = ""
    step: int | None = None
    steps: int = 1
    from_step: int | None = None
    probability: float = 1.0
    during_replay: str = "keep"
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        self._check_place()
        self._check_pattern()
        self._check_time()

    @property
    def one_shot(self) -> bool:
        """Whether it fires in live executions of single steps only."""
        return self.step is not None

    @property
    def first_step(self) -> int:
        return self.step if self.step is not None else self.from_step or 0

    def in_force(self, step: int) -> bool:
        """Whether ``step`` is one of its steps."""
        return step >= self.first_step and (not self.one_shot or step < self.first_step + self.steps)

    @property
    def error(self) -> float:
        """The relative error of ``relative`` and ``stuck_lane``."""
        return SMALL_ERROR if self.relative is None else self.relative

    def describe(self) -> str:
        """The fault in a few words, for tables and logs."""
        where = self.site if not self.target else f"{self.site} of {self.target}"
        if self.site == "optimizer_state":
            where += f" ({self.key})"
        if self.site == "reduction":
            where += " (delivery)" if self.delivery else " (sum)"
        who = self.node or ("all ranks" if self.rank is None else f"rank {self.rank}")
        when = f"from step {self.first_step}"
        if self.one_shot:
            when = f"step {self.first_step}" if self.steps == 1 else f"{self.steps} steps from {self.first_step}"
        chance = "" if self.probability == 1 else f", probability {self.probability:g}"
        return f"{self.pattern} in {where} on {who}, {when}{chance}"

    @property
    def everywhere(self) -> bool:
        """Whether it is on no one rank and no one node."""
        return self.rank is None and not self.node

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values; ``fault_from`` reads them back."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def _check_types(self) -> None:
        for name in _STRINGS:
            _require(isinstance(getattr(self, name), str), f"{name} must be a string, not {getattr(self, name)!r}")
        for name in _BOOLEANS:
            _require(
                isinstance(getattr(self, name), bool), f"{name} must be true or false, not {getattr(self, name)!r}"
            )
        for name, smallest in _SMALLEST.items():
            value = getattr(self, name)
            if value is not None:
                whole = isinstance(value, int) and not isinstance(value, bool)
                _require(whole and value >= smallest, f"{name} must be a whole number from {smallest}, not {value!r}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None:
                number = isinstance(value, int | float) and not isinstance(value, bool)
                _require(number and math.isfinite(value), f"{name} must be a finite number, not {value!r}")

    def _check_place(self) -> None:
        _one_of("site", self.site, SITES)
        if self.site == "reduction":
            _require(not self.target, "a fault of the reduction has no target: any reduction large enough is one")
            _require(
                self.delivery or self.everywhere,
                "a wrong sum reaches all ranks: leave rank out, or say delivery = true for one rank's copy",
            )
        else:
            what = "module" if self.site in ("forward", "backward") else "parameter"
            _require(bool(self.target), f"a fault of site {self.site!r} needs a target, the name of a {what}")
            _require(not self.delivery, "delivery belongs to faults of the reduction only")
        if self.site != "reduction" or self.delivery:
            _require(not self.everywhere, "a fault needs a rank, the one that is wrong, or a node")
        _require(self.rank is None or not self.node, "a fault is on a rank or on a node, not on both")
        if self.site != "optimizer_state":
            _require(self.key == "exp_avg", "key belongs to faults of the optimizer_state only")
        _require(bool(self.key), "key must name a state of the optimizer, such as exp_avg")

    def _check_pattern(self) -> None:
        _one_of("pattern", self.pattern, PATTERNS)
        understood = _PATTERN_OPTIONS[self.pattern]
        for option in frozenset[str]().union(*_PATTERN_OPTIONS.values()):
            changed = getattr(self, option) != _DEFAULTS[option]
            _require(option in understood or not changed, f"pattern {self.pattern!r} does not use {option}")
        if self.pattern == "bit_flip":
            _require(self.bit is not None, "pattern 'bit_flip' needs a bit (0 is the lowest of the mantissa)")
        if self.bit is not None:
            _require(self.bit < 64, f"no number has a bit {self.bit}")
        if self.pattern == "scale":
            _require(self.factor is not None, "pattern 'scale' needs a factor")
        _require(self.add is None or self.relative is None, "a stuck lane has add or relative, not both")

    def _check_time(self) -> None:
        _one_of("during_replay", self.during_replay, REPLAY_MODES)
        _require(0 <= self.probability <= 1, f"probability must lie between 0 and 1, not {self.probability!r}")
        _require(
            self.step is None or self.from_step is None,
            "step (for single steps) and from_step (for ever) exclude one another",
        )
        _require(self.step is not None or self.steps == 1, "steps needs step, the first of them")
        _require(
            self.step is not None or self.from_step is not None or self.probability < 1,
            "say when the fault fires: step, from_step, or a probability below 1",
        )


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Fault)}


def fault_from(options: Mapping[str, Any]) -> Fault:
    """A fault from plain values, such as a table of a TOML file."""
    for name in options:
        if name not in _DEFAULTS:
            raise UsageError(f"a fault has no option {name!r}{_suggest(name, tuple(_DEFAULTS))}")
    for name in ("site", "pattern"):
        if name not in options:
            raise UsageError(f"a fault needs a {name}: one of {', '.join(SITES if name == 'site' else PATTERNS)}")
    return Fault(**options)


def read_faults(path: str | Path) -> tuple[Fault, ...]:
    """The faults of a TOML file: its own keys are one fault, or each ``[[fault]]`` table is."""
    try:
        with Path(path).open("rb") as file:
            document: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read the fault file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    tables: Any = document.get("fault", document)
    if not isinstance(tables, list):
        tables = [tables]
    if "fault" in document and len(document) > 1:
        raise UsageError(f"{path} has keys beside its [[fault]] tables: put each into the fault it belongs to")
    faults: list[Fault] = []
    table: Any
    for table in tables:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(table, dict) or not table:
            raise UsageError(f"{path} holds no fault: write site, pattern and the rest, or [[fault]] tables")
        try:
            faults.append(fault_from(table))  # pyright: ignore[reportUnknownArgumentType]
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error
    if not faults:
        raise UsageError(f"{path} holds no fault: write site, pattern and the rest, or [[fault]] tables")
    return tuple(faults)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UsageError(sentence)


def _one_of(what: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise UsageError(f"unknown {what} {given!r}{_suggest(given, known)} (there are: {', '.join(known)})")


def _suggest(given: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f": did you mean {close[0]!r}?" if close else ""
