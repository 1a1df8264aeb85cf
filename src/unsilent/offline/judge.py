"""What a rerun after the fact says. Pure: what was recorded and what came out are arguments, and every answer has its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from unsilent.errors import EXIT_INCONCLUSIVE, EXIT_INTEGRITY_LOST, EXIT_OK
from unsilent.offline.prints import Difference


class Outcome(str, Enum):
    """How the value came out. ``AS_REPLAYED`` is the value that the replays of the run agreed on."""

    AS_REPLAYED = "as replayed"
    AS_RECORDED = "as recorded"
    OTHERWISE = "otherwise"
    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "cannot be told"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An outcome, the exit code that goes with it, and the reason in words."""

    outcome: Outcome
    exit_code: int
    reason: str


def judge_finding(
    executions: Sequence[Mapping[str, Any]], agreed: str | None, reruns: Sequence[str], *, unlike: Sequence[str]
) -> Answer:
    """What the reruns of a finding's work say.

    Args:
        executions: those of the run, each with ``rank``, ``recorded`` and ``digest``, the live one first.
        agreed: the digest that was taken for the right one, None when nobody could tell.
        reruns: the digests that came out here.
        unlike: in what this environment differs from the run's, in words.
    """
    if len(set(reruns)) > 1:
        expected = " although devices of the run repeated it" if agreed is not None else ""
        return _unknown(
            f"the work does not repeat here{expected}: {len(reruns)} reruns gave {len(set(reruns))} values{_but(unlike)}"
        )
    value = reruns[0]
    recorded = next((e["digest"] for e in executions if e["recorded"]), None)
    others = sorted({e["rank"] for e in executions if e["digest"] == value and not e["recorded"]})
    if value == agreed:
        if value == recorded:
            wrong = sorted({e["rank"] for e in executions if e["digest"] not in (agreed, None)})
            ranks = ", ".join(map(str, wrong))
            whose = f"rank {ranks} gave a wrong one" if wrong else "what is wrong with it is in the code or the data"
            return Answer(
                outcome=Outcome.AS_RECORDED,
                exit_code=EXIT_OK,
                reason=f"the recorded value comes out again, and it is the one that the run agreed on: {whose}",
            )
        return Answer(
            outcome=Outcome.AS_REPLAYED,
            exit_code=EXIT_OK,
            reason="the recorded value does not come out again: this machine gives the value that the replays agreed on",
        )
    if value == recorded:
        if agreed is None:
            return Answer(
                outcome=Outcome.AS_RECORDED,
                exit_code=EXIT_INCONCLUSIVE,
                reason="the recorded value comes out again, and the run itself could not tell the right one",
            )
        return Answer(
            outcome=Outcome.AS_RECORDED,
            exit_code=EXIT_INTEGRITY_LOST,
            reason="the recorded value comes out again, and it is not the one that the replays agreed on: this machine is "
            "the faulty one, or makes the same error",
        )
    if others:
        ranks = ", ".join(str(rank) for rank in others)
        if agreed is not None:
            return Answer(
                outcome=Outcome.OTHERWISE,
                exit_code=EXIT_INTEGRITY_LOST,
                reason=f"the value comes out that rank {ranks} gave alone, against all others: this machine is the faulty "
                "one, or makes the same error",
            )
        return Answer(
            outcome=Outcome.AS_REPLAYED,
            exit_code=EXIT_INCONCLUSIVE,
            reason=f"the value of rank {ranks}'s replay comes out; the run itself could not tell the right one",
        )
    return Answer(
        outcome=Outcome.OTHERWISE,
        exit_code=EXIT_INCONCLUSIVE,
        reason=f"a value comes out here, twice, that no execution of the run gave{_but(unlike)}",
    )


def judge_stretch(
    first: Difference | None,
    second: Difference | None,
    *,
    reruns_differ: Difference | None,
    found: Sequence[str],
    unlike: Sequence[str],
    unsteady: str,
) -> Answer:
    """What the reruns of a stretch say.

    Args:
        first: where the first rerun differs from the run's log, None where it nowhere does.
        second: the same of the second rerun, which is made only when the first one differs.
        reruns_differ: where the two reruns differ from one another.
        found: what the checks have found in the reruns.
        unlike: in what this environment differs from the run's, in words.
        unsteady: why the run's work may not repeat, "" where calibration found that it does.
    """
    if found:
        return _unknown(f"the rerun itself was not clean, so nothing can be said of the run: {found[0]}")
    if first is None:
        return Answer(
            outcome=Outcome.SAME,
            exit_code=EXIT_OK,
            reason="this stretch comes out the same here: its values were not a fault of the machine, unless it is this one "
            "and it repeats its error exactly; look at data and code",
        )
    if reruns_differ is not None:
        again = "the second gave the run's values" if second is None else "they differ from the run and from each other"
        return _unknown(
            f"two reruns do not agree with each other ({again}; first in {reruns_differ}): the work does not repeat here, so "
            "no machine can be blamed for a difference"
        )
    if unlike:
        return _unknown(
            f"it comes out differently, first in {first}, and twice alike; but this environment is not the run's: "
            f"{', '.join(unlike)}"
        )
    if unsteady:
        return _unknown(f"it comes out differently, first in {first}, and twice alike; but {unsteady}")
    return Answer(
        outcome=Outcome.DIFFERENT,
        exit_code=EXIT_INTEGRITY_LOST,
        reason=f"it comes out differently, first in {first}; two reruns agree with each other, so the values of the run "
        "were wrong there: what it has trained since rests on them",
    )


def _unknown(reason: str) -> Answer:
    return Answer(outcome=Outcome.UNKNOWN, exit_code=EXIT_INCONCLUSIVE, reason=reason)


def _but(unlike: Sequence[str]) -> str:
    if not unlike:
        return ", in an environment like the run's"
    return f"; but this environment is not the run's: {', '.join(unlike)}"
