"""From a specification to its trials: every combination, with what is left open drawn by the trial's name alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from random import Random
from typing import Any

from torch import nn
from torch.optim import AdamW

from unsilent.errors import UsageError
from unsilent.lab.campaign.spec import Parallelism, Spec
from unsilent.lab.faults import INTEGER_SITES, Fault, fault_from
from unsilent.lab.inject import Injector

CLEAN = "none"
"""Site and fault of trials without a fault: there is one in every job under every set of checks."""
DEVICE = "whole device"
"""Site of trials with a simulated sick unit."""
_LATE = ("weight", "optimizer_state", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Sick:
    """A simulated sick unit: which one, on which rank, and the seed of its bursts."""

    unit: int
    rank: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One guarded run, with one fault or sick unit, or none.

    Attributes:
        checks, site, kind: names of tables of the specification; ``kind`` is the fault's.
        seed: of the job.
    """

    parallelism: Parallelism
    checks: str
    site: str
    kind: str
    seed: int
    fault: Fault | Sick | None

    @property
    def name(self) -> str:
        return f"{self.parallelism.name}/{self.checks}/{self.site}/{self.kind}/{self.seed}"

    @property
    def drawn_by(self) -> str:
        """What its fault is drawn by: without the set of checks, so that all sets meet the same faults."""
        return f"{self.parallelism.name}/{self.site}/{self.kind}/{self.seed}"

    @property
    def faulty(self) -> tuple[int, ...]:
        """The ranks whose device the fault is on."""
        if self.fault is None:
            return ()
        if isinstance(self.fault, Fault) and self.fault.node:
            return tuple(r for r in range(self.parallelism.ranks) if self.parallelism.node(r) == self.fault.node)
        return () if self.fault.rank is None else (self.fault.rank,)

    @property
    def lasting(self) -> bool:
        """Whether it may fire in more than one step."""
        return isinstance(self.fault, Sick) or (
            self.fault is not None and (not self.fault.one_shot or self.fault.steps > 1)
        )

    @property
    def computed(self) -> bool:
        """Whether the fault is in what one rank computes in the live run: no delivery, no replay, no comparison."""
        if isinstance(self.fault, Fault):
            elsewhere = self.fault.site in ("reduction", "comparison") or self.fault.during_replay == "only"
            return bool(self.faulty) and not elsewhere
        return self.fault is not None

    @property
    def sound(self) -> bool:
        """Whether the fault touches no value of the run: a comparison that errs."""
        return isinstance(self.fault, Fault) and self.fault.site == "comparison"

    @property
    def after_update(self) -> bool:
        """Whether it fires in or after the update of its step."""
        return isinstance(self.fault, Fault) and (self.fault.site in _LATE or self.fault.phase == "optimizer")

    @property
    def felt_later(self) -> int:
        """How many steps after it fires an update is the first to be wrong."""
        return int(isinstance(self.fault, Fault) and self.fault.site == "optimizer_state")

    def describe(self) -> str:
        """The fault in words."""
        if isinstance(self.fault, Sick):
            return f"simulated sick unit {self.fault.unit} as rank {self.fault.rank}"
        return "none" if self.fault is None else self.fault.describe()


