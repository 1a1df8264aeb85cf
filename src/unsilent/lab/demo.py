"""The demo: four ranks train a LLaMA on real text, once for each fault, and every run is compared bit for bit.

The comparison is with a run that had neither guard nor fault. A row is right when the fault really changed a tensor, was
caught in the first step in which a check can see it, the right rank was named (nobody, where nobody is to blame), the
expected was done about it, and the bits are those of the clean run.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from unsilent.checkpoint import Status, checkpoints_in, verify
from unsilent.errors import EXIT_OK, EXIT_QUARANTINE, UsageError
from unsilent.events import Event, excluded_nodes, read
from unsilent.lab.pool import Failed, PoolDied, RankPool
from unsilent.lab.scenarios import (
    CHECKPOINTS,
    LOGS,
    RESUMED,
    Plan,
    Scenario,
    full_plan,
    quick_plan,
    resume,
    train_guarded,
    train_unguarded,
)
from unsilent.records import Action

UNGUARDED, GUARDED = "clean-unguarded", "clean-guarded"
_TRIAL_SECONDS = 240.0


@dataclass(kw_only=True)
class Row:
    """What came of one scenario, and in ``problems`` what should have been otherwise."""

    scenario: Scenario
    caught_step: int | None = None
    verdict: str | None = None
    named_rank: int | None = None
    named_node: str | None = None
    action: str | None = None
    weights: str | None = None
    bit_exact: bool = False
    problems: list[str] = field(default_factory=list[str])

    def to_json(self) -> dict[str, Any]:
        fault = self.scenario.fault
        return {
            "name": self.scenario.name,
            "fault_step": fault.first_step,
            "caught_step": self.caught_step,
            "verdict": self.verdict,
            "named_rank": self.named_rank,
            "named_node": self.named_node,
            "true_rank": fault.rank,
            "action": self.action,
            "weights_sha256": self.weights,
            "bit_exact": self.bit_exact,
        }


@dataclass(kw_only=True)
class Clean:
    """The two runs without a fault: hashes of the final weights, and of the guarded run's weights after each update."""

    unguarded: str
    guarded: str
    after_update: list[str]
    losses: list[float]
    problems: list[str] = field(default_factory=list[str])


def run(out: Path, *, quick: bool = False) -> int:
    """Play the demo, print a table, write ``out/demo.json``; 0 when every row is right, else 1.

    Every run has its directory under ``out``, for ``unsilent report``. ``quick`` takes a very small model.

    Raises:
        UsageError: ``out`` holds something in the place of a run that is not from an earlier demo.
    """
    return play(quick_plan() if quick else full_plan(), Path(out), Console())


def play(plan: Plan, out: Path, console: Console, pool: RankPool | None = None) -> int:
    """``run`` with a plan of one's own, and on a pool that is there already, if one is given."""
    begin = time.monotonic()
    out = out.resolve()
    _make_room(out, [UNGUARDED, GUARDED, *(s.name for s in plan.scenarios)])
    console.print(_introduction(plan))
    stage = _Stage(console)
    with contextlib.ExitStack() as pools:
        if pool is None:
            with console.status(f"starting {plan.ranks} processes"):
                pool = pools.enter_context(RankPool(plan.ranks))
        try:
            clean = _clean_runs(pool, plan, out, stage)
        except (RuntimeError, PoolDied) as error:
            console.print(Text(f"A run without any fault broke, so there is nothing to compare with: {error}", "red"))
            return 1
        console.print(Text(f"           the loss falls from {clean.losses[0]:.2f} to {clean.losses[-1]:.2f}", "dim"))
        rows: list[Row] = []
        for scenario in plan.scenarios:
            with stage.act(scenario.title):
                rows.append(_play_scenario(pool, plan, scenario, clean, out))
        taken_out = [row for row in rows if row.action == Action.QUARANTINE.value and not row.problems]
        if taken_out:
            with console.status(f"starting {plan.ranks - 1} processes for the restarts"):
                left = pools.enter_context(RankPool(plan.ranks - 1))
            for row in taken_out:
                with stage.act(f"{row.scenario.title}: restart without {row.named_node}"):
                    _restart(left, plan, row, clean, out)
    seconds = time.monotonic() - begin
    _write(out, clean, rows, seconds)
    wrong = [*clean.problems, *(f"{row.scenario.name}: {problem}" for row in rows for problem in row.problems)]
    console.print(_table(plan, clean, rows))
    console.print(_meaning(plan, clean, rows, wrong, out, seconds))
    return 1 if wrong else 0


