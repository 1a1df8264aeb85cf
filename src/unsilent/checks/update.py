"""Check ``update``: is this rank's own step like those before it? A statistic, which blames nobody: it asks for an audit.

Every rank looks at its *local* gradient before the reduction. One that stands out raises a flag in the agreed vector, so
that all ranks enter the audit of that very step together; what the audit confirms bit for bit is a real spike and stays.
The rules are in ``update_rules.py``.

Cost. Time: one norm of every local gradient; rules that look at the update, not at the gradient alone, also make it from
the optimizer's moments, of large models of a part of the tensors in each step, taking turns. A false alarm costs one unplanned
audit. Memory: a number per tensor and for each of 50 steps; of those rules, a copy of a turn's gradients. Traffic: none
beyond one flag in the agreed vector; on an alarm, one name and one sentence from every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from unsilent.agreement import Agreed, Declaration
from unsilent.checks.protocol import Coverage, Moment
from unsilent.checks.update_rules import PRESETS, RULES, Alarm, Observation, Watch, default_sensitivity
from unsilent.errors import UsageError
from unsilent.fingerprints import elements
from unsilent.records import Site, SpikeEvidence
from unsilent.reduction import Bucket

Preset = Literal["scarce", "default", "critical", "debug"]
TURNS, PER_TURN = 8, 2_000_000
_SHORT = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """Options of the check ``update``.

    Args:
        rule: ``"robust"``, or for comparison ``"harmful"``, ``"ema"``, ``"ema_mean"``.
        sensitivity: larger alarms sooner: a number above 0, or one of the presets ``"scarce"`` (recomputing is very
            dear), ``"default"``, ``"critical"`` (phases that must not fail) and ``"debug"``. For ``robust`` it is about
            the share of clean steps that cost an audit. None takes the rule's own for this size of model.
        layers: (pattern of parameter names, sensitivity) for key layers; the first that fits counts.
        critical_steps: (first step, first step after it) in which at least ``critical_sensitivity`` holds.
    """

    rule: Literal["robust", "harmful", "ema", "ema_mean"] = "robust"
    sensitivity: float | Preset | None = None
    layers: tuple[tuple[str, float | Preset], ...] = ()
    critical_steps: tuple[tuple[int, int], ...] = ()
    critical_sensitivity: float | Preset = "critical"

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise UsageError(f"the update rule is {self.rule!r}: it must be one of {', '.join(RULES)}")
        for value in (self.sensitivity, self.critical_sensitivity, *(s for _, s in self.layers)):
            number(value)
        for first, end in self.critical_steps:
            if not 0 <= first < end:
                raise UsageError(
                    f"critical_steps holds ({first}, {end}): it takes pairs (first step, first step after)"
                )


def number(sensitivity: float | str | None) -> float | None:
    """A preset's or a plain sensitivity; None stays None.

    Raises:
        UsageError: it is neither a preset's name nor a finite number above 0.
    """
    if isinstance(sensitivity, str):
        if sensitivity not in PRESETS:
            raise UsageError(
                f"there is no sensitivity {sensitivity!r}: a number above 0, or one of {', '.join(PRESETS)}"
            )
        return PRESETS[sensitivity]
    if sensitivity is not None and not 0 < sensitivity < math.inf:
        raise UsageError(f"the sensitivity is {sensitivity}: it must be a finite number above 0")
    return sensitivity


class Update:
    """See the module's text.

    Args:
        inner: the module under the DDP wrapper.
        reduces: whether buckets are reduced; without, local gradients are read from ``.grad``.
        scale: what local gradients are multiplied by before they are reduced.
        loss_scale: what the loss of this step was multiplied by.
        clip_norm: the norm that the step clips to, None when it does not clip.
        ranks: of the job.

    Raises:
        UsageError: the rule looks at updates, and the optimizer is not of Adam's family.
    """

    name = "update"
    sites: tuple[Site, ...] = (Site.GRADIENT,)
    period = 1

    def __init__(
        self,
        inner: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: UpdateConfig,
        *,
        reduces: bool,
        scale: float,
        loss_scale: Callable[[], float],
        clip_norm: float | None,
        ranks: int,
    ) -> None:
        self._parameters = [(n, p) for n, p in inner.named_parameters() if p.requires_grad]
        self._optimizer, self._config, self._reduces, self._scale = optimizer, config, reduces, scale
        self._loss_scale, self._clip_norm = loss_scale, clip_norm
        chosen = number(config.sensitivity)
        size = sum(p.numel() for _, p in self._parameters)
        self.sensitivity = default_sensitivity(config.rule, size) if chosen is None else chosen
        self._groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        looks_at_moments = RULES[config.rule].needs_update
        if looks_at_moments and not all("betas" in group and "eps" in group for group in optimizer.param_groups):
            raise UsageError(
                f"the update rule {config.rule!r} reads an optimizer of Adam's family, and this one is a "
                f"{type(optimizer).__name__}: take rule='robust'"
            )
        self._moments = looks_at_moments
        turns = min(TURNS, len(self._parameters), 1 + size // PER_TURN) if looks_at_moments else 1
        layers = tuple((pattern, number(s) or 0.0) for pattern, s in config.layers)
        self._turns = [self._parameters[i::turns] for i in range(turns)]
        self._watches = [
            Watch(
                config.rule,
                self.sensitivity,
                names=[n for n, _ in part],
                sizes=[p.numel() for _, p in part],
                ranks=ranks,
                layers=layers,
                critical=config.critical_steps,
                critical_sensitivity=number(config.critical_sensitivity) or 0.0,
            )
            for part in self._turns
        ]
        self._step = 0
        self._norms: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._ready = False
        self._seen: Observation | None = None
        self._alarm: Alarm | None = None
        self._left_out = False

    def coverage(self) -> tuple[Coverage, ...]:
        watched = f"a {len(self._turns)}th of the tensors in turn, " if len(self._turns) > 1 else ""
        return (
            Coverage(
                site="gradient", check=self.name,
                how=f"statistic of the local step ({self._config.rule}, sensitivity {self.sensitivity:g}): an alarm asks "
                "for an audit of that step",
                when=f"{watched}every step, once some 50 steps are known",
                blind="errors that change no tensor's size by more than it varies anyway",
            ),
        )  # fmt: skip

    def declares(self) -> Declaration:
        return Declaration(flags=("spike",))

    def wants(self, step: int, micro_batch: int) -> frozenset[str]:
        return frozenset()

    def begin(self, moment: Moment) -> None:
        if moment.first:
            for watch in self._watches:
                watch.reset()
        self._step = moment.step
        self._norms, self._copies = {}, {}
        self._seen = self._alarm = None
        self._ready = self._left_out = False

    def before_reduction(self, bucket: Bucket) -> None:
        self._measure({id(p): view for p, view in bucket.views()})

    def before_update(self, moment: Moment) -> None:
        if not self._reduces:
            self._measure({id(p): p.grad for _, p in self._parameters if p.grad is not None})
        self._ready = True

    def fill(self) -> tuple[dict[str, bool], dict[str, int]]:
        if self._seen is None and self._ready:
            self._seen = self._observe(self._read().tolist())
            self._watch.follow(float(self._optimizer.param_groups[0]["lr"]))
            self._alarm = self._watch.look(self._step, self._seen)
        return {"spike": self._alarm is not None}, {}

    def alarm(self, agreed: Agreed) -> bool:
        return agreed.raised(self.name, "spike")

    def details(self) -> tuple[str, str] | None:
        """(name of the tensor, why it stands out) where this rank's step does."""
        return None if self._alarm is None else (self._alarm.tensor, self._alarm.reason)

    def evidence(self, step: int, details: Sequence[tuple[str, str] | None]) -> tuple[SpikeEvidence, ...]:
        return tuple(
            SpikeEvidence(step=step, rank=rank, tensor=found[0], reason=found[1])
            for rank, found in enumerate(details)
            if found is not None
        )

    def comes_again(self, gradients: Mapping[int, torch.Tensor]) -> bool:
        """Whether these gradients of a rerun, by ``id(parameter)`` and scaled as the recorded ones, stand out as well."""
        self._norms, self._copies = {}, {}
        self._measure(gradients)
        return self._watch.look(self._step, self._observe(self._read().tolist())) is not None

    def settled(self) -> None:
        """The spike was looked into, or the step was rebuilt: it no longer objects, and what it read is not learned from."""
        self._alarm = None
        self._left_out = True

    def confirmed(self) -> None:
        """The spike is real: what this rank read belongs to the baseline."""
        self._alarm = None

    def after_update(self, moment: Moment, *, skipped: bool) -> None:
        resolved = self._alarm is None and not self._left_out
        if self._seen is not None and resolved and not skipped:
            self._watch.learn(self._seen)

    # ---- readings ----------------------------------------------------------------------------------------------------

    @property
    def _turn(self) -> list[tuple[str, nn.Parameter]]:
        return self._turns[self._step % len(self._turns)]

    @property
    def _watch(self) -> Watch:
        return self._watches[self._step % len(self._watches)]

    def _measure(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """The norm of each local gradient, on its device; and a copy of those whose update is to be made."""
        if gradients:
            tensors = [elements(gradient) for gradient in gradients.values()]
            short = all(t.dtype in _SHORT for t in tensors)  # their norm would overflow in their own type
            norms = torch._foreach_norm(tensors, dtype=torch.float32 if short else None)
            self._norms.update(zip(gradients, norms, strict=True))
        if self._moments:
            here = {id(p) for _, p in self._turn if id(p) in gradients and not gradients[id(p)].is_sparse}
            self._copies.update({key: gradients[key].detach().clone() for key in here})

    def _read(self) -> torch.Tensor:
        """All numbers of this step in one tensor, fp64, on the device: norms of all, then the updates' RMS of a turn."""
        nothing = torch.zeros((), device=self._parameters[0][1].device)
        norms = torch.stack([self._norms.get(id(p), nothing) for _, p in self._parameters]).double()
        if not self._moments:
            return norms
        factor = 1 / (self._scale * self._loss_scale())
        clip = torch.ones_like(norms[0])
        if self._clip_norm is not None:
            clip = (self._clip_norm / (norms.norm() * factor + 1e-6)).clamp(max=1.0)
        updates = [self._update_of(p, clip * factor) for _, p in self._turn]
        return torch.cat([norms, torch.stack([u.double() for u in updates])])

    @torch.no_grad()
    def _update_of(self, parameter: nn.Parameter, coefficient: torch.Tensor) -> torch.Tensor:
        """RMS of lr·m/(√v + ε), m and v as Adam would set them of the local gradient alone, without bias correction."""
        gradient, state = self._copies.get(id(parameter)), self._optimizer.state.get(parameter)
        if gradient is None or not state or "exp_avg_sq" not in state:
            return torch.zeros((), device=parameter.device)
        group = self._groups[id(parameter)]
        first, second = group["betas"]
        scaled = gradient.float().mul_(coefficient.float())
        down = (scaled * scaled).mul_(1 - second).add_(state["exp_avg_sq"], alpha=second).sqrt_().add_(group["eps"])
        up = scaled.mul_(1 - first).add_(state["exp_avg"], alpha=first).div_(down)
        return up.norm() * (float(group["lr"]) / math.sqrt(up.numel()))

    def _observe(self, values: list[float]) -> Observation:
        """What the rule is shown, from the numbers of :meth:`_read`."""
        count = len(self._parameters)
        factor = 1 / (self._scale * self._loss_scale())
        norms = np.array(values[:count]) * factor
        here = {id(p) for _, p in self._turn}
        mine = [i for i, (_, p) in enumerate(self._parameters) if id(p) in here]
        roots = np.sqrt(np.array([p.numel() for _, p in self._turn], dtype=np.float64))
        return Observation(
            gradient=norms[mine] / roots, update=np.array(values[count:]), norm=float(np.linalg.norm(norms))
        )
