"""``unsilent study alpha``: which sensitivity of the update check catches how many harmful faults, at what price?

Four stages, each in a file of its own, so that an interrupted study goes on with the stage that was not finished:

``clean``      a run without faults on one seed: the thresholds are set on it
``faults``     a run on another seed: its clean steps count the false alarms; faults are tried at random steps of it, each
               from the very state of the run, which then goes on as if nothing had been (history is frozen at the fault)
``sustained``  faults that last 50 steps, against clean and reseeded runs from the same state
``paired``     whole runs in triples: without faults, with faults, with faults and the check

A trial computes the clean step first, then the faulty rank's work with the fault in real tensors, and a third time
without it, as the recovery does; so each knows how far the update went astray, and whether the recomputed step is the
clean one bit for bit. The job of several ranks is simulated inside one process (``job.py``).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from unsilent.checks.update_rules import Observation, make_rule
from unsilent.errors import UsageError
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.progress import progress
from unsilent.lab.studies.draws import draw, is_finite, is_gross, targets
from unsilent.lab.studies.job import Job, Seen, Shape, State
from unsilent.training.data import standard_library_text
from unsilent.training.presets import preset as preset_of

#: parts of the plan that a stage does not depend on
_OTHERS = {
    "clean": ("sustained", "reseeded", "paired", "trials", "fault"),
    "faults": ("sustained_trials", "reseeded", "paired", "fault"),
    "sustained": ("paired", "trials", "fault"),
    "paired": ("sustained", "reseeded", "trials"),
}
SEED_OF_THRESHOLDS, SEED_OF_FAULTS = 0, 1
PAIRED_RULE, PAIRED_TARGET = "robust", 0.037
LASTING = 50


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is run. The first ``skip`` steps (of paired runs ``paired_skip``) are neither counted nor hit: every rule needs
    a baseline."""

    preset: str
    ranks: int
    samples: int
    length: int
    skip: int
    clean_steps: int
    trials_per_step: float
    sustained_from: tuple[int, ...]
    sustained_trials: int
    reseeded: int
    paired_seeds: int
    paired_steps: int
    paired_skip: int = 60
    fault_rate: float = 0.2

    @property
    def shape(self) -> Shape:
        return Shape(
            preset=preset_of(self.preset),
            ranks=self.ranks,
            samples=self.samples,
            length=self.length,
            steps=self.skip + self.clean_steps,
            warm_up=min(100, self.skip),
            raw=self.preset == "tiny",
        )


_TINY = Plan(
    preset="tiny", ranks=4, samples=4, length=64, skip=100, clean_steps=2050, trials_per_step=1.0,
    sustained_from=(500, 1200), sustained_trials=24, reseeded=5, paired_seeds=10, paired_steps=140,
)  # fmt: skip
_LARGE = Plan(
    preset="60m", ranks=2, samples=1, length=64, skip=55, clean_steps=90, trials_per_step=1.0,
    sustained_from=(), sustained_trials=0, reseeded=0, paired_seeds=0, paired_steps=0,
)  # fmt: skip
PLANS = {
    "tiny": _TINY,
    "60m": _LARGE,
    "350m": replace(_LARGE, preset="350m", ranks=4, samples=4, length=256, skip=100, clean_steps=2050),
    "1b": replace(_LARGE, preset="1b", ranks=4, samples=4, length=256, skip=100, clean_steps=2050),
}


def quick(plan: Plan) -> Plan:
    """The same study in two minutes; its figures mean nothing."""
    return replace(
        plan, samples=1, length=32, skip=60, clean_steps=40, trials_per_step=1.0, sustained_from=(70,) if
        plan.sustained_from else (), sustained_trials=1, reseeded=2, paired_seeds=2, paired_steps=66,
    )  # fmt: skip


