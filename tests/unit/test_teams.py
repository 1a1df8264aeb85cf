"""Teams: who audits whom where ranks compute together, what a team's executions are, and who of it erred first."""

from __future__ import annotations

import pytest

from unsilent.localize import team_ring
from unsilent.records import AuditEvidence, Execution, Place, Replay
from unsilent.teams import Crossing, Teams, first_to_diverge

TENSOR = Teams([(0, 1), (2, 3), (4, 5)])
PIPELINE = Teams([(0, 3), (1, 4), (2, 5)])


def places(nodes: str, environments: str = "") -> list[Place]:
    return [
        Place(rank=rank, node=node, device="d", environment=(environments or "e" * len(nodes))[rank])
        for rank, node in enumerate(nodes)
    ]


def test_ranks_that_compute_by_themselves_are_teams_of_one() -> None:
    teams = Teams.of_one(4)
    assert teams.alone and teams.peers(2) == (0, 1, 2, 3) and teams.lead(2) == 2
    assert teams.places(places("abcd")) == tuple(places("abcd"))


def test_teams_audit_teams_position_by_position() -> None:
    assert team_ring(places("aabbcc"), TENSOR) == (2, 3, 4, 5, 0, 1)
    assert team_ring(places("abcdef"), PIPELINE) == (1, 2, 0, 4, 5, 3)


def test_a_team_has_the_environments_of_all_its_members() -> None:
    # The members at the second position differ between the first team and the others.
    assert team_ring(places("aabbcc", "eeefef"), TENSOR) == (None, None, 4, 5, 2, 3)


def test_a_team_on_several_nodes_has_all_their_names() -> None:
    assert [place.node for place in PIPELINE.places(places("abcdef"))] == ["a+d", "b+e", "c+f"]


def test_the_teams_of_a_mesh() -> None:
    assert Teams.of_mesh({"dp": 2, "tp": 2}, ["dp"]).members == ((0, 1), (2, 3))
    assert Teams.of_mesh({"pp": 2, "dp": 3}, ["dp"]).members == PIPELINE.members
    assert Teams.of_mesh({"pp": 2, "dp": 2, "tp": 2}, ["dp"]).members == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_peers_and_counterparts() -> None:
    assert PIPELINE.peers(4) == (3, 4, 5) and PIPELINE.counterpart(4, 2) == 5 and PIPELINE.lead(4) == 1


def audit(auditee: int, auditor: int, recorded: str | None, replayed: str | None) -> AuditEvidence:
    executions = (
        Execution(rank=auditee, digest=recorded, recorded=True),
        Execution(rank=auditor, digest=replayed, failure="" if replayed else "out of memory"),
    )
    return AuditEvidence(step=3, auditee=auditee, auditor=auditor, executions=executions, tensors=(f"t{auditee}",))


def test_the_audits_of_the_members_become_one() -> None:
    (one,) = TENSOR.as_one([audit(3, 1, "d", "x"), audit(2, 0, "c", "c")])
    assert (one.auditee, one.auditor, one.tensors) == (2, 0, ("t2", "t3"))
    assert [(e.rank, e.digest, e.recorded) for e in one.executions] == [(2, "c+d", True), (0, "c+x", False)]
    assert TENSOR.each("c+d", 2) == {2: "c", 3: "d"} and TENSOR.each(None, 2) == {2: None, 3: None}


def test_a_member_that_failed_makes_the_teams_execution_fail() -> None:
    (one,) = TENSOR.as_one([audit(2, 0, "c", "c"), audit(3, 1, "d", None)])
    assert one.executions[1].digest is None and one.executions[1].failure == "out of memory"


def test_a_team_of_which_a_member_could_not_be_read_is_not_judged() -> None:
    assert TENSOR.as_one([audit(2, 0, "c", "c")]) == []


def test_what_is_asked_of_a_team_is_asked_of_each_member() -> None:
    asked = PIPELINE.requests([Replay(executor=2, auditee=0, times=2)])
    assert asked == [Replay(executor=2, auditee=0, times=2), Replay(executor=5, auditee=3, times=2)]
    assert PIPELINE.substitutes({3: 4}) == {0: 1, 3: 4}


def crossing(
    number: int, digest: int, *, backward: bool = False, stage: int = 0, call: int = 1, arrived: bool = False
) -> Crossing:
    order = (call, int(backward), -stage if backward else stage, number)
    return Crossing(order=order, name=f"m{number}", digest=(digest, 0), arrived=arrived)


def test_the_member_that_differs_first_is_named() -> None:
    right = [[crossing(i, 0) for i in range(4)] for _ in range(2)]
    first_at_1 = [right[0], [crossing(0, 0), crossing(1, 9), crossing(2, 9), crossing(3, 9)]]
    spread = [[*right[0][:2], crossing(2, 7), crossing(3, 7)], first_at_1[1]]
    found = first_to_diverge(spread, right)
    assert found is not None and found[0] == 1 and found[1].name == "m1"


def test_in_a_pipeline_values_go_down_in_forward_and_up_in_backward() -> None:
    stages = [[crossing(i, 0, backward=i == 1, stage=s) for i in range(2)] for s in range(2)]
    wrong_backward_of_stage_1 = [
        [stages[0][0], crossing(1, 5, backward=True)],
        [stages[1][0], crossing(1, 5, backward=True, stage=1)],
    ]
    found = first_to_diverge(wrong_backward_of_stage_1, stages)
    assert found is not None and found[0] == 1
    wrong_forward_of_stage_0 = [[crossing(0, 5), stages[0][1]], [crossing(0, 5, stage=1), stages[1][1]]]
    found = first_to_diverge(wrong_forward_of_stage_0, stages)
    assert found is not None and found[0] == 0


@pytest.mark.parametrize(
    "recorded",
    [
        [[crossing(0, 1)], [crossing(0, 1)]],  # both at once
        [[crossing(0, 0)], [crossing(0, 0)]],  # nobody
        [[crossing(0, 0)], []],  # nothing was noted on one
        [[crossing(0, 1, arrived=True)], [crossing(0, 0)]],  # what it was sent
        [[crossing(0, 1), crossing(1, 1)], [crossing(0, 0)]],  # not the way that the rerun took
    ],
)
def test_nobody_is_named_where_it_cannot_be_told(recorded: list[list[Crossing]]) -> None:
    assert first_to_diverge(recorded, [[crossing(0, 0)], [crossing(0, 0)]]) is None


def test_members_that_do_not_go_the_same_way_cannot_be_compared_by_number() -> None:
    right = [[crossing(0, 0), crossing(1, 0)], [crossing(0, 0), crossing(2, 0)]]
    wrong = [[crossing(0, 0), crossing(1, 7)], right[1]]
    assert first_to_diverge(wrong, right) is None
    assert first_to_diverge([wrong[0], right[0]], [right[0], right[0]]) == (0, crossing(1, 7))
