"""Who audits whom, what must still be rerun, and which value is the right one. Pure: no torch, no I/O, no clock.

One rank drives one device; a rank number therefore also stands for its device.

What makes the answers here safe is one assumption, the fault budget: two devices on different nodes do not make the
same error in the same bits. A value that two nodes give is then the right one, or the common cause is not a device.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from unsilent.records import AuditEvidence, Place, Replay
from unsilent.teams import Teams

REPLAYS_OF_AUDITEE = 2
REPLAYS_OF_AUDITOR = 2


def audit_ring(places: Sequence[Place], groups: Sequence[Hashable] | None = None) -> tuple[int | None, ...]:
    """For each place, in order, the rank that audits it; None where it has no partner.

    Partners have the same environment digest and the same group (model-parallel coordinate): a *class*. Guaranteed:

    * within a class the auditors are a permutation: every rank audits at most one other, and never itself;
    * auditee and auditor lie on different nodes if no node holds more than half of the class;
    * otherwise as many pairs as possible do: twice the number of ranks outside the largest node;
    * a rank that is alone in its class has no partner.
    """
    auditor_of: dict[int, int] = {}
    for members in _classes(places, groups):
        shift = _largest_node(members)
        if shift == len(members):
            shift = 1  # one node only: the next device
        for index, member in enumerate(members):
            partner = members[(index + shift) % len(members)]
            if partner.rank != member.rank:
                auditor_of[member.rank] = partner.rank
    return tuple(auditor_of.get(place.rank) for place in places)


def team_ring(places: Sequence[Place], teams: Teams) -> tuple[int | None, ...]:
    """The same where teams audit teams: for each rank, in order, the rank at its position in the team that audits its own."""
    leads = teams.places(places)
    of_lead = dict(zip((lead.rank for lead in leads), audit_ring(leads), strict=True))
    auditors = [of_lead[teams.lead(rank)] for rank in range(len(places))]
    return tuple(None if a is None else teams.counterpart(rank, a) for rank, a in enumerate(auditors))


def arbiter(
    places: Sequence[Place],
    auditee: int,
    auditor: int,
    asked: Sequence[int] = (),
    groups: Sequence[Hashable] | None = None,
) -> int | None:
    """The rank to ask next when auditee and auditor disagree; None when nobody is left.

    It has the environment and the group of the auditee and lies on a node of which nobody was asked yet. When no such
    node is left, it is a device that was not asked yet. Ring order, beginning after the auditor, so that all ranks
    come to the same answer and the work spreads.
    """
    members = _class_of(auditee, places, groups)
    taken = {auditee, auditor, *asked}
    used_nodes = {place.node for place in places if place.rank in taken}
    ranks = [member.rank for member in members]
    start = ranks.index(auditor) + 1 if auditor in ranks else ranks.index(auditee) + 1
    in_order = members[start:] + members[:start]
    free = [member for member in in_order if member.rank not in taken]
    for member in free:
        if member.node not in used_nodes:
            return member.rank
    return free[0].rank if free else None


def next_replays(
    evidence: AuditEvidence,
    places: Sequence[Place],
    groups: Sequence[Hashable] | None = None,
    *,
    max_arbiters: int = 3,
) -> tuple[Replay, ...]:
    """What must still be rerun to settle this audit; empty when it is settled, clean or hopeless.

    First the auditee twice and the auditor up to a total of two, then one arbiter at a time. The caller runs all
    requests, appends one Execution for each run asked for (with ``failure`` where it could not be made) and asks
    again: this ends after at most ``1 + max_arbiters`` rounds. ``auditor == auditee`` means that it has no partner.
    """
    if evidence.outside_state or not evidence.weights_equal:
        return ()
    if evidence.attribute:  # whatever an arbiter gave could come from what it keeps itself
        return _first_round(evidence) if _values_differ(evidence) else ()
    if not alike(evidence.auditee, evidence.auditor, places):
        return ()
    outputs = outputs_by_rank(evidence, places)
    values = {value for made in outputs.values() for value in made}
    failed = any(execution.digest is None for execution in evidence.executions)
    if len(values) <= 1 and not failed and not evidence.alarm:
        return ()

    asked = _asked(evidence)
    candidate = arbiter(places, evidence.auditee, evidence.auditor, asked, groups)
    if agreed_value(evidence, places) is not None and not _second_node_missing(outputs, candidate, places):
        return ()

    first = _first_round(evidence)
    if first:
        return first
    if _all_replays_failed(evidence) or nothing_repeats(outputs) or several_values_agree(outputs, places):
        return ()
    if candidate is None or len(asked) >= max_arbiters:
        return ()
    return (Replay(executor=candidate, auditee=evidence.auditee),)


def agreed_value(evidence: AuditEvidence, places: Sequence[Place]) -> str | None:
    """The right value of the audited work, or None when nobody can tell.

    It is the only value that two nodes of like environment give. If all that ran lie on one node, two devices do; if
    the auditee has no partner, two of its own executions. Work that no device repeats has no right value: at least
    one device must have given this value twice and no other, or two places have given no other.
    """
    outputs = outputs_by_rank(evidence, places)
    if evidence.auditor == evidence.auditee and len(outputs) == 1:
        own = next(iter(outputs.values()))
        repeated = [value for value in own if own.count(value) >= 2]
        return repeated[0] if repeated else None
    if nothing_repeats(outputs):
        return None
    by_device = one_node(outputs, places)
    supported = [value for value, where in _supporters(outputs, places, by_device).items() if len(where) >= 2]
    if len(supported) != 1:
        return None
    value = supported[0]
    steady = {rank: made for rank, made in outputs.items() if set(made) == {value}}
    repeated = any(len(made) >= 2 for made in steady.values())
    if repeated or len(_supporters(steady, places, by_device).get(value, ())) >= 2:
        return value
    return None


def recorded_value(evidence: AuditEvidence) -> str | None:
    """What the auditee computed live; None when that is not known."""
    for execution in evidence.executions:
        if execution.recorded:
            return execution.digest
    return None


def recorded_is_right(evidence: AuditEvidence, places: Sequence[Place]) -> bool:
    """Whether the live value is the agreed one (then it was not the auditee that erred)."""
    value = agreed_value(evidence, places)
    return value is not None and value == recorded_value(evidence)


def steady_value(evidence: AuditEvidence, places: Sequence[Place]) -> str | None:
    """Where no third node can settle it: what the other devices repeat, if exactly one disagrees with itself."""
    outputs = outputs_by_rank(evidence, places)
    if len({place.node for place in places if place.rank in outputs}) > 2 or several_values_agree(outputs, places):
        return None
    unsteady = [rank for rank, made in outputs.items() if len(set(made)) > 1]
    steady = {made[0] for made in outputs.values() if len(made) >= 2 and len(set(made)) == 1}
    return steady.pop() if len(unsteady) == 1 and len(steady) == 1 else None


def holders(evidence: AuditEvidence, places: Sequence[Place], value: str | None = None) -> tuple[int, ...]:
    """The ranks whose latest replay gave ``value``, else the agreed one: a repair may take it from any of them."""
    value = agreed_value(evidence, places) if value is None else value
    latest = {execution.rank: execution.digest for execution in evidence.executions if not execution.recorded}
    return tuple(rank for rank, digest in latest.items() if value is not None and digest == value)


def attribute_may_explain(evidence: AuditEvidence) -> bool:
    """Whether the attribute that a forward changes, each rank's own, may be why values differ, or why one is bad.

    It is not where auditee and auditor, each with its own, give the same value in all executions but one: that one began
    with what its rank's others began with.
    """
    made = [execution.digest for execution in evidence.executions]
    if not evidence.attribute or (len(set(made)) == 1 and not evidence.alarm):
        return False
    common = max(made, key=made.count)
    again = {e.rank for e in evidence.executions if e.digest == common and not e.recorded}
    both = evidence.auditee != evidence.auditor and {evidence.auditee, evidence.auditor} <= again
    return not both or None in made or made.count(common) != len(made) - 1


def alike(rank: int, other: int, places: Sequence[Place]) -> bool:
    """Whether two ranks promise equal bits for equal work."""
    by_rank = {place.rank: place for place in places}
    return by_rank[rank].environment == by_rank[other].environment


def outputs_by_rank(evidence: AuditEvidence, places: Sequence[Place]) -> dict[int, list[str]]:
    """The values that each rank gave, in order; only ranks whose environment is that of the auditee."""
    environment_of = {place.rank: place.environment for place in places}
    environment = environment_of[evidence.auditee]
    outputs: dict[int, list[str]] = {}
    for execution in evidence.executions:
        if execution.digest is not None and environment_of[execution.rank] == environment:
            outputs.setdefault(execution.rank, []).append(execution.digest)
    return outputs


def nothing_repeats(outputs: Mapping[int, Sequence[str]]) -> bool:
    """Whether two or more devices ran the work more than once and none of them got the same value each time."""
    several = [made for made in outputs.values() if len(made) >= 2]
    return len(several) >= 2 and all(len(set(made)) > 1 for made in several)


def several_values_agree(outputs: Mapping[int, Sequence[str]], places: Sequence[Place]) -> bool:
    """Whether more than one value is given by two places: no further replay can settle that."""
    supporters = _supporters(outputs, places, one_node(outputs, places))
    return sum(len(where) >= 2 for where in supporters.values()) > 1


def one_node(outputs: Mapping[int, Sequence[str]], places: Sequence[Place]) -> bool:
    """Whether all that ran lie on one node: a device can then be told from another, but not from its host."""
    return len({place.node for place in places if place.rank in outputs}) <= 1


def _supporters(
    outputs: Mapping[int, Sequence[str]], places: Sequence[Place], by_device: bool
) -> dict[str, set[Hashable]]:
    """Per value the nodes that gave it; the devices instead where there is only one node to count."""
    node_of = {place.rank: place.node for place in places}
    where: dict[str, set[Hashable]] = {}
    for rank, made in outputs.items():
        for value in made:
            where.setdefault(value, set()).add(rank if by_device else node_of[rank])
    return where


def _second_node_missing(outputs: Mapping[int, Sequence[str]], candidate: int | None, places: Sequence[Place]) -> bool:
    """Whether all that ran lie on one node although somebody on another node can still be asked."""
    if candidate is None or not one_node(outputs, places):
        return False
    return not one_node({**outputs, candidate: ()}, places)


def _values_differ(evidence: AuditEvidence) -> bool:
    made = {execution.digest for execution in evidence.executions}
    return len(made) > 1 and None not in made


def _first_round(evidence: AuditEvidence) -> tuple[Replay, ...]:
    """What the auditee and the auditor still owe. Failed attempts count, so that this ends."""
    auditee, auditor = evidence.auditee, evidence.auditor
    owed = [(auditee, REPLAYS_OF_AUDITEE)]
    if auditor != auditee:
        owed.append((auditor, REPLAYS_OF_AUDITOR))
    requests: list[Replay] = []
    for rank, total in owed:
        made = sum(execution.rank == rank and not execution.recorded for execution in evidence.executions)
        if made < total:
            requests.append(Replay(executor=rank, auditee=auditee, times=total - made))
    return tuple(requests)


def _all_replays_failed(evidence: AuditEvidence) -> bool:
    return all(execution.recorded or execution.digest is None for execution in evidence.executions)


def _asked(evidence: AuditEvidence) -> list[int]:
    """The arbiters asked so far, those that failed included."""
    pair = (evidence.auditee, evidence.auditor)
    return list(dict.fromkeys(execution.rank for execution in evidence.executions if execution.rank not in pair))


def _classes(places: Sequence[Place], groups: Sequence[Hashable] | None) -> list[list[Place]]:
    """The places that may audit one another, each class ordered by node and rank."""
    if groups is not None and len(groups) != len(places):
        raise ValueError(f"{len(groups)} groups for {len(places)} places")
    classes: dict[tuple[str, Hashable], list[Place]] = {}
    for index, place in enumerate(places):
        group = None if groups is None else groups[index]
        classes.setdefault((place.environment, group), []).append(place)
    return [sorted(members, key=lambda place: (place.node, place.rank)) for members in classes.values()]


def _class_of(rank: int, places: Sequence[Place], groups: Sequence[Hashable] | None) -> list[Place]:
    """The class of one rank, in ring order."""
    if groups is not None and len(groups) != len(places):
        raise ValueError(f"{len(groups)} groups for {len(places)} places")
    home = next(index for index, place in enumerate(places) if place.rank == rank)
    environment = places[home].environment
    members = [
        place
        for index, place in enumerate(places)
        if place.environment == environment and (groups is None or groups[index] == groups[home])
    ]
    return sorted(members, key=lambda place: (place.node, place.rank))


def _largest_node(members: Sequence[Place]) -> int:
    sizes: dict[str, int] = {}
    for member in members:
        sizes[member.node] = sizes.get(member.node, 0) + 1
    return max(sizes.values())
