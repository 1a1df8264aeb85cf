"""Faults as data: where a value goes wrong, how, on which rank and when. No torch here.

When a fault fires
    ``step`` (with ``steps = n``): in the *live* execution of n consecutive steps; the first execution of the target in
    each of them, never a replay, and never twice for one step, even when the step is run again after a rollback.
    ``from_step``: in *every* execution of the target from that step on, replays included (``during_replay = "off"``
    leaves replays out), whichever rank's batch is being worked on: a sick device also spoils the replays that it makes
    for its neighbours.
    ``probability``: each execution that would fire does so with this probability only; alone it means from step 0 on.
    ``burst``: steps come in bursts: in each step one begins with this probability and lasts ``burst_steps`` steps.
    ``on``, ``off``: of every ``on + off`` executions only the first ``on`` are wrong, so that a fault vanishes on a retry.
    ``during_replay = "only"``: the live run is right; what is wrong is the work of an auditor or arbiter.
    A weight or optimizer moment has one execution per step: the moment between its update and the next step.
"""

from __future__ import annotations

import difflib
import hashlib
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

SITES = (
    "forward", "backward", "gradient", "reduction", "weight", "optimizer_state",
    "operation", "ids", "optimizer", "comparison",
)  # fmt: skip
INTEGER_SITES = ("ids", "comparison")
"""Where integers are wrong, not numbers with a mantissa."""
PHASES = ("forward", "recompute", "backward", "optimizer")

# Every pattern with the options that only it, or few others, understand.
_PATTERN_OPTIONS: dict[str, frozenset[str]] = {
    "bit_flip": frozenset({"bit", "count", "lane", "rate"}),
    "stuck_bit": frozenset({"bit", "high", "count", "lane", "rate"}),
    "zero": frozenset({"count", "lane", "rate"}),
    "nan": frozenset({"count", "lane", "rate"}),
    "inf": frozenset({"count", "lane", "rate"}),
    "scale": frozenset({"factor", "count", "lane", "rate"}),
    "relative": frozenset({"relative", "count", "lane", "rate"}),
    "stuck_lane": frozenset({"relative", "add", "every"}),
    "random_bits": frozenset({"bit", "count", "lane", "rate"}),
    "gates": frozenset({"period", "share", "count", "lane", "rate"}),
}
PATTERNS = tuple(_PATTERN_OPTIONS)
INTEGER_PATTERNS = ("bit_flip", "stuck_bit", "random_bits", "zero")
REPLAY_MODES = ("keep", "off", "only")
GROUP = 32
"""Elements in which the addresses of ``gates`` repeat."""
PERIODS = (2, 4, 8, 16)

SMALL_ERROR = 2.5e-5
"""4.0001 where 4.0000 is right: what a marginal multiplier typically makes."""

