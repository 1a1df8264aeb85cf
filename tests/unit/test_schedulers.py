"""What ``unsilent exec`` tells a scheduler, with commands of our own in the place of Slurm's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unsilent.cli import app
from unsilent.schedulers import KUBEFLOW_RESTART, Scheduler, slurm_commands, tell

SCONTROL = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
  show) echo "JobId=7 JobState=RUNNING"; echo "   ReqNodeList=(null) ExcNodeList={already}" ;;
  requeuehold) kill -TERM $PPID ;;  # as Slurm ends the job that is requeued
  {fails}) exit 1 ;;
esac
"""


def told(scheduler: Scheduler, code: int, excluded: tuple[str, ...], *, restarts: int = 3, **environment: str):
    said: list[str] = []
    end = tell(scheduler, code, excluded, restarts=restarts, environment=environment, say=said.append)
    return end, said


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a ``scontrol`` on the path that notes what it was asked."""

    def install(*, already: str = "(null)", fails: str = "nothing") -> Path:
        log, program = tmp_path / "asked", tmp_path / "scontrol"
        program.write_text(SCONTROL.format(log=log, already=already, fails=fails))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return log

    return install


@pytest.mark.parametrize("scheduler", list(Scheduler))
@pytest.mark.parametrize("code", [0, 1, 2, 10, 12, 13, 70, 137])
def test_only_a_quarantine_is_told(scheduler: Scheduler, code: int) -> None:
    assert told(scheduler, code, ("n2",), SLURM_JOB_ID="7") == (code, [])


def test_kubeflow_starts_again_on_a_code_that_no_signal_has() -> None:
    code, said = told(Scheduler.KUBEFLOW, 11, ("n2",))
    assert code == KUBEFLOW_RESTART == 211
    assert said == ["keep pods off n2, as with: kubectl cordon n2"]
    assert 128 + 64 < code < 255


@pytest.mark.parametrize("scheduler", [Scheduler.SLURM, Scheduler.KUBEFLOW])
def test_it_is_bounded_by_the_nodes_that_are_out(scheduler: Scheduler) -> None:
    code, said = told(scheduler, 11, ("n1", "n2"), restarts=1, SLURM_JOB_ID="7")
    assert code == 11 and "2 nodes are left out already" in said[0]
    code, said = told(scheduler, 11, (), SLURM_JOB_ID="7")
    assert code == 11 and "names no node" in said[0]


def test_slurm_requeues_held_excludes_and_releases(slurm) -> None:
    log = slurm()
    code, said = told(Scheduler.SLURM, 11, ("n3", "n2"), SLURM_JOB_ID="7")
    assert code == 11  # and the SIGTERM that came in between has ended nothing
    assert log.read_text().splitlines() == [
        "show job 7", "requeuehold 7", "update JobId=7 ExcNodeList=n2,n3", "release 7",
    ]  # fmt: skip
    assert said == ["scontrol requeuehold 7", "scontrol update JobId=7 ExcNodeList=n2,n3", "scontrol release 7"]


def test_slurm_keeps_what_the_job_excludes_already(slurm) -> None:
    log = slurm(already="gpu[01-03]")
    told(Scheduler.SLURM, 11, ("n2",), SLURM_JOB_ID="7")
    assert "update JobId=7 ExcNodeList=gpu[01-03],n2" in log.read_text()


def test_a_job_that_cannot_be_changed_stays_held(slurm) -> None:
    log = slurm(fails="update")
    code, said = told(Scheduler.SLURM, 11, ("n2",), SLURM_JOB_ID="7")
    assert code == 11 and "release" not in log.read_text()
    assert said[-2:] == [
        "scontrol update ended with 1",
        "the job may be held now; when it is put right: scontrol release 7",
    ]


def test_outside_a_job_it_only_says_how(slurm) -> None:
    log = slurm()
    code, said = told(Scheduler.SLURM, 11, ("n2",))
    assert code == 11 and not log.exists()
    assert said == [" ".join(command) for command in slurm_commands("JOBID", "", ["n2"])]


def test_exec_maps_the_code_of_the_run(tmp_path: Path) -> None:
    ends = (
        "import json, pathlib, sys\n"
        "from unsilent.events import write_exclude\n"
        "out = pathlib.Path(sys.argv[2])\n"
        "write_exclude(out, ['n2'], 'it was wrong')\n"
        "(out / 'exit.json').write_text(json.dumps({'exit_code': 11}))\n"
        "sys.exit(1)"
    )
    command = [sys.executable, "-c", ends, "--out", str(tmp_path)]
    runner = CliRunner()
    assert runner.invoke(app, ["exec", "--scheduler", "kubeflow", "--", *command]).exit_code == 211
    assert runner.invoke(app, ["exec", "--scheduler", "kubeflow", "--restarts", "0", "--", *command]).exit_code == 11
    assert runner.invoke(app, ["exec", "--", *command]).exit_code == 11
    refused = runner.invoke(app, ["exec", "--scheduler", "cron", "--", *command])
    assert refused.exit_code == 2 and "one of none, slurm, kubeflow" in refused.stderr
