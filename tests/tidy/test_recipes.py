"""The recipes in ``deploy/`` parse, and what they call exists: commands, options, variables of our own."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from torch.distributed.run import get_args_parser

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPTS = sorted(path.name for path in DEPLOY.iterdir() if path.suffix in (".sh", ".sbatch"))
JOB = "pytorchjob.yaml"


def words(name: str) -> list[str]:
    """What a recipe runs, from the first ``unsilent`` on, with values in the place of variables."""
    if name == JOB:
        (container,) = job()["template"]["spec"]["containers"]
        return container["command"]
    text = re.sub(r"\\\n", " ", (DEPLOY / name).read_text())
    (line,) = [line for line in text.splitlines() if re.match(r"unsilent (exec|launch) ", line)]
    line = re.sub(r'"\$\{?\w+(:-\d+)?\}?(:\d+)?"', "1", line)
    return [
        part for word in shlex.split(line) for part in (shlex.split(word) if word.startswith("torchrun") else [word])
    ]


def job() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / JOB).read_text())["spec"]["pytorchReplicaSpecs"]["Worker"]


def parse(command: str, given: list[str]) -> dict[str, Any]:
    """The words as the command understands them; what follows ``--`` stays as it is."""
    app = typer.main.get_command(importlib.import_module("unsilent.cli").app)
    known: Any = app.commands[command]  # type: ignore[attr-defined]
    return known.make_context(command, given, resilient_parsing=False).params


def test_there_is_one_for_each_way() -> None:
    assert [*SCRIPTS, JOB] == ["nvrx.sh", "slurm-requeue.sbatch", "slurm-spares.sbatch", "torchrun.sh", JOB]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_shell_can_read_it(name: str) -> None:
    assert subprocess.run(["bash", "-n", DEPLOY / name], check=False).returncode == 0


@pytest.mark.parametrize("name", [*SCRIPTS, JOB])
def test_what_it_runs_is_understood(name: str) -> None:
    program, command, *rest = words(name)
    assert program == "unsilent"
    ours = parse(command, rest)
    launched: list[str] = list(ours["command"])
    agent = next((i for i, word in enumerate(launched) if word in ("torchrun", "ft_launcher")), None)
    torchrun = launched if agent is None else launched[agent + 1 :]
    if agent is not None and launched[agent] == "ft_launcher":  # it takes torchrun's options and its own
        assert not any(word.startswith("--ft") for word in torchrun)
    found = get_args_parser().parse_args(torchrun)
    assert found.module and found.training_script == "unsilent" and found.max_restarts == 0
    trained = parse("train", found.training_script_args[1:])
    assert found.training_script_args[0] == "train" and trained["quarantine"] == "auto" and trained["save_every"]
    directory = ours.get("run") or ours.get("out")
    assert str(directory) == str(trained["out"])


def test_the_operator_starts_again_by_exit_code_and_the_node_is_the_hosts() -> None:
    assert job()["restartPolicy"] == "ExitCode"
    (container,) = job()["template"]["spec"]["containers"]
    assert [entry["name"] for entry in container["env"]] == ["NODE_NAME"]
    assert parse("exec", words(JOB)[2:])["scheduler"] == "kubeflow"


def test_slurm_is_told_by_the_requeueing_recipe_only() -> None:
    assert parse("exec", words("slurm-requeue.sbatch")[2:])["scheduler"] == "slurm"
    assert "#SBATCH --requeue" in (DEPLOY / "slurm-requeue.sbatch").read_text()
    spares = parse("launch", words("slurm-spares.sbatch")[2:])
    assert "{node}" in spares["run_on"] and "{command}" in spares["run_on"]