class Study:
    """See the module's text.

    Args:
        out: where parts are kept and results are written.
    """

    def __init__(self, plan: Plan, out: Path, *, console: Console | None = None) -> None:
        self.plan, self.parts = plan, out / "parts"
        self._console = console or Console(stderr=True)
        try:
            self.parts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {self.parts}: {error.strerror or error}") from error
        self._text = standard_library_text()

    def run(self) -> dict[str, dict[str, Any]]:
        """All stages that the plan has; each is a dictionary of arrays and of what ``about`` says of it."""
        plan = self.plan
        results = {"clean": self._stage("clean", self._clean), "faults": self._stage("faults", self._faults)}
        if plan.sustained_trials and plan.sustained_from:
            results["sustained"] = self._stage("sustained", lambda: self._sustained(results["faults"]))
        if plan.paired_seeds:
            threshold = threshold_for(PAIRED_RULE, results["clean"], PAIRED_TARGET, skip=plan.skip)
            results["paired"] = self._stage("paired", lambda: self._paired(threshold))
        return results

    # ---- stages ------------------------------------------------------------------------------------------------------

    def _clean(self) -> dict[str, Any]:
        job = self._job(SEED_OF_THRESHOLDS)
        seen: list[list[Seen]] = []
        begin = time.perf_counter()
        with progress("clean", job.shape.steps, console=self._console) as advance:
            for step in range(job.shape.steps):
                job.compute(step)
                seen.append([job.see(step, gradient) for gradient in job.local])
                job.apply(step)
                advance()
        return {**_arrays(seen), **_names(job), "about": {"seconds": time.perf_counter() - begin}}

    def _faults(self) -> dict[str, Any]:
        plan, job = self.plan, self._job(SEED_OF_FAULTS)
        among = targets(job.model, plan.samples * plan.length)
        random = np.random.default_rng(SEED_OF_FAULTS + 77)
        trial = torch.empty(job.weights.numel())
        seen: list[list[Seen]] = []
        trials: list[dict[str, Any]] = []
        hit: list[Seen] = []
        states: dict[str, Any] = {}
        step_s: list[float] = []
        begin = time.perf_counter()
        with progress("faults", job.shape.steps, console=self._console) as advance:
            for step in range(job.shape.steps):
                job.compute(step)
                seen.append([job.see(step, gradient) for gradient in job.local])
                if step in plan.sustained_from:
                    states |= _state_arrays(step, job.state())
                count = int(random.poisson(plan.trials_per_step)) if step >= plan.skip else 0
                before = job.state() if count else None
                started = time.perf_counter()
                job.apply(step)
                step_s.append(time.perf_counter() - started)
                if before is not None:
                    after = job.state()
                    for _ in range(count):
                        fault = draw(random, among, step=step, rank=int(random.integers(plan.ranks)))
                        job.restore(before)
                        record, corrupted = self._try(job, fault, step, trial, before, after)
                        trials.append(record)
                        hit.append(corrupted)
                    job.restore(after)
                advance()
        about = {
            "seconds": time.perf_counter() - begin,
            "trials": trials,
            "update_s": float(np.median(step_s)),
        }
        return {**_arrays(seen), **_names(job), **_arrays([hit], "trial_"), **states, "about": about}

    def _try(
        self, job: Job, fault: Fault, step: int, trial: torch.Tensor, before: State, after: State
    ) -> tuple[dict[str, Any], Seen]:
        """One fault at one step, from the state ``before``; ``after`` is where the clean step ends."""
        rank = fault.rank or 0
        with Injector(job.model, None, fault, rank=rank, world_size=self.plan.ranks) as injector:
            injector.begin_step(step)
            job.compute_rank(step, rank, trial)
        seen = job.see(step, trial)
        finite = bool(torch.isfinite(trial).all())
        deviation = math.nan
        if finite:
            job.apply(step, _with(job.local, rank, trial))
            astray = job.weights.detach() - after.weights
            deviation = float(astray.norm() / (after.weights - before.weights).norm())
            job.restore(before)
        started = time.perf_counter()
        job.compute_rank(step, rank, trial)
        seconds = time.perf_counter() - started
        job.apply(step, _with(job.local, rank, trial))
        identical = torch.equal(trial, job.local[rank]) and _same(job.state(), after)
        record = {
            "step": step, "rank": rank, "fault": fault.to_json(), "deviation": deviation, "finite": finite,
            "put_in_finite": is_finite(injector.record), "gross": is_gross(fault, injector.record),
            "changed": sum(one.changed for one in injector.record), "recomputed_identical": identical,
            "recompute_s": seconds,
        }  # fmt: skip
        return record, seen

    def _sustained(self, faults: dict[str, Any]) -> dict[str, Any]:
        """Faults that last ``LASTING`` steps, from the states that the run with faults has left behind."""
        plan, job = self.plan, self._job(SEED_OF_FAULTS)
        among = targets(job.model, plan.samples * plan.length)
        random = np.random.default_rng(SEED_OF_FAULTS + 770)
        each = plan.sustained_trials // len(plan.sustained_from)
        runs: list[dict[str, Any]] = []
        hit: list[list[Seen]] = []
        begin = time.perf_counter()
        with progress(
            "sustained", len(plan.sustained_from) * (1 + plan.reseeded + each), console=self._console
        ) as advance:
            for first in plan.sustained_from:
                state = _state_from(faults, first)
                clean, _ = self._lasting(job, state, first, None)
                advance()
                reseeded: list[float] = []
                for other in range(plan.reseeded):
                    job.reseed(1000 + other)
                    reseeded.append(self._lasting(job, state, first, None)[0])
                    advance()
                job.reseed(SEED_OF_FAULTS)
                for _ in range(each):
                    fault = draw(random, among, step=first, rank=int(random.integers(plan.ranks)), steps=LASTING)
                    ended, seen = self._lasting(job, state, first, fault)
                    runs.append({"step": first, "fault": fault.to_json(), "loss": ended, "clean": clean,
                                 "reseeded": reseeded})  # fmt: skip
                    hit.append(seen)
                    advance()
        return {**_arrays(hit), "about": {"runs": runs, "seconds": time.perf_counter() - begin}}

    def _lasting(self, job: Job, state: State, first: int, fault: Fault | None) -> tuple[float, list[Seen]]:
        """Evaluation loss after ``LASTING`` steps from a state, NaN where a gradient was not finite; and what the faulty
        rank saw, its last step repeated to the full length."""
        job.restore(state)
        seen: list[Seen] = []
        turn = [0]  # the process plays all ranks in turn: a fault of one is not to hit the others' work
        injector = None
        if fault is not None:
            injector = Injector(job.model, None, fault, rank=fault.rank or 0, world_size=self.plan.ranks,
                                replaying=lambda: turn[0] != fault.rank)  # fmt: skip
        try:
            for step in range(first, first + LASTING):
                if injector is not None:
                    injector.begin_step(step)
                for rank in range(self.plan.ranks):
                    turn[0] = rank
                    job.compute_rank(step, rank, job.local[rank])
                if fault is not None:
                    seen.append(job.see(step, job.local[fault.rank or 0]))
                    if not math.isfinite(seen[-1].norm):
                        return math.nan, [*seen, *[seen[-1]] * (LASTING - len(seen))]
                job.apply(step)
        finally:
            if injector is not None:
                injector.close()
        return job.evaluate(), seen

    def _paired(self, threshold: float) -> dict[str, Any]:
        """Whole runs in triples."""
        plan = self.plan
        rows: list[dict[str, Any]] = []
        begin = time.perf_counter()
        with progress("paired", 3 * plan.paired_seeds, console=self._console) as advance:
            for seed in range(10, 10 + plan.paired_seeds):
                row: dict[str, Any] = {"seed": seed}
                for kind in ("clean", "unwatched", "watched"):
                    row[kind] = self._whole_run(seed, faults=kind != "clean", threshold=threshold, watched=kind ==
                                                "watched")  # fmt: skip
                    advance()
                rows.append(row)
        about = {"rows": rows, "threshold": threshold, "seconds": time.perf_counter() - begin}
        return {"about": about}

    def _whole_run(self, seed: int, *, faults: bool, watched: bool, threshold: float) -> dict[str, Any]:
        """One run of ``paired_steps``; from ``paired_skip`` on a share of the steps is hit by a finite fault on one rank."""
        plan = self.plan
        job = Job(replace(plan.shape, steps=plan.paired_steps, warm_up=20), seed=seed, text=self._text)
        among = targets(job.model, plan.samples * plan.length)
        rules = [make_rule(PAIRED_RULE, [1.0] * len(job.names), sizes=job.sizes, ranks=plan.ranks)
                 for _ in range(plan.ranks)]  # fmt: skip
        counts = {"faults": 0, "caught": 0, "identical": 0, "false_alarms": 0, "not_finite": 0,
                  "clean_steps": 0}  # fmt: skip
        recompute_s, step_s = [], []
        trial = torch.empty(job.weights.numel())
        for step in range(plan.paired_steps):
            random = np.random.default_rng([seed, step])
            started = time.perf_counter()
            job.compute(step)
            step_s.append((time.perf_counter() - started) / plan.ranks)
            fault = None
            if faults and step >= plan.paired_skip and random.random() < plan.fault_rate:
                fault = draw(random, among, step=step, rank=int(random.integers(plan.ranks)))
            rank, pristine = 0, None
            if fault is not None:
                rank = fault.rank or 0
                pristine = job.local[rank].clone()
                with Injector(job.model, None, fault, rank=rank, world_size=plan.ranks) as injector:
                    injector.begin_step(step)
                    job.compute_rank(step, rank, job.local[rank])
                if not bool(torch.isfinite(job.local[rank]).all()):  # the business of the check for NaN and Inf
                    counts["not_finite"] += 1
                    job.local[rank].copy_(pristine)
                    fault = None
            counts["faults"] += fault is not None
            counts["clean_steps"] += fault is None and step >= plan.paired_skip
            if watched:
                looks = [observation(job.see(step, gradient)) for gradient in job.local]
                alarm = any(rule.look(seen).needed <= threshold for rule, seen in zip(rules, looks, strict=True))
                if alarm and fault is not None:
                    counts["caught"] += 1
                    started = time.perf_counter()
                    job.compute_rank(step, rank, trial)
                    recompute_s.append(time.perf_counter() - started)
                    job.local[rank].copy_(trial)
                    counts["identical"] += pristine is not None and torch.equal(job.local[rank], pristine)
                    looks[rank] = observation(job.see(step, job.local[rank]))
                counts["false_alarms"] += alarm and fault is None and step >= plan.paired_skip
                for rule, seen in zip(rules, looks, strict=True):
                    rule.learn(seen)
            job.apply(step)
        return {
            "loss": job.evaluate(), **counts, "steps": plan.paired_steps,
            "rank_s": float(np.median(step_s)), "recompute_s": float(np.median(recompute_s)) if recompute_s else None,
        }  # fmt: skip

    # ---- around them -------------------------------------------------------------------------------------------------

    def _job(self, seed: int) -> Job:
        return Job(self.plan.shape, seed=seed, text=self._text)

    def _stage(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The stage's file, if it is there and of this plan; else the work is done and kept."""
        path = self.parts / f"{name}.npz"
        matters = {key: value for key, value in asdict(self.plan).items() if not key.startswith(_OTHERS[name])}
        plan = json.dumps(matters, sort_keys=True)
        if path.is_file():
            with np.load(path) as file:
                kept = {key: file[key] for key in file.files}
            if str(kept.pop("plan")) == plan:
                self._console.print(f"{name}: taken from {path}")
                return {**kept, "about": json.loads(str(kept.pop("about")))}
        result = work()
        draft = path.with_suffix(".part.npz")
        arrays = {key: value for key, value in result.items() if key != "about"}
        np.savez_compressed(draft, plan=plan, about=json.dumps(result["about"]), **arrays)
        draft.replace(path)
        return {**arrays, "about": json.loads(json.dumps(result["about"]))}


# ---- from what was seen to what a rule says of it --------------------------------------------------------------------


def observation(seen: Seen) -> Observation:
    return Observation(gradient=seen.gradient, update=seen.update, norm=seen.norm)


def observed(stage: dict[str, Any], at: Any, prefix: str = "") -> Observation:
    """What a rank saw, from the arrays of a stage; ``at`` is an index into their leading dimensions."""
    norm = float(stage[f"{prefix}norm"][at])
    return Observation(gradient=stage[f"{prefix}gradient"][at], update=stage[f"{prefix}update"][at], norm=norm)


def needed(rule: str, stage: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The lowest sensitivity at which the rule alarms, for each clean step and rank, fp64[steps, ranks], and for each
    trial of the stage, fp64[trials], on the faulty rank with the history frozen at the fault."""
    steps, ranks = stage["norm"].shape
    trials: list[dict[str, Any]] = stage["about"].get("trials", [])
    by_place: dict[tuple[int, int], list[int]] = {}
    for i, trial in enumerate(trials):
        by_place.setdefault((trial["step"], trial["rank"]), []).append(i)
    sizes = stage["sizes"].tolist()
    clean, faulty = np.full((steps, ranks), math.inf), np.full(len(trials), math.inf)
    for rank in range(ranks):
        made = make_rule(rule, [1.0] * len(sizes), sizes=sizes, ranks=ranks)
        for step in range(steps):
            seen = observed(stage, (step, rank))
            clean[step, rank] = made.look(seen).needed
            for i in by_place.get((step, rank), ()):
                wrong = observed(stage, (0, i), "trial_")
                if wrong.finite:
                    faulty[i] = made.look(wrong).needed
            made.learn(seen)
    return clean, faulty


def sustained_needed(rule: str, faults: dict[str, Any], sustained: dict[str, Any]) -> np.ndarray:
    """The same for each run with a lasting fault and each of its steps, fp64[runs, LASTING], the history frozen where
    the fault begins."""
    runs = sustained["about"]["runs"]
    ranks, sizes = faults["norm"].shape[1], faults["sizes"].tolist()
    out = np.full((len(runs), LASTING), math.inf)
    for rank in range(ranks):
        made = make_rule(rule, [1.0] * len(sizes), sizes=sizes, ranks=ranks)
        for step in range(max(run["step"] for run in runs) + 1):
            for i, run in enumerate(runs):
                if run["step"] == step and run["fault"]["rank"] == rank:
                    for later in range(LASTING):
                        seen = observed(sustained, (i, later))
                        out[i, later] = made.look(seen).needed if seen.finite else math.inf
            made.learn(observed(faults, (step, rank)))
    return out


def threshold_for(rule: str, clean: dict[str, Any], target: float, *, skip: int) -> float:
    """The highest sensitivity at which at most ``target`` of the clean steps of the job alarm."""
    job = np.sort(needed(rule, clean)[0][skip:].min(axis=1))
    allowed = int(target * len(job))
    return float(np.nextafter(job[allowed], 0.0)) if allowed < len(job) else math.inf


# ---- small things ----------------------------------------------------------------------------------------------------


def _arrays(seen: list[list[Seen]], prefix: str = "") -> dict[str, np.ndarray]:
    """Per field the values of all, fp64[outer, inner, tensors] and fp64[outer, inner]."""
    out = {
        f"{prefix}{name}": np.array([[getattr(one, name) for one in row] for row in seen])
        for name in ("gradient", "update", "update_unclipped")
    }
    return out | {f"{prefix}norm": np.array([[one.norm for one in row] for row in seen])}


def _names(job: Job) -> dict[str, np.ndarray]:
    return {"names": np.array(job.names), "sizes": np.array(job.sizes)}


def _with(local: torch.Tensor, rank: int, gradient: torch.Tensor) -> torch.Tensor:
    mixed = local.clone()
    mixed[rank] = gradient
    return mixed


def _same(one: State, other: State) -> bool:
    if one.moments is None or other.moments is None:
        return one.moments is other.moments and torch.equal(one.weights, other.weights)
    pairs = zip((one.weights, *one.moments), (other.weights, *other.moments), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _state_arrays(step: int, state: State) -> dict[str, np.ndarray]:
    assert state.moments is not None
    kept = {"weights": state.weights, "one": state.moments[0], "two": state.moments[1]}
    arrays = {f"state{step}_{name}": tensor.numpy().copy() for name, tensor in kept.items()}
    return arrays | {f"state{step}_count": np.array(state.count)}


def _state_from(stage: dict[str, Any], step: int) -> State:
    weights, one, two = (torch.from_numpy(stage[f"state{step}_{name}"]) for name in ("weights", "one", "two"))
    return State(weights, (one, two), float(stage[f"state{step}_count"]))
