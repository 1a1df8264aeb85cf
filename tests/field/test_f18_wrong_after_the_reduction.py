"""F18: one rank's replica holds another result after the all-reduce."""

import pytest

from tests.field.harness import Case, run
from unsilent.records import Kind, Site


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("bit", [0, 20, 31])
def test_it_is_found_before_the_step_and_the_minority_is_named(pool3, rank, bit):
    fault = {"site": "reduction", "pattern": "bit_flip", "bit": bit, "delivery": True, "rank": rank, "step": 3}
    case = Case(config={"replicas_every": 1, "audit_every": None})
    reference = run(pool3, case, guarded=False)
    for result, clean in zip(run(pool3, case, fault=fault), reference, strict=True):
        assert result.error is None, result.error
        found = result.only
        assert found.step == 3 and found.verdict.site is Site.REDUCTION and found.verdict.kind is Kind.TRANSIENT
        assert found.ranks == [rank] and found.verdict.suspects[0].node == f"node{rank}"
        assert f"rank {rank}" in found.verdict.reason and found.action == "RECOMPUTE"
        assert result.bits == clean.bits


def test_always_the_same_node_is_named_each_time(pool3):
    """A defect in one rank's memory or network card that comes back: every reduction there, from step 2 on."""
    fault = {"site": "reduction", "pattern": "bit_flip", "bit": 20, "delivery": True, "rank": 1, "from_step": 2}
    results = run(pool3, Case(config={"replicas_every": 1, "audit_every": None}, fault=fault))
    for result in results:
        assert type(result.error).__name__ == "IntegrityLost" and result.steps == 2
        assert result.only.ranks == [1] and result.weights[-1] == result.weights[2], "the wrong sum was used"
