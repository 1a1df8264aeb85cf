"""What is done about a verdict, from cheap to dear, and which checkpoints lose trust."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.policy import Situation, decide, trust_lost
from unsilent.records import Action, Decision, Kind, Site, Suspect, Verdict

T, P, S, I = Kind.TRANSIENT, Kind.PERSISTENT, Kind.SOFTWARE, Kind.INCONCLUSIVE  # noqa: E741


def verdict(kind: Kind, site: Site = Site.GRADIENT, node: str | None = "n1", rank: int = 1, step: int = 10) -> Verdict:
    suspects = () if kind in (S, I) else (Suspect(rank=rank, node=node, device="gpu-1"),)
    return Verdict(kind=kind, site=site, step=step, reason="", check="audit", suspects=suspects)


SITUATION: dict[str, Any] = {
    "mode": "act",
    "quarantine": "ask",
    "strikes": 0,
    "recomputes_left": 3,
    "repair_possible": True,
    "heal_allowed": True,
    "approved": False,
    "recorded_is_right": False,
    "on_inconclusive": "continue",
}


def decided(found: Verdict, **changes: Any) -> Decision:
    return decide(found, Situation(**{**SITUATION, **changes}))


@pytest.mark.parametrize(
    ("found", "changes", "action"),
    [
        # TRANSIENT
        (verdict(T), {}, Action.REPAIR),
        (verdict(T), {"repair_possible": False}, Action.RECOMPUTE),
        (verdict(T), {"repair_possible": False, "recomputes_left": 0}, Action.STOP),
        (verdict(T), {"recorded_is_right": True}, Action.CONTINUE),
        (verdict(T), {"strikes": 5}, Action.REPAIR),
        # a replica at rest
        (verdict(T, Site.WEIGHTS), {}, Action.HEAL),
        (verdict(T, Site.OPTIMIZER_STATE), {}, Action.HEAL),
        (verdict(T, Site.WEIGHTS), {"heal_allowed": False, "no_way_back": ""}, Action.ROLLBACK),
        (verdict(T, Site.OPTIMIZER_STATE), {"heal_allowed": False, "no_way_back": ""}, Action.ROLLBACK),
        (verdict(T, Site.WEIGHTS), {"heal_allowed": False}, Action.STOP),
        (verdict(T, Site.OPTIMIZER_STATE), {"heal_allowed": False}, Action.STOP),
        # the reduction
        (verdict(T, Site.REDUCTION), {}, Action.RECOMPUTE),
        (verdict(T, Site.REDUCTION), {"recomputes_left": 0}, Action.STOP),
        # PERSISTENT
        (verdict(P), {}, Action.REPAIR),
        (verdict(P), {"quarantine": "auto"}, Action.REPAIR),
        (verdict(P), {"repair_possible": False}, Action.RECOMPUTE),
        (verdict(P), {"recorded_is_right": True}, Action.CONTINUE),
        (verdict(P), {"strikes": 1}, Action.REPAIR),
        (verdict(P), {"contaminated": True, "no_way_back": ""}, Action.ROLLBACK),
        (verdict(P), {"contaminated": True}, Action.REPAIR),
        (verdict(P), {"no_way_back": ""}, Action.REPAIR),
        (verdict(T), {"contaminated": True, "no_way_back": ""}, Action.REPAIR),
        (verdict(P), {"strikes": 1, "quarantine": "auto"}, Action.QUARANTINE),
        (verdict(P), {"strikes": 0.5, "quarantine": "auto"}, Action.QUARANTINE),
        (verdict(P), {"strikes": 0.49, "quarantine": "auto"}, Action.REPAIR),
        (verdict(P), {"strikes": 1, "approved": True}, Action.QUARANTINE),
        (verdict(P), {"strikes": 1, "quarantine": "auto", "recorded_is_right": True}, Action.QUARANTINE),
        (verdict(P), {"strikes": 1, "repair_possible": False, "recomputes_left": 0}, Action.STOP),
        (verdict(P, node=None), {"strikes": 1, "quarantine": "auto"}, Action.REPAIR),
        # SOFTWARE
        (verdict(S), {}, Action.STOP),
        (verdict(S), {"harmless": True}, Action.CONTINUE),
        # INCONCLUSIVE
        (verdict(I), {}, Action.CONTINUE),
        (verdict(I), {"on_inconclusive": "stop"}, Action.STOP),
        (verdict(I, Site.WEIGHTS), {"even_copies": True, "no_way_back": ""}, Action.ROLLBACK),
        (verdict(I, Site.WEIGHTS), {"even_copies": True}, Action.CONTINUE),
        (verdict(I, Site.WEIGHTS), {"no_way_back": ""}, Action.CONTINUE),
        (verdict(I), {"even_copies": True, "no_way_back": ""}, Action.CONTINUE),
        (verdict(I, Site.WEIGHTS), {"even_copies": True, "no_way_back": "", "on_inconclusive": "stop"}, Action.STOP),
        (verdict(I, Site.REDUCTION), {"even_copies": True, "recomputes_left": 1}, Action.RECOMPUTE),
        (verdict(I, Site.REDUCTION), {"even_copies": True, "recomputes_left": 0}, Action.STOP),
        (verdict(I, Site.REDUCTION), {"recomputes_left": 1}, Action.CONTINUE),
    ],
)
def test_act_mode(found: Verdict, changes: dict[str, Any], action: Action) -> None:
    decision = decided(found, **changes)
    assert decision.action is action
    assert decision.would is action
    assert decision.reason

    observed = decided(found, **{**changes, "mode": "observe"})
    assert observed.action is Action.CONTINUE
    assert observed.would is action
    assert action.value in observed.reason and decision.reason in observed.reason


def test_waiting_for_approval_says_how_to_approve() -> None:
    assert "waiting for approval: unsilent approve RUN n1" in decided(verdict(P), strikes=1).reason
    assert "no node can be named" in decided(verdict(P, node=None), strikes=1).reason
    assert "audited every step" in decided(verdict(P)).reason


@given(
    st.sampled_from(Kind),
    st.sampled_from(Site),
    st.fixed_dictionaries(
        {
            "mode": st.sampled_from(["observe", "act"]),
            "quarantine": st.sampled_from(["ask", "auto"]),
            "strikes": st.integers(0, 3),
            "recomputes_left": st.integers(0, 3),
            "repair_possible": st.booleans(),
            "heal_allowed": st.booleans(),
            "no_way_back": st.sampled_from(["", "no snapshot"]),
            "contaminated": st.booleans(),
            "approved": st.booleans(),
            "recorded_is_right": st.booleans(),
            "even_copies": st.booleans(),
            "on_inconclusive": st.sampled_from(["continue", "stop"]),
        }
    ),
)
def test_bounds_on_every_decision(kind: Kind, site: Site, situation: dict[str, Any]) -> None:
    decision = decide(verdict(kind, site), Situation(**situation))
    if situation["mode"] == "observe":
        assert decision.action is Action.CONTINUE
    if decision.would is Action.QUARANTINE:
        assert kind is P and situation["strikes"] >= 1 and (situation["quarantine"] == "auto" or situation["approved"])
    if decision.would is Action.RECOMPUTE:
        assert situation["recomputes_left"] > 0
    if decision.would is Action.ROLLBACK:
        assert not situation["no_way_back"]
    if decision.would is Action.REPAIR:
        assert situation["repair_possible"] and kind in (T, P)
    if decision.would is Action.CONTINUE:
        assert kind is I or situation["recorded_is_right"]


# ---- trust -----------------------------------------------------------------------------------------------------------


def test_what_a_device_did_since_its_last_clean_audit_is_doubtful() -> None:
    loss = trust_lost(verdict(P, step=35), candidates=[10, 20, 30, 35], certified=[10, 20], clean_audits={1: [9, 19]})
    assert loss.distrusted == (30, 35)
    assert "rank 1" in loss.reason and "step 19" in loss.reason and "checkpoint 20" in loss.reason


def test_an_audit_vouches_for_the_checkpoint_that_its_step_completes_and_no_further() -> None:
    loss = trust_lost(verdict(P, step=30), candidates=[19, 20, 21], certified=[], clean_audits={1: [19]})
    assert loss.distrusted == (21,)
    assert "no certified checkpoint is left" in loss.reason


def test_without_a_clean_audit_everything_that_holds_a_step_is_distrusted() -> None:
    loss = trust_lost(verdict(P, step=30), candidates=[0, 10, 20], certified=[0, 10], clean_audits={2: [9, 19]})
    assert loss.distrusted == (10, 20)
    assert "go back to checkpoint 0" in loss.reason


def test_audits_at_the_verdict_or_later_do_not_count() -> None:
    loss = trust_lost(verdict(P, step=30), candidates=[20, 31], certified=[20], clean_audits={1: [19, 30, 31]})
    assert loss.distrusted == (31,)


def test_an_audited_every_step_device_costs_no_checkpoint() -> None:
    loss = trust_lost(verdict(P, step=30), candidates=[20, 30], certified=[20, 30], clean_audits={1: [28, 29]})
    assert loss.distrusted == () and "go back to checkpoint 30" in loss.reason


def test_only_persistent_takes_trust_away() -> None:
    loss = trust_lost(verdict(T, step=30), candidates=[20, 25], certified=[20], clean_audits={})
    assert loss.distrusted == ()


@given(st.sets(st.integers(0, 50)), st.sets(st.integers(0, 50)), st.lists(st.integers(0, 50)), st.integers(0, 50))
def test_trust_properties(candidates: set[int], certified: set[int], audits: list[int], step: int) -> None:
    loss = trust_lost(
        verdict(P, step=step), candidates=sorted(candidates), certified=certified, clean_audits={1: audits}
    )
    assert set(loss.distrusted) <= candidates
    kept = [c for c in candidates & certified if all(c < other for other in loss.distrusted)]
    assert (f"go back to checkpoint {max(kept)}" if kept else "no certified checkpoint") in loss.reason
    more = trust_lost(
        verdict(P, step=step), candidates=sorted(candidates), certified=certified, clean_audits={1: [*audits, step - 1]}
    )
    assert set(more.distrusted) <= set(loss.distrusted)
