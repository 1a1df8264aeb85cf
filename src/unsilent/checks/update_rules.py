"""Rules that ask of one rank's step: is this update like those before it? Pure: numbers per tensor in, no torch.

One knob for all: *sensitivity*, larger alarms sooner. A rule answers with the lowest sensitivity at which it would have
alarmed, so that one run tells what every setting would have done; the alarm is that this lies at or below the one chosen.

========  ==============================================================  ==============================================
rule      alarms when                                                     what the sensitivity s is to it
========  ==============================================================  ==============================================
robust    a tensor's gradient leaves what its own last 50 steps and the   the share of clean steps of the whole job that
          other tensors of this step suggest by k of its usual            may alarm; k follows from it and from the number
          deviations                                                      of ranks
harmful   |R_t - R_(t-1)| > mean/(α·√G), R the largest RMS of a           α itself
          tensor's update, G the growth of the gradient's norm
ema       a tensor's update leaves its own moving average by α times it   α = 0.05²/s: there a small α alarms sooner
ema_mean  a tensor's update leaves the moving average of all tensors'     α = 0.05²/s
          mean by α times it and by 3 σ
========  ==============================================================  ==============================================

``harmful`` is a published rule; ``ema`` and ``ema_mean`` are what a text retelling it says and what its sample does.
They are kept for the record and for comparison: see ``docs/results/update.md``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from unsilent.errors import UsageError

Array = npt.NDArray[np.float64]

PRESETS: Mapping[str, float] = {"scarce": 0.002, "default": 0.03, "critical": 0.08, "debug": 0.3}
"""When to use: recomputing is very scarce; always; in critical phases of training; to look for faults only."""

_REFERENCE = 0.05  # the α at which the two directions of the knob meet
_NOTHING = 1e-30  # a gradient of zeros has a logarithm too
_JUMP = 1.25  # a learning rate that changes by more in one step begins a new baseline


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One rank's own step, before any reduction.

    Args:
        gradient: RMS of each tensor's local gradient, fp64[tensors].
        update: RMS of each tensor's update as the optimizer would make it of that gradient alone, fp64[tensors]; empty
            for rules that do not ask for it.
        norm: of the whole local gradient, before clipping.
    """

    gradient: Array
    update: Array
    norm: float

    @property
    def finite(self) -> bool:
        """NaN and Inf are another check's business: such a step is neither judged nor learned from."""
        return bool(np.isfinite(self.gradient).all() and np.isfinite(self.update).all() and math.isfinite(self.norm))


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a rule makes of a step: it alarms at every sensitivity from ``needed`` on; ``tensor`` is the index of the one
    that stands out most, None where the rule has no baseline yet."""

    needed: float = math.inf
    tensor: int | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A step that stands out: the tensor's name, and why."""

    tensor: str
    reason: str


class Rule(Protocol):
    """``look`` changes nothing; ``learn`` takes a step that is known to be right into the baseline.

    ``weights`` are the sensitivities of the tensors relative to the rule's own, so that key layers alarm sooner.
    """

    needs_update: bool

    def look(self, seen: Observation) -> Look: ...
    def learn(self, seen: Observation) -> None: ...
    def reset(self) -> None: ...