# ---- the runs --------------------------------------------------------------------------------------------------------


def _clean_runs(pool: RankPool, plan: Plan, out: Path, stage: _Stage) -> Clean:
    """The run that all others are compared with, and the same one guarded."""
    with stage.act("no guard, no fault (all others are compared with this one)"):
        plain = pool.results(train_unguarded, plan.setup, out / UNGUARDED, timeout=_TRIAL_SECONDS)
    with stage.act("guarded, no fault"):
        guarded = pool.results(train_guarded, plan.setup, None, out / GUARDED, timeout=_TRIAL_SECONDS)
    clean = Clean(
        unguarded=plain[0]["weights"],
        guarded=guarded[0]["weights"][-1],
        after_update=guarded[0]["weights"],
        losses=plain[0]["losses"],
    )
    ends = {answer["weights"] for answer in plain} | {answer["weights"][-1] for answer in guarded}
    if len(ends) != 1:
        clean.problems.append("no fault: the guarded run does not end with the bits of the unguarded one on every rank")
    if _verdicts(out / GUARDED):
        clean.problems.append("no fault: the guard raised an alarm where nothing was wrong")
    if any(tuple(answer["saved"]) != plan.setup.saves for answer in guarded):
        clean.problems.append("no fault: not every checkpoint was written")
    return clean


def _play_scenario(pool: RankPool, plan: Plan, scenario: Scenario, clean: Clean, out: Path) -> Row:
    """One guarded run with its fault."""
    directory = out / scenario.name
    answers, broke = _attempt(pool, train_guarded, plan.setup, scenario.fault, directory)
    if broke:
        return Row(scenario=scenario, problems=[broke])
    row = judge_row(plan, scenario, answers, _verdicts(directory), clean)
    if scenario.refuses is not None:
        expected = {step for step in plan.setup.saves if step != scenario.refuses}
        root = directory / CHECKPOINTS
        found = {path.name for path in root.iterdir()} if root.is_dir() else set[str]()
        if found != {f"step-{step:08d}" for step in expected}:
            row.problems.append(f"the checkpoint of step {scenario.refuses} must not be on disk, and there is: {found}")
    return row


def judge_row(
    plan: Plan, scenario: Scenario, answers: Sequence[dict[str, Any]], verdicts: Sequence[Event], clean: Clean
) -> Row:
    """From what the ranks report and what the guard has logged to a row; every doubt becomes a problem."""
    row, fault = Row(scenario=scenario), scenario.fault
    quarantined = scenario.action is Action.QUARANTINE
    ends = [answer["weights"][-1] for answer in answers]
    row.weights = ends[0]
    row.bit_exact = not quarantined and set(ends) == {clean.unguarded}

    def must(true: bool, problem: str) -> None:
        if not true:
            row.problems.append(problem)

    must(sum(a["fired"] for a in answers) > 0 and sum(a["changed"] for a in answers) > 0, "the fault changed no bit")
    if not verdicts:
        row.problems.append("it was not caught")
        return row
    suspects = {(s["rank"], s["node"]) for event in verdicts for s in event.fields["suspects"]}
    if len(suspects) == 1:
        row.named_rank, row.named_node = suspects.pop()
    else:
        must(not suspects, f"more than one rank was named: {sorted(rank for rank, _ in suspects)}")
    row.caught_step = verdicts[0].step
    row.verdict = verdicts[-1].fields["verdict"]["kind"]
    row.action = verdicts[-1].fields["action"]

    node = None if fault.rank is None else f"node-{fault.rank}"
    steps = tuple(dict.fromkeys(event.step for event in verdicts))
    expected_exit = EXIT_QUARANTINE if quarantined else EXIT_OK
    expected_saves = tuple(step for step in plan.setup.saves if step != scenario.refuses)
    must(steps == scenario.verdict_steps, f"verdicts in steps {steps}, expected in {scenario.verdict_steps}")
    must(row.named_rank == fault.rank, f"rank {row.named_rank} was named, and it was rank {fault.rank}")
    must(row.named_node == node, f"node {row.named_node} was named, and it was {node}")
    must(row.verdict == scenario.kind.value, f"the verdict is {row.verdict}, expected {scenario.kind.value}")
    must(row.action == scenario.action.value, f"the action is {row.action}, expected {scenario.action.value}")
    must(all(a["exit_code"] == expected_exit for a in answers), f"not every rank ended with exit code {expected_exit}")
    if quarantined:
        must(len({a["resume_from"] for a in answers}) == 1, "the ranks name different checkpoints to resume from")
    else:
        must(row.bit_exact, "the run does not end with the bits of the clean one on every rank")
        must(all(tuple(a["saved"]) == expected_saves for a in answers), f"the saves were not {expected_saves}")
    return row


