"""The door: every command, what it takes, and the exit codes. The work is done elsewhere, and imported when it is asked
for: reading a report does not import torch.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from unsilent.errors import EXIT_BAD_CHECKPOINT, EXIT_INTERNAL, EXIT_OK, EXIT_QUARANTINE, UnsilentError, UsageError

app = typer.Typer(
    name="unsilent",
    help="Catches silent data corruption in PyTorch training, names the rank, and repairs the step bit for bit.",
    epilog=(
        "Exit codes: 0 fine or recovered, 2 usage, 10 integrity lost, 11 restart without the named node, "
        "12 inconclusive, 13 a checkpoint failed verification, 70 internal error."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

ledger_app = typer.Typer(
    help="What is known of each device over many runs.", no_args_is_help=True, pretty_exceptions_enable=False
)
app.add_typer(ledger_app, name="ledger")
study_app = typer.Typer(
    help="What the checks catch, measured on injected faults.", no_args_is_help=True, pretty_exceptions_enable=False
)
app.add_typer(study_app, name="study")

Command = TypeVar("Command", bound=Callable[..., None])
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]


def main() -> None:
    """The entry point."""
    app()


def _ends_well(command: Command) -> Command:
    """What goes wrong becomes one sentence and an exit code; what nobody foresaw a traceback and 70."""

    @functools.wraps(command)
    def guarded(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except UnsilentError as error:
            _say(str(error))
            if options.get("as_json"):
                _print_json({"exit_code": error.exit_code, "error": str(error)})
            raise typer.Exit(error.exit_code) from None
        except (typer.Exit, typer.Abort, KeyboardInterrupt):
            raise
        except Exception:  # noqa: BLE001 - the contract: exit code 70, with the traceback
            traceback.print_exc()
            raise typer.Exit(EXIT_INTERNAL) from None

    return guarded  # type: ignore[return-value]


@app.command()
@_ends_well
def demo(
    out: Annotated[Path, typer.Option(help="Where runs, logs and demo.json go.")] = Path("out/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model and fewer steps; under 2 minutes.")] = False,
    as_json: Json = False,
) -> None:
    """Watch a 4-rank run lose a rank to a silent fault, name it, and repair the step bit for bit."""
    from unsilent.lab.demo import run

    code = run(out=out, quick=quick)
    if as_json:
        found = out / "demo.json"
        body = json.loads(found.read_text()) if found.is_file() else {}
        _print_json({"exit_code": code, **body})
    raise typer.Exit(code)


@app.command()
@_ends_well
def train(
    preset: Annotated[str, typer.Option(help="Size of the model: tiny, 25m, 60m, 350m, 1b.")] = "tiny",
    steps: Annotated[int, typer.Option(help="Steps of the whole run, those before a resume included.")] = 60,
    out: Annotated[Path, typer.Option(help="Run directory.")] = Path("out/run"),
    data: Annotated[
        Path | None, typer.Option(help="Text to train on; by default the sources of Python's standard library.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of samples.")] = 0,
    batch: Annotated[int | None, typer.Option(help="Samples per rank and step; by default the preset's.")] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(help="Samples per step over all ranks, instead; kept, as the data order is, on other ranks too."),
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Most samples per micro-batch; by default a rank's, or as --accumulate says.")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Bytes per sample; by default the preset's.")] = None,
    accumulate: Annotated[int, typer.Option(help="Split each rank's samples into so many micro-batches.")] = 1,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up; then half a cosine down to a tenth.")] = 10,
    clip: Annotated[float, typer.Option(help="Highest norm of the gradient.")] = 1.0,
    bf16: Annotated[bool, typer.Option("--bf16", help="Forward under bf16 autocast.")] = False,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints in OUT/checkpoints; then one at the end, too.")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between evaluations on the held-out part; always one at the end.")
    ] = None,
    audit_every: Annotated[int, typer.Option(help="Steps between audits; 0 for none on schedule.")] = 100,
    replicas_every: Annotated[int, typer.Option(help="Steps between votes over the replicas; 0 for none.")] = 10,
    mode: Annotated[str, typer.Option(help="act repairs; observe records only.")] = "act",
    quarantine: Annotated[str, typer.Option(help="ask before a node is taken out, or auto.")] = "ask",
    update_rule: Annotated[
        str,
        typer.Option(
            help="Statistic of each rank's own step that may ask for an audit: robust, harmful, ema, ema_mean, or off."
        ),
    ] = "off",
    sensitivity: Annotated[
        str | None,
        typer.Option(help="Of that rule, larger alarms sooner: a number, or scarce, default, critical, debug."),
    ] = None,
    evidence: Annotated[
        str, typer.Option(help="What is kept of a finding: digests, slices, or full, which unsilent replay needs.")
    ] = "digests",
    resume: Annotated[
        bool, typer.Option(help="Go on from the newest certified checkpoint in OUT/checkpoints, if there is one.")
    ] = True,
    ledger: Annotated[
        Path | None, typer.Option(help="Directory that many runs share, for what is known of each device over runs.")
    ] = None,
    fault: Annotated[Path | None, typer.Option(help="TOML file with faults to inject.")] = None,
    require_localization: Annotated[
        bool, typer.Option("--require-localization", help="Refuse to start on fewer than three nodes.")
    ] = False,
    unguarded: Annotated[
        bool, typer.Option("--unguarded", help="Plain training, to compare with: no checks, no checkpoints.")
    ] = False,
    node: Annotated[
        str | None, typer.Option(help="Name of this host; {rank} in it (or in UNSILENT_NODE) becomes the rank.")
    ] = None,
    nodes_imitated: Annotated[int | None, typer.Option(help="Play so many nodes on one machine.")] = None,
    as_json: Json = False,
) -> None:
    """Train a LLaMA on real text, guarded. Alone, or: torchrun --nproc-per-node 4 -m unsilent train ..."""
    from unsilent.training.loop import Options, leave, run

    def make_options() -> Options:
        return Options(
            out=out,
            preset=preset,
            steps=steps,
            data=data,
            seed=seed,
            batch=batch,
            global_batch=global_batch,
            micro_batch=micro_batch,
            sequence_length=sequence_length,
            accumulate=accumulate,
            learning_rate=lr,
            warmup=warmup,
            clip=clip,
            bf16=bf16,
            save_every=save_every,
            eval_every=eval_every,
            audit_every=audit_every or None,
            replicas_every=replicas_every or None,
            mode=mode,
            quarantine=quarantine,
            update_rule=update_rule,
            sensitivity=sensitivity,
            evidence=evidence,
            ledger=ledger,
            resume=resume,
            require_localization=require_localization,
            unguarded=unguarded,
            node=node,
            nodes_imitated=nodes_imitated,
        )

    leave(run(out, make_options, None if fault is None else lambda: _read_faults(fault), as_json=as_json))


def _read_faults(path: Path) -> Any:
    """The faults of a file, ready to be put into a model. Here, since training must not know the lab."""
    from unsilent.lab.faults import read_faults

    faults = read_faults(path)

    def inject(
        model: Any, optimizer: Any, *, rank: int, world_size: int, node: str, replaying: Callable[[], bool]
    ) -> Any:
        from unsilent.lab.inject import Injector

        return [
            Injector(model, optimizer, one, rank=rank, world_size=world_size, node=node, replaying=replaying)
            for one in faults
        ]

    return inject


# What follows the first word of the child's command is the child's, options too, with or without "--".
@app.command("launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_ends_well
def launch_(
    command: Annotated[
        list[str],
        typer.Argument(help="What torchrun is to run, after --: a script or -m MODULE.", metavar="-- COMMAND..."),
    ],
    nodes: Annotated[str, typer.Option(help="How many nodes to imitate on this machine, or names with commas.")] = "4",
    nproc_per_node: Annotated[int, typer.Option(help="Processes on each node.")] = 1,
    spares: Annotated[
        str, typer.Option(help="Nodes that wait to take the place of a bad one: a number, or names with commas.")
    ] = "0",
    restarts: Annotated[int, typer.Option(help="How often the job may be started again.")] = 3,
    run_on: Annotated[
        str, typer.Option(help="Shell line that runs {command} on {node}; by default all nodes are imitated here.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="The run directory; by default the command's own --out.")] = None,
    as_json: Json = False,
) -> None:
    """Run a job under torchrun, an agent for each node, and start it again without a node that was taken out.

    On exit code 11 all agents are ended and the job is started again on the nodes that are left, or with a spare in the
    bad one's place, from the checkpoint that the verdict trusts. Every other code ends the launch.
    """
    from unsilent.launch import launch, plan_from

    plan = plan_from(
        nodes=nodes,
        spares=spares,
        ranks_per_node=nproc_per_node,
        restarts=restarts,
        out=out,
        command=command,
        run_on=run_on,
    )
    record = launch(plan)
    if as_json:
        _print_json({"exit_code": record["exit_code"], "launch": record})
    raise typer.Exit(record["exit_code"])


# As with launch.
@app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_ends_well
def exec_(
    command: Annotated[list[str], typer.Argument(help="The command, after --", metavar="-- COMMAND...")],
    run: Annotated[
        Path | None, typer.Option("--run", "--out", help="The run directory; by default the command's own --out.")
    ] = None,
    scheduler: Annotated[
        str,
        typer.Option(help="slurm: on code 11 requeue the job without the node; kubeflow: then end with 211; or none."),
    ] = "none",
    restarts: Annotated[int, typer.Option(help="How many nodes the scheduler may be told to leave out in all.")] = 3,
    as_json: Json = False,
) -> None:
    """Run a launcher and return the run's own exit code, which torchrun turns into 1.

    The run's code is taken from its exit.json. A command that fails although its run ended in order keeps its own code.
    """
    from unsilent.events import excluded_nodes
    from unsilent.execute import execute, out_of
    from unsilent.schedulers import Scheduler, tell

    try:
        told = Scheduler(scheduler)
    except ValueError:
        raise UsageError(f"--scheduler is {scheduler!r}: one of {', '.join(s.value for s in Scheduler)}") from None
    directory = run or out_of(command)
    if directory is None and told is not Scheduler.NONE:
        raise UsageError("--scheduler needs the run directory, where exclude.json will be: give --run DIR")
    ended = execute(command, directory)
    if ended.outcome is not None and ended.outcome["exit_code"] == EXIT_OK and ended.own != EXIT_OK:
        _say(f"the run ended in order, but the command ended with {ended.own}")
    code = ended.exit_code
    if directory is not None and told is not Scheduler.NONE and code == EXIT_QUARANTINE:
        try:
            code = tell(told, code, excluded_nodes(directory), restarts=restarts)
        except UsageError as error:
            _say(f"{error}; the scheduler is not told")
    if as_json:
        _print_json({"exit_code": code, "command_exit_code": ended.own, "outcome": ended.outcome})
    raise typer.Exit(code)


@app.command()
@_ends_well
def approve(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    node: Annotated[str, typer.Argument(help="The node that the run has asked about.")],
    as_json: Json = False,
) -> None:
    """Give leave to take a node out; the run sees it at its next step."""
    from unsilent.events import approve as approve_node
    from unsilent.ledger import note_approval

    approve_node(run, node)
    print(f"{node} is approved: the run takes it out at its next step")
    problem = note_approval(run, node)
    if problem:
        _say(f"the approval stands, but the ledger could not be told of it: {problem}")
    if as_json:
        _print_json({"exit_code": EXIT_OK, "run": str(run), "approved": node})


@app.command()
@_ends_well
def report(
    directory: Annotated[Path | None, typer.Argument(metavar="DIR", help="Run directory.")] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Instead of a run: a ledger, as its directory or as the SQLite file built of it."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the report, as text, to OUT/report.txt.")] = None,
    as_json: Json = False,
) -> None:
    """What ran, what was checked, found and done, and what can be trusted. With --ledger: who comes back over runs."""
    from rich.console import Console

    from unsilent.report.text import render, render_text

    if ledger is not None and directory is None:
        _report_ledger(ledger, out, as_json=as_json)
        return
    if directory is None or ledger is not None:
        raise UsageError("report takes a run directory, or --ledger with a ledger: one of the two")

    Console().print(render(directory))
    if out is not None:
        _write(out, "report.txt", render_text(directory))
    if as_json:
        _print_json(_report_record(directory))


def _report_ledger(ledger: Path, out: Path | None, *, as_json: bool) -> None:
    import time

    from rich.console import Console

    from unsilent.ledger import read_database, read_directory
    from unsilent.report import ledger as over_runs
    from unsilent.report.text import as_text

    contents = read_directory(ledger) if ledger.is_dir() else read_database(ledger)
    now = time.time()
    rendered = over_runs.render(contents, source=str(ledger), now=now)
    Console().print(rendered)
    if out is not None:
        _write(out, "report.txt", as_text(rendered))
    if as_json:
        _print_json({"exit_code": EXIT_OK, **over_runs.as_json(contents, source=str(ledger), now=now)})


def _report_record(directory: Path) -> dict[str, Any]:
    from unsilent.events import approved_nodes, asked_nodes, excluded_nodes, read, read_exit

    log = read(directory)
    found = [e for e in log.events if e.kind in ("verdict", "action")]
    return {
        "exit_code": EXIT_OK,
        "run": str(directory),
        "events": len(log.events),
        "unreadable": log.unreadable,
        "verdicts": [e.fields["verdict"] for e in found if e.kind == "verdict"],
        "actions": [{"step": e.step, "action": e.fields.get("action")} for e in found if e.kind == "action"],
        "asked": list(asked_nodes(log.events)),
        "approved": sorted(approved_nodes(directory)),
        "excluded": excluded_nodes(directory),
        "outcome": read_exit(directory),
    }


@ledger_app.command("build")
@_ends_well
def ledger_build(
    directory: Annotated[Path, typer.Argument(metavar="LEDGER_DIR", help="The directory that runs write to.")],
    out: Annotated[Path, typer.Option(help="The SQLite file; on a local disk. One that is there is added to.")],
    as_json: Json = False,
) -> None:
    """Fold the files of a ledger into one SQLite file; what cannot be read is named and left out."""
    from unsilent.ledger import build

    built = build(directory, out)
    for problem in built.problems:
        _say(str(problem))
    if built.notice:
        _say(built.notice)
    print(f"{out}: {_count(built.runs, 'run')}, {_count(built.lines, 'line')}, {built.added} of them new")
    if as_json:
        _print_json(
            {
                "exit_code": EXIT_OK,
                "ledger": str(out),
                "runs": built.runs,
                "lines": built.lines,
                "added": built.added,
                "journal": built.journal,
                "notice": built.notice,
                "problems": [vars(problem) for problem in built.problems],
            }
        )


@app.command()
@_ends_well
def verify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint, a directory of them, or a run directory.")
    ],
    as_json: Json = False,
) -> None:
    """Compare checkpoints with their certificates, offline: every file, every tensor. Exit 13 if one fails."""
    from unsilent.checkpoint import verify as verify_checkpoint

    paths = _checkpoints_of(directory)
    problems: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        found = verify_checkpoint(path)
        problems[str(path)] = [
            {"file": p.file, "tensors": list(p.tensors), "reason": p.reason, "rank": p.rank} for p in found
        ]
        print(f"{path}: FAILED, {_count(len(found), 'problem')}" if found else f"{path}: {_verified(path)}")
        for problem in found:
            where = f"{problem.file}: " if problem.file else ""
            tensors = f" [tensors: {', '.join(problem.tensors)}]" if problem.tensors else ""
            print(f"  {where}{problem.reason}{tensors}")
    bad = sum(bool(found) for found in problems.values())
    code = EXIT_BAD_CHECKPOINT if bad else EXIT_OK
    print(f"{_count(len(paths), 'checkpoint')}, {bad} failed")
    if as_json:
        _print_json({"exit_code": code, "checkpoints": problems})
    raise typer.Exit(code)


def _checkpoints_of(directory: Path) -> list[Path]:
    from unsilent.checkpoint import checkpoints_in
    from unsilent.checkpoint.listing import look

    if not directory.is_dir():
        raise UsageError(f"{directory}: there is no such directory")
    if look(directory) is not None:
        return [directory]
    for root in (directory, directory / "checkpoints"):
        found = [saved.path for saved in checkpoints_in(root)]
        if found:
            return found
    raise UsageError(f"{directory}: there is no checkpoint in it")


def _verified(path: Path) -> str:
    """What was compared; never that it is correct."""
    from unsilent.checkpoint.listing import look

    saved = look(path)
    status = saved.status.value if saved is not None and saved.status is not None else "unknown"
    return f"as its certificate says, files and tensors ({status})"


@app.command()
@_ends_well
def replay(
    bundle: Annotated[Path, typer.Argument(metavar="EVIDENCE_DIR", help="One bundle: RUN/evidence/STEP-CHECK-N.")],
    entry: Annotated[
        str | None,
        typer.Option(help="module:function that returns (model, loss_fn); not needed for runs of unsilent train."),
    ] = None,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="The bundle is mine: unpickle a batch of whatever kind.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Also write what is found to OUT/replay.json.")] = None,
    as_json: Json = False,
) -> None:
    """Rerun one finding from its evidence: does the faulty value come out again, or the agreed one? Needs evidence=full.

    Exit 0: the agreed value comes out; 10: a wrong one, so this machine makes that error; 12: cannot be told.
    """
    from unsilent.offline.replay import replay as rerun

    answer, record = rerun(bundle, entry=entry, trusted=trusted)
    print(f"{bundle}: {answer.outcome.value}: {answer.reason}")
    if out is not None:
        _write(out, "replay.json", json.dumps(record, indent=2) + "\n")
    if as_json:
        _print_json(record)
    raise typer.Exit(answer.exit_code)


@app.command()
@_ends_well
def recheck(
    checkpoint: Annotated[Path, typer.Option("--from", help="The checkpoint to begin from; it is verified first.")],
    steps: Annotated[str, typer.Option(help="The steps to compare, A..B.")],
    run: Annotated[
        Path | None,
        # torchrun takes --run for an option of its own, so there is a longer name.
        typer.Option("--run", "--run-directory", help="Run directory of unsilent train; by default the checkpoint's."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the rerun's log and recheck.json go.")] = Path("out/recheck"),
    as_json: Json = False,
) -> None:
    """My loss looks wrong: was it hardware? Reruns steps of a run and compares them, bit for bit, with the run's log.

    It starts as many ranks here as the run had, or runs on those of torchrun. Exit 0: the same values come out; 10: the
    run's values were wrong; 12: cannot be told.
    """
    from unsilent.offline.recheck import on_ranks, plan, start_ranks, under_launcher

    run = run if run is not None else checkpoint.resolve().parent.parent
    wanted = plan(checkpoint, steps, run, out)
    if wanted.world_size > 1 and not under_launcher():
        words = [
            "--from",
            checkpoint,
            "--steps",
            steps,
            "--run-directory",
            run,
            "--out",
            out,
            *(["--json"] if as_json else []),
        ]
        raise typer.Exit(start_ranks(wanted, out, [str(word) for word in words]))
    from unsilent.training.loop import leave

    leave(on_ranks(wanted, out, as_json=as_json))


@study_app.command("alpha")
@_ends_well
def study_alpha(
    out: Annotated[Path, typer.Option(help="Where results go, and the parts that a later start goes on from.")],
    preset: Annotated[str, typer.Option(help="Size of the model: tiny, 60m (shorter), 350m, 1b.")] = "tiny",
    quick: Annotated[bool, typer.Option("--quick", help="Under 2 minutes; its figures mean nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Which sensitivity of the update check catches which faults, with how many false alarms, for each rule."""
    from unsilent.lab.studies.alpha.page import run

    command = f"unsilent study alpha --preset {preset}{' --quick' if quick else ''} --out {out.name}"
    record = run(out=out, preset=preset, shorter=quick, command=command)
    for goal in record["goals"]:
        print(f"{'met' if goal['met'] else 'NOT MET'}: {goal['goal']}: {goal['measured']}")
    print(f"tables in {out / 'update.md'}, all figures in {out / 'update.json'}")
    if as_json:
        _print_json({"exit_code": EXIT_OK, **record})