class Robust:
    """The largest |x - m - c| over tensors in units of its usual size: x the logarithm of a tensor's gradient, m its own
    median over the last ``WINDOW`` steps, c the median of x - m over all tensors.

    Taking c out removes what all tensors share, such as a hard batch; the unit is each tensor's own median of |x - m - c|
    over the window. No learning rate, loss scale or size of a model enters.
    """

    WINDOW = 50
    FLOOR = 1e-3  # a tensor whose gradient never changes has no usual deviation
    # How often one rank's clean step leaves k deviations: (K/k)^SLOPE. Measured on `tiny`: docs/results/update.md.
    K, SLOPE = 3.46, 4.76

    needs_update = False

    def __init__(self, weights: Array, *, ranks: int) -> None:
        self._weights, self._ranks = weights, ranks
        self.reset()

    def reset(self) -> None:
        self._logs: deque[Array] = deque(maxlen=self.WINDOW)
        self._deviations: deque[Array] = deque(maxlen=self.WINDOW)
        self._baseline: tuple[Array, Array] | None = None

    def look(self, seen: Observation) -> Look:
        if len(self._deviations) < self.WINDOW:
            return Look()
        off = self._off(seen)
        usual = self._usual()[1] + self.FLOOR
        needed = self.sensitivity_of(np.abs(off) / usual) / self._weights
        i = int(needed.argmin())
        times = math.exp(min(700.0, off[i]))
        reason = (
            f"its gradient is {times:.3g} times what its last {self.WINDOW} steps and the other tensors of this step "
            f"suggest, {abs(off[i]) / usual[i]:.1f} of its usual deviations"
        )
        return Look(needed=float(needed[i]), tensor=i, reason=reason)

    def learn(self, seen: Observation) -> None:
        if self._logs:
            self._deviations.append(np.abs(self._off(seen)))
        self._logs.append(np.log(np.maximum(seen.gradient, _NOTHING)))
        self._baseline = None

    def sensitivity_of(self, deviations: Array) -> Array:
        """The share of the job's clean steps that leave so many deviations on some rank."""
        return self._ranks * (self.K / np.maximum(deviations, 1e-9)) ** self.SLOPE

    def _off(self, seen: Observation) -> Array:
        off = np.log(np.maximum(seen.gradient, _NOTHING)) - self._usual()[0]
        return off - np.median(off)

    def _usual(self) -> tuple[Array, Array]:
        """(median of the logarithms, median deviation) of each tensor over the window."""
        if self._baseline is None:
            deviations = np.median(np.stack(self._deviations), axis=0) if self._deviations else np.zeros(0)
            self._baseline = (np.median(np.stack(self._logs), axis=0), deviations)
        return self._baseline


class Harmful:
    """R_t = max RMS(update); J = |R_t - R_(t-1)|; G = max(0, growth of the norm). Alarm if J > mean(J)/(α·√G), from step
    ``FIRST`` of the baseline on, mean(J) over its first ``WARM_UP`` steps. Tensors of like weight share one R."""

    FIRST, WARM_UP = 10, 100

    needs_update = True

    def __init__(self, weights: Array, *, ranks: int) -> None:
        self._groups = [(float(w), np.flatnonzero(weights == w)) for w in np.unique(weights)]
        self.reset()

    def reset(self) -> None:
        self._last: tuple[list[float], float] | None = None
        self._sums = [0.0] * len(self._groups)
        self._count = 0

    def look(self, seen: Observation) -> Look:
        if self._last is None or self._count < self.FIRST:
            return Look()
        best = Look()
        root = math.sqrt(max(0.0, seen.norm - self._last[1]))
        for (weight, members), before, total in zip(self._groups, self._last[0], self._sums, strict=True):
            i = int(members[seen.update[members].argmax()])
            jump, mean = abs(float(seen.update[i]) - before), total / self._count
            if jump * root <= 0.0:
                continue
            needed = mean / (jump * root) / weight
            if needed < best.needed:
                reason = (
                    f"the largest update jumped by {jump:.3g}, {jump / max(mean, _NOTHING):.1f} times the usual jump, "
                    f"while the gradient's norm grew by {root * root:.3g}"
                )
                best = Look(needed=needed, tensor=i, reason=reason)
        return best

    def learn(self, seen: Observation) -> None:
        largest = [float(seen.update[members].max()) for _, members in self._groups]
        if self._last is not None and self._count < self.WARM_UP:
            self._sums = [s + abs(r - b) for s, r, b in zip(self._sums, largest, self._last[0], strict=True)]
            self._count += 1
        self._last = (largest, seen.norm)


