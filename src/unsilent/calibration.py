"""Whether a model's work repeats bit for bit, and with which kernels; until that has been shown no bits are compared.

What calibration tries goes from the fastest to the last resort. It compares the recorded run with two own replays and the
neighbour's; where they differ the next rung is tried in the next step.
"""

from __future__ import annotations

from torch import nn

from unsilent.checks.audit import Audit, Strength
from unsilent.determinism import Kernels
from unsilent.journal import Journal
from unsilent.records import Verdict

#: What calibration tries, best first; each needs the work to repeat, and the last compares nothing.
_LADDER = (
    (Kernels.DETERMINISTIC, Strength.BITWISE),
    (Kernels.MATH_ATTENTION, Strength.BITWISE),
    (Kernels.DETERMINISTIC, Strength.LOSS_ONLY),
    (Kernels.DEFAULT, Strength.OFF),
)


class Calibration:
    """Every method is called by all ranks, with the same arguments.

    Args:
        audit: what it calibrates; its strength is set here.
    """

    def __init__(self, inner: nn.Module, audit: Audit, journal: Journal) -> None:
        self._inner, self._audit, self._journal = inner, audit, journal
        self._rung = 0  # of _LADDER
        self._in = 1  # steps until the next one: after the first update, when the optimizer's memory exists

    @property
    def kernels(self) -> Kernels:
        """What an audited step runs with."""
        return _LADDER[self._rung][0]

    @property
    def due(self) -> bool:
        """Whether this step calibrates."""
        return self._in == 0

    @property
    def done(self) -> bool:
        """Whether it is known how far this work repeats."""
        return self._in < 0

    def begin_anew(self) -> None:
        """Another state was loaded: calibrate again after the next update."""
        self._in = 1

    def updated(self) -> None:
        """A step is over."""
        if self._in > 0:
            self._in -= 1

    def settle(self, step: int) -> None:
        """The step that calibrated has been compared, and no other rung was asked for."""
        self._in = -1
        kernels, strength = _LADDER[self._rung]
        self._journal.write("calibration", step, check="audit", strength=strength.value, kernels=kernels.value)
        self._journal.say(f"calibration at step {step}: audits compare {strength.value}, {kernels.value} kernels")
        if self._audit.attribute:
            text = (
                f"{self._audit.attribute} is changed by the forward and lies outside of buffers, so an audit names a device that "
                "errs once, but not one that keeps erring: keep it in a buffer, or outside of the model"
            )
            self._journal.write("notice", step, text=text)
            self._journal.say(text)

    def degrade(self, verdict: Verdict, step: int) -> None:
        """Nothing repeats: take the next rung, and calibrate again in the next step."""
        if self._rung == len(_LADDER) - 1:
            return
        self._rung += 1
        if self.kernels is Kernels.MATH_ATTENTION and not _uses_attention(self._inner):
            self._rung += 1
        if _LADDER[self._rung][1] is Strength.LOSS_ONLY and not self._audit.compares_losses:
            self._rung += 1
        kernels, strength = _LADDER[self._rung]
        self._audit.strength = strength
        self._in = 1 if strength is not Strength.OFF else -1
        self._tell(f"the audit compares from now on: {strength.value}, {kernels.value} kernels; {verdict.reason}", step)

    def give_up(self, reason: str, step: int) -> None:
        """Audits go off for good."""
        self._rung = len(_LADDER) - 1
        self._audit.strength = Strength.OFF
        self._in = -1
        self._tell(f"audits are off: {reason}", step)

    def _tell(self, text: str, step: int) -> None:
        self._journal.write("check_degraded", step, check="audit", strength=self._audit.strength.value, reason=text)
        self._journal.say(text)


def _uses_attention(model: nn.Module) -> bool:
    """Whether another attention kernel could make a difference; a model may always hide one in plain code."""
    return any("attention" in type(m).__name__.lower() or "attn" in type(m).__name__.lower() for m in model.modules())
