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

from unsilent.errors import EXIT_BAD_CHECKPOINT, EXIT_INTERNAL, EXIT_OK, UnsilentError, UsageError

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
    resume: Annotated[
        bool, typer.Option(help="Go on from the newest certified checkpoint in OUT/checkpoints, if there is one.")
    ] = True,
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

    def inject(model: Any, optimizer: Any, *, rank: int, world_size: int, replaying: Callable[[], bool]) -> Any:
        from unsilent.lab.inject import Injector

        return [
            Injector(model, optimizer, one, rank=rank, world_size=world_size, replaying=replaying) for one in faults
        ]

    return inject


# What follows the first word of the child's command is the child's, options too, with or without "--".
@app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_ends_well
def exec_(
    command: Annotated[list[str], typer.Argument(help="The command, after --", metavar="-- COMMAND...")],
    run: Annotated[
        Path | None, typer.Option("--run", "--out", help="The run directory; by default the command's own --out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a launcher and return the run's own exit code, which torchrun turns into 1.

    The run's code is taken from its exit.json. A command that fails although its run ended in order keeps its own code.
    """
    from unsilent.execute import execute

    ended = execute(command, run)
    if ended.outcome is not None and ended.outcome["exit_code"] == EXIT_OK and ended.own != EXIT_OK:
        _say(f"the run ended in order, but the command ended with {ended.own}")
    if as_json:
        _print_json({"exit_code": ended.exit_code, "command_exit_code": ended.own, "outcome": ended.outcome})
    raise typer.Exit(ended.exit_code)


@app.command()
@_ends_well
def approve(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    node: Annotated[str, typer.Argument(help="The node that the run has asked about.")],
    as_json: Json = False,
) -> None:
    """Give leave to take a node out; the run sees it at its next step."""
    from unsilent.events import approve as approve_node

    approve_node(run, node)
    print(f"{node} is approved: the run takes it out at its next step")
    if as_json:
        _print_json({"exit_code": EXIT_OK, "run": str(run), "approved": node})


@app.command()
@_ends_well
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Run directory.")],
    out: Annotated[Path | None, typer.Option(help="Also write the report, as text, to OUT/report.txt.")] = None,
    as_json: Json = False,
) -> None:
    """What ran, what was checked, found and done, and what can be trusted."""
    from rich.console import Console

    from unsilent.report.text import render, render_text

    Console().print(render(directory))
    if out is not None:
        _write(out, "report.txt", render_text(directory))
    if as_json:
        _print_json(_report_record(directory))


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
def doctor(
    ranks: Annotated[int | None, typer.Option(help="Imagine a run of so many ranks.")] = None,
    nodes: Annotated[int | None, typer.Option(help="... on so many nodes; by default each rank has its own.")] = None,
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
