"""Faults below autograd, in ids, in the optimizer's arithmetic, in an auditor and in the comparison, under a real guard:
the device that errs is named, nobody else, and what can be repaired ends with the bits of a clean run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.promises.job import Job, both
from unsilent.lab.pool import RankPool

OPERATION = {"site": "operation", "rank": 2}
TWICE = {"site": "forward", "target": "layers.1", "pattern": "scale", "factor": 2.0, "rank": 1}
STICKY = {"pattern": "stuck_bit", "bit": 20, "target": "layers.1.weight", "rank": 1, "from_step": 3}

#: the fault, the first step in which something must be found, the kind and the rank of that verdict
CASES: dict[str, tuple[dict[str, Any], int, str, int]] = {
    "a bit of a forward product": (
        {**OPERATION, "target": "addmm", "phase": "forward", "module": "layers.1", "pattern": "bit_flip", "bit": 21,
         "step": 3}, 3, "TRANSIENT", 2,
    ),
    "a lane of every backward product": (
        {**OPERATION, "target": "mm", "phase": "backward", "pattern": "stuck_lane", "every": 8, "relative": 0.01,
         "from_step": 4}, 5, "PERSISTENT", 2,
    ),
    "gates of a matrix unit": (
        {**OPERATION, "target": "addmm", "phase": "forward", "pattern": "gates", "period": 4, "count": 2, "step": 3},
        3, "TRANSIENT", 2,
    ),
    "an operation of the optimizer": (
        {**OPERATION, "target": "addcdiv_", "phase": "optimizer", "pattern": "relative", "relative": 0.1, "step": 3},
        4, "TRANSIENT", 2,
    ),
    "the arithmetic of an update": (
        {"site": "optimizer", "target": "layers.1.weight", "pattern": "scale", "factor": 2.0, "rank": 1, "step": 3},
        4, "TRANSIENT", 1,
    ),
    "an auditor, once": ({**TWICE, "step": 3, "during_replay": "only"}, 3, "TRANSIENT", 1),
    "an auditor, always": ({**TWICE, "from_step": 3, "during_replay": "only"}, 3, "PERSISTENT", 1),
    "a fault that vanishes on the retry": ({**TWICE, "from_step": 3, "on": 1, "off": 5}, 3, "TRANSIENT", 1),
    "a sticky bit of a weight": ({**STICKY, "site": "weight"}, 4, "TRANSIENT", 1),
}  # fmt: skip
LEAVES_OTHER_BITS = ("a sticky bit of a weight",)  # it comes back after the last vote of the run


@pytest.mark.parametrize("case", CASES)
def test_the_true_device_is_named_and_the_run_ends_with_clean_bits(pool: RankPool, case: str) -> None:
    fault, step, kind, rank = CASES[case]
    results = pool.results(both, Job(fault=fault, steps=8, config={"replicas_every": 1}))
    assert [result.fired > 0 for result, _ in results] == [r == rank for r in range(len(results))]
    for result, clean in results:
        assert result.found, "nothing was found"
        assert (result.found[0][0], result.found[0][2]) == (step, kind), result.reasons
        assert {suspects for _, _, _, suspects in result.found} == {(rank,)}, result.reasons
        if case not in LEAVES_OTHER_BITS:
            assert result.bits == clean.bits


def test_a_comparison_that_errs_for_good_stops_the_run_and_names_its_own_device(pool: RankPool) -> None:
    fault = {"site": "comparison", "pattern": "bit_flip", "bit": 3, "rank": 1, "from_step": 3}
    results = pool.results(both, Job(fault=fault, steps=8, config={"replicas_every": 1}))
    for result, _ in results:
        assert result.error.startswith("IntegrityLost")
        assert {suspects for _, _, _, suspects in result.found} == {(1,)}