def _restart(pool: RankPool, plan: Plan, row: Row, clean: Clean, out: Path) -> None:
    """Do what a scheduler would: read which node to leave out and where to resume, then train on without it."""
    directory = out / row.scenario.name
    excluded = excluded_nodes(directory)
    if row.named_node not in excluded or len(excluded) != 1:
        row.problems.append(f"exclude.json names {sorted(excluded) or 'no node'}, and it was {row.named_node}")
        return
    record = json.loads((directory / "exit.json").read_text())
    if record.get("resume_from") is None:
        row.problems.append("no checkpoint was named to resume from")
        return
    checkpoint = Path(record["resume_from"])
    row.problems += [f"the checkpoint does not verify: {problem}" for problem in verify(checkpoint)]
    trusted = [saved.path for saved in checkpoints_in(checkpoint.parent) if saved.status is Status.CERTIFIED]
    if trusted[-1:] != [checkpoint]:
        row.problems.append(f"{checkpoint.name} was named, and it is not the newest that is certified")
    nodes = tuple(f"node-{rank}" for rank in range(plan.ranks) if f"node-{rank}" not in excluded)
    answers, broke = _attempt(pool, resume, plan.setup, checkpoint, nodes, directory / RESUMED)
    if broke:
        row.problems.append(f"the restart broke: {broke}")
        return
    first = answers[0]
    steps: int = first["steps"]
    row.weights = first["loaded"]
    row.bit_exact = {answer["loaded"] for answer in answers} == {clean.after_update[steps - 1]}
    if not row.bit_exact:
        row.problems.append(f"the checkpoint of step {steps} does not hold the clean run's bits")
    if steps != row.scenario.resumes_from:
        row.problems.append(f"it resumed from step {steps}, expected {row.scenario.resumes_from}")
    if any(answer["alarms"] for answer in answers):
        row.problems.append(f"the restarted run raised an alarm: {first['alarms'][:1]}")
    together = len({answer["weights"] for answer in answers}) == 1
    if not together or not all(math.isfinite(loss) for answer in answers for loss in answer["losses"]):
        row.problems.append("the restarted run did not come to a sound end")


def _attempt(pool: RankPool, work: Callable[..., Any], *arguments: Any) -> tuple[list[dict[str, Any]], str]:
    """The answers of all ranks, or why there are none; a broken run costs its own row, not the demo."""
    try:
        answers = pool.run(work, *arguments, timeout=_TRIAL_SECONDS)
    except PoolDied as error:
        return [], f"the run broke: {error}"
    for rank, answer in enumerate(answers):
        if isinstance(answer, Failed):
            pool.restart()  # the ranks may stand in different places now
            return [], f"the run broke on rank {rank}: {answer.kind}: {answer.text}"
    return answers, ""


def _verdicts(directory: Path) -> tuple[Event, ...]:
    return tuple(event for event in read(directory).events if event.kind == "verdict")


def _make_room(out: Path, names: Sequence[str]) -> None:
    """Take away what an earlier demo left, and nothing else."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        old = out / name
        if old.exists() and not (old / LOGS).is_dir():
            raise UsageError(f"{old} is not from an earlier demo: choose another directory with --out")
        if old.exists():
            shutil.rmtree(old)
    (out / "demo.json").unlink(missing_ok=True)


def _write(out: Path, clean: Clean, rows: Sequence[Row], seconds: float) -> None:
    record = {
        "clean": {"unguarded": clean.unguarded, "guarded": clean.guarded},
        "scenarios": [row.to_json() for row in rows],
        "seconds": round(seconds, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    (out / "demo.json").write_text(json.dumps(record, indent=2) + "\n")


# ---- the screen ------------------------------------------------------------------------------------------------------


class _Stage:
    """One line per run: what is running, then that it ran and how long it took."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextlib.contextmanager
    def act(self, title: str) -> Iterator[None]:
        begin = time.monotonic()
        with self.console.status(Text(title)):
            yield
        self.console.print(Text(f"  {time.monotonic() - begin:5.1f} s  {title}", "dim"))


