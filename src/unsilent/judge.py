"""From evidence to verdicts. Pure: no torch, no I/O, no clock; each verdict says in words who, where and why.

A device is blamed (TRANSIENT, PERSISTENT) only against a value that healthy peers agree on, or because it does not
repeat work that its neighbour repeats. Suspects of an INCONCLUSIVE verdict are not blamed: one of them may be healthy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unsilent.localize import (
    agreed_value,
    alike,
    attribute_may_explain,
    nothing_repeats,
    one_node,
    outputs_by_rank,
    recorded_is_right,
    recorded_value,
    several_values_agree,
)
from unsilent.records import (
    STATE_SITES,
    AuditEvidence,
    CounterEvidence,
    FiniteEvidence,
    Kind,
    Place,
    Site,
    Suspect,
    UnreducedEvidence,
    Verdict,
    VoteEvidence,
)

_SEVERITY = (Kind.PERSISTENT, Kind.SOFTWARE, Kind.TRANSIENT, Kind.INCONCLUSIVE)
_SHOWN = 8  # names or ranks listed in a reason before "and n more"


@dataclass(frozen=True, kw_only=True)
class FiniteFinding:
    """What to do about NaN or Inf.

    ``audit`` are the ranks to audit first: their audit tells hardware from data. ``quiet_if_reproduced``: when such an
    audit reproduces the value it is the loss scaler's normal search, no alarm. With neither ``audit`` nor ``verdict``
    the scaler is backing off and nothing is wrong. ``reason`` says which, in words.
    """

    reason: str
    audit: tuple[int, ...] = ()
    verdict: Verdict | None = None
    quiet_if_reproduced: bool = False


@dataclass(frozen=True, kw_only=True)
class _Error:
    """One device that erred in one audit: ``wrong`` of ``made`` executions; ``against`` says against what."""

    rank: int
    wrong: int
    made: int
    against: str
    host_known: bool
    evidence: AuditEvidence


# ---- audits ----------------------------------------------------------------------------------------------------------


def judge_audit(evidence: AuditEvidence, places: Sequence[Place]) -> Verdict | None:
    """The verdict of one audit; None when it is clean, or when the pair held unlike weights (the vote settles that).

    Where several could be given, that a recorded value is right and bad anyway comes first (SOFTWARE).
    """
    verdicts = judge_audits((evidence,), places)
    for verdict in verdicts:
        if verdict.kind is Kind.SOFTWARE:
            return verdict
    return verdicts[0] if verdicts else None


def judge_audits(
    evidences: Sequence[AuditEvidence], places: Sequence[Place], *, unlike: Sequence[AuditEvidence] = ()
) -> tuple[Verdict, ...]:
    """The verdicts of all audits of one step together, the most severe first.

    One verdict per device, whether it erred as auditee, auditor or arbiter: two or more executions in all are
    PERSISTENT, one is TRANSIENT. Of ``unlike`` (see :func:`unlike_the_block`) nobody is judged.
    """
    verdicts: list[Verdict] = []
    not_replayable = list(unlike) or [evidence for evidence in evidences if _only_recorded_differs(evidence, places)]
    common_cause = bool(unlike) or (len(not_replayable) >= 2 and 2 * len(not_replayable) > len(places))
    if common_cause:
        verdicts.append(_unlike_the_block(unlike) if unlike else _outside_the_replay(not_replayable))

    errors: list[_Error] = []
    for evidence in evidences:
        if evidence.outside_state or attribute_may_explain(evidence):
            verdicts.append(_outside_state(evidence))
            continue
        if not evidence.weights_equal or (common_cause and evidence in not_replayable):
            continue
        value = agreed_value(evidence, places)
        if value is None:
            found = _without_agreement(evidence, places)
            if isinstance(found, _Error):
                errors.append(found)
            elif found is not None:
                verdicts.append(found)
            continue
        errors.extend(_errors_against(value, evidence, places))
        if evidence.alarm and recorded_value(evidence) == value:
            verdicts.append(_right_but_bad(evidence, places))

    verdicts = _merge_alike(verdicts)
    for rank in sorted({error.rank for error in errors}):
        verdicts.append(_device_verdict([error for error in errors if error.rank == rank], places))
    return tuple(sorted(verdicts, key=lambda verdict: _SEVERITY.index(verdict.kind)))


def unlike_the_block(
    evidences: Sequence[AuditEvidence], places: Sequence[Place], *, proved: bool
) -> tuple[AuditEvidence, ...]:
    """Where the live work is the loop's own code: the audits in which that code, and no device, differs from all reruns.

    One device errs at a time, so two ranks or more that differ so have run other code than the reruns. One is judged only
    where it was shown that the two can agree: by an audit of this run before (``proved``), or of another rank now.
    """
    differing = tuple(evidence for evidence in evidences if _only_recorded_differs(evidence, places))
    shown = proved or any(recorded_is_right(evidence, places) for evidence in evidences)
    alone = () if proved else tuple(evidence for evidence in evidences if _differs_from_own_replays(evidence))
    return (*(() if shown and len(differing) == 1 else differing), *alone)


def _differs_from_own_replays(evidence: AuditEvidence) -> bool:
    """Whether a rank without a partner repeats in all its replays what its live run did not give."""
    replayed = {execution.digest for execution in evidence.executions if not execution.recorded}
    repeats = len(replayed) == 1 and None not in replayed
    return evidence.auditor == evidence.auditee and repeats and recorded_value(evidence) not in replayed


def _only_recorded_differs(evidence: AuditEvidence, places: Sequence[Place]) -> bool:
    """Whether auditee and auditor agree in all replays, and only the live run gave something else."""
    if (
        evidence.outside_state
        or attribute_may_explain(evidence)
        or not evidence.weights_equal
        or evidence.auditor == evidence.auditee
    ):
        return False
    recorded = recorded_value(evidence)
    replayed = {execution.digest for execution in evidence.executions if not execution.recorded}
    replayers = {execution.rank for execution in evidence.executions if not execution.recorded}
    return (
        recorded is not None
        and len(replayed) == 1
        and None not in replayed
        and recorded not in replayed
        and {evidence.auditee, evidence.auditor} <= replayers
        and agreed_value(evidence, places) in replayed
    )


def _errors_against(value: str, evidence: AuditEvidence, places: Sequence[Place]) -> list[_Error]:
    """Every device that gave something else than the agreed value."""
    outputs = outputs_by_rank(evidence, places)
    host_known = not one_node(outputs, places)
    agreeing = [rank for rank, made in outputs.items() if value in made]
    if host_known:
        nodes = sorted({place.node for place in places if place.rank in agreeing})
        against = f"the value that nodes {_listed(nodes)} give"
    elif len(agreeing) >= 2:
        against = f"the value that ranks {_listed(sorted(agreeing))} give (one node: the host cannot be judged)"
    else:
        against = "the value that the same device gives twice (it has no partner to compare with)"
    errors: list[_Error] = []
    for rank, made in outputs.items():
        wrong = sum(digest != value for digest in made)
        if wrong:
            errors.append(
                _Error(
                    rank=rank, wrong=wrong, made=len(made), against=against, host_known=host_known, evidence=evidence
                )
            )
    return errors


def _device_verdict(errors: Sequence[_Error], places: Sequence[Place]) -> Verdict:
    """One device, all the executions in which it erred in this step."""
    rank = errors[0].rank
    place = next(place for place in places if place.rank == rank)
    wrong = sum(error.wrong for error in errors)
    host_known = any(error.host_known for error in errors)
    told = [
        f"{error.wrong} of {error.made} executions of {_whose_work(error.evidence, rank)} differ from {error.against}"
        for error in errors[:_SHOWN]
    ]
    if len(errors) > _SHOWN:
        told.append(f"and so in {len(errors) - _SHOWN} more audits")
    if wrong >= 2:
        kind, ending = Kind.PERSISTENT, "it does not repeat here what its neighbours repeat"
    else:
        kind, ending = Kind.TRANSIENT, "it did not come back in the replays"
    tensors = tuple(dict.fromkeys(name for error in errors for name in error.evidence.tensors))
    return Verdict(
        kind=kind,
        site=Site.GRADIENT,
        step=errors[0].evidence.step,
        reason=f"{_named(place, host_known)}: {'; '.join(told)}; {ending}{_first_of(tensors)}",
        check="audit",
        suspects=(Suspect(rank=rank, node=place.node if host_known else None, device=place.device),),
        tensors=tensors,
    )


def _without_agreement(evidence: AuditEvidence, places: Sequence[Place]) -> _Error | Verdict | None:
    """No value is known to be right: one device may still be told by not repeating; otherwise INCONCLUSIVE."""
    outputs = outputs_by_rank(evidence, places)
    values = {value for made in outputs.values() for value in made}
    failures = [
        f"rank {execution.rank} could not run it: {execution.failure or 'no reason given'}"
        for execution in evidence.executions
        if execution.digest is None
    ]
    work = f"the work of rank {evidence.auditee}"

    if not alike(evidence.auditee, evidence.auditor, places):
        digests = {execution.digest for execution in evidence.executions if execution.digest is not None}
        if len(digests) <= 1 and not failures and not evidence.alarm:
            return None
        return _inconclusive(
            evidence,
            f"ranks {evidence.auditee} and {evidence.auditor} run in unlike environments (libraries, CPU or GPU type, "
            f"thread count), where {work} need not give the same bits; nobody is blamed",
        )
    if len(values) <= 1:
        if failures:
            return _inconclusive(evidence, f"{work} could not be compared: {_listed(failures)}; nobody is blamed")
        if evidence.alarm:
            return _inconclusive(evidence, f"{evidence.alarm}, and nobody has replayed {work}; nobody is blamed")
        return None
    if _bad_wherever_it_runs(evidence, places):
        return _unsteady_but_bad(evidence, sorted(outputs))
    if evidence.auditor == evidence.auditee:
        return _inconclusive(
            evidence,
            f"{work} gives another value each time and it has no partner: a faulty device cannot be told from work "
            "that does not repeat (deterministic algorithms would); nobody is blamed",
        )
    if nothing_repeats(outputs) or several_values_agree(outputs, places):
        return _inconclusive(
            evidence,
            f"{work} repeats on no device ({len(values)} values from ranks {_listed(sorted(outputs))}): the work "
            "itself does not repeat; torch.use_deterministic_algorithms(True) may help; nobody is blamed",
        )

    nodes = {place.node for place in places if place.rank in outputs}
    if len(nodes) <= 2:
        found = _no_third_node(evidence, outputs, places)
        if found is not None:
            return found
    told = "".join(f"; {failure}" for failure in failures)
    return _inconclusive(
        evidence,
        f"no two places agree on {work}: {len(values)} values from ranks {_listed(sorted(outputs))}{told}; "
        "nobody is blamed",
    )


def _no_third_node(
    evidence: AuditEvidence, outputs: dict[int, list[str]], places: Sequence[Place]
) -> _Error | Verdict | None:
    """At most two nodes could be asked: the device that disagrees with itself, else both sides, unblamed."""
    host_known = not one_node(outputs, places)
    third = "third node" if host_known else "third device"
    unsteady = [rank for rank, made in outputs.items() if len(set(made)) > 1]
    steady = [rank for rank, made in outputs.items() if len(made) >= 2 and len(set(made)) == 1]
    if len(unsteady) == 1 and steady:
        rank = unsteady[0]
        right = outputs[steady[0]][0]
        return _Error(
            rank=rank,
            wrong=sum(value != right for value in outputs[rank]),
            made=len(outputs[rank]),
            against=f"the value that rank {steady[0]} repeats, and from one another (no {third} settles it)",
            host_known=host_known,
            evidence=evidence,
        )
    if len({value for made in outputs.values() for value in made}) != 2:
        return None
    pair = [next(place for place in places if place.rank == rank) for rank in (evidence.auditee, evidence.auditor)]
    return _inconclusive(
        evidence,
        f"{_named(pair[0], host_known)} and {_named(pair[1], host_known)} differ on the work of rank "
        f"{evidence.auditee}, each repeats its own value and no {third} could tell which one is right: "
        f"one of the two is wrong{_first_of(evidence.tensors)}",
        suspects=tuple(
            Suspect(rank=place.rank, node=place.node if host_known else None, device=place.device) for place in pair
        ),
    )


def _right_but_bad(evidence: AuditEvidence, places: Sequence[Place]) -> Verdict:
    """R is the agreed value, and bad anyway: code, data or state, not a device."""
    outputs = outputs_by_rank(evidence, places)
    agreeing = [rank for rank in outputs if rank != evidence.auditee and recorded_value(evidence) in outputs[rank]]
    if agreeing:
        how = f"{_ranks(sorted(agreeing))} got the same bits from the same batch"
    else:
        how = "its own replay gave the same bits (it has no partner to ask)"
    return Verdict(
        kind=Kind.SOFTWARE,
        site=Site.GRADIENT,
        step=evidence.step,
        reason=f"{evidence.alarm}: it came from the work of rank {evidence.auditee}, and {how}; "
        "so it is the batch, the code or the state, and no device is blamed",
        check="audit",
        suspects=(Suspect(rank=evidence.auditee, path="batch"),),
        tensors=evidence.tensors,
    )


def _bad_wherever_it_runs(evidence: AuditEvidence, places: Sequence[Place]) -> bool:
    """Whether the live value and all replays are NaN or Inf, on more than one node: no device makes that alone."""
    node_of = {place.rank: place.node for place in places}
    ran = [execution for execution in evidence.executions if execution.digest is not None]
    nodes = {node_of[execution.rank] for execution in ran}
    return bool(evidence.alarm) and len(nodes) >= 2 and not any(execution.finite for execution in ran)


def _unsteady_but_bad(evidence: AuditEvidence, ranks: Sequence[int]) -> Verdict:
    return Verdict(
        kind=Kind.SOFTWARE,
        site=Site.GRADIENT,
        step=evidence.step,
        reason=f"{evidence.alarm}: it came from the work of rank {evidence.auditee}, and {_ranks(ranks)} got NaN or Inf "
        "from the same batch each time, though the work does not repeat bit by bit "
        "(torch.use_deterministic_algorithms(True) may help); so it is the batch, the code or the state, and no device "
        "is blamed",
        check="audit",
        suspects=(Suspect(rank=evidence.auditee, path="batch"),),
        tensors=evidence.tensors,
    )


def _outside_state(evidence: AuditEvidence) -> Verdict:
    if evidence.outside_state:
        why = (
            f"a forward has written {evidence.outside_state!r} outside of the capture, so the work of rank "
            f"{evidence.auditee} cannot be replayed faithfully"
        )
    else:
        why = (
            f"the forward changes the attribute {evidence.attribute!r}, of which each rank has its own, and that may be why "
            f"executions of the work of rank {evidence.auditee} differ"
        )
    return _inconclusive(evidence, f"{why}; nobody is blamed")


def _outside_the_replay(evidences: Sequence[AuditEvidence]) -> Verdict:
    """On most ranks at once the live value is not what replays agree on: a common cause."""
    ranks = sorted({evidence.auditee for evidence in evidences})
    tensors = tuple(dict.fromkeys(name for evidence in evidences for name in evidence.tensors))
    return Verdict(
        kind=Kind.SOFTWARE,
        site=Site.GRADIENT,
        step=evidences[0].step,
        reason=f"on ranks {_listed(ranks)} the live value differs from the rank's own and its neighbour's replays, "
        "which agree: something outside the replay changes gradients (a hook, or code after backward), or the ranks "
        f"are not synchronised; no device is blamed{_first_of(tensors)}",
        check="audit",
        tensors=tensors,
    )


def _unlike_the_block(evidences: Sequence[AuditEvidence]) -> Verdict:
    """The loop's own code and ``loss_fn`` are two different computations, or something outside of them changes gradients."""
    ranks = sorted({evidence.auditee for evidence in evidences})
    tensors = tuple(dict.fromkeys(name for evidence in evidences for name in evidence.tensors))
    return _inconclusive(
        replace(evidences[0], tensors=tensors),
        f"on {_ranks(ranks)} the block of guard.watch has left other gradients than every rerun of loss_fn(model, batch): "
        "the two must compute the same, from the same batch, with the same divide_by and nothing random before it; "
        f"nobody is blamed{_first_of(tensors)}",
    )


