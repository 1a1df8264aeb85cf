"""From a verdict to an action. Pure: history and time are arguments, and every answer comes with its reason.

Recovery goes from cheap to dear, and a node is taken out only when a person, or the configuration, has said so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from unsilent.records import STATE_SITES, Action, Decision, Kind, Site, Verdict
from unsilent.recurrence import COMES_BACK

Mode = Literal["observe", "act"]
QuarantineBy = Literal["ask", "auto"]
OnInconclusive = Literal["continue", "stop"]

MOST_UNEXPLAINED = 0.05
"""How far a recomputed gradient may lie from the recorded one, as a share of the norm, before a person is asked for."""


@dataclass(frozen=True, kw_only=True)
class TrustLoss:
    """Which checkpoints lose trust; ``reason`` also names the certified one to go back to."""

    reason: str
    distrusted: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What choosing an action depends on besides the verdict.

    Args:
        mode, quarantine, on_inconclusive: as configured.
        strikes: what is held against that device from before this verdict, see :func:`unsilent.recurrence.strikes`.
        recomputes_left: how often this step may still be recomputed.
        repair_possible: a healthy rank holds the right gradient and it can still be put in place.
        heal_allowed: the same tensors read clean at the step before, so the wrong replica has reached nobody.
        no_way_back: why no trusted state from before the first step that the fault can have touched is at hand, with the
            work of every step since; "" when there is one.
        contaminated: that device has computed since its last clean audit, and all replicas have taken its gradients in.
        approved: a person has approved taking the suspect's node out.
        recorded_is_right: the live value was the agreed one (the auditor or an arbiter erred).
        harmless: a SOFTWARE finding that this step cannot carry into the state (its update is skipped anyway).
        even_copies: replicas differ, nobody can be outvoted, and going back has not been tried in vain: what all of them
            agreed on before is right all the same.
    """

    mode: Mode = "act"
    quarantine: QuarantineBy = "ask"
    on_inconclusive: OnInconclusive = "continue"
    strikes: float = 0.0
    recomputes_left: int = 0
    repair_possible: bool = False
    heal_allowed: bool = False
    no_way_back: str = "nothing is kept to go back to"
    contaminated: bool = False
    approved: bool = False
    recorded_is_right: bool = False
    harmless: bool = False
    even_copies: bool = False


def decide(verdict: Verdict, situation: Situation) -> Decision:
    """The action for one verdict."""
    would = _in_act_mode(verdict, situation)
    if situation.mode == "act":
        return would
    return Decision(
        action=Action.CONTINUE,
        reason=f"observe mode changes nothing; act mode would {would.action.value}: {would.reason}",
        would=would.action,
    )


def _in_act_mode(verdict: Verdict, situation: Situation) -> Decision:
    if verdict.kind is Kind.INCONCLUSIVE:
        if situation.on_inconclusive == "stop":
            return _take(Action.STOP, "nobody can tell the right value, and on_inconclusive is 'stop'")
        if situation.even_copies and verdict.site in STATE_SITES and not situation.no_way_back:
            return _take(
                Action.ROLLBACK,
                "nobody can tell which copy is right: back to the state that all agreed on, and the steps since are run again",
            )
        if situation.even_copies and verdict.site is Site.REDUCTION:
            left = situation.recomputes_left
            if left > 0:
                return _take(
                    Action.RECOMPUTE,
                    f"nobody can tell which copy of the reduced gradient is right: all is computed again ({left} left)",
                )
            return _take(Action.STOP, "copies of the reduced gradient differ, and no recomputation is left")
        return _take(Action.CONTINUE, "nobody can tell the right value; the check is degraded, the step not certified")

    if verdict.kind is Kind.SOFTWARE:
        if situation.harmless:
            return _take(Action.CONTINUE, "the cause is common to all ranks, and this step's update is skipped anyway")
        return _take(Action.STOP, "the cause is common to all ranks: a recomputation would give the same")

    if verdict.kind is Kind.PERSISTENT and situation.strikes >= COMES_BACK:
        node = next((suspect.node for suspect in verdict.suspects if suspect.node is not None), None)
        if node is None:
            waiting = "it came back, but no node can be named to take out"
        elif situation.quarantine == "auto" or situation.approved:
            who = "approved" if situation.approved else "quarantine is 'auto'"
            return _take(
                Action.QUARANTINE, f"{situation.strikes:.1f} strikes were held against this device already ({who})"
            )
        else:
            waiting = f"waiting for approval: unsilent approve RUN {node}"
    elif verdict.kind is Kind.PERSISTENT:
        waiting = "first PERSISTENT verdict on this device: it is audited every step that can be, from now on"
    else:
        waiting = ""

    fix = _restore_the_step(verdict, situation)
    return _take(fix.action, f"{fix.reason}; {waiting}") if waiting else fix