_Units = Annotated[str, typer.Option("--units", help="Numbers of simulated sick units, such as 1,10,11, or all.")]
_Shape = Annotated[str, typer.Option(help="Widths of the model: small, small-wide, million.")]
_Seed = Annotated[int, typer.Option(min=0, help="Of the weights, the text's order and the faults.")]


@study_app.command("submodule")
@_ends_well
def study_submodule(
    out: Annotated[Path, typer.Option(help="Where results go.")],
    units: _Units = "1,10,11,2,3",
    shape: _Shape = "small-wide",
    seed: _Seed = 1,
    steps: Annotated[int, typer.Option(help="Of each unit; a place with under 20 bursts gets its interval.")] = 600,
    quick: Annotated[bool, typer.Option("--quick", help="8 steps, a minute; its figures mean nothing.")] = False,
    as_json: Json = False,
) -> None:
    """How often and by how much a sick device's attention and FFN err, beside a healthy one in lock step."""
    from unsilent.lab.studies.llama import shape_of
    from unsilent.lab.studies.submodule.study import run

    steps = 8 if quick else steps
    command = (
        f"unsilent study submodule --units {units} --shape {shape} --seed {seed} "
        f"{'--quick' if quick else f'--steps {steps}'} --out {out.name}"
    )
    record = run(out=out, units=_units_named(units), shape=shape_of(shape), seed=seed, steps=steps, quick=quick,
                 command=command)  # fmt: skip
    _print_goals(record)
    print(f"page in {out / 'submodule.html'}, all figures in {out / 'submodule.json'}")
    if as_json:
        _print_json({"exit_code": EXIT_OK, **record})


