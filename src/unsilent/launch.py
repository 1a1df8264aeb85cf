"""``unsilent launch``: runs a job under torchrun, one agent for each node, and starts it again without a bad node.

torchrun can start workers again, but not without a node, and every code that they leave with becomes its 1. So all agents
are ended and new ones are started, with a port of their own: four agents that were to go on as three did not find one
another again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import sys
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unsilent.children import Children, exit_code, kill_left_over
from unsilent.errors import EXIT_OK, EXIT_QUARANTINE, CheckpointError, UsageError
from unsilent.events import EventLog, excluded_nodes, write_whole
from unsilent.execute import Ended, ended, out_of, stamp
from unsilent.screen import show

LAUNCH_FILE = "launch.json"
MARK = "UNSILENT_LAUNCH"
"""The environment variable that tells the processes of one attempt from all others."""
#: what the others get to end by themselves once one agent has failed; the guard's own bound is 60 seconds
PATIENCE_S = 75.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is launched.

    Attributes:
        nodes: their names, in the order of their ranks.
        spares: nodes that wait; each takes the place of one that is taken out.
        ranks_per_node: processes on each node.
        restarts: how often the job may be started again.
        directory: the run directory, on a disk that all nodes see.
        command: what torchrun is to run: a script or ``-m MODULE``, and its arguments.
        run_on: a line for the shell that runs ``{command}`` on ``{node}``; empty where all nodes are imitated here.
    """

    nodes: tuple[str, ...]
    spares: tuple[str, ...] = ()
    ranks_per_node: int = 1
    restarts: int = 3
    directory: Path
    command: tuple[str, ...]
    run_on: str = ""

    def __post_init__(self) -> None:
        names = [*self.nodes, *self.spares]
        if len(set(names)) < len(names):
            raise UsageError(f"a node is named twice among {', '.join(names)}")
        if self.ranks_per_node < 1 or self.restarts < 0:
            raise UsageError("--nproc-per-node must be at least 1, and --restarts at least 0")
        if re.fullmatch(r"torchrun|python(3(\.\d+)?)?", Path(self.command[0]).name):
            raise UsageError(
                f"launch starts torchrun itself: instead of {self.command[0]} give what it is to run, a script or "
                "-m MODULE"
            )
        if any(word.startswith(("--nodes-imitated", "--node=")) or word == "--node" for word in self.command):
            raise UsageError("launch gives every node its name: leave --node and --nodes-imitated out of the command")
        if self.run_on and "{command}" not in self.run_on:
            raise UsageError("--run-on must hold {command}, as in --run-on 'ssh -tt {node} {command}'")


def plan_from(
    *,
    nodes: str,
    spares: str,
    ranks_per_node: int,
    restarts: int,
    out: Path | None,
    command: Sequence[str],
    run_on: str,
) -> Plan:
    """A plan from the words of a command line: ``nodes`` and ``spares`` are numbers, or names with commas."""
    directory = out or out_of(command)
    if directory is None:
        raise UsageError("launch needs the run directory: give --out DIR to it or to the command")
    running = _names("--nodes", nodes, after=0)
    waiting: tuple[str, ...] = ()
    if spares not in ("", "0"):
        if spares.isdecimal() and not nodes.isdecimal():
            raise UsageError("--nodes gives names, so --spares must give names, too")
        waiting = _names("--spares", spares, after=len(running))
    return Plan(
        nodes=running,
        spares=waiting,
        ranks_per_node=ranks_per_node,
        restarts=restarts,
        directory=directory,
        command=tuple(command),
        run_on=run_on,
    )


def _names(option: str, text: str, *, after: int) -> tuple[str, ...]:
    """``"3"`` are three imitated nodes, the first with number ``after``; else names with commas."""
    if text.isdecimal():
        if int(text) < 1:
            raise UsageError(f"{option} is {text}: it must be at least 1")
        return tuple(f"node-{i}" for i in range(after, after + int(text)))
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or any(set(name) & set("/ \t") for name in names):
        raise UsageError(f"{option} is {text!r}: give a number, or names with commas between them")
    return names


def seats(nodes: Sequence[str], spares: Sequence[str], excluded: Collection[str]) -> tuple[str, ...]:
    """Who runs: each node, or a spare in its place where it is excluded, or nobody where no spare is left."""
    waiting = [spare for spare in spares if spare not in excluded]
    taken = [node if node not in excluded else (waiting.pop(0) if waiting else "") for node in nodes]
    return tuple(node for node in taken if node)


