"""What ``unsilent exec`` does for a scheduler when a run asks to be started again without a node.

A scheduler sees an exit code and nothing else, so each has its own way to be told. Every way is bounded by the number of
nodes in ``exclude.json``, which grows with each such start.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping
from enum import Enum

from unsilent.errors import EXIT_QUARANTINE
from unsilent.screen import show

KUBEFLOW_RESTART = 211
"""The training operator starts a pod again on codes from 128 on. Codes up to 192 say that a signal ended the process
(128 and its number, and Linux has 64 signals), so this one, 200 and 11, is mistaken for none of them."""


class Scheduler(str, Enum):
    """Who started the command."""

    NONE = "none"
    SLURM = "slurm"
    KUBEFLOW = "kubeflow"


def tell(
    scheduler: Scheduler,
    code: int,
    excluded: Collection[str],
    *,
    restarts: int,
    environment: Mapping[str, str] = os.environ,
    say: Callable[[str], None] = lambda text: show(f"unsilent: {text}"),
) -> int:
    """Tell the scheduler that the run is to go on without the excluded nodes, where ``code`` asks for that.

    Args:
        code: what the run has ended with.
        excluded: all nodes that the run leaves out.
        restarts: how many nodes may be left out in all; with more, the run is not started again.

    Returns:
        The code to end with.
    """
    if code != EXIT_QUARANTINE or scheduler is Scheduler.NONE:
        return code
    if not excluded:
        say("exclude.json names no node, so another start would be the same: the scheduler is not told")
        return code
    if len(excluded) > restarts:
        say(f"{len(excluded)} nodes are left out already, and --restarts allows {restarts}: the scheduler is not told")
        return code
    if scheduler is Scheduler.KUBEFLOW:
        for node in sorted(excluded):
            say(f"keep pods off {node}, as with: kubectl cordon {shlex.quote(node)}")
        return KUBEFLOW_RESTART
    _tell_slurm(excluded, environment, say)
    return code


def _tell_slurm(excluded: Collection[str], environment: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Requeue this job with the nodes excluded; outside a job only say how.

    Slurm changes the excluded nodes of pending jobs only, so the job is requeued as held, changed, and released.
    Requeueing ends this very job: SIGTERM is ignored here and in the commands until they are done.
    """
    job = environment.get("SLURM_JOB_ID", "")
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        for command in slurm_commands(job or "JOBID", _excluded_by_slurm(job) if job else "", excluded):
            say(shlex.join(command))
            if job and not _succeeds(command, say):
                say(f"the job may be held now; when it is put right: scontrol release {job}")
                return
    finally:
        signal.signal(signal.SIGTERM, before)


def slurm_commands(job: str, already: str, excluded: Collection[str]) -> list[list[str]]:
    """What requeues a job with nodes excluded, ``already`` being its list so far. Pure."""
    nodes = ",".join([*([already] if already else []), *sorted(excluded)])
    return [
        ["scontrol", "requeuehold", job],
        ["scontrol", "update", f"JobId={job}", f"ExcNodeList={nodes}"],
        ["scontrol", "release", job],
    ]


def _excluded_by_slurm(job: str) -> str:
    """The nodes that the job excludes so far, as Slurm writes them; "" where there are none or it cannot be asked."""
    try:
        shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
    found = re.search(r"\bExcNodeList=(\S+)", shown)
    return "" if found is None or found.group(1) == "(null)" else found.group(1)


def _succeeds(command: list[str], say: Callable[[str], None]) -> bool:
    try:
        code = subprocess.run(command, check=False).returncode
    except OSError as error:
        say(f"cannot start {command[0]}: {error.strerror or error}")
        return False
    if code:
        say(f"{command[0]} {command[1]} ended with {code}")
    return code == 0