class Ema:
    """Each tensor's update against its own moving average (0.9/0.1)."""

    FIRST = 10

    needs_update = True

    def __init__(self, weights: Array, *, ranks: int) -> None:
        self._weights = weights
        self.reset()

    def reset(self) -> None:
        self._average: Array | None = None
        self._count = 0

    def look(self, seen: Observation) -> Look:
        if self._average is None or self._count < self.FIRST:
            return Look()
        off = np.abs(seen.update / np.maximum(self._average, _NOTHING) - 1)
        needed = _turned(off) / self._weights
        i = int(needed.argmin())
        return Look(needed=float(needed[i]), tensor=i, reason=f"its update left its moving average by {off[i]:.1%}")

    def learn(self, seen: Observation) -> None:
        self._average = seen.update if self._average is None else 0.9 * self._average + 0.1 * seen.update
        self._count += 1


class EmaMean:
    """Each tensor's update norm against one moving average over the mean of all, updated before it is compared with; as
    :class:`SDCDetector` has it, 3 σ of the last ``WINDOW`` means included."""

    WINDOW = 100

    needs_update = True

    def __init__(self, weights: Array, *, ranks: int, sizes: Sequence[int] = ()) -> None:
        self._weights = weights
        self._roots = np.sqrt(np.asarray(sizes, dtype=np.float64)) if sizes else np.ones(len(weights))
        self.reset()

    def reset(self) -> None:
        self._average: float | None = None
        self._means: deque[float] = deque(maxlen=self.WINDOW)

    def look(self, seen: Observation) -> Look:
        if self._average is None:
            return Look()
        norms = seen.update * self._roots
        average, means = self._with(float(norms.mean()))
        off = np.abs(norms - average)
        needed = np.where(off > 3 * np.std(means), _turned(off / max(average, _NOTHING)), np.inf) / self._weights
        i = int(needed.argmin())
        reason = f"its update is {norms[i] / max(average, _NOTHING):.3g} times the moving average over all tensors"
        return Look(needed=float(needed[i]), tensor=i, reason=reason)

    def learn(self, seen: Observation) -> None:
        mean = float((seen.update * self._roots).mean())
        self._average, _ = self._with(mean)
        self._means.append(mean)

    def _with(self, mean: float) -> tuple[float, list[float]]:
        average = mean if self._average is None else 0.9 * self._average + 0.1 * mean
        return average, [*self._means, mean][-self.WINDOW :]


RULES: Mapping[str, type[Any]] = {"robust": Robust, "harmful": Harmful, "ema": Ema, "ema_mean": EmaMean}


def default_sensitivity(rule: str, parameters: int) -> float:
    """What a rule takes when nobody chooses, by the number of parameters.

    ``robust`` measures each tensor in its own units and needs no size: a preset's share of clean steps, ``scarce``.
    ``harmful``: α = 0.05, at which its source and its retelling found their best balance on 60 M parameters. ``ema`` and
    ``ema_mean``: below 100 M the retelling takes α between 0.01 and 0.03, as stricter; from there on 0.05, and for more
    than 1 B a smaller α on key layers, which it does not name (``layers`` is for that).
    """
    if rule == "robust":
        return PRESETS["scarce"]
    if rule == "harmful" or parameters >= 100_000_000:
        return _REFERENCE
    return float(_turned(np.asarray(0.02)))


def make_rule(name: str, weights: Sequence[float], *, sizes: Sequence[int], ranks: int) -> Rule:
    """The rule of that name for tensors of these ``sizes``.

    Args:
        weights: the sensitivity of each tensor relative to the rule's.
        ranks: of the job; each watches its own step, and one alarm is the job's.
    """
    if name not in RULES:
        raise UsageError(f"there is no update rule {name!r}: one of {', '.join(RULES)}")
    more: dict[str, Any] = {"sizes": sizes} if name == "ema_mean" else {}
    return RULES[name](np.asarray(weights, dtype=np.float64), ranks=ranks, **more)


