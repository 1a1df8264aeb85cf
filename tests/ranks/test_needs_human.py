"""A recomputed gradient that lies far from the recorded one, with no exact check to explain it: a person is asked for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.promises.job import Job, Result, batch_of, build, loss_of, train
from unsilent import response
from unsilent.events import read, read_exit
from unsilent.lab.pool import RankPool
from unsilent.policy import person_needed
from unsilent.records import Event, Kind, Site, Verdict
from unsilent.report.text import render_text


def verdict(kind: Kind, check: str = "finite") -> Verdict:
    return Verdict(kind=kind, site=Site.GRADIENT, step=3, reason="", check=check)


@pytest.mark.parametrize(
    ("verdicts", "difference", "words"),
    [
        ((), 0.051, "differ by 5.1 % of the norm"),
        ((), 0.05, ""),
        ((verdict(Kind.INCONCLUSIVE),), 0.2, "differ by 20 % of the norm"),
        ((verdict(Kind.INCONCLUSIVE),), math.nan, "are not both finite"),
        ((verdict(Kind.INCONCLUSIVE),), math.inf, "are not both finite"),
        ((verdict(Kind.TRANSIENT),), 7.0, ""),
        ((verdict(Kind.PERSISTENT),), math.nan, ""),
        ((verdict(Kind.SOFTWARE),), 7.0, ""),
        ((verdict(Kind.INCONCLUSIVE), verdict(Kind.TRANSIENT, "replicas")), 7.0, ""),
    ],
)
def test_a_person_is_needed_for_a_large_difference_that_nothing_explains(
    verdicts: tuple[Verdict, ...], difference: float, words: str
) -> None:
    reason = person_needed(verdicts, difference)
    assert bool(reason) == bool(words)
    assert words in reason


def calls(directory: Path) -> list[Event]:
    return [event for event in read(directory).events if event.kind == "needs_human"]


def run(pool: RankPool, directory: Path, **job: Any) -> list[Result]:
    config = {"directory": str(directory), "audit_every": 1} | job.pop("config", {})
    return pool.results(train, Job(config=config, **job))


def test_a_bad_number_that_is_gone_the_second_time_calls_for_a_person(pool: RankPool, tmp_path: Path) -> None:
    """The work repeats nowhere, so no audit can tell where it came from; training goes on, and so does exit.json."""
    fault = {"site": "gradient", "pattern": "nan", "target": "layer.weight", "rank": 1, "step": 6}
    results = run(pool, tmp_path, model="unrepeatable", fault=fault)
    assert results[1].fired == 1
    assert all(result.error == "" for result in results)
    (call,) = calls(tmp_path)
    assert call.step == 6
    assert "are not both finite, and no exact check explains it" in call.fields["reason"]
    assert call.fields["verdict"]["kind"] == "INCONCLUSIVE"
    assert "step 6 needs a person" in results[0].said
    outcome = read_exit(tmp_path)
    assert outcome is not None and outcome["exit_code"] == 0
    # Before everything else that the report says.
    report = render_text(tmp_path)
    assert report.index("Step 6 needs a person") < report.index("What is covered")


def test_a_repair_that_an_audit_explains_calls_for_nobody(pool: RankPool, tmp_path: Path) -> None:
    fault = {"site": "gradient", "pattern": "scale", "factor": 100.0, "target": "layers.3.weight", "rank": 2, "step": 3}
    results = run(pool, tmp_path, fault=fault)
    assert [found[1] for found in results[0].found] == ["REPAIR"]
    assert calls(tmp_path) == []


def measured(rank: int, size: int, fault: dict[str, Any], audit_every: int) -> tuple[list[float | None], float]:
    """(by how much the rebuilt gradient is said to have changed, this rank's right local norm at that step)."""
    found: list[float | None] = []
    real = response.rebuild

    def watched(*arguments: Any, **options: Any) -> float | None:
        found.append(real(*arguments, **options))
        return found[-1]

    response.rebuild = watched  # type: ignore[assignment]
    try:
        train(rank, size, Job(steps=1, fault=fault, config={"audit_every": audit_every}))
    finally:
        response.rebuild = real
    job = Job()
    _, inner, _ = build(job, rank)
    loss_of(False, rank)(inner, batch_of(rank, 0)).backward()
    squares = [p.grad.double().square().sum() for p in inner.parameters() if p.grad is not None]
    return found, float(torch.stack(squares).sum().sqrt())


@pytest.mark.parametrize("audit_every", [1, 100], ids=["local gradients kept", "nothing kept"])
def test_the_difference_is_what_the_faulty_part_was_off_by(pool: RankPool, audit_every: int) -> None:
    """A NaN is found in any step; scaling by 3 changes a part by twice its value, and the gradient by as much."""
    if audit_every == 1:
        fault = {"site": "gradient", "pattern": "scale", "factor": 3.0, "target": "layers.3.bias", "rank": 2, "step": 0,
                 "element": 0, "count": 1}  # fmt: skip
    else:
        fault = {"site": "gradient", "pattern": "nan", "target": "layers.3.bias", "rank": 2, "step": 0}
    results = pool.results(measured, fault, audit_every)
    changes = [change for change, _ in results]
    assert all(len(change) == 1 and change[0] is not None for change in changes)
    if audit_every == 100:
        assert all(math.isnan(change[0] or 0.0) for change in changes)
        return
    # The same change on every rank, each measured by its own norm.
    absolute = [(change[0] or 0.0) * norm for change, norm in results]
    assert min(absolute) > 0
    assert max(absolute) == pytest.approx(min(absolute), rel=1e-3)
