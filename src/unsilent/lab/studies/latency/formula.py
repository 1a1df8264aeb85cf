"""How many corrupted steps an audit every K steps lets through: the formula, and the same drawn at random. No torch here.

A device turns sick at a step that lies anywhere in an interval between audits, all K places being equally likely. From then
on its work of a step is corrupted with probability p, independently of other steps. In an audit step every rank is audited
by its neighbour in the ring, bit for bit, so the audit sees

    q = p                   where only the device's own work can be wrong,
    q = 1 − (1 − p)²        where the audit that it makes for a neighbour can be wrong as well.

With J the steps up to and with the first audit step (uniform on 1 … K) and G the audits that see nothing (geometric, mean
(1 − q)/q), the finding comes in step D = J + K·G of the sickness:

    E[D] = (K + 1)/2 + K·(1 − q)/q.

An audit that sees nothing was of a step whose work was right, so what is corrupted and kept lies in the other steps, of which
there are J − 1 + (K − 1)·G:

    E[C] = p·(K − 1)·(1/q − 1/2)       if the audited step is repaired,
    E[C] + p/q                         if it is not: p/q is the chance that the step of the finding was itself corrupted.

With q = p the first is (K − 1)·(1 − p/2): a device that errs rarely is found late, and does as much harm before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """``period``: steps between two audits, K; ``rate``: probability that a step of the sick device is corrupted, p;
    ``audits_too``: its work as an auditor is corrupted with that probability, too."""

    period: int
    rate: float
    audits_too: bool = True

    @property
    def seen(self) -> float:
        """The probability q that an audit step sees the fault."""
        return 1 - (1 - self.rate) ** 2 if self.audits_too else self.rate


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Means and median over all places of the onset: steps from the onset to the finding, that step counted; corrupted steps
    that entered the weights, with the audited step repaired and without."""

    steps: float
    median_steps: int
    repaired: float
    unrepaired: float


def expected(setting: Setting) -> Expected:
    """The formula of the module's text."""
    k, p, q = setting.period, setting.rate, setting.seen
    repaired = p * (k - 1) * (1 / q - 1 / 2)
    return Expected(
        steps=(k + 1) / 2 + k * (1 - q) / q,
        median_steps=median_steps(setting),
        repaired=repaired,
        unrepaired=repaired + p / q,
    )


def median_steps(setting: Setting) -> int:
    """The smallest n by which the fault has been found with probability ≥ 1/2.

    For n = a·K + b with 0 ≤ b < K, P(D ≤ n) = 1 − (1 − q)^a·(1 − q·b/K).
    """
    k, q = setting.period, setting.seen
    # Whole intervals of which all could pass without the finding being likelier than not.
    a = 0 if q > 1 / 2 else math.floor(math.log(1 / 2) / math.log1p(-q))
    missed = (1 - q) ** a
    b = math.ceil((1 - 1 / (2 * missed)) * k / q - 1e-9)
    return max(1, a * k + b)


def simulated(setting: Setting, *, runs: int, seed: int) -> tuple[Integers, Integers, Integers]:
    """The same by chance alone, step by step: of each run the steps to the finding, and the corrupted steps that were kept
    with a repair of the audited step and without; int64[runs] each."""
    random = np.random.default_rng(seed)
    steps, repaired, unrepaired = (np.zeros(runs, dtype=np.int64) for _ in range(3))
    for run in range(runs):
        step = int(random.integers(setting.period))
        while True:
            steps[run] += 1
            wrong = random.random() < setting.rate
            audited = (step + 1) % setting.period == 0
            found = audited and (wrong or (setting.audits_too and random.random() < setting.rate))
            unrepaired[run] += wrong
            repaired[run] += wrong and not found
            if found:
                break
            step += 1
    return steps, repaired, unrepaired