class Watch:
    """One rank's rule, with its sensitivities over tensors and steps, and the resets of its baseline.

    Args:
        rule: name of the rule.
        sensitivity: of every tensor that no layer names.
        layers: (pattern of tensor names, sensitivity) in order; the first that fits counts.
        critical: (first step, first step after it) of phases in which at least ``critical_sensitivity`` holds.
        names, sizes: of the tensors, in the order of the observations.
        ranks: of the job.
    """

    def __init__(
        self,
        rule: str,
        sensitivity: float,
        *,
        names: Sequence[str],
        sizes: Sequence[int],
        ranks: int,
        layers: Sequence[tuple[str, float]] = (),
        critical: Sequence[tuple[int, int]] = (),
        critical_sensitivity: float = PRESETS["critical"],
    ) -> None:
        own = [next((s for pattern, s in layers if fnmatchcase(name, pattern)), sensitivity) for name in names]
        self._sensitivity, self._critical, self._raised = sensitivity, tuple(critical), critical_sensitivity
        self._names = tuple(names)
        self.rule = make_rule(rule, [s / sensitivity for s in own], sizes=sizes, ranks=ranks)
        self._rate: float | None = None

    def at(self, step: int) -> float:
        """The sensitivity that holds in this step."""
        critical = any(first <= step < end for first, end in self._critical)
        return max(self._sensitivity, self._raised) if critical else self._sensitivity

    def follow(self, rate: float) -> None:
        """A step begins at this learning rate: one that jumps, as in the first steps of a warm-up, begins a new baseline."""
        if self._rate is not None and not 1 / _JUMP <= rate / max(self._rate, _NOTHING) <= _JUMP:
            self.reset()
        self._rate = rate

    def look(self, step: int, seen: Observation) -> Alarm | None:
        """Whether the step stands out; it changes nothing."""
        if not seen.finite:
            return None
        look = self.rule.look(seen)
        if look.tensor is None or look.needed > self.at(step):
            return None
        return Alarm(tensor=self._names[look.tensor], reason=look.reason)

    def learn(self, seen: Observation) -> None:
        """Take a step into the baseline: one that was clean, or whose spike was confirmed."""
        if seen.finite:
            self.rule.learn(seen)

    def reset(self) -> None:
        """Forget: after a resume, and whenever the run goes on from another state."""
        self.rule.reset()
        self._rate = None


class SDCDetector:
    """The sample class of the text that ``ema_mean`` is named after, with its signature and its behaviour.

    Kept for the record: on a small LLaMA it alarms on every clean step, since matrices of unlike sizes are all measured
    against one average. Use :class:`unsilent.UpdateConfig` instead.

    Args:
        alpha: share of the moving average by which a norm may leave it.
        window_size: steps over which the deviation of the mean is taken.
    """

    def __init__(self, alpha: float = 0.05, window_size: int = 100) -> None:
        self.alpha = alpha
        self.ema: float | None = None
        self.buffer: deque[float] = deque(maxlen=window_size)

    def check_step(self, grad_updates: Sequence[Any]) -> bool:
        """Whether any of these updates (tensors or arrays, one for each matrix) stands out; also takes them in.

        Raises:
            UsageError: there is no update to look at.
        """
        if not len(grad_updates):
            raise UsageError("check_step() needs at least one update")
        norms = [float(g.norm(2)) if hasattr(g, "norm") else float(np.linalg.norm(np.ravel(g))) for g in grad_updates]
        mean = float(np.mean(norms))
        self.ema = mean if self.ema is None else 0.9 * self.ema + 0.1 * mean
        self.buffer.append(mean)
        allowed = max(self.alpha * self.ema, 3 * float(np.std(list(self.buffer))))
        return any(abs(norm - self.ema) > allowed for norm in norms)


def _turned(deviation: Array) -> Array:
    """Between the sensitivity and a share α of the average that must be left, where the smaller α alarms sooner."""
    return _REFERENCE**2 / np.maximum(deviation, 1e-12)
