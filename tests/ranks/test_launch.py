"""``unsilent launch`` with torchrun: four imitated nodes, a stuck lane on one of them, and a run that ends by itself.

The fault belongs to the node: it does not follow the rank number to the node that has it after the restart. What such a
run must look like at its end is said in ``benchmarks/launch_repeat.py``, which does it many times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.launch_repeat import KINDS, STUCK, TRAIN, Launched
from tests.ranks import train_job
from unsilent.events import read
from unsilent.lab.pool import RankPool
from unsilent.report.text import render_text


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launch")


@pytest.fixture(scope="module")
def clean(home: Path, pool4: RankPool) -> dict[str, Any]:
    """The run without a fault, on four nodes from the beginning to the end."""
    return pool4.results(train_job.train, home / "clean", [*TRAIN, "--nodes-imitated", "4"])[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_without_the_node(kind: str, home: Path, clean: dict[str, Any]) -> None:
    options, last_nodes = KINDS[kind]
    run = Launched(home / kind, options=["--nodes", "4", *options], timeout=280)
    assert run.problems(clean, last_nodes) == [], run.everything
    shares = "divide evenly over the ranks (3, 3, 2)"
    assert (shares in run.everything) == (len(last_nodes) == 3)
    starts = [event for event in read(run.out).events if event.kind == "run_started"]
    assert [event.fields["world_size"] for event in starts] == [4, len(last_nodes)]
    assert "launch: node-2 is taken out" in " ".join(render_text(run.out).split())


@pytest.mark.slow
def test_agents_that_another_program_starts_meet_too(home: Path) -> None:
    """As over ssh, with a plain shell in its place: what travels is one line, and the first name is the address."""
    options = ["--nodes", "localhost,127.0.0.1", "--nproc-per-node", "2", "--run-on", "sh -c {command}"]
    run = Launched(home / "shell", options=options, fault=STUCK, timeout=280)  # neither of them is node-2
    assert run.code == 0, run.everything
    assert run.result(0)["nodes"] == ["127.0.0.1", "localhost"] and run.result(0)["world_size"] == 4
