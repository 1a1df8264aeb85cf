"""Every action is held to one contract: after it, the run has the bits of a run in which the fault never was.

Weights, moments, buffers, gradients, generators, training flags, the optimizer's settings, scaler and scheduler; with
dropout, accumulation, clipping, a loss scaler and a scheduler at once; BatchNorm's buffers differ between the ranks
and are synchronised by DDP.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.promises.job import Job, Result, both
from unsilent.lab.pool import RankPool

FLIP = {"site": "weight", "target": "layers.2.weight", "pattern": "bit_flip", "bit": 21}
FLIP_TO_NAN = {"site": "weight", "target": "layers.2.weight", "pattern": "nan"}
MOMENT = {"site": "optimizer_state", "target": "layers.1.weight", "pattern": "bit_flip", "bit": 22}
STUCK = {"site": "forward", "target": "layers.2", "pattern": "stuck_lane", "add": 0.01, "every": 16}
ONCE = {"site": "backward", "target": "layers.3", "pattern": "scale", "factor": 1.5}

#: the fault, the options of the guard, and what must be done about it, in order
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[int, str]]]] = {
    "REPAIR": ({**ONCE, "rank": 2, "step": 7}, {}, [(7, "REPAIR")]),
    "RECOMPUTE": ({"site": "reduction", "pattern": "nan", "step": 6}, {}, [(6, "RECOMPUTE")]),
    "HEAL, a weight": ({**FLIP, "rank": 1, "step": 7}, {"replicas_every": 1}, [(8, "HEAL")]),
    "HEAL, a moment": ({**MOMENT, "rank": 0, "step": 7}, {"replicas_every": 1}, [(8, "HEAL")]),
    "HEAL, a weight that is NaN, before its vote": ({**FLIP_TO_NAN, "rank": 0, "step": 5}, {}, [(6, "HEAL")]),
    "ROLLBACK, a weight that is NaN, before its vote": ({**FLIP_TO_NAN, "rank": 1, "step": 6}, {}, [(7, "ROLLBACK")]),
    "ROLLBACK, a weight in use for one step": ({**FLIP, "rank": 2, "step": 6}, {"audit_every": None}, [(8, "ROLLBACK")]),
    "ROLLBACK, a weight in use for many steps": (
        {**FLIP, "rank": 1, "step": 2}, {"replicas_every": 9, "audit_every": None}, [(8, "ROLLBACK")],
    ),
    "ROLLBACK, twice, the second from a snapshot of the first": (
        {**FLIP, "rank": 1, "step": 3, "steps": 4}, {"snapshot_every": 3, "audit_every": None},
        [(5, "ROLLBACK"), (8, "ROLLBACK")],
    ),
    "ROLLBACK, to before the optimizer had state": (
        {**FLIP, "rank": 1, "step": 0}, {"replicas_every": 4, "audit_every": None}, [(3, "ROLLBACK")],
    ),
    "ROLLBACK, a first moment": (
        {**MOMENT, "key": "exp_avg", "rank": 0, "step": 4}, {"replicas_every": 4}, [(7, "ROLLBACK")],
    ),
    "ROLLBACK, a second moment": (
        {**MOMENT, "key": "exp_avg_sq", "rank": 2, "step": 4}, {"replicas_every": 4}, [(7, "ROLLBACK")],
    ),
    "ROLLBACK, of what a bad device did": (
        {**STUCK, "rank": 2, "from_step": 5}, {"replicas_every": 4},
        [(7, "ROLLBACK"), *((step, "REPAIR") for step in range(8, 12))],
    ),
    "ROLLBACK, of what bad rank 0 did, whose buffers all take over": (
        {**STUCK, "rank": 0, "from_step": 5}, {"replicas_every": 4},
        [(7, "ROLLBACK"), *((step, "REPAIR") for step in range(8, 12))],
    ),
}  # fmt: skip
AT_ONCE = {"micro_batches": 3, "scaler": True, "clip": True, "scheduler": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket views": {"ddp": {"gradient_as_bucket_view": True}, "clip": True},
    "unused parameters": {"ddp": {"find_unused_parameters": True}, "model": "unused", "scheduler": True},
    "static graph": {"ddp": {"static_graph": True}},
    "buffers of its own on each rank": {"ddp": {"broadcast_buffers": False}, "micro_batches": 2},
    "bf16": {"autocast": True, "micro_batches": 2},
    "checkpointed": {"model": "reentrant"},
}


@pytest.mark.parametrize(("fault", "options", "done"), CASES.values(), ids=CASES.keys())
def test_after_it_the_run_has_the_bits_of_a_clean_one(
    pool: RankPool, fault: dict[str, Any], options: dict[str, Any], done: list[tuple[int, str]]
) -> None:
    _holds(pool, fault, options, done, AT_ONCE)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("case", ["ROLLBACK, a weight in use for many steps", "ROLLBACK, of what a bad device did"])
def test_a_rollback_holds_it_in_every_setting(pool3: RankPool, case: str, setting: dict[str, Any]) -> None:
    fault, options, done = CASES[case]
    if setting.get("model") == "reentrant":  # its layers have other names
        fault = {**fault, "target": {"layers.2": "blocks.1", "layers.2.weight": "blocks.2.0.weight"}[fault["target"]]}
    _holds(pool3, fault, options, done, setting)


def _holds(
    pool: RankPool, fault: dict[str, Any], options: dict[str, Any], done: list[tuple[int, str]], setting: dict[str, Any]
) -> None:
    job = Job(fault=fault, steps=12, config={"audit_every": 4, "replicas_every": 3, **options}, **setting)
    results = pool.results(both, job)
    assert sum(result.fired for result, _ in results) >= 1
    for result, clean in results:
        assert [(step, action) for step, action, _, _ in result.found] == done, (result.reasons, result.error)
        _same(result, clean)


def _same(result: Result, clean: Result) -> None:
    assert result.error == ""
    assert [part for part in clean.parts if result.parts[part] != clean.parts[part]] == []
    assert result.losses[-1] == clean.losses[-1]


def test_what_a_bad_device_did_is_undone_from_a_checkpoint_where_the_snapshot_is_too_new(
    pool: RankPool, tmp_path: Any
) -> None:
    """Votes in every step leave snapshots that hold what the device did; the certified checkpoint of step 4 does not."""
    config = {"audit_every": 4, "replicas_every": 1, "snapshot_every": 1}
    job = Job(fault={**STUCK, "rank": 2, "from_step": 5}, steps=9, config=config, save_to=str(tmp_path), save_at=4)
    for result, clean in pool.results(both, job):
        done = [(step, action) for step, action, _, _ in result.found if action != "saved"]
        assert done == [(7, "ROLLBACK"), (8, "REPAIR")], (result.reasons, result.error)
        _same(result, clean)
