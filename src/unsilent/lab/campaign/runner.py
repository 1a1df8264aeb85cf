"""Runs a campaign: trial after trial on warm pools of ranks, each written down as it ends, so that it can be gone on with.

OUT holds ``trials.jsonl`` (a line for each trial, and first what they were run with), ``twins/`` (weights of the runs
without guard and fault) and ``reseeded.json`` (evaluation losses of jobs with other seeds).
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import unsilent
from unsilent.errors import RankFailure, UsageError
from unsilent.events import EVENTS_FILE, read
from unsilent.lab.campaign.outcome import Observed, Said
from unsilent.lab.campaign.spec import Spec
from unsilent.lab.campaign.tables import Result
from unsilent.lab.campaign.trial import NOT_FINITE, Seen, run_trial, run_twin
from unsilent.lab.campaign.trials import Trial
from unsilent.lab.pool import Failed, PoolDied, RankPool
from unsilent.lab.progress import progress

TRIALS = "trials.jsonl"
RESEEDED = 5
"""Jobs with other seeds, whose evaluation losses say how far apart healthy runs end."""
_FIRST_OTHER_SEED = 1000
_TRIAL_S = 60.0
"""Within which a trial ends, or its pool is given up."""
_OFF = ("check_disabled", "check_degraded", "guard_error")


class Runner:
    """The trials of ``spec`` in ``out``.

    Args:
        pools: warm pools by their number of ranks, which stay open; others are started and closed in ``run``.

    Raises:
        UsageError: ``out`` cannot be written, or holds trials of another specification or version.
    """

    def __init__(
        self, spec: Spec, trials: Sequence[Trial], out: Path, *, pools: Mapping[int, RankPool] | None = None
    ) -> None:
        self.spec, self.trials, self.out = spec, trials, out
        self._given = dict(pools or {})
        self._pools: dict[int, RankPool] = {}
        self._limits: dict[tuple[int, int], float] = {}
        try:
            (out / "twins").mkdir(parents=True, exist_ok=True)
            self._results = self._resume()
        except OSError as error:
            raise UsageError(f"cannot write the campaign into {out}: {error.strerror or error}") from error

    @property
    def pools_replaced(self) -> int:
        """How often the ranks had to be started anew."""
        return sum(r.observed.ended in ("hang", "error") for r in self.results)

    @property
    def results(self) -> list[Result]:
        """Of all trials that are done, in the order of the specification."""
        return [self._results[t.name] for t in self.trials if t.name in self._results]

    def run(self, *, only: int | None = None, minutes: float | None = None) -> None:
        """Run what is left, at most ``only`` trials, and begin none after ``minutes``."""
        left = [t for t in self.trials if t.name not in self._results][:only]
        begin = time.monotonic()
        with ExitStack() as stack, progress(self.spec.name, len(left)) as advance:
            stack.callback(self._close)
            for trial in left:
                if minutes is not None and time.monotonic() - begin > 60 * minutes:
                    break
                self._note(trial, self._observe(trial))
                advance()

    # ---- one trial ---------------------------------------------------------------------------------------------------

    def _observe(self, trial: Trial) -> Observed:
        size, log = trial.parallelism.ranks, self.out / "run"
        twin, limit = self._twin(size, trial.seed), self._limit(size, trial.seed)
        shutil.rmtree(log, ignore_errors=True)
        begin = time.perf_counter()
        problem, answers = "", []
        try:
            checks = self.spec.checks[trial.checks]
            answers = self._pool(size).run(run_trial, self.spec.job, checks, trial, twin, log, timeout=_TRIAL_S)
        except PoolDied as error:  # it has been started again
            problem = f"hang: {error}"
        failed = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, Failed)]
        if failed:
            self._pool(size).restart()  # the others may be waiting in a collective
            # Who heard of another rank's error says less than the one that raised it.
            rank, cause = min(failed, key=lambda one: one[1].kind == RankFailure.__name__)
            problem = f"error: rank {rank}: {cause.kind}: {cause.text}"
        seen = [] if problem else answers
        return _observed(trial, seen, _said(log), problem, limit, time.perf_counter() - begin)

    def _twin(self, size: int, seed: int) -> Path:
        """The pristine twin's weights: computed once for each number of ranks and seed. No guard is in it, so it is the
        same under all checks, and the clean trials show that a guard does not change it."""
        path = self.out / "twins" / f"ranks-{size}-seed-{seed}.pt"
        if not path.exists():
            self._pool(size).results(run_twin, self.spec.job, seed, path)
        return path

    def _limit(self, size: int, seed: int) -> float:
        """Evaluation loss of the twin and two standard deviations of reseeded jobs."""
        if (size, seed) not in self._limits:
            clean = float(torch.load(self._twin(size, seed), weights_only=True)["loss"])
            self._limits[size, seed] = clean + 2 * statistics.stdev(self._reseeded(size))
        return self._limits[size, seed]

    def _reseeded(self, size: int) -> list[float]:
        path = self.out / "reseeded.json"
        known: dict[str, list[float]] = json.loads(path.read_text()) if path.exists() else {}
        if str(size) not in known:
            seeds = range(_FIRST_OTHER_SEED, _FIRST_OTHER_SEED + RESEEDED)
            known[str(size)] = [self._pool(size).results(run_twin, self.spec.job, seed, None)[0] for seed in seeds]
            path.write_text(json.dumps(known) + "\n")
        return known[str(size)]

    # ---- pools -------------------------------------------------------------------------------------------------------

    def _pool(self, size: int) -> RankPool:
        if size in self._given:
            return self._given[size]
        if size not in self._pools:
            self._pools[size] = RankPool(size)
        return self._pools[size]

    def _close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()

    # ---- what is written down ----------------------------------------------------------------------------------------

    def _resume(self) -> dict[str, Result]:
        path = self.out / TRIALS
        head = {"spec": self.spec.digest, "torch": torch.__version__, "code": _digest_of_the_package()}
        if not path.exists() or not path.stat().st_size:
            path.write_text(json.dumps(head) + "\n")
            for twin in [*(self.out / "twins").glob("*"), self.out / "reseeded.json"]:
                twin.unlink(missing_ok=True)  # of another specification, perhaps
        lines = path.read_bytes().split(b"\n")
        if lines[-1]:  # cut short while it was written: that trial is run again
            path.write_bytes(b"\n".join([*lines[:-1], b""]))
        first, *rest = [json.loads(line) for line in lines[:-1]] or [{}]
        if first != head:
            raise UsageError(
                f"{path} holds trials of another specification, torch or version of this package ({first}, now {head}): take another directory"
            )
        return {record["name"]: result_from(record) for record in rest}

    def _note(self, trial: Trial, observed: Observed) -> None:
        result = Result(
            name=trial.name, parallelism=trial.parallelism.name, checks=trial.checks, site=trial.site, kind=trial.kind,
            seed=trial.seed, fault=trial.describe(), observed=observed,
        )  # fmt: skip
        self._results[trial.name] = result
        with (self.out / TRIALS).open("a") as file:
            file.write(json.dumps(asdict(result), allow_nan=False) + "\n")


def _digest_of_the_package() -> str:
    """16 hex digits over all of its files: what a trial gives depends on the guard as much as on the specification."""
    root = Path(unsilent.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".toml"))
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def result_from(record: dict[str, Any]) -> Result:
    """The inverse of ``asdict``, after JSON."""
    observed = record["observed"]
    said = tuple(Said(**{**verdict, "ranks": tuple(verdict["ranks"])}) for verdict in observed["said"])
    tuples = {name: tuple(observed[name]) for name in ("faulty", "fired", "off")}
    return Result(**{**record, "observed": Observed(**{**observed, **tuples, "said": said})})


def _observed(
    trial: Trial, seen: Sequence[Seen], log: tuple[tuple[Said, ...], tuple[str, ...]], problem: str, limit: float,
    seconds: float,
) -> Observed:  # fmt: skip
    """One trial from what its ranks saw; none, where there was a ``problem``."""
    fired = {firing for one in seen for firing in one.fired}
    felt = {step + trial.felt_later for step, replay in fired if not replay}
    deviations = [d for one in seen for step, d in enumerate(one.deviations) if step in felt]
    losses = [one.loss for one in seen if one.loss is not None]
    kind, _, text = problem.partition(": ")
    return Observed(
        fault=trial.fault is not None,
        faulty=trial.faulty,
        computed=trial.computed,
        sound=trial.sound,
        lasting=trial.lasting,
        fired=tuple(sorted({step for step, _ in fired})),
        felt=max(deviations, default=0.0),
        after_update=trial.after_update,
        said=log[0],
        ended=kind or seen[0].ended,
        end=text if problem else seen[0].end,
        identical=bool(seen) and all(one.identical for one in seen),
        identical_at_end=bool(seen) and all(one.identical_at_end for one in seen),
        loss=max(losses, default=None),
        loss_limit=min(limit, NOT_FINITE),
        ran=dict(seen[0].ran) if seen else {"audit": (), "replicas": ()},
        off=log[1],
        steps=seen[0].steps if seen else 0,
        seconds=round(seconds, 3),
    )


def _said(log: Path) -> tuple[tuple[Said, ...], tuple[str, ...]]:
    """The verdicts in a run's log, and what it says of checks that went off or compare less."""
    said: list[Said] = []
    off: list[str] = []
    for event in read(log).events if (log / EVENTS_FILE).exists() else ():
        if event.kind == "verdict":
            verdict = event.fields["verdict"]
            said.append(
                Said(step=verdict["step"], kind=verdict["kind"], site=verdict["site"], check=verdict["check"],
                     action=event.fields["action"], ranks=_ranks(verdict["suspects"]), reason=verdict["reason"])
            )  # fmt: skip
        elif event.kind in _OFF:
            off.append(f"{event.kind}: {event.fields.get('reason') or event.fields.get('error')}")
    return tuple(said), tuple(off)


def _ranks(suspects: Iterable[dict[str, Any]]) -> tuple[int, ...]:
    return tuple(sorted({suspect["rank"] for suspect in suspects if suspect.get("rank") is not None}))