def why_not_again(
    code: int, *, ran: Sequence[str], next_nodes: Sequence[str], excluded: Collection[str], restarts_left: int
) -> str:
    """Why a job that ended with ``code`` is not started again; empty when it is. Pure."""
    if code != EXIT_QUARANTINE:
        return "it ended in order" if code == EXIT_OK else f"only exit code {EXIT_QUARANTINE} asks for another start"
    if not set(ran) & set(excluded):
        return "exclude.json names none of the nodes that ran, so the same would happen again"
    if not next_nodes:
        return "no node is left"
    if restarts_left < 1:
        return "it has been started again as often as --restarts allows"
    return ""


def launch(plan: Plan) -> dict[str, Any]:
    """Run it to its end.

    Returns:
        What ``launch.json`` holds; its ``exit_code`` is the run's own, or the first agent's that failed.

    Raises:
        UsageError: it cannot be started.
    """
    return _Launch(plan).run()


class _Launch:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.identity = uuid.uuid4().hex[:12]
        self.attempts: list[dict[str, Any]] = []
        self.log = EventLog(plan.directory, rank=None, run_id="")
        self.threads = os.environ.get("OMP_NUM_THREADS") or self._threads()

    def run(self) -> dict[str, Any]:
        plan = self.plan
        code = EXIT_QUARANTINE
        excluded = excluded_nodes(plan.directory)
        nodes = seats(plan.nodes, plan.spares, excluded)
        if not nodes:
            raise UsageError(
                f"every node is to be left out, says {plan.directory}/exclude.json: there is none to start on"
            )
        with Children() as children:
            for restarts_left in range(plan.restarts, -1, -1):
                try:
                    result = self._attempt(children, nodes)
                except UsageError as error:
                    if restarts_left == plan.restarts:
                        raise
                    self._end(code, f"it cannot be started again: {error}")
                    break
                code, ran, known, unreadable = result.exit_code, nodes, set(excluded), ""
                try:
                    excluded = excluded_nodes(plan.directory)
                except UsageError as error:
                    unreadable = str(error)
                nodes = seats(plan.nodes, plan.spares, excluded)
                stop = why_not_again(code, ran=ran, next_nodes=nodes, excluded=excluded, restarts_left=restarts_left)
                if unreadable and code == EXIT_QUARANTINE:
                    stop = unreadable
                if children.signals and code != EXIT_OK:
                    stop = f"signal {children.signals[0]} has asked for the end"
                if not stop:
                    stop = self._resume_point(result)
                if stop:
                    self._end(code, stop)
                    break
                self.attempts[-1]["decision"] = f"start again on {', '.join(nodes)}"
                self._write(None)
                out = ", ".join(node for node in excluded if node not in known)
                self._say(f"{out} is taken out: starting again on {', '.join(nodes)}, {self._from(result)}")
        self.log.close()
        return self._record(code)

    def _end(self, code: int, why: str) -> None:
        """The last attempt stays the last."""
        last = self.attempts[-1]
        last["decision"] = f"end: {why}"
        self._write(code)
        if code != EXIT_OK:
            self._say(f"attempt {last['attempt']} ended with {code}: {why}; its logs are in {last['logs']}")

    def _attempt(self, children: Children, nodes: tuple[str, ...]) -> Ended:
        """Start an agent on each node and wait for all of them.

        Raises:
            UsageError: they cannot be started, or have no place for their logs.
        """
        plan = self.plan
        number = len(self.attempts) + 1
        mark = f"{self.identity}.{number}"
        logs = plan.directory / "launch" / f"{self.identity}-{number}"
        try:
            logs.mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"cannot make {logs}: {error.strerror or error}") from error
        port = _free_port()
        attempt: dict[str, Any] = {
            "attempt": number, "nodes": list(nodes), "port": port, "logs": str(logs), "began": round(time.time(), 3),
        }  # fmt: skip
        self.attempts.append(attempt)
        self._write(None)
        self._say(f"attempt {number} on {', '.join(nodes)}; logs in {logs}")
        before = stamp(plan.directory)
        begin = time.monotonic()
        screen = _Follow(logs / f"{nodes[0]}.log")
        failed, left = True, 0
        try:
            agents = {
                node: children.start(
                    self._agent(node, rank, nodes, port, mark),
                    environment={**os.environ, **self._environment(node, mark)},
                    log=logs / f"{node}.log",
                )
                for rank, node in enumerate(nodes)
            }
            codes = children.wait(patience_s=PATIENCE_S, meanwhile=screen.show)
            failed = any(codes)
        finally:
            if failed:  # agents that ended in order have waited for their workers
                left = kill_left_over(f"{MARK}={mark}")
        own = next((code for code in codes if code), EXIT_OK)
        result = ended(own, plan.directory, before)
        attempt |= {
            "seconds": round(time.monotonic() - begin, 3),
            "agents": {node: exit_code(agent) for node, agent in agents.items()},
            "killed": left,
            "exit_code": result.exit_code,
            "outcome": result.outcome,
        }
        self._write(None)
        return result

    def _agent(self, node: str, rank: int, nodes: Sequence[str], port: int, mark: str) -> list[str]:
        """The command of one agent. The rendezvous is static, so that ranks follow the order of the nodes."""
        plan = self.plan
        address = nodes[0] if plan.run_on else "127.0.0.1"
        command = [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes", str(len(nodes)), "--node-rank", str(rank), "--nproc-per-node", str(plan.ranks_per_node),
            "--master-addr", address, "--master-port", str(port), "--max-restarts", "0", *plan.command,
        ]  # fmt: skip
        if not plan.run_on:
            return command
        settings = [f"{name}={value}" for name, value in self._environment(node, mark).items()]
        there = f"cd {shlex.quote(str(Path.cwd()))} && exec env {shlex.join([*settings, *command])}"
        line = plan.run_on.replace("{node}", shlex.quote(node)).replace("{command}", shlex.quote(there))
        return ["sh", "-c", f"exec {line}"]

    def _environment(self, node: str, mark: str) -> dict[str, str]:
        return {"UNSILENT_NODE": node, MARK: mark, **({"OMP_NUM_THREADS": self.threads} if self.threads else {})}

    def _threads(self) -> str:
        """Imitated nodes share this machine's cores; as many for each after a restart, since threads change bits."""
        if self.plan.run_on:
            return ""
        return str(max(1, (os.cpu_count() or 1) // (len(self.plan.nodes) * self.plan.ranks_per_node)))

    def _resume_point(self, result: Ended) -> str:
        """See to it that the newest certified checkpoint is the one that the verdict trusts; why that cannot be done."""
        from unsilent.checkpoint import Status, checkpoints_in

        named = (result.outcome or {}).get("resume_from")
        if named is None:
            return ""
        trusted = Path(named)
        newer = [
            s for s in checkpoints_in(trusted.parent) if s.status is Status.CERTIFIED and s.path.name > trusted.name
        ]
        if not newer:
            return ""
        from unsilent.checkpoint import CheckpointStore  # imports torch, which takes seconds

        store = CheckpointStore(trusted.parent)
        try:
            for saved in newer:
                store.distrust(saved.steps, f"the verdict of an earlier start goes back to {trusted.name}")
        except (OSError, CheckpointError) as error:
            return f"a checkpoint that the verdict does not trust cannot be marked: {error}"
        return ""

    def _from(self, result: Ended) -> str:
        named = (result.outcome or {}).get("resume_from")
        return f"from {named}" if named else "from the beginning, since no certified checkpoint was named"

    def _say(self, text: str) -> None:
        show(f"unsilent launch: {text}")
        self.log.write("notice", -1, text=f"launch: {text}")

    def _record(self, code: int | None) -> dict[str, Any]:
        """What was done and why."""
        plan = {**asdict(self.plan), "directory": str(self.plan.directory)}
        return {"schema": 1, "plan": plan, "attempts": self.attempts, "exit_code": code}

    def _write(self, code: int | None) -> None:
        """Put the record into ``launch.json``; a disk that fails does not end the job."""
        if not write_whole(self.plan.directory / LAUNCH_FILE, self._record(code)):
            show(f"unsilent launch: {self.plan.directory / LAUNCH_FILE} cannot be written")


class _Follow:
    """Shows what is added to a file, on stderr; what cannot be read or shown does not end the job."""

    def __init__(self, path: Path) -> None:
        self._path, self._shown = path, 0

    def show(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            with self._path.open("rb") as file:
                file.seek(self._shown)
                new = file.read()
            self._shown += len(new)
            if new:
                sys.stderr.write(new.decode("utf-8", "replace"))
                sys.stderr.flush()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
