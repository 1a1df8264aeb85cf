"""The judge's table, row by row: what is observed, what the verdict is, who is named and who must not be."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from unsilent.judge import (
    FiniteFinding,
    judge_audit,
    judge_audits,
    judge_counters,
    judge_finite,
    judge_unreduced,
    judge_votes,
    unlike_the_block,
)
from unsilent.records import (
    AuditEvidence,
    CounterEvidence,
    Execution,
    FiniteEvidence,
    Kind,
    Place,
    Site,
    Suspect,
    UnreducedEvidence,
    VoteEvidence,
)

NAN = "digest of a gradient with NaN"


def on_nodes(nodes: str, environments: str = "") -> list[Place]:
    return [
        Place(rank=rank, node=node, device=f"gpu-{rank}", environment=environments[rank] if environments else "e")
        for rank, node in enumerate(nodes)
    ]


def audit(
    r: str, *, a: str = "", b: str = "", c: str = "", d: str = "", pair: tuple[int, int] = (0, 1), **more: object
):
    """R, and each letter of a, b, c, d one value of a replay by auditee, auditor, ranks 2 and 3; '-' is one that failed."""
    auditee, auditor = pair
    executions = [Execution(rank=auditee, digest=r, recorded=True)]
    for rank, values in ((auditee, a), (auditor, b), (2, c), (3, d)):
        for value in values:
            failed = value == "-"
            executions.append(
                Execution(rank=rank, digest=None if failed else value, failure="out of memory" if failed else "")
            )
    return AuditEvidence(step=5, auditee=auditee, auditor=auditor, executions=tuple(executions), **more)  # type: ignore[arg-type]


ABC, ABCD, AB, A = on_nodes("abc"), on_nodes("abcd"), on_nodes("ab"), on_nodes("a")

T, P, S, I = Kind.TRANSIENT, Kind.PERSISTENT, Kind.SOFTWARE, Kind.INCONCLUSIVE  # noqa: E741


@pytest.mark.parametrize(
    ("places", "evidence", "kind", "ranks"),
    [
        # exactly one execution of a device differs
        pytest.param(ABC, audit("y", a="xx", b="xx"), T, [0], id="auditee erred live"),
        pytest.param(ABC, audit(NAN, a="xx", b="xx"), T, [0], id="auditee's live value is NaN"),
        pytest.param(ABC, audit("x", a="yx", b="xx"), T, [0], id="auditee erred in one replay"),
        pytest.param(ABC, audit("x", a="xx", b="yx"), T, [1], id="auditor erred once"),
        pytest.param(ABC, audit("x", a="xx", b="xy"), T, [1], id="auditor erred in its second run"),
        pytest.param(
            ABCD, audit("y", a="yy", b="xx", c="z", d="x"), P, [0], id="persistent auditee before the arbiter"
        ),
        # two or more executions of one device differ
        pytest.param(ABC, audit("y", a="yx", b="xx"), P, [0], id="auditee erred twice alike"),
        pytest.param(ABC, audit("y", a="zx", b="xx"), P, [0], id="auditee erred twice otherwise"),
        pytest.param(ABC, audit("y", a="yy", b="xx", c="x"), P, [0], id="auditee repeats its error, arbiter"),
        pytest.param(ABC, audit(NAN, a="yy", b="xx", c="x"), P, [0], id="auditee NaN, then something else"),
        pytest.param(ABC, audit("y", a="zw", b="xx", c="x"), P, [0], id="auditee never repeats, arbiter"),
        pytest.param(ABC, audit("x", a="xx", b="yy", c="x"), P, [1], id="auditor repeats its error, arbiter"),
        pytest.param(ABC, audit("x", a="xx", b="yz", c="x"), P, [1], id="auditor never repeats, arbiter"),
        # weights of the pair differ: settled by the vote
        pytest.param(ABC, audit("y", b="x", weights_equal=False), None, [], id="unlike weights"),
        pytest.param(ABC, audit("y", a="yy", b="xx", weights_equal=False), None, [], id="unlike weights, replayed"),
        # a parameter that a forward has written outside of the capture
        pytest.param(ABC, audit("y", b="x", outside_state="m.codebook"), I, [], id="outside state, differing"),
        pytest.param(ABC, audit("x", b="x", outside_state="m.codebook"), I, [], id="outside state, equal"),
        pytest.param(
            ABC, audit("y", a="xx", b="xx", outside_state="m.codebook"), I, [], id="outside state, erred live"
        ),
        # an attribute that a forward changes, each rank its own
        pytest.param(ABC, audit("x", b="x", attribute="m.calls"), None, [], id="attribute, equal"),
        pytest.param(ABC, audit("y", a="xx", b="xx", attribute="m.calls"), T, [0], id="attribute, auditee erred live"),
        pytest.param(ABC, audit("x", a="yx", b="xx", attribute="m.calls"), T, [0], id="attribute, auditee erred again"),
        pytest.param(ABC, audit("x", a="xx", b="yx", attribute="m.calls"), T, [1], id="attribute, auditor erred once"),
        pytest.param(ABC, audit("y", a="yy", b="xx", attribute="m.calls"), I, [], id="attribute, each its own"),
        pytest.param(ABC, audit("y", a="yy", b="xx", c="x", attribute="m.calls"), I, [], id="attribute, one apart"),
        pytest.param(ABC, audit("y", a="yx", b="xx", attribute="m.calls"), I, [], id="attribute, two executions"),
        pytest.param(ABC, audit("y", a="xx", b="--", attribute="m.calls"), I, [], id="attribute, no auditor"),
        pytest.param(ABC, audit("n", b="n", alarm="the loss is NaN", attribute="m.calls"), I, [], id="attribute, NaN"),
        pytest.param(A, audit("y", a="xx", pair=(0, 0), attribute="m.calls"), I, [], id="attribute, alone"),
        # R is agreed and bad anyway
        pytest.param(ABC, audit(NAN, alarm="the loss is NaN", b=""), I, [], id="alarm, nobody replayed"),
        pytest.param(ABC, audit("n", b="n", alarm="the loss is NaN"), S, [0], id="alarm, neighbour agrees"),
        pytest.param(ABC, audit("n", a="nn", b="xx", c="n", alarm="spike"), S, [0], id="alarm, arbiter agrees"),
        pytest.param(ABC, audit("n", a="xx", b="xx", alarm="spike"), T, [0], id="alarm, but R is not the agreed value"),
        pytest.param(A, audit("n", a="nn", pair=(0, 0), alarm="spike"), S, [0], id="alarm, alone"),
        # no agreed value
        pytest.param(ABC, audit("1", a="23", b="45"), I, [], id="nobody repeats"),
        pytest.param(ABC, audit("1", a="21", b="13", c="1"), I, [], id="nobody repeats, some coincide"),
        pytest.param(ABC, audit("1", a="22", b="11", c="2"), I, [], id="two nodes give each of two values"),
        pytest.param(ABC, audit("1", a="11", b="22", c="3"), I, [], id="three nodes, three values"),
        pytest.param(ABC, audit("1", a="--", b="--"), I, [], id="no replay runs"),
        pytest.param(ABC, audit("1", a="11", b="--", c="-"), I, [], id="no neighbour's replay runs"),
        pytest.param(on_nodes("abc", "efe"), audit("1", a="11", b="22"), I, [], id="unlike environments"),
        pytest.param(on_nodes("ab", "ef"), audit("1", b="2"), I, [], id="unlike environments, not replayed"),
        pytest.param(A, audit("1", a="23", pair=(0, 0)), I, [], id="alone, does not repeat"),
        # no third node
        pytest.param(AB, audit("y", a="yy", b="pq"), P, [1], id="two nodes, auditor disagrees with itself"),
        pytest.param(AB, audit("p", a="qq", b="xx"), P, [0], id="two nodes, auditee disagrees with itself"),
        pytest.param(AB, audit("y", a="xx", b="xx"), T, [0], id="two nodes, auditee erred once"),
        pytest.param(AB, audit("1", a="23", b="4-"), I, [], id="two nodes, the neighbour ran once only"),
        pytest.param(AB, audit("y", a="yy", b="xx"), I, [0, 1], id="two nodes, each repeats its own"),
        pytest.param(AB, audit(NAN, a=[NAN, NAN], b="xx"), I, [0, 1], id="two nodes, NaN repeats"),  # type: ignore[arg-type]
        pytest.param(on_nodes("abb"), audit("x", a="xx", b="yy", c="x"), P, [1], id="two nodes, third device"),
        pytest.param(on_nodes("abb"), audit("x", a="xx", b="yy", c="y"), I, [0, 1], id="two nodes, host against host"),
        pytest.param(on_nodes("aa"), audit("y", a="xx", b="xx"), T, [0], id="one node, auditee erred once"),
        pytest.param(on_nodes("aa"), audit("x", a="xx", b="yz"), P, [1], id="one node, auditor disagrees with itself"),
        pytest.param(on_nodes("aa"), audit("x", a="xx", b="yy"), I, [0, 1], id="one node, each repeats its own"),
        pytest.param(on_nodes("aaa"), audit("y", a="yy", b="xx", c="x"), P, [0], id="one node, third device"),
        # a single rank: two of its own three
        pytest.param(A, audit("y", a="xx", pair=(0, 0)), T, [0], id="alone, erred live"),
        pytest.param(A, audit("x", a="yx", pair=(0, 0)), T, [0], id="alone, erred in a replay"),
        # clean
        pytest.param(ABC, audit("x", b="x"), None, [], id="clean"),
        pytest.param(ABC, audit(NAN, b=[NAN]), None, [], id="clean, NaN equals the same NaN"),  # type: ignore[arg-type]
        pytest.param(A, audit("x", a="x", pair=(0, 0)), None, [], id="clean, alone"),
        pytest.param(ABC, audit("x", a="xx", b="-x"), None, [], id="clean at the second attempt"),
        pytest.param(on_nodes("ab", "ef"), audit("x", b="x"), None, [], id="clean in spite of unlike environments"),
    ],
)
def test_one_audit(places: list[Place], evidence: AuditEvidence, kind: Kind | None, ranks: list[int]) -> None:
    verdict = judge_audit(evidence, places)
    if kind is None:
        assert verdict is None
        return
    assert verdict is not None
    assert verdict.kind is kind, verdict
    assert [suspect.rank for suspect in verdict.suspects] == ranks, verdict
    assert verdict.site is Site.GRADIENT and verdict.step == 5 and verdict.check == "audit"
    assert all(f"rank {rank}" in verdict.reason for rank in ranks)
    json.dumps(verdict.to_json())


def test_a_faulty_arbiter_is_named_too() -> None:
    verdicts = judge_audits([audit("y", a="yy", b="xx", c="z", d="x")], ABCD)
    assert [(v.kind, v.suspects[0].rank) for v in verdicts] == [(P, 0), (T, 2)]


def test_the_reason_names_rank_node_device_and_tensor() -> None:
    verdict = judge_audit(audit("y", a="yy", b="xx", c="x", tensors=("head.weight", "head.bias")), ABC)
    assert verdict is not None
    assert verdict.suspects == (Suspect(rank=0, node="a", device="gpu-0"),)
    assert verdict.tensors == ("head.weight", "head.bias")
    for word in ("rank 0", "node a", "gpu-0", "3 of 3 executions of its own work", "nodes b, c", "head.weight"):
        assert word in verdict.reason


def test_on_one_node_the_device_is_named_without_the_host() -> None:
    verdict = judge_audit(audit("y", a="yy", b="xx", c="x"), on_nodes("aaa"))
    assert verdict is not None
    assert verdict.suspects == (Suspect(rank=0, node=None, device="gpu-0"),)
    assert "host cannot be judged" in verdict.reason


@pytest.mark.parametrize(
    ("evidence", "word"),
    [
        (audit("y", b="x", outside_state="model.codebook"), "'model.codebook'"),
        (audit("y", a="yy", b="xx", attribute="model.calls"), "'model.calls'"),
        (audit("1", a="23", b="45"), "use_deterministic_algorithms"),
        (audit("1", a="11", b="--", c="-"), "out of memory"),
        (audit("n", b="n", alarm="the loss is not finite"), "the loss is not finite"),
    ],
)
def test_reasons(evidence: AuditEvidence, word: str) -> None:
    verdict = judge_audit(evidence, ABC)
    assert verdict is not None and word in verdict.reason


def test_a_bad_value_that_the_neighbour_reproduces_points_at_the_batch_not_at_a_device() -> None:
    verdict = judge_audit(audit("n", b="n", alarm="the loss is not finite"), ABC)
    assert verdict is not None
    assert verdict.suspects == (Suspect(rank=0, path="batch"),)


def test_a_right_but_bad_value_does_not_hide_a_faulty_auditor() -> None:
    verdicts = judge_audits([audit("n", a="nn", b="pq", c="n", alarm="spike")], ABC)
    assert [(v.kind, v.suspects[0].rank) for v in verdicts] == [(P, 1), (S, 0)]


# ---- all audits of a step --------------------------------------------------------------------------------------------


def test_a_device_that_errs_in_both_its_roles_gets_one_persistent_verdict() -> None:
    as_auditee = audit("y", a="xx", b="xx", pair=(1, 2), tensors=("w",))
    as_auditor = audit("x", a="xx", b="yx", pair=(0, 1), tensors=("v",))
    (verdict,) = judge_audits([as_auditee, as_auditor], ABC)
    assert (verdict.kind, [s.rank for s in verdict.suspects]) == (P, [1])
    assert "its own work" in verdict.reason and "the work of rank 0" in verdict.reason
    assert verdict.tensors == ("w", "v")


def test_two_devices_get_a_verdict_each_the_most_severe_first() -> None:
    verdicts = judge_audits(
        [audit("y", a="xx", b="xx", pair=(0, 1)), audit("y", a="yx", b="xx", pair=(3, 2))], on_nodes("abcdef")
    )
    assert [(v.kind, v.suspects[0].rank) for v in verdicts] == [(P, 3), (T, 0)]


def test_live_values_that_differ_from_agreeing_replays_on_most_ranks_are_software() -> None:
    everywhere = [audit("p", a="xx", b="xx", pair=pair) for pair in ((0, 1), (1, 2), (2, 0))]
    (verdict,) = judge_audits(everywhere, ABC)
    assert (verdict.kind, verdict.suspects) == (S, ())
    assert "hook" in verdict.reason and "not synchronised" in verdict.reason
    two_ranks = [audit("p", a="xx", b="xx", pair=(0, 1)), audit("q", a="xx", b="xx", pair=(1, 0))]
    assert [v.kind for v in judge_audits(two_ranks, AB)] == [S]


def test_a_minority_of_such_live_values_is_no_common_cause() -> None:
    verdicts = judge_audits([audit("p", a="xx", b="xx"), audit("x", b="x", pair=(1, 2))], ABC)
    assert [(v.kind, v.suspects[0].rank) for v in verdicts] == [(T, 0)]


def test_replays_that_nowhere_run_are_not_taken_for_a_common_cause() -> None:
    nowhere = [audit("p", a="--", b="--", pair=pair) for pair in ((0, 1), (1, 2), (2, 0))]
    assert [v.kind for v in judge_audits(nowhere, ABC)] == [I]


def test_a_loops_own_code_that_differs_from_all_reruns_is_no_device() -> None:
    def judged(
        evidences: list[AuditEvidence], places: list[Place], *, proved: bool
    ) -> list[tuple[Kind, list[int | None]]]:
        verdicts = judge_audits(evidences, places, unlike=unlike_the_block(evidences, places, proved=proved))
        return [(v.kind, [s.rank for s in v.suspects]) for v in verdicts]

    everywhere = [audit("p", a="xx", b="xx", pair=pair) for pair in ((0, 1), (1, 2), (2, 0))]
    one, other, clean = *everywhere[:2], audit("x", b="x", pair=(2, 3))
    for proved in (False, True):
        assert judged(everywhere, ABC, proved=proved) == [(I, [])]
        assert judged([one, other, clean], ABCD, proved=proved) == [(I, [])]  # two at once: not one device's fault
        assert judged([one, clean], ABCD, proved=proved) == [(T, [0])]  # another rank shows that they can agree
    assert judged([one], ABC, proved=False) == [(I, [])]
    assert judged([one], ABC, proved=True) == [(T, [0])]
    alone = audit("p", a="xxx", pair=(0, 0))
    assert judged([alone], A, proved=False) == [(I, [])]
    assert judged([alone], A, proved=True) == [(T, [0])]
    assert unlike_the_block([audit("p", a="---", pair=(0, 0))], A, proved=False) == ()
    (verdict,) = judge_audits(everywhere, ABC, unlike=unlike_the_block(everywhere, ABC, proved=True))
    assert "ranks 0, 1, 2" in verdict.reason and "nobody is blamed" in verdict.reason


def test_alike_findings_become_one_verdict() -> None:
    bad = [audit("n", b="n", alarm="the loss is NaN", pair=pair) for pair in ((0, 1), (1, 2), (2, 0))]
    (software,) = judge_audits(bad, ABC)
    assert [s.rank for s in software.suspects] == [0, 1, 2]
    odd = [audit("1", a="23", b="45", pair=pair) for pair in ((0, 1), (1, 2), (2, 0))]
    (inconclusive,) = judge_audits(odd, ABC)
    assert (inconclusive.kind, inconclusive.suspects) == (I, ())
    both = [audit("y", a="yy", b="xx", pair=(0, 1)), audit("x", a="xx", b="yy", pair=(1, 0))]
    (pair_verdict,) = judge_audits(both, AB)
    assert {s.rank for s in pair_verdict.suspects} == {0, 1}


def test_clean_audits_give_nothing() -> None:
    assert judge_audits([audit("x", b="x"), audit("z", b="z", pair=(1, 2))], ABC) == ()
    assert judge_audits([], ABC) == ()


# ---- votes -----------------------------------------------------------------------------------------------------------


def vote(digests: str, tensor: str = "w", site: Site = Site.WEIGHTS) -> VoteEvidence:
    """One letter per rank; '-' where the rank has no such tensor."""
    return VoteEvidence(
        step=5, site=site, tensor=tensor, digests=tuple(None if letter == "-" else letter for letter in digests)
    )


@pytest.mark.parametrize(
    ("digests", "kind", "ranks"),
    [
        ("xxx", None, []),
        ("---", None, []),
        ("x", None, []),
        ("xyx", T, [1]),
        ("yxx", T, [0]),
        ("xxyzx", T, [2, 3]),
        ("xyxy", I, []),
        ("xxyz", I, []),
        ("xy", I, []),
        ("xyz", S, []),
        ("x--", S, [0]),
        ("xx-", S, [2]),
        ("x-", S, []),
    ],
)
def test_one_vote(digests: str, kind: Kind | None, ranks: list[int]) -> None:
    verdicts = judge_votes([vote(digests), vote("k" * len(digests), "other")], on_nodes("abcde"[: len(digests)]))
    if kind is None:
        assert verdicts == ()
        return
    (verdict,) = verdicts
    assert (verdict.kind, [s.rank for s in verdict.suspects], verdict.tensors) == (kind, ranks, ("w",))
    assert verdict.site is Site.WEIGHTS and "w" in verdict.reason


def test_a_minority_is_named_with_node_and_device() -> None:
    (verdict,) = judge_votes([vote("xyx", "exp_avg.w", Site.OPTIMIZER_STATE)], ABC)
    assert verdict.suspects == (Suspect(rank=1, node="b", device="gpu-1"),)
    assert verdict.site is Site.OPTIMIZER_STATE
    assert "rank 1 (node b, device gpu-1)" in verdict.reason


def test_tensors_with_the_same_outcome_share_a_verdict() -> None:
    votes = [vote("xyx", "w1"), vote("xyx", "w2"), vote("xxy", "w3"), vote("xyx", "m", Site.OPTIMIZER_STATE)]
    verdicts = judge_votes(votes, ABC)
    assert sorted(v.tensors for v in verdicts) == [("m",), ("w1", "w2"), ("w3",)]


def test_state_that_only_one_rank_restored_blames_no_device() -> None:
    votes = [vote("x--", name, Site.OPTIMIZER_STATE) for name in ("exp_avg.w", "exp_avg_sq.w")]
    (verdict,) = judge_votes(votes, ABC)
    assert verdict.kind is S and verdict.tensors == ("exp_avg.w", "exp_avg_sq.w")
    assert verdict.suspects == (Suspect(rank=0, path="exp_avg.w"),)
    assert "only rank 0 has optimizer state exp_avg.w, exp_avg_sq.w: was it restored there alone?" in verdict.reason


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_that_differ_in_everything_were_never_synchronised(world: int) -> None:
    (verdict,) = judge_votes([vote("abcd"[:world], "w1"), vote("efgh"[:world], "w2")], on_nodes("abcd"[:world]))
    assert (verdict.kind, verdict.suspects) == (S, ())
    assert "not synchronised: w1, w2" in verdict.reason


def test_copies_that_differ_in_most_weights_before_anything_was_done_were_never_synchronised() -> None:
    votes = [vote("xy", "w1"), vote("xy", "w2"), vote("zz", "bias"), vote("zz", "gradient.w1", Site.REDUCTION)]
    (verdict,) = judge_votes(votes, on_nodes("ab"), nothing_done_yet=True)
    assert (verdict.kind, verdict.suspects, verdict.tensors) == (S, (), ("w1", "w2"))
    assert [v.kind for v in judge_votes(votes, on_nodes("ab"))] == [I]
    one = [vote("xy", "w1"), vote("zz", "w2"), vote("zz", "bias")]
    assert [v.kind for v in judge_votes(one, on_nodes("ab"), nothing_done_yet=True)] == [I]
    minority = [vote("xyx", "w1"), vote("xyx", "w2")]
    assert [v.kind for v in judge_votes(minority, on_nodes("abc"), nothing_done_yet=True)] == [T]


def test_votes_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 digests for 3 places"):
        judge_votes([vote("xy")], ABC)


# ---- counters --------------------------------------------------------------------------------------------------------


def test_counters() -> None:
    same = CounterEvidence(step=5, name="step", values=("5", "5"))
    assert judge_counters([same]) is None
    assert judge_counters([]) is None
    scale = CounterEvidence(step=5, name="scaler scale", values=("256.0", "512.0"))
    verdict = judge_counters([same, scale])
    assert verdict is not None
    assert (verdict.kind, verdict.suspects, verdict.tensors) == (S, (), ("scaler scale",))
    assert "the loss scaler's scale differs between ranks: rank 0 256.0, rank 1 512.0" in verdict.reason
    rate = judge_counters([CounterEvidence(step=5, name="learning rate", values=("0.1", "0.1", "0.2"))])
    assert rate is not None and "the learning rate differs between ranks" in rate.reason


# ---- NaN and Inf -----------------------------------------------------------------------------------------------------


def finite(
    world: int = 4,
    local: tuple[int, ...] = (),
    reduced: tuple[int, ...] = (),
    *,
    scaler: bool = False,
    streak: int = 0,
    lone_streak: int = 0,
    places: list[Place] | None = None,
    replicated: bool = True,
) -> FiniteFinding | None:
    evidence = FiniteEvidence(
        step=5, world_size=world, local=local, reduced=reduced, scaler=scaler, streak=streak, lone_streak=lone_streak
    )
    return judge_finite(evidence, streak_limit=20, lone_limit=3, places=places or (), replicated=replicated)


EVERYONE = (0, 1, 2, 3)


def test_all_finite() -> None:
    assert finite() is None
    assert finite(scaler=True, streak=3) is None


def test_bad_local_gradients_are_audited_first() -> None:
    one = finite(local=(1,), reduced=EVERYONE)
    assert one is not None and (one.audit, one.verdict, one.quiet_if_reproduced) == ((1,), None, False)
    every = finite(local=EVERYONE, reduced=EVERYONE)
    assert every is not None and every.audit == EVERYONE


def test_a_scaler_that_backs_off_on_all_ranks_is_quiet_until_the_limit() -> None:
    for local in (EVERYONE, ()):
        quiet = finite(local=local, reduced=EVERYONE, scaler=True, streak=19)
        assert quiet is not None and (quiet.audit, quiet.verdict) == ((), None)
        loud = finite(local=local, reduced=EVERYONE, scaler=True, streak=20)
        assert loud is not None and loud.verdict is not None
        assert (loud.verdict.kind, loud.verdict.suspects) == (S, ())
        assert "20 steps in a row" in loud.verdict.reason


def test_a_rank_that_overflows_alone_under_a_scaler_is_audited() -> None:
    first = finite(local=(1,), reduced=EVERYONE, scaler=True, streak=1, lone_streak=1)
    assert first is not None and (first.audit, first.quiet_if_reproduced) == ((1,), True)
    again = finite(local=(1,), reduced=EVERYONE, scaler=True, streak=3, lone_streak=3)
    assert again is not None and (again.audit, again.quiet_if_reproduced) == ((1,), False)


@pytest.mark.parametrize(
    ("world", "reduced", "suspects"),
    [(4, EVERYONE, ()), (4, (2,), (2,)), (3, (0,), (0,)), (2, (0,), ()), (4, (0, 1), ()), (4, (0, 1, 2), ())],
)
def test_what_the_reduction_made(world: int, reduced: tuple[int, ...], suspects: tuple[int, ...]) -> None:
    finding = finite(world, reduced=reduced, places=on_nodes("abcd"))
    assert finding is not None and finding.verdict is not None and finding.audit == ()
    verdict = finding.verdict
    assert (verdict.kind, verdict.site) == (T, Site.REDUCTION)
    assert tuple(s.rank for s in verdict.suspects) == suspects
    assert all(s.node == "abcd"[s.rank] for s in verdict.suspects if s.rank is not None)


def test_nobody_is_named_where_reduced_gradients_are_shards() -> None:
    finding = finite(reduced=(2,), replicated=False)
    assert finding is not None and finding.verdict is not None and finding.verdict.suspects == ()


def test_gradients_that_were_not_reduced() -> None:
    verdict = judge_unreduced(UnreducedEvidence(step=5, tensors=("adapter.weight", "adapter.bias"), ranks=(0, 1)))
    assert (verdict.kind, verdict.suspects) == (S, ())
    assert "gradients were not reduced: adapter.weight, adapter.bias" in verdict.reason


def test_judging_imports_no_torch() -> None:
    code = "import sys, unsilent.judge, unsilent.localize, unsilent.policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0
