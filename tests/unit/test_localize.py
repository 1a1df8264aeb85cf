"""Who audits whom, and what is rerun next."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.localize import (
    agreed_value,
    arbiter,
    audit_ring,
    holders,
    next_replays,
    recorded_is_right,
    recorded_value,
)
from unsilent.records import AuditEvidence, Execution, Place, Replay


def place(rank: int, node: str, environment: str = "e") -> Place:
    return Place(rank=rank, node=node, device=f"gpu-{rank}", environment=environment)


def on_nodes(nodes: str, environments: str = "") -> list[Place]:
    """One place per letter: the node it lies on."""
    return [place(rank, node, environments[rank] if environments else "e") for rank, node in enumerate(nodes)]


def audit(auditee: int, auditor: int, executions: list[Execution], **more: object) -> AuditEvidence:
    return AuditEvidence(step=1, auditee=auditee, auditor=auditor, executions=tuple(executions), **more)  # type: ignore[arg-type]


def recorded(rank: int, digest: str | None) -> Execution:
    return Execution(rank=rank, digest=digest, recorded=True)


def ran(rank: int, *digests: str | None) -> list[Execution]:
    return [Execution(rank=rank, digest=d, failure="" if d else "out of memory") for d in digests]


worlds = st.lists(
    st.tuples(st.sampled_from("abcdefg"), st.sampled_from("xy"), st.integers(0, 1)), min_size=1, max_size=40
).map(lambda rows: ([place(rank, node, env) for rank, (node, env, _) in enumerate(rows)], [g for *_, g in rows]))


# ---- the ring --------------------------------------------------------------------------------------------------------


def test_ring_of_equal_nodes() -> None:
    assert audit_ring(on_nodes("aabb")) == (2, 3, 0, 1)
    assert audit_ring(on_nodes("abc")) == (1, 2, 0)


def test_ring_on_one_node_takes_the_next_device() -> None:
    assert audit_ring(on_nodes("aaa")) == (1, 2, 0)


def test_ring_of_one_has_no_partner() -> None:
    assert audit_ring(on_nodes("a")) == (None,)
    assert audit_ring([]) == ()


def test_ring_keeps_unlike_environments_apart() -> None:
    assert audit_ring(on_nodes("abc", "eef")) == (1, 0, None)


def test_ring_keeps_groups_apart() -> None:
    assert audit_ring(on_nodes("aabb"), groups=[(0,), (1,), (0,), (1,)]) == (2, 3, 0, 1)
    assert audit_ring(on_nodes("abab"), groups=[0, 0, 1, 1]) == (1, 0, 3, 2)


def test_ring_refuses_groups_of_another_length() -> None:
    with pytest.raises(ValueError, match="3 groups for 2 places"):
        audit_ring(on_nodes("ab"), groups=[0, 0, 1])


@given(worlds)
def test_ring_is_a_permutation_within_each_class_and_crosses_nodes_as_often_as_possible(
    world: tuple[list[Place], list[int]],
) -> None:
    places, groups = world
    ring = audit_ring(places, groups)
    classes: dict[tuple[str, int], list[int]] = defaultdict(list)
    for p in places:
        classes[p.environment, groups[p.rank]].append(p.rank)

    for members in classes.values():
        auditors = [ring[rank] for rank in members]
        if len(members) == 1:
            assert auditors == [None]
            continue
        assert sorted(auditors) == members  # type: ignore[type-var]
        assert all(auditor != rank for rank, auditor in zip(members, auditors, strict=True))
        crossing = sum(
            places[rank].node != places[auditor].node for rank, auditor in zip(members, auditors, strict=True)
        )
        largest = max(Counter(places[rank].node for rank in members).values())
        assert crossing == min(len(members), 2 * (len(members) - largest))


# ---- arbiters --------------------------------------------------------------------------------------------------------


def test_arbiter_lies_on_a_third_node_in_ring_order() -> None:
    assert arbiter(on_nodes("abcd"), 0, 1) == 2
    assert arbiter(on_nodes("abcd"), 0, 1, asked=[2]) == 3
    assert arbiter(on_nodes("abcd"), 3, 0) == 1
    assert arbiter(on_nodes("aabbcc"), 0, 2) == 4


def test_arbiter_without_a_third_node_is_a_third_device() -> None:
    assert arbiter(on_nodes("aaa"), 0, 1) == 2
    assert arbiter(on_nodes("aabb"), 0, 2) == 3


def test_no_arbiter_is_left() -> None:
    assert arbiter(on_nodes("ab"), 0, 1) is None
    assert arbiter(on_nodes("abc"), 0, 1, asked=[2]) is None


def test_arbiter_has_the_environment_and_group_of_the_auditee() -> None:
    assert arbiter(on_nodes("abcd", "eefe"), 0, 1) == 3
    assert arbiter(on_nodes("abcd"), 0, 1, groups=[0, 0, 1, 0]) == 3


@given(worlds, st.data())
def test_arbiters_are_alike_never_asked_twice_and_on_new_nodes_first(
    world: tuple[list[Place], list[int]], data: st.DataObject
) -> None:
    places, groups = world
    auditee = data.draw(st.sampled_from([p.rank for p in places]))
    auditor = audit_ring(places, groups)[auditee]
    if auditor is None:
        assert arbiter(places, auditee, auditee, groups=groups) is None
        return
    asked: list[int] = []
    while (found := arbiter(places, auditee, auditor, asked, groups)) is not None:
        assert found not in {auditee, auditor, *asked}
        assert places[found].environment == places[auditee].environment
        assert groups[found] == groups[auditee]
        used = {places[rank].node for rank in (auditee, auditor, *asked)}
        unused = [
            p for p in places if p.environment == places[auditee].environment and groups[p.rank] == groups[auditee]
        ]
        assert places[found].node not in used or all(p.node in used for p in unused)
        asked.append(found)


# ---- what to rerun ---------------------------------------------------------------------------------------------------

ABC = on_nodes("abc")


def test_nothing_is_rerun_when_nothing_differs() -> None:
    assert next_replays(audit(0, 1, [recorded(0, "x"), *ran(1, "x")]), ABC) == ()


def test_first_the_pair_and_only_what_is_owed() -> None:
    assert next_replays(audit(0, 1, [recorded(0, "y"), *ran(1, "x")]), ABC) == (
        Replay(executor=0, auditee=0, times=2),
        Replay(executor=1, auditee=0, times=1),
    )


def test_then_an_arbiter_if_the_pair_does_not_settle_it() -> None:
    settled = audit(0, 1, [recorded(0, "y"), *ran(1, "x"), *ran(0, "x", "x"), *ran(1, "x")])
    assert next_replays(settled, ABC) == ()
    open_still = audit(0, 1, [recorded(0, "y"), *ran(1, "x"), *ran(0, "y", "y"), *ran(1, "x")])
    assert next_replays(open_still, ABC) == (Replay(executor=2, auditee=0),)
    told = replace(open_still, executions=(*open_still.executions, *ran(2, "x")))
    assert next_replays(told, ABC) == ()


def test_a_failed_arbiter_is_followed_by_another_up_to_the_bound() -> None:
    places = on_nodes("abcde")
    known = [recorded(0, "y"), *ran(1, "x"), *ran(0, "y", "y"), *ran(1, "x"), *ran(2, None)]
    assert next_replays(audit(0, 1, known), places) == (Replay(executor=3, auditee=0),)
    assert next_replays(audit(0, 1, known), places, max_arbiters=1) == ()


def test_two_devices_of_one_node_do_not_settle_it_while_another_node_can_be_asked() -> None:
    places = on_nodes("aaab")
    known = audit(0, 1, [recorded(0, "y"), *ran(1, "x"), *ran(0, "x", "x"), *ran(1, "x")])
    assert next_replays(known, places) == (Replay(executor=3, auditee=0),)
    assert next_replays(known, on_nodes("aaaa")) == ()


@pytest.mark.parametrize("more", [{"outside_state": "model.codebook"}, {"weights_equal": False}])
def test_nothing_is_rerun_where_a_rerun_would_say_nothing(more: dict[str, object]) -> None:
    assert next_replays(audit(0, 1, [recorded(0, "y"), *ran(1, "x")], **more), ABC) == ()


def test_where_forwards_change_an_attribute_the_pair_is_asked_and_nobody_else() -> None:
    known = [recorded(0, "y"), *ran(1, "x")]
    asked = next_replays(audit(0, 1, known, attribute="model.calls"), ABC)
    assert asked == (Replay(executor=0, auditee=0, times=2), Replay(executor=1, auditee=0, times=1))
    known += [*ran(0, "y", "y"), *ran(1, "x")]
    assert next_replays(audit(0, 1, known, attribute="model.calls"), ABC) == ()
    assert next_replays(audit(0, 1, [recorded(0, "x"), *ran(1, "x")], attribute="model.calls"), ABC) == ()
    assert next_replays(audit(0, 1, [recorded(0, "x"), *ran(1, None)], attribute="model.calls"), ABC) == ()


def test_nothing_is_rerun_between_unlike_environments() -> None:
    assert next_replays(audit(0, 1, [recorded(0, "y"), *ran(1, "x")]), on_nodes("abc", "efe")) == ()


def test_work_that_repeats_nowhere_is_hopeless() -> None:
    known = [recorded(0, "1"), *ran(1, "2"), *ran(0, "3", "4"), *ran(1, "5")]
    assert next_replays(audit(0, 1, known), ABC) == ()


def test_replays_that_all_fail_are_hopeless() -> None:
    known = [recorded(0, "1"), *ran(1, None), *ran(0, None, None), *ran(1, None)]
    assert next_replays(audit(0, 1, known), ABC) == ()


def test_an_alarm_alone_asks_the_neighbour_and_is_settled_by_its_answer() -> None:
    alarm = "the loss is not finite"
    asked = next_replays(audit(0, 1, [recorded(0, "x")], alarm=alarm), ABC)
    assert Replay(executor=1, auditee=0, times=2) in asked
    assert next_replays(audit(0, 1, [recorded(0, "x"), *ran(1, "x")], alarm=alarm), ABC) == ()


def test_without_a_partner_the_rank_itself_is_asked() -> None:
    alone = on_nodes("a")
    assert next_replays(audit(0, 0, [recorded(0, "y"), *ran(0, "x")]), alone) == (Replay(executor=0, auditee=0),)
    assert next_replays(audit(0, 0, [recorded(0, "y"), *ran(0, "x", "x")]), alone) == ()
    assert next_replays(audit(0, 0, [recorded(0, "y"), *ran(0, "x", "z")]), alone) == ()


@given(worlds, st.data())
def test_whatever_the_replays_give_the_requests_end(world: tuple[list[Place], list[int]], data: st.DataObject) -> None:
    places, groups = world
    auditee = data.draw(st.sampled_from([p.rank for p in places]))
    auditor = audit_ring(places, groups)[auditee]
    max_arbiters = data.draw(st.integers(0, 4))
    digests = st.sampled_from(["x", "y", "z", None])
    partner = auditee if auditor is None else auditor
    evidence = audit(auditee, partner, [recorded(auditee, data.draw(digests)), *ran(partner, data.draw(digests))])
    rounds = 0
    while requests := next_replays(evidence, places, groups, max_arbiters=max_arbiters):
        rounds += 1
        assert rounds <= 2 + max_arbiters
        made = [e for r in requests for _ in range(r.times) for e in ran(r.executor, data.draw(digests))]
        evidence = replace(evidence, executions=(*evidence.executions, *made))
    arbiters = {e.rank for e in evidence.executions} - {auditee, partner}
    assert len(arbiters) <= max_arbiters


# ---- the agreed value ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "executions", "value"),
    [
        ("abc", [recorded(0, "x"), *ran(1, "x")], "x"),
        ("abc", [recorded(0, "y"), *ran(1, "x")], None),
        ("abc", [recorded(0, "y"), *ran(0, "x", "x"), *ran(1, "x", "x")], "x"),
        ("abc", [recorded(0, "y"), *ran(0, "y", "y"), *ran(1, "x", "x"), *ran(2, "x")], "x"),
        ("abc", [recorded(0, "x"), *ran(0, "x", "x"), *ran(1, "p", "q"), *ran(2, "x")], "x"),
        # Two devices of one node are one voice where another node was heard, too.
        ("aab", [recorded(0, "x"), *ran(0, "x", "x"), *ran(1, "x", "x"), *ran(2, "y")], None),
        ("aaa", [recorded(0, "y"), *ran(0, "y", "y"), *ran(1, "x", "x"), *ran(2, "x")], "x"),
        # Nobody repeats: that two happened to coincide says nothing.
        ("abc", [recorded(0, "x"), *ran(0, "y", "x"), *ran(1, "x", "z")], None),
        ("abcd", [recorded(0, "x"), *ran(0, "y", "y"), *ran(1, "x", "x"), *ran(2, "y"), *ran(3, "q")], None),
        ("abcd", [recorded(0, "x"), *ran(0, "y", "x"), *ran(1, "x", "z"), *ran(2, "x"), *ran(3, "x")], None),
        # One steady voice that was heard once is not enough beside one that wavers.
        ("abc", [recorded(0, "y"), *ran(0, "x", "x"), *ran(1, "x", None)], None),
        ("abc", [recorded(0, "y"), *ran(0, "x", "x"), *ran(1, "x", None), *ran(2, "x")], "x"),
    ],
)
def test_agreed_value(nodes: str, executions: list[Execution], value: str | None) -> None:
    assert agreed_value(audit(0, 1, executions), on_nodes(nodes)) == value


def test_agreed_value_without_a_partner_is_what_two_of_three_give() -> None:
    assert agreed_value(audit(0, 0, [recorded(0, "y"), *ran(0, "x", "x")]), on_nodes("a")) == "x"
    assert agreed_value(audit(0, 0, [recorded(0, "y"), *ran(0, "x", "z")]), on_nodes("a")) is None


def test_unlike_environments_have_no_voice() -> None:
    known = audit(0, 1, [recorded(0, "x"), *ran(1, "x"), *ran(2, "y"), *ran(3, "y")])
    assert agreed_value(known, on_nodes("abcd", "eeff")) == "x"
    assert agreed_value(known, on_nodes("abcd", "eeee")) is None


def test_who_holds_the_right_gradient() -> None:
    known = audit(0, 1, [recorded(0, "y"), *ran(1, "x"), *ran(0, "y", "y"), *ran(1, "x"), *ran(2, "x")])
    assert recorded_value(known) == "y"
    assert not recorded_is_right(known, ABC)
    assert holders(known, ABC) == (1, 2)
    assert recorded_is_right(audit(0, 1, [recorded(0, "x"), *ran(1, "x")]), ABC)
    assert holders(audit(0, 1, [recorded(0, "y"), *ran(1, "x")]), ABC) == ()