@study_app.command("step")
@_ends_well
def study_step(
    out: Annotated[Path, typer.Option(help="Where results go.")],
    units: _Units = "1,4,11,2,3",
    shape: _Shape = "small-wide",
    seed: _Seed = 1,
    steps: Annotated[int, typer.Option(help="At each of two batch sizes.")] = 400,
    quick: Annotated[bool, typer.Option("--quick", help="20 steps, under a minute; its figures mean nothing.")] = False,
    as_json: Json = False,
) -> None:
    """How far a sick device's gradient of one step is from the right one, at two numbers of tokens per step."""
    from unsilent.lab.studies.llama import shape_of
    from unsilent.lab.studies.step.study import run

    steps = 20 if quick else steps
    command = (
        f"unsilent study step --units {units} --shape {shape} --seed {seed} "
        f"{'--quick' if quick else f'--steps {steps}'} --out {out.name}"
    )
    record = run(out=out, units=_units_named(units), shape=shape_of(shape), seed=seed, steps=steps, quick=quick,
                 command=command)  # fmt: skip
    _print_goals(record)
    print(f"page in {out / 'step.html'}, all figures in {out / 'step.json'}")
    if as_json:
        _print_json({"exit_code": EXIT_OK, **record})


def _units_named(text: str) -> list[Any]:
    """The units of ``1,10,11`` or of ``all``."""
    from unsilent.lab.units import unit, units

    if text == "all":
        return list(units())
    try:
        return [unit(int(number)) for number in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--units {text!r} is neither 'all' nor a list of numbers such as 1,10,11") from error


def _print_goals(record: dict[str, Any]) -> None:
    for goal in record["goals"]:
        print(f"{'met' if goal['met'] else 'NOT MET'}: {goal['goal']}: {goal['measured']}")


@study_app.command("drift")
@_ends_well
def study_drift(
    out: Annotated[Path, typer.Option(help="Where results go, and the runs that a later start goes on from.")],
    quick: Annotated[bool, typer.Option("--quick", help="A minute; its figures mean nothing.")] = False,
    as_json: Json = False,
) -> None:
    """How far weights stray from a healthy run's on every simulated sick unit, when nobody corrects them."""
    from unsilent.lab.studies.drift.page import run

    record = run(out=out, quick=quick, command=f"unsilent study drift{' --quick' if quick else ''} --out {out.name}")
    _print_goals(record)
    print(f"page in {out / 'drift.html'}, all figures in {out / 'drift.json'}")
    if as_json:
        _print_json({"exit_code": EXIT_OK, **record})


@study_app.command("surface")
@_ends_well
def study_surface(
    out: Annotated[Path, typer.Option(help="Where results go, and the runs that a later start goes on from.")],
    quick: Annotated[bool, typer.Option("--quick", help="A minute; its figures mean nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Whether the loss surface sets how fast weights drift, or the fault."""
    from unsilent.lab.studies.surface.page import run

    record = run(out=out, quick=quick, command=f"unsilent study surface{' --quick' if quick else ''} --out {out.name}")
    print(record["answer"])
    print(f"page in {out / 'surface.html'}, all figures in {out / 'surface.json'}")
    if as_json:
        _print_json({"exit_code": EXIT_OK, **record})


@study_app.command("finetune")
@_ends_well
def study_finetune(
    out: Annotated[Path, typer.Option(help="Where results go, and the runs that a later start goes on from.")],
    quick: Annotated[bool, typer.Option("--quick", help="A minute; its figures mean nothing.")] = False,
    as_json: Json = False,
) -> None:
    """What a model is worth that was tuned for a task on a sick device."""
    from unsilent.lab.studies.finetune.page import run

    record = run(out=out, quick=quick, command=f"unsilent study finetune{' --quick' if quick else ''} --out {out.name}")
    _print_goals(record)
    print(f"page in {out / 'finetune.html'}, all figures in {out / 'finetune.json'}")
    if as_json:
        _print_json({"exit_code": EXIT_OK, **record})


@study_app.command("bits")
@_ends_well
def study_bits(
    out: Annotated[Path, typer.Option(help="Where results go, and the parts that a later start goes on from.")],
    quick: Annotated[bool, typer.Option("--quick", help="About a minute; its figures mean nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Which flipped bit matters, of which kernel, in which stage of a step."""
    from unsilent.lab.studies.bits.page import lead, run

    record = run(out=out, quick=quick, command=f"unsilent study bits{' --quick' if quick else ''} --out {out.name}")
    print(lead(record))
    print(f"page in {out / 'bits.html'}, all figures in {out / 'bits.json'}")
    if as_json:
        _print_json({"exit_code": EXIT_OK, **record})


@study_app.command("norms")
@_ends_well
def study_norms(
    out: Annotated[Path, typer.Option(help="Where results go, and the parts that a later start goes on from.")],
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute; its figures mean nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Whether a rank whose gradient norm stands out is one whose device errs."""
    from unsilent.lab.studies.norms.page import lead, run

    record = run(out=out, quick=quick, command=f"unsilent study norms{' --quick' if quick else ''} --out {out.name}")
    print(lead(record))
    print(f"page in {out / 'norms.html'}, all figures in {out / 'norms.json'}")
    if as_json:
        _print_json({"exit_code": EXIT_OK, **record})


@study_app.command("latency")
@_ends_well
def study_latency(
    out: Annotated[Path, typer.Option(help="Where results go, and the parts that a later start goes on from.")],
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute; its figures mean nothing.")] = False,
    as_json: Json = False,
) -> None:
    """How many corrupted steps are kept before an audit every K steps finds a sick device: formula and real guard."""
    from unsilent.lab.studies.latency.page import lead, run

    record = run(out=out, quick=quick, command=f"unsilent study latency{' --quick' if quick else ''} --out {out.name}")
    print(lead(record))
    print(f"page in {out / 'latency.html'}, all figures in {out / 'latency.json'}")
    if as_json:
        _print_json({"exit_code": EXIT_OK, **record})


@app.command()
@_ends_well
def campaign(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="TOML file, such as campaigns/quick.toml.")],
    out: Annotated[Path, typer.Option(help="Where trials and results go; a later start goes on from them.")],
    only: Annotated[int | None, typer.Option(help="Run at most so many trials this time.", min=0)] = None,
    minutes: Annotated[float | None, typer.Option(help="Begin no trial after so many minutes.", min=0)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The same as --minutes 1.5.")] = False,
    as_json: Json = False,
) -> None:
    """Many short guarded runs with one simulated fault each: which faults are caught, at which site, by which checks."""
    from unsilent.lab.campaign.page import lead
    from unsilent.lab.campaign.report import run

    record = run(spec=spec, out=out, only=only, minutes=1.5 if quick else minutes)
    print(lead(record))
    print(f"page in {out / 'campaign.html'}, all figures in {out / 'campaign.json'}, trials in {out / 'trials.csv'}")
    if as_json:
        _print_json({"exit_code": EXIT_OK, **record})


@app.command()
@_ends_well
def doctor(
    ranks: Annotated[int | None, typer.Option(help="Imagine a run of so many ranks.")] = None,
    nodes: Annotated[int | None, typer.Option(help="... on so many nodes; by default each rank has its own.")] = None,
    mesh: Annotated[str | None, typer.Option(help="... that spread a model like this: dp=2,tp=4.")] = None,
    data: Annotated[str, typer.Option(help="Its dimensions along which batches differ.")] = "dp",
    preset: Annotated[str, typer.Option(help="The model whose memory and cost are shown.")] = "tiny",
    audit_every: Annotated[int, typer.Option(help="Steps between audits; 0 for none on schedule.")] = 100,
    replicas_every: Annotated[int, typer.Option(help="Steps between votes; 0 for none.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Also write what is found to OUT/doctor.json.")] = None,
    as_json: Json = False,
) -> None:
    """What this machine can promise: environment, nodes, who audits whom, coverage, memory and cost.

    Under torchrun it shows the ranks that were started.
    """
    from rich.console import Console

    from unsilent.doctor import examine, render
    from unsilent.training.loop import leave

    facts = examine(
        ranks=ranks,
        nodes=nodes,
        preset_name=preset,
        audit_every=audit_every or None,
        replicas_every=replicas_every or None,
        mesh=mesh,
        data=data,
    )
    if facts is not None:
        Console().print(render(facts))
        record = {"exit_code": EXIT_OK, **facts}
        if out is not None:
            _write(out, "doctor.json", json.dumps(record, indent=2) + "\n")
        if as_json:
            _print_json(record)
    leave(EXIT_OK)


def _write(out: Path, name: str, text: str) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write {out / name}: {error.strerror or error}") from error


def _print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def _say(text: str) -> None:
    print(f"unsilent: {text}", file=sys.stderr, flush=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