@dataclass(frozen=True, kw_only=True)
class _Names:
    """What patterns of the specification are matched with."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]

    def of(self, key: str, site: str) -> tuple[str, ...] | None:
        """The names that option ``key`` of a fault at ``site`` may take; None where it names nothing in the model."""
        if key == "module" or (key == "target" and site in ("forward", "backward", "ids")):
            return self.modules
        return self.parameters if key == "target" and site != "operation" else None


def trials_of(spec: Spec, model: nn.Module) -> tuple[Trial, ...]:
    """All trials of a campaign on ``model``, seed by seed, those of one seed and job in a mixed order.

    Raises:
        UsageError: a fault cannot be, or does not fit the model or the job; the message names the line.
    """
    names = _Names(
        modules=tuple(name for name, _ in model.named_modules(remove_duplicate=False) if name),
        parameters=tuple(name for name, _ in model.named_parameters(remove_duplicate=False)),
    )
    cells = [(site, kind) for kind, sites in spec.sites_of.items() for site in sites]
    cells += [(DEVICE, f"unit {number}") for number in spec.units]
    cells += [(CLEAN, CLEAN)]
    queue: list[Trial] = []
    for seed in range(spec.job.seeds):
        for parallelism in spec.job.parallelism:
            block = [
                Trial(parallelism=parallelism, checks=checks, site=site, kind=kind, seed=seed, fault=None)
                for checks in spec.checks for site, kind in cells
            ]  # fmt: skip
            # So that the first trials of a campaign that is cut short are a fair sample.
            Random(f"{seed}/{parallelism.name}").shuffle(block)
            queue += [replace(trial, fault=_fault(trial, spec, names)) for trial in block]
    _must_fit(spec, queue, model)
    return tuple(queue)


def _fault(trial: Trial, spec: Spec, names: _Names) -> Fault | Sick | None:
    """What is put into a trial, from the trial's name."""
    draw = Random(trial.drawn_by)
    if trial.site == CLEAN:
        return None
    if trial.site == DEVICE:
        unit = int(trial.kind.split()[-1])
        return Sick(unit=unit, rank=draw.randrange(trial.parallelism.ranks), seed=draw.getrandbits(31))
    options: dict[str, Any] = {**spec.sites[trial.site], **spec.faults[trial.kind]}
    try:
        drawn = {key: _draw(key, value, options["site"], names, draw) for key, value in options.items()}
        if "rank" not in drawn and (drawn["site"] != "reduction" or drawn.get("delivery")):
            drawn["rank"] = draw.randrange(trial.parallelism.ranks)
        fault = fault_from({"seed": draw.getrandbits(31), **drawn})
        _must_be_in_the_job(fault, spec, trial.parallelism)
    except UsageError as error:
        raise spec.places.blame(_tables(spec, trial), str(error)) from error
    return fault


def _draw(key: str, value: Any, site: str, names: _Names, draw: Random) -> Any:
    """One value of a list; of patterns of names, one of the names that fit any of them."""
    choices: Sequence[Any] = value if isinstance(value, list) else [value]
    if not choices:
        raise UsageError(f"{key} is an empty list: nothing can be drawn from it")
    known = names.of(key, site)
    if known is not None:
        for pattern in choices:
            if not any(fnmatchcase(name, str(pattern)) for name in known):
                raise UsageError(f"{key} {pattern!r} fits nothing in the model, which has, for example, {known[0]!r}")
        choices = [name for name in known if any(fnmatchcase(name, str(pattern)) for pattern in choices)]
    return choices[draw.randrange(len(choices))] if len(choices) > 1 else choices[0]


def _must_be_in_the_job(fault: Fault, spec: Spec, parallelism: Parallelism) -> None:
    if fault.rank is not None and fault.rank >= parallelism.ranks:
        raise UsageError(
            f"rank {fault.rank} is outside {parallelism.name}, which has ranks 0 to {parallelism.ranks - 1}"
        )
    if fault.first_step >= spec.job.steps:
        key = "step" if fault.one_shot else "from_step"
        raise UsageError(f"{key} {fault.first_step} never comes: a trial has steps 0 to {spec.job.steps - 1}")


def _must_fit(spec: Spec, trials: Sequence[Trial], model: nn.Module) -> None:
    """Put every fault into the model once and take it out again, so that what does not fit is known before anything runs."""
    optimizer = AdamW(model.parameters())
    widest = max(8 * parameter.element_size() for parameter in model.parameters())
    for trial in trials:
        fault = trial.fault
        if not isinstance(fault, Fault):
            continue
        try:
            Injector(model, optimizer, fault, rank=0, world_size=trial.parallelism.ranks).close()
            if fault.bit is not None and fault.bit >= widest and fault.site not in INTEGER_SITES:
                raise UsageError(f"there is no bit {fault.bit} in the job's numbers, which have {widest} bits")
        except UsageError as error:
            raise spec.places.blame(_tables(spec, trial), str(error)) from error


def _tables(spec: Spec, trial: Trial) -> dict[str, Mapping[str, Any]]:
    """The tables that say what the fault is, by their names in the text."""
    return {f"faults.{trial.kind}": spec.faults[trial.kind], f"sites.{trial.site}": spec.sites[trial.site]}