def _restore_the_step(verdict: Verdict, situation: Situation) -> Decision:
    """The cheapest way back to a right step."""
    if verdict.site in STATE_SITES:
        if situation.heal_allowed:
            return _take(Action.HEAL, "the wrong replica has reached nobody: copied from the majority, then recomputed")
        reached = "the wrong replica may have reached the others through its gradients"
        if not situation.no_way_back:
            return _take(Action.ROLLBACK, f"{reached}: back to a trusted state, and the steps since are run again")
        return _take(Action.STOP, f"{reached}, and there is no way back: {situation.no_way_back}")
    if verdict.kind is Kind.PERSISTENT and situation.contaminated and not situation.no_way_back:
        return _take(
            Action.ROLLBACK,
            "what it did since its last clean audit has reached every replica: back to the trusted state before, and the "
            "steps since are run again, its share by its auditor",
        )
    if situation.recorded_is_right:
        return _take(Action.CONTINUE, "the live value is the agreed one: only a replay was wrong")
    # What a reduction made is in no single rank's share, so nobody holds the right value.
    if situation.repair_possible and verdict.site is not Site.REDUCTION:
        return _take(Action.REPAIR, "a healthy rank holds the right gradient")
    left = situation.recomputes_left
    if left > 0:
        return _take(Action.RECOMPUTE, f"the right value is not at hand ({left} recomputations left)")
    return _take(Action.STOP, "the right value is not at hand and no recomputation is left")


def _take(action: Action, reason: str) -> Decision:
    return Decision(action=action, reason=reason, would=action)


def explained(verdicts: Sequence[Verdict]) -> bool:
    """Whether an exact check could tell the cause of what was found in this step: that explains any difference."""
    return any(verdict.kind is not Kind.INCONCLUSIVE for verdict in verdicts)


def person_needed(verdicts: Sequence[Verdict], difference: float) -> str:
    """Why a person must look at a step whose gradient was computed anew; "" when nobody must.

    Args:
        verdicts: what was found in this step.
        difference: of the recorded and the recomputed gradient, as a share of the norm; NaN where one was not finite.
    """
    if explained(verdicts) or difference <= MOST_UNEXPLAINED:
        return ""
    how = f"differ by {100 * difference:.3g} % of the norm" if math.isfinite(difference) else "are not both finite"
    return f"the recorded and the recomputed gradient {how}, and no exact check explains it"


def trust_lost(
    verdict: Verdict,
    *,
    candidates: Sequence[int],
    certified: Collection[int],
    clean_audits: Mapping[int, Sequence[int]],
) -> TrustLoss:
    """What a PERSISTENT verdict takes from the checkpoints written so far.

    Args:
        candidates: all checkpoints, each named by the updates it holds (checkpoint u holds steps 0 to u - 1).
        certified: those of them that were certified.
        clean_audits: per rank of a suspect (a rank drives one device in a run) the steps of its clean audits.

    Every step after the device's last clean audit before the verdict is doubtful. An audit at step c vouches for
    checkpoint c + 1; checkpoints above it lose trust. Without a clean audit all that hold any step do.
    """
    ordered = sorted(set(candidates))
    if verdict.kind is not Kind.PERSISTENT:
        return TrustLoss(reason="only a PERSISTENT verdict takes trust away")

    ranks = [suspect.rank for suspect in verdict.suspects if suspect.rank is not None]
    last_clean = [
        max((step for step in clean_audits.get(rank, ()) if step < verdict.step), default=-1) for rank in ranks
    ]
    vouched = min(last_clean, default=-1)
    distrusted = tuple(step for step in ordered if step > vouched + 1)
    go_back_to = max((step for step in ordered if step in certified and step <= vouched + 1), default=None)
    since = (
        f"since step {vouched}, its last clean audit," if vouched >= 0 else "since the start, without a clean audit,"
    )
    back = f"go back to checkpoint {go_back_to}" if go_back_to is not None else "no certified checkpoint is left"
    named = ", ".join(f"rank {rank}" for rank in ranks) or "nobody named"
    return TrustLoss(
        reason=f"PERSISTENT at step {verdict.step} ({named}): what it did {since} is doubtful; {back}",
        distrusted=distrusted,
    )
