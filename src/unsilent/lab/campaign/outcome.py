"""What a trial is counted as. Pure: what was put in, what the guard said and what the weights became are arguments.

The classes, in the order in which they are asked for:

    hang              a rank did not answer, so that the pool of ranks had to be replaced.
    ended by an error a rank raised something that no check raises: loud, but nothing that the guard found. Also a trial
                      without a fault and without a verdict that did not end with the twin's weights.
    false alarm       a verdict before the fault first fired, or in a trial without one.
    never fired       the fault changed no bit in this trial (a small probability, a bit that was set already); says nothing
                      of any check.
    wrong device      a verdict names healthy devices only, or a healthy device is taken out.
    repaired          caught, and the run ended with the twin's weights, bit for bit.
    stopped           caught, and the run was stopped, naming the device; of a wrong sum of a reduction, nobody.
    needless          caught and stopped without taking the device out, though the fault touched no value of the run.
    unnamed           caught and stopped, but no device was named although one is faulty.
    not bit-exact     caught, went on, and ended with other weights than the twin.
    masked            no verdict, and the weights were the twin's after every step.
    missed harmful    no verdict, and the update in which the fault was felt deviated by more than ``HARMFUL``; or, of a
                      fault that lasts, the evaluation loss ended above its limit.
    missed small      no verdict, and neither.

A verdict that names several devices, the faulty one among them, is no wrong device unless a healthy one is taken out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from unsilent.lab.rates import HARMFUL
from unsilent.records import Action


class Class(str, Enum):
    """See the module's text."""

    REPAIRED = "repaired bit-exactly"
    STOPPED = "caught, run stopped rightly"
    NEEDLESS = "caught, sound run stopped"
    UNNAMED = "caught, run stopped, no device named"
    INEXACT = "caught, not bit-exact"
    WRONG_DEVICE = "caught, wrong device named"
    MASKED = "masked (weights identical)"
    MISSED_SMALL = "missed small"
    MISSED_HARMFUL = "missed harmful"
    CLEAN = "clean, no alarm"
    FALSE_ALARM = "false alarm"
    HANG = "hang"
    ERROR = "ended by an error"
    NEVER_FIRED = "fault never fired"


CAUGHT = (Class.REPAIRED, Class.STOPPED, Class.NEEDLESS, Class.UNNAMED, Class.INEXACT, Class.WRONG_DEVICE)
MISSED = (Class.MISSED_SMALL, Class.MISSED_HARMFUL)


class Named(str, Enum):
    """Whom the verdicts of a trial name, against who is faulty."""

    RIGHT = "the faulty device"
    AMONG = "several, the faulty device among them"
    WRONG = "healthy devices only"
    NOBODY = "nobody"


@dataclass(frozen=True, kw_only=True)
class Said:
    """One verdict of a trial: the ranks that it names, and what was done about it."""

    step: int
    kind: str
    site: str
    check: str
    action: str
    ranks: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A trial from outside, all ranks together.

    Attributes:
        fault: whether there was one; ``faulty`` are the ranks whose device it is on, none of a sum that is wrong on
            all alike.
        computed: whether the fault is in what one rank computes in the live run.
        sound: whether the fault can touch no value of the run, but only what is said of it.
        lasting: whether the fault fires in more than one step.
        fired: the steps in which it changed a bit, in the live run or in a replay.
        felt: of the updates in which it was felt first-hand, the largest deviation from the twin's, on any rank. Of later
            steps of a lasting fault, what earlier ones set off is part of it.
        after_update: whether it fires in or after the update of its step, so that no verdict of that step is about it.
        ended: ``finished``, ``stopped`` (by a verdict), ``error`` or ``hang``; ``end`` says more.
        identical, identical_at_end: whether the weights of all ranks were the twin's, after every step and at the end.
        loss, loss_limit: evaluation loss at the end, of the worst rank; the twin's and two standard deviations of
            reseeded runs.
        ran: of ``audit`` and ``replicas``, the steps in which they were due.
        off: checks that switched themselves off or compared less, in the guard's words.
        seconds: of wall time.
    """

    fault: bool
    faulty: tuple[int, ...]
    computed: bool
    sound: bool
    lasting: bool
    fired: tuple[int, ...]
    felt: float
    after_update: bool
    said: tuple[Said, ...]
    ended: str
    end: str
    identical: bool
    identical_at_end: bool
    loss: float | None
    loss_limit: float
    ran: Mapping[str, Sequence[int]]
    off: tuple[str, ...]
    steps: int
    seconds: float


def classify(trial: Observed) -> Class:
    """What the trial is counted as."""
    if trial.ended in ("hang", "error"):
        return Class.HANG if trial.ended == "hang" else Class.ERROR
    if any(too_early(trial, verdict) for verdict in trial.said):
        return Class.FALSE_ALARM
    if not trial.fault:
        return Class.CLEAN if trial.identical else Class.ERROR
    if not trial.fired:
        return Class.NEVER_FIRED
    return _caught(trial) if trial.said else _missed(trial)


def named(trial: Observed) -> Named:
    """Whom the verdicts name: of all that name anybody, the worst."""
    judged = {_judged(verdict, trial.faulty) for verdict in trial.said}
    return next(one for one in (Named.WRONG, Named.AMONG, Named.RIGHT, Named.NOBODY) if one in {*judged, Named.NOBODY})


def steps_to_detection(trial: Observed) -> int | None:
    """Steps from the first firing to the first verdict after it; 0 within the same step, None where there is none."""
    if not trial.fired:
        return None
    return min((v.step - trial.fired[0] for v in trial.said if not too_early(trial, v)), default=None)


def too_early(trial: Observed, verdict: Said) -> bool:
    """Whether the verdict came before there was anything to find."""
    return not trial.fired or verdict.step < trial.fired[0] + trial.after_update


def why_missed(trial: Observed) -> str:
    """For a missed fault: whether the check that looks at such faults had a turn when it fired."""
    if not trial.faulty:
        return "all ranks got the same wrong sum, and no check compares a sum with its parts"
    if trial.after_update:
        return "the votes after it, the last of them at the end of the run, saw nothing"
    if not trial.computed:
        vote = bool(set(trial.fired) & set(trial.ran["replicas"]))
        return "a vote ran in that step and saw nothing" if vote else "no vote ran in that step"
    if set(trial.fired) & set(trial.ran["audit"]):
        return "it fired in an audited step, and the audit saw nothing"
    return "it fired in no audited step, and what votes compare was alike on all ranks"


def _caught(trial: Observed) -> Class:
    who = named(trial)
    taken_out = {rank for v in trial.said if v.action == Action.QUARANTINE.value for rank in v.ranks}
    if who is Named.WRONG or taken_out - set(trial.faulty):
        return Class.WRONG_DEVICE
    if trial.ended == "stopped":
        if trial.sound and not taken_out:
            return Class.NEEDLESS
        return Class.UNNAMED if who is Named.NOBODY and trial.faulty else Class.STOPPED
    return Class.REPAIRED if trial.identical_at_end else Class.INEXACT


def _missed(trial: Observed) -> Class:
    if trial.identical:
        return Class.MASKED
    sustained = trial.lasting and trial.loss is not None and trial.loss > trial.loss_limit
    return Class.MISSED_HARMFUL if trial.felt > HARMFUL or sustained else Class.MISSED_SMALL


def _judged(verdict: Said, faulty: Sequence[int]) -> Named:
    if not verdict.ranks:
        return Named.NOBODY
    if not set(verdict.ranks) & set(faulty):
        return Named.WRONG
    return Named.RIGHT if set(verdict.ranks) <= set(faulty) else Named.AMONG