def _inconclusive(evidence: AuditEvidence, reason: str, suspects: tuple[Suspect, ...] = ()) -> Verdict:
    return Verdict(
        kind=Kind.INCONCLUSIVE,
        site=Site.GRADIENT,
        step=evidence.step,
        reason=reason,
        check="audit",
        suspects=suspects,
        tensors=evidence.tensors,
    )


def _merge_alike(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """SOFTWARE findings of several audits become one; so do INCONCLUSIVE ones about the same pair, or about nobody."""
    groups: dict[object, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.kind is Kind.SOFTWARE:
            key: object = (verdict.kind, bool(verdict.suspects))
        else:
            key = (verdict.kind, frozenset(suspect.rank for suspect in verdict.suspects))
        groups.setdefault(key, []).append(verdict)
    merged: list[Verdict] = []
    for alike_ones in groups.values():
        first = alike_ones[0]
        reasons = list(dict.fromkeys(verdict.reason for verdict in alike_ones))
        merged.append(
            replace(
                first,
                reason=first.reason if len(reasons) == 1 else " | ".join(reasons[:3]) + _more(len(reasons) - 3),
                suspects=tuple(dict.fromkeys(suspect for verdict in alike_ones for suspect in verdict.suspects)),
                tensors=tuple(dict.fromkeys(name for verdict in alike_ones for name in verdict.tensors)),
            )
        )
    return merged


# ---- votes and counters ----------------------------------------------------------------------------------------------


def judge_votes(
    votes: Sequence[VoteEvidence],
    places: Sequence[Place],
    *,
    unlike_is_known: bool = False,
    nothing_done_yet: bool = False,
) -> tuple[Verdict, ...]:
    """The verdicts of all votes of one step, the most severe first; tensors with the same outcome share one.

    ``digests[i]`` belongs to ``places[i]``. Pass the clean votes too: whether *all* tensors differ is part of the
    judgement. A strict majority names the ranks outside it; without one nobody is blamed.

    An update need not give the same bits in unlike environments. State is therefore compared among ranks of like
    environment; what differs between environments only is INCONCLUSIVE, or nothing when ``unlike_is_known``.

    ``nothing_done_yet``: no update has been made since the start. Where half of the weights and more have no majority then,
    no device has erred: the copies were made with seeds of their own, or loaded from different files.
    """
    told = () if unlike_is_known else _unlike([v for v in votes if differs_by_environment(v, places)])
    votes = [_within_environments(vote, places) for vote in votes]
    # Any two ranks differ on everything they hold: these were never the same model.
    if len(votes) >= 2 and all(
        len(set(vote.digests)) == len(places) > 1 and None not in vote.digests for vote in votes
    ):
        return (_not_synchronised(votes, everything=True),)

    weights = [vote for vote in votes if vote.site is Site.WEIGHTS]
    apart = [vote for vote in weights if _outcome(vote.digests)[0] in ("tie", "all differ")]
    if nothing_done_yet and len(apart) >= 2 and 2 * len(apart) >= len(weights):
        return (_not_synchronised(apart, everything=False),)

    outcomes: dict[tuple[Site, str, tuple[int, ...]], list[VoteEvidence]] = {}
    for vote in votes:
        if len(vote.digests) != len(places):
            raise ValueError(f"{vote.tensor}: {len(vote.digests)} digests for {len(places)} places")
        outcome, odd = _outcome(vote.digests)
        if outcome != "clean":
            outcomes.setdefault((vote.site, outcome, odd), []).append(vote)

    verdicts: list[Verdict] = []
    for (_, outcome, odd), group in outcomes.items():
        if outcome == "absent":
            verdicts.append(_absent(group, odd, places))
        elif outcome == "minority":
            verdicts.append(_minority(group, odd, places))
        elif outcome == "all differ" and len(places) >= 3:
            verdicts.append(_not_synchronised(group, everything=False))
        else:
            verdicts.append(_no_majority(group))
    return tuple(sorted((*verdicts, *told), key=lambda verdict: _SEVERITY.index(verdict.kind)))


def differs_by_environment(vote: VoteEvidence, places: Sequence[Place]) -> bool:
    """Whether ranks of like environment hold the same, and only ranks of unlike ones differ."""
    return len(set(vote.digests)) > 1 and len(set(_within_environments(vote, places).digests)) == 1


def _within_environments(vote: VoteEvidence, places: Sequence[Place]) -> VoteEvidence:
    """The vote with what the most ranks of each environment hold made equal over the environments."""
    if vote.site not in STATE_SITES or None in vote.digests:
        return vote
    classes: dict[str, list[str | None]] = {}
    for place, digest in zip(places, vote.digests, strict=False):
        classes.setdefault(place.environment, []).append(digest)
    if len(classes) < 2:
        return vote
    usual: dict[str, str | None] = {}
    for environment, digests in classes.items():
        value, count = Counter(digests).most_common(1)[0]
        if 2 * count <= len(digests):
            return vote
        usual[environment] = value
    alike_ones = tuple(
        "usual" if digest == usual[place.environment] else digest
        for place, digest in zip(places, vote.digests, strict=False)
    )
    return replace(vote, digests=alike_ones)


def _unlike(votes: Sequence[VoteEvidence]) -> tuple[Verdict, ...]:
    if not votes:
        return ()
    tensors = tuple(vote.tensor for vote in votes)
    return (
        Verdict(
            kind=Kind.INCONCLUSIVE,
            site=votes[0].site,
            step=votes[0].step,
            reason=f"{_listed(tensors)} differ between ranks of unlike environments (libraries, CPU or GPU type, thread "
            "count), where an update need not give the same bits, so the replicas drift apart; from now on only ranks "
            "of like environment are compared; nobody is blamed",
            check="replicas",
            tensors=tensors,
        ),
    )


def _outcome(digests: Sequence[str | None]) -> tuple[str, tuple[int, ...]]:
    """How a vote ended, and the indices of the odd ones."""
    counts = Counter(digests)
    if len(counts) <= 1:
        return "clean", ()
    if None in counts:
        return "absent", tuple(index for index, digest in enumerate(digests) if digest is None)
    winner, count = counts.most_common(1)[0]
    if 2 * count > len(digests):
        return "minority", tuple(index for index, digest in enumerate(digests) if digest != winner)
    return ("all differ" if count == 1 else "tie"), ()


def _absent(votes: Sequence[VoteEvidence], lacking: Sequence[int], places: Sequence[Place]) -> Verdict:
    """Some ranks lack the tensor: a matter of code. The smaller side is pointed at, without a device."""
    site, tensors = votes[0].site, tuple(vote.tensor for vote in votes)
    holding = [index for index in range(len(places)) if index not in lacking]
    what = f"{_site_words(site)} {_listed(tensors)}"
    if len(holding) < len(lacking):
        odd = [places[index].rank for index in holding]
        has, was = ("has", "was it") if len(odd) == 1 else ("have", "were they")
        reason = f"only {_ranks(odd)} {has} {what}: {was} restored there alone?"
    else:
        odd = [places[index].rank for index in lacking]
        lack, was = ("lacks", "was it") if len(odd) == 1 else ("lack", "were they")
        reason = f"{_ranks(odd)} {lack} {what}, which the others have: {was} left out when the state was restored?"
        if len(holding) == len(lacking):
            holders = [places[index].rank for index in holding]
            reason = f"{_ranks(holders)} have {what} and {_ranks(odd)} do not: was the state restored on a part only?"
            odd = []
    return Verdict(
        kind=Kind.SOFTWARE,
        site=site,
        step=votes[0].step,
        reason=reason,
        check="replicas",
        suspects=tuple(Suspect(rank=rank, path=tensors[0]) for rank in odd),
        tensors=tensors,
    )


def _minority(votes: Sequence[VoteEvidence], odd: Sequence[int], places: Sequence[Place]) -> Verdict:
    site, tensors = votes[0].site, tuple(vote.tensor for vote in votes)
    culprits = [places[index] for index in odd]
    differ = "differs" if len(culprits) == 1 else "differ"
    named = _listed([_named(place, True) for place in culprits])
    return Verdict(
        kind=Kind.TRANSIENT,
        site=site,
        step=votes[0].step,
        reason=f"{_site_words(site)}: {named} {differ} from the other {len(places) - len(odd)} of {len(places)} "
        f"ranks, which are equal, in {_listed(tensors)}",
        check="replicas",
        suspects=tuple(Suspect(rank=place.rank, node=place.node, device=place.device) for place in culprits),
        tensors=tensors,
    )


def _not_synchronised(votes: Sequence[VoteEvidence], *, everything: bool) -> Verdict:
    tensors = tuple(vote.tensor for vote in votes)
    extent = "in everything compared" if everything else "here"
    return Verdict(
        kind=Kind.SOFTWARE,
        site=votes[0].site,
        step=votes[0].step,
        reason=f"not synchronised: {_listed(tensors)}: every rank holds something else {extent}; no device is blamed",
        check="replicas",
        tensors=tensors,
    )


def _no_majority(votes: Sequence[VoteEvidence]) -> Verdict:
    site, tensors = votes[0].site, tuple(vote.tensor for vote in votes)
    world = len(votes[0].digests)
    why = "two ranks cannot outvote each other" if world == 2 else "no value has a strict majority"
    return Verdict(
        kind=Kind.INCONCLUSIVE,
        site=site,
        step=votes[0].step,
        reason=f"{_site_words(site)} differ between ranks in {_listed(tensors)}, and {why}; nobody is blamed",
        check="replicas",
        tensors=tensors,
    )


def judge_counters(counters: Sequence[CounterEvidence]) -> Verdict | None:
    """SOFTWARE when a counter, a learning rate or the loss scaler's scale is not the same on all ranks."""
    differing = [counter for counter in counters if len(set(counter.values)) > 1]
    if not differing:
        return None
    told: list[str] = []
    for counter in differing:
        name = "loss scaler's scale" if counter.name == "scaler scale" else counter.name
        values = [f"rank {rank} {value}" for rank, value in enumerate(counter.values)]
        told.append(f"the {name} differs between ranks: {_listed(values)}")
    return Verdict(
        kind=Kind.SOFTWARE,
        site=Site.OPTIMIZER,
        step=differing[0].step,
        reason=f"{'; '.join(told)}; no device is blamed",
        check="replicas",
        tensors=tuple(counter.name for counter in differing),
    )


# ---- non-finite and unreduced gradients ------------------------------------------------------------------------------


def judge_finite(
    evidence: FiniteEvidence,
    *,
    streak_limit: int,
    lone_limit: int,
    places: Sequence[Place] = (),
    replicated: bool = True,
) -> FiniteFinding | None:
    """What NaN or Inf in gradients means; None when there is none.

    ``places`` only lends names of nodes and devices. ``replicated`` is False where reduced gradients are shards: then
    a rank that alone sees a bad value may merely own it, and nobody is named.
    """
    everyone = evidence.world_size
    if not evidence.local and not evidence.reduced:
        return None
    backing_off = evidence.scaler and evidence.streak < streak_limit

    if evidence.local:
        overflow = f"{_ranks(evidence.local)} saw NaN or Inf in local gradients{_first_of(evidence.tensors)}"
        if evidence.scaler and len(evidence.local) == everyone:
            if backing_off:
                return FiniteFinding(reason="all ranks overflow: the loss scaler backs off, which is its normal search")
            return _streak_exceeded(evidence, streak_limit)
        quiet = backing_off and evidence.lone_streak < lone_limit
        return FiniteFinding(
            reason=f"{overflow}: an audit tells hardware from data", audit=evidence.local, quiet_if_reproduced=quiet
        )

    everybody_skips = len(evidence.reduced) == everyone or not replicated  # of shards only the owner sees it
    if everybody_skips and evidence.scaler and not evidence.averaged:
        if backing_off:
            return FiniteFinding(
                reason="the sum over ranks overflows where each rank is finite: the loss scaler backs off"
            )
        return _streak_exceeded(evidence, streak_limit)
    verdict = _made_by_reduction(evidence, places, replicated)
    return FiniteFinding(reason=verdict.reason, verdict=verdict)


def _streak_exceeded(evidence: FiniteEvidence, streak_limit: int) -> FiniteFinding:
    verdict = Verdict(
        kind=Kind.SOFTWARE,
        site=Site.GRADIENT,
        step=evidence.step,
        reason=f"all ranks overflow, and the loss scaler had to back off {evidence.streak} steps in a row (limit "
        f"{streak_limit}): no scale helps, so it is the data, the code or the weights; no device is blamed",
        check="finite",
        tensors=evidence.tensors,
    )
    return FiniteFinding(reason=verdict.reason, verdict=verdict)


def _made_by_reduction(evidence: FiniteEvidence, places: Sequence[Place], replicated: bool) -> Verdict:
    """Every local gradient was finite and a reduced one is not."""
    seen, world = evidence.reduced, evidence.world_size
    place_of = {place.rank: place for place in places}
    suspects: tuple[Suspect, ...] = ()
    if replicated and world >= 3 and 2 * len(seen) < world:
        found = [(rank, place_of.get(rank)) for rank in seen]
        suspects = tuple(
            Suspect(rank=rank) if place is None else Suspect(rank=rank, node=place.node, device=place.device)
            for rank, place in found
        )
        names = [f"rank {rank}" if place is None else _named(place, True) for rank, place in found]
        who = f"only {_listed(names)} of {world} ranks sees it" if len(names) == 1 else f"only {_listed(names)} see it"
    elif len(seen) == world:
        who = "all ranks see it, so nobody can be named"
    else:
        who = f"{_ranks(seen)} of {world} see it, which names nobody"
    return Verdict(
        kind=Kind.TRANSIENT,
        site=Site.REDUCTION,
        step=evidence.step,
        reason=f"every local gradient was finite and a reduced one is NaN or Inf: the reduction made it; "
        f"{who}{_first_of(evidence.tensors)}",
        check="finite",
        suspects=suspects,
        tensors=evidence.tensors,
    )


def judge_unreduced(evidence: UnreducedEvidence) -> Verdict:
    """Parameters whose gradients no reduction has touched: always SOFTWARE."""
    return Verdict(
        kind=Kind.SOFTWARE,
        site=Site.REDUCTION,
        step=evidence.step,
        reason=f"gradients were not reduced: {_listed(evidence.tensors)} (seen on {_ranks(evidence.ranks)}); parameters "
        "that a forward does not use (find_unused_parameters) or that were added after wrapping do this; "
        "no device is blamed",
        check="unreduced",
        tensors=evidence.tensors,
    )


# ---- words -----------------------------------------------------------------------------------------------------------


def _named(place: Place, host_known: bool) -> str:
    where = f"node {place.node}, device {place.device}" if host_known else f"device {place.device}"
    return f"rank {place.rank} ({where})"


def _whose_work(evidence: AuditEvidence, rank: int) -> str:
    return "its own work" if evidence.auditee == rank else f"the work of rank {evidence.auditee}"


def _site_words(site: Site) -> str:
    return "optimizer state" if site is Site.OPTIMIZER_STATE else site.value


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_listed(ranks)}"


def _listed(items: Sequence[object]) -> str:
    """The first few, separated by commas."""
    return ", ".join(str(item) for item in items[:_SHOWN]) + _more(len(items) - _SHOWN)


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def _first_of(tensors: Sequence[str]) -> str:
    return f" (first: {tensors[0]})" if tensors else ""