def _introduction(plan: Plan) -> Text:
    setup = plan.setup
    return Text(
        f"{plan.ranks} ranks, as {plan.ranks} nodes on this machine, train a LLaMA of {setup.preset.parameters:,} "
        f"parameters on the source text of Python's standard library, {setup.steps} steps in each run. "
        f"{len(plan.scenarios)} runs get one fault each: wrong values put into real tensors. The guard is not told.\n"
    )


def _table(plan: Plan, clean: Clean, rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="What happened", title_justify="left", title_style="bold", leading=1)
    table.add_column("fault")
    table.add_column("began\nat step", justify="right")
    table.add_column("caught\nat step", justify="right")
    table.add_column("named")
    table.add_column("action")
    table.add_column("same bits\nas clean")
    same = Text("yes", "green") if not clean.problems else Text("NO", "bold red")
    table.add_row("none (guarded)", "-", "-", "nobody", "none", same)
    for row in rows:
        fault = row.scenario.fault
        named = "nobody" if row.named_rank is None else f"rank {row.named_rank} ({row.named_node})"
        caught = "never" if row.caught_step is None else str(row.caught_step)
        table.add_row(
            row.scenario.title, str(fault.first_step), caught, named, _action_words(plan, row), _bits_words(row)
        )
    return table


def _action_words(plan: Plan, row: Row) -> str:
    refused = row.scenario.refuses
    match row.action:
        case None:
            return "none"
        case "REPAIR":
            return f"{row.action}: gradient taken from its auditor"
        case "RECOMPUTE":
            return f"{row.action}: all ranks ran the step again"
        case "HEAL" if refused is not None:
            return f"checkpoint {refused} not written; {row.action}"
        case "HEAL":
            return f"{row.action}: weights copied from a healthy rank"
        case "QUARANTINE":
            resumed = f", {plan.ranks - 1} nodes go on from step {row.scenario.resumes_from}"
            return f"{row.action}: {row.named_node} out{'' if row.problems else resumed}"
        case other:
            return other


def _bits_words(row: Row) -> Text:
    if row.problems:
        return Text("NO" if not row.bit_exact else "yes, but see below", "bold red")
    if row.action == Action.QUARANTINE.value:
        return Text(f"yes, at step {row.scenario.resumes_from}", "green")
    return Text("yes", "green")


def _meaning(plan: Plan, clean: Clean, rows: Sequence[Row], wrong: Sequence[str], out: Path, seconds: float) -> Group:
    every = plan.setup.audit_every
    notes = Text(
        f"Steps count from 0. In every {every}th step ({every - 1}, {2 * every - 1}, ...), and on suspicion, each rank's "
        "work is recomputed by another node (its auditor); weights are compared in every step. A fault that only an audit can "
        "see has spoiled the steps before it: going back to a checkpoint undoes them.",
        "dim",
    )
    if wrong:
        verdict = Text("Not as it should be:\n" + "\n".join(f"  - {problem}" for problem in wrong), "bold red")
    else:
        verdict = Text.assemble((f"All {len(rows) + 1} rows are right. ", "bold green"), _sentence(clean, rows))
    shown = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    more = Text(f"\n{seconds:.0f} s. The figures: {shown / 'demo.json'}", "dim")
    if rows:
        more.append(f"\nA run's own account: unsilent report {shown / rows[-1].scenario.name}")
    return Group(notes, Text(), verdict, more)


def _sentence(clean: Clean, rows: Sequence[Row]) -> str:
    taken = sum(row.action == Action.QUARANTINE.value for row in rows)
    repaired = len(rows) - taken
    text = (
        f"{_runs(repaired)} lost nothing to the fault: put right while running, {'it' if repaired == 1 else 'they'} "
        "ended with exactly the bits of the run that had neither guard nor fault (SHA-256 of the weights "
        f"{clean.unguarded[:12]}...)."
    )
    if taken:
        text += (
            f" {_runs(taken)} had a device that stays broken: its node was taken out, and the others went on from a "
            "checkpoint with exactly the bits that the clean run had at that step."
        )
    return text


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
