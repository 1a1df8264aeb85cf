"""P3: bits are compared only where the work repeats; elsewhere the check degrades and says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.promises.job import MODELS, Job, both, train
from unsilent.events import read
from unsilent.lab.pool import RankPool

REPEATS = [
    name for name in MODELS if not name.startswith("unrepeatable") and name not in ("net", "unused", "never used")
]


@pytest.mark.parametrize("name", REPEATS)
def test_audited_bitwise_without_an_alarm_and_without_a_trace(pool3: RankPool, name: str) -> None:
    # DDP's reducer and reentrant checkpointing need static_graph together.
    job = Job(model=name, steps=7, ddp={"static_graph": True} if name == "reentrant" else {})
    for guarded, plain in pool3.results(both, job):
        assert guarded.found == (), guarded.reasons
        assert guarded.strength == "bitwise" and guarded.counts["audit"] >= 3
        assert guarded.parts == plain.parts and guarded.losses == plain.losses


@pytest.mark.parametrize("name", REPEATS)
def test_and_a_real_fault_in_such_a_model_is_still_caught_and_repaired(pool3: RankPool, name: str) -> None:
    """A check that had degraded itself would have passed the test above as well."""
    target = {
        "checkpointed": "first", "reentrant": "first", "channels_last": "body.0", "lstm": "lstm",
        "tied and frozen": "a", "spectral norm": "layer", "python and numpy randomness": "layer",
    }[name]  # fmt: skip
    fault = {"site": "forward", "target": target, "pattern": "scale", "factor": 2.0, "rank": 1, "step": 3}
    job = Job(model=name, steps=5, ddp={"static_graph": True} if name == "reentrant" else {}, fault=fault)
    for repaired, clean in pool3.results(both, job):
        assert repaired.found == ((3, "REPAIR", "TRANSIENT", (1,)),), repaired.reasons
        assert repaired.parts == clean.parts


def test_a_hook_that_scales_gradients_is_no_alarm(pool3: RankPool) -> None:
    for guarded, plain in pool3.results(both, Job(scaled_by_hook=True)):
        assert guarded.found == () and guarded.strength == "bitwise" and guarded.parts == plain.parts


@pytest.mark.parametrize(("name", "strength"), [("unrepeatable", "off"), ("unrepeatable backward", "loss only")])
def test_work_that_repeats_nowhere_degrades_and_blames_nobody(
    pool3: RankPool, tmp_path: Path, name: str, strength: str
) -> None:
    job = Job(model=name, steps=10, config={"directory": str(tmp_path)})
    for result in pool3.results(train, job):
        assert result.found and {(action, kind) for _, action, kind, _ in result.found} == {
            ("CONTINUE", "INCONCLUSIVE")
        }
        assert all(suspects == () for *_, suspects in result.found)
        assert result.strength == strength
        # Each rung of the ladder was left once; from then on it is quiet.
        assert len(result.found) <= 2 and max(step for step, *_ in result.found) <= 4
    events = read(tmp_path).events
    assert [e.fields["strength"] for e in events if e.kind == "check_degraded"][-1] == strength
    assert not any(e.kind == "checkpoint" for e in events)


def test_or_stops_where_that_is_asked_for(pool3: RankPool) -> None:
    for result in pool3.results(train, Job(model="unrepeatable", config={"on_inconclusive": "stop"})):
        assert result.error.startswith("Inconclusive: ")


def test_many_clean_steps_at_both_sizes(pool: RankPool) -> None:
    job = Job(steps=20, config={"audit_every": 1, "replicas_every": 1}, micro_batches=2)
    for result in pool.results(train, replace(job, autocast=True)):
        assert result.found == () and result.counts == {"finite": 20, "replicas": 21, "audit": 20}