_SMALLEST: dict[str, int] = {
    "element": 0,
    "bit": 0,
    "count": 1,
    "lane": 1,
    "every": 1,
    "burst_steps": 1,
    "on": 1,
    "off": 0,
    "rank": 0,
    "step": 0,
    "steps": 1,
    "from_step": 0,
    "seed": 0,
}
_NUMBERS = ("factor", "relative", "add", "probability", "burst", "rate", "share", "at_least", "below")
_BOOLEANS = ("delivery", "high")
_STRINGS = ("site", "pattern", "target", "module", "phase", "key", "node", "during_replay")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. Everything is checked when it is made; what needs the model is checked by the injector.

    Attributes:
        site: ``forward`` (a module's output), ``backward`` (the gradient of a module's output), ``gradient`` (a
            parameter's local gradient, before the reduction), ``reduction`` (the reduced values), ``weight``,
            ``optimizer_state``, ``operation`` (the result of one ATen operation), ``ids`` (the integers that an
            embedding looks up), ``optimizer`` (the arithmetic of a parameter's update), ``comparison`` (the
            fingerprints that a vote compares).
        target: name of a module (forward, backward, ids) or of a parameter (gradient, weight, optimizer_state,
            optimizer), as in ``named_modules`` / ``named_parameters`` of the inner model; of an ATen operation such as
            ``mm`` (operation); empty for ``reduction``, where any reduction that is large enough is a target, and for
            ``comparison``.
        module, phase: for ``operation``: only inside this module (and what is in it), and only in this phase:
            ``forward``, ``recompute``, ``backward``, ``optimizer``; empty for all.
        key: which optimizer state of the parameter, e.g. ``exp_avg``.
        delivery: for ``reduction``: False, the sum itself is wrong, so all ranks get the same wrong value; True, the
            sum is right and only ``rank`` gets a wrong copy.
        pattern: ``bit_flip`` (``bit``), ``zero``, ``nan``, ``inf``, ``scale`` (times ``factor``), ``relative`` (times
            1 + ``relative``, and at least the next representable number), ``stuck_lane`` (every ``every``-th column of
            the last dimension gets ``add``, or the error ``relative``), ``random_bits`` (other bits at each execution,
            up to bit ``bit``; by default mantissa only, so that the value stays finite), ``stuck_bit`` (``bit`` reads 1,
            or 0 with ``high = false``), ``gates`` (each value zeroed, changed, or NaN or Inf, in the shares that a
            gate-level study found, see ``gates.py``).
        element: flat index of the first wrong element (``stuck_lane``: of a wrong column); None chooses by ``seed``.
            The choice depends on the seed and the tensor's shape only: a defect stays where it is.
        count, lane: ``count`` groups of ``lane`` neighbouring elements each; with ``element`` the groups stand side by
            side from there, otherwise each is chosen by the seed.
        period, share: for ``gates``: every ``period``-th element of ``count`` groups of 32; or the part ``share`` of the
            tensor, in one piece.
        rate: in the place of ``count``: each element of an execution is hit with this probability, other elements each
            time.
        at_least, below: only elements whose right value has a magnitude in this range are hit.
        rank: the global rank that is wrong; left out only where the sum itself is wrong.
        node: in the place of ``rank``, the node whose ranks are wrong: the fault stays where it is when a run is
            started again on other nodes.
        step, steps, from_step, probability, burst, burst_steps, on, off, during_replay: when; see the module.
        seed: same seed, same corrupted bits.
    """

    site: str
    pattern: str
    target: str = ""
    module: str = ""
    phase: str = ""
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
    high: bool = True
    period: int | None = None
    share: float | None = None
    rate: float | None = None
    at_least: float = 0.0
    below: float | None = None
    rank: int | None = None
    node: str = ""
    step: int | None = None
    steps: int = 1
    from_step: int | None = None
    probability: float = 1.0
    burst: float | None = None
    burst_steps: int = 1
    on: int = 1
    off: int = 0
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
        if step < self.first_step or (self.one_shot and step >= self.first_step + self.steps):
            return False
        if self.burst is None:
            return True
        begins = range(max(self.first_step, step - self.burst_steps + 1), step + 1)
        return any(uniform(self.seed, "burst", begin) < self.burst for begin in begins)

    @property
    def error(self) -> float:
        """The relative error of ``relative`` and ``stuck_lane``."""
        return SMALL_ERROR if self.relative is None else self.relative

    def describe(self) -> str:
        """The fault in a few words, for tables and logs."""
        where = self.site if not self.target else f"{self.site} of {self.target}"
        if self.site == "operation":
            where = f"{self.phase or 'any'} {self.target}{f' in {self.module}' if self.module else ''}"
        if self.site == "optimizer_state":
            where += f" ({self.key})"
        if self.site == "reduction":
            where += " (delivery)" if self.delivery else " (sum)"
        who = self.node or ("all ranks" if self.rank is None else f"rank {self.rank}")
        when = f"from step {self.first_step}"
        if self.one_shot:
            when = f"step {self.first_step}" if self.steps == 1 else f"{self.steps} steps from {self.first_step}"
        if self.burst is not None:
            when += f" in bursts of {self.burst_steps}, probability {self.burst:g}"
        chance = "" if self.probability == 1 else f", probability {self.probability:g}"
        only = ", in replays only" if self.during_replay == "only" else ""
        return f"{self.pattern} in {where} on {who}, {when}{chance}{only}"

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
        elif self.site == "comparison":
            _require(
                not self.target, "a fault of the comparison has no target: it hits the fingerprints that votes compare"
            )
        else:
            _require(
                bool(self.target), f"a fault of site {self.site!r} needs a target, the name of a {self._target_is}"
            )
        _require(self.site == "reduction" or not self.delivery, "delivery belongs to faults of the reduction only")
        if self.site != "reduction" or self.delivery:
            _require(not self.everywhere, "a fault needs a rank, the one that is wrong, or a node")
        _require(self.rank is None or not self.node, "a fault is on a rank or on a node, not on both")
        if self.site != "optimizer_state":
            _require(self.key == "exp_avg", "key belongs to faults of the optimizer_state only")
        _require(bool(self.key), "key must name a state of the optimizer, such as exp_avg")
        if self.site != "operation":
            _require(not self.module and not self.phase, "module and phase belong to faults of an operation only")
        if self.phase:
            _one_of("phase", self.phase, PHASES)

    @property
    def _target_is(self) -> str:
        if self.site in ("forward", "backward", "ids"):
            return "module"
        return "ATen operation, such as mm" if self.site == "operation" else "parameter"

    def _check_pattern(self) -> None:
        _one_of("pattern", self.pattern, PATTERNS)
        if self.site in INTEGER_SITES:
            _require(
                self.pattern in INTEGER_PATTERNS,
                f"site {self.site!r} holds integers, so its patterns are {', '.join(INTEGER_PATTERNS)}",
            )
        understood = _PATTERN_OPTIONS[self.pattern]
        for option in frozenset[str]().union(*_PATTERN_OPTIONS.values()):
            changed = getattr(self, option) != _DEFAULTS[option]
            _require(option in understood or not changed, f"pattern {self.pattern!r} does not use {option}")
        if self.pattern in ("bit_flip", "stuck_bit"):
            _require(self.bit is not None, f"pattern {self.pattern!r} needs a bit (0 is the lowest of the mantissa)")
        if self.bit is not None:
            _require(self.bit < 64, f"no number has a bit {self.bit}")
        if self.pattern == "scale":
            _require(self.factor is not None, "pattern 'scale' needs a factor")
        _require(self.add is None or self.relative is None, "a stuck lane has add or relative, not both")
        self._check_extent()

    def _check_extent(self) -> None:
        if self.period is not None:
            _require(self.period in PERIODS, f"period must be one of {', '.join(map(str, PERIODS))}")
            _require(self.lane == 1, "period counts groups of 32 elements: leave lane out")
        if self.share is not None:
            _require(0 < self.share <= 1, f"share must lie above 0 and up to 1, not {self.share!r}")
            _require(self.count == 1 and self.lane == 1, "share is one piece of the tensor: leave count and lane out")
        if self.rate is not None:
            _require(0 <= self.rate <= 1, f"rate must lie between 0 and 1, not {self.rate!r}")
            _require(
                self.count == 1 and self.lane == 1, "rate says how many elements are hit: leave count and lane out"
            )
        ways = [name for name in ("period", "share", "rate", "element") if getattr(self, name) is not None]
        _require(len(ways) <= 1, f"{' and '.join(ways)} exclude one another: each says which elements are wrong")
        _require(self.at_least >= 0, f"at_least is a magnitude, so from 0 on, not {self.at_least!r}")
        if self.below is not None:
            _require(self.below > self.at_least, f"below ({self.below!r}) must be above at_least ({self.at_least!r})")

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
        if self.burst is not None:
            _require(0 <= self.burst <= 1, f"burst is a probability, so between 0 and 1, not {self.burst!r}")
            _require(not self.one_shot, "burst needs from_step: single steps are no bursts")
        _require(self.burst is not None or self.burst_steps == 1, "burst_steps needs burst")
        _require(
            self.off == 0 or not self.one_shot, "on and off need from_step: a fault of single steps never comes back"
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


def uniform(*key: object) -> float:
    """A number from 0 up to 1, below it, that depends on the key alone; 53 bits, so that rates of 2e-9 are met."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UsageError(sentence)


def _one_of(what: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise UsageError(f"unknown {what} {given!r}{_suggest(given, known)} (there are: {', '.join(known)})")


def _suggest(given: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f": did you mean {close[0]!r}?" if close else ""
