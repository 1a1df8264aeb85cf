"""P8: the limits are stated, by the documents and by the run itself, and verdicts keep to them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import unsilent
from tests.promises.job import Job, batch_of, both, build, loss_of, train
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import RankPool


@pytest.fixture(scope="module")
def pool2() -> Iterator[RankPool]:
    """Two gloo ranks."""
    with RankPool(2) as pool:
        yield pool


ROOT = Path(__file__).parents[2]
STUCK = {"site": "forward", "target": "layers.2", "pattern": "stuck_lane", "add": 0.01, "every": 16, "from_step": 3}
ONCE = {"site": "forward", "target": "layers.2", "pattern": "scale", "factor": 2.0, "step": 3}


def test_the_document_of_guarantees_states_budget_and_gaps() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    for heading in ("## The fault budget", "## What each check sees", "## Known gaps", "## Fewer than three nodes",
                    "## What has never run on a GPU"):  # fmt: skip
        assert heading in text
    for check in ("finite", "audit", "replicas"):
        assert f"| `{check}`" in text
    assert "One faulty device at a time" in text


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (("a", "b", "c", "d"), ""),
        (("a", "b", "a", "b"), "with 2 nodes a fault that repeats names both sides"),
        (("a", "a", "a", "a"), "are audited on their own node"),
    ],
    ids=["4 nodes", "2 nodes", "1 node"],
)
def test_the_table_says_what_few_nodes_cannot_tell(pool4: RankPool, nodes: tuple[str, ...], words: str) -> None:
    result = pool4.results(train, Job(steps=1, nodes=nodes))[0]
    audit = [row.blind for row in result.coverage if row.check == "audit"]
    assert audit and all(words in blind for blind in audit)
    assert all("one-shot errors in steps that are not audited" in blind for blind in audit)
    if not words:
        assert all("names both" not in blind and "own node" not in blind for blind in audit)


def test_two_ranks_on_two_nodes_a_fault_that_repeats_names_both_and_blames_nobody(pool2: RankPool) -> None:
    job = Job(nodes=("a", "b"), fault={**STUCK, "rank": 1}, steps=6)
    for result in pool2.results(train, job):
        step, action, kind, suspects = result.found[0]
        assert (step, action, kind) == (3, "CONTINUE", "INCONCLUSIVE"), result.reasons
        assert sorted(rank for rank in suspects if rank is not None) == [0, 1]
        assert "no third node could tell" in result.reasons[0]


@pytest.mark.parametrize(
    ("fault", "action"),
    [
        ({**ONCE, "rank": 1}, "REPAIR"),
        ({"site": "forward", "target": "layers.2", "pattern": "random_bits", "count": 16, "from_step": 3}, "ROLLBACK"),
    ],
    ids=["once", "other bits each time"],
)
def test_two_ranks_on_two_nodes_a_device_that_disagrees_with_itself_is_named_and_repaired(
    pool2: RankPool, fault: dict[str, Any], action: str
) -> None:
    job = Job(nodes=("a", "b"), fault={**fault, "rank": 1}, steps=4)
    for result, clean in pool2.results(both, job):
        assert [f[1] for f in result.found] == [action] and result.found[0][3] == (1,), result.reasons
        assert result.parts == clean.parts


def test_two_nodes_with_two_devices_each_name_the_device_since_its_neighbour_agrees_with_the_other_node(
    pool4: RankPool,
) -> None:
    job = Job(nodes=("a", "a", "b", "b"), fault={**STUCK, "rank": 2}, steps=4)
    for result, clean in pool4.results(both, job):
        assert result.found == ((3, "ROLLBACK", "PERSISTENT", (2,)),), result.reasons
        assert result.parts["weights"] == clean.parts["weights"]


def test_two_nodes_a_fault_that_comes_once_is_named_and_repaired(pool4: RankPool) -> None:
    job = Job(nodes=("a", "a", "b", "b"), fault={**ONCE, "rank": 2}, steps=6)
    for result, clean in pool4.results(both, job):
        assert result.found == ((3, "REPAIR", "TRANSIENT", (2,)),), result.reasons
        assert result.nodes == (("b",),) and result.parts == clean.parts


def test_one_node_names_the_device_without_the_host(pool4: RankPool) -> None:
    job = Job(nodes=("a",) * 4, fault={**STUCK, "rank": 2}, steps=4)
    for result in pool4.results(train, job):
        assert result.found == ((3, "ROLLBACK", "PERSISTENT", (2,)),), result.reasons
        assert result.nodes == ((None,),)
        assert "the host cannot be judged" in result.reasons[0]


def test_the_weights_of_two_replicas_on_two_nodes_outvote_nobody(pool4: RankPool) -> None:
    """Two against two: there is no majority, so nobody is blamed and nothing is copied."""
    result = pool4.results(_split, 0)
    for kind, suspects, error in result:
        assert kind == "INCONCLUSIVE" and suspects == [] and error == ""


def _split(rank: int, size: int, _: int) -> tuple[str, list[int | None], str]:
    from tests.promises.job import guard_of

    model, inner, optimizer = build(Job(), rank)
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(config={"audit_every": None, "replicas_every": 1}), rank, model, optimizer)
        guard.step(batch_of(rank, 0))
        if rank >= 2:
            with torch.no_grad():
                inner.layers[0].weight[0, 0] += 1.0
        verdict = guard.step(batch_of(rank, 1)).verdict
        assert verdict is not None
        guard.close()
    return verdict.kind.value, [s.rank for s in verdict.suspects], ""


def _alone(fault: dict[str, Any] | None) -> tuple[list[Any], torch.Tensor, dict[str, int]]:
    """One process without a process group."""
    model, inner, optimizer = build(Job(ddp=None), 0)
    with contextlib.redirect_stderr(io.StringIO()):
        config = unsilent.GuardConfig(audit_every=2, replicas_every=2, node="here")
        guard = unsilent.Guard(model, optimizer, loss_of(False, 0), config=config)
        injector = None
        if fault is not None:
            injector = Injector(inner, optimizer, Fault(**fault), rank=0, world_size=1,
                                replaying=lambda: guard.replayer.running)  # fmt: skip
        found = []
        for step in range(6):
            if injector is not None:
                injector.begin_step(step)
            outcome = guard.step(batch_of(0, step))
            if outcome.verdict is not None:
                found.append((step, outcome.action.value, outcome.verdict.kind.value, outcome.verdict.suspects[0].node))
        counts = guard.counts
        guard.close()
        if injector is not None:
            injector.close()
    return found, torch.cat([p.detach().flatten() for p in inner.parameters()]), counts


def test_a_single_process_audits_by_its_own_replay() -> None:
    clean, weights, counts = _alone(None)
    assert clean == [] and counts["audit"] == 3
    once, repaired, _ = _alone({**ONCE, "rank": 0})
    assert once == [(3, "REPAIR", "TRANSIENT", None)]
    assert torch.equal(weights, repaired)
    # What repeats on its only device looks like the right value: the table and the document say so.
    stuck, wrong, _ = _alone({**STUCK, "rank": 0})
    assert stuck == [] and not torch.equal(weights, wrong)
