"""``unsilent study bits``: which bit of which kernel matters in which stage of a step?

A small LLaMA is trained briefly; from that one state single bits are flipped, one in each trial, and the step is finished
and compared with the same step without the flip. All values are fp32, so a bit is one of 32.

``forward``              an element of what a kernel gives
``backward``             an element of the gradient that reaches the kernel's backward
``clipping``             the norm of one weight's gradient, the total norm, or the coefficient that is made of it
``optimizer: exp_avg``   an element of the first moment, as it lies in memory before the update
``optimizer: exp_avg_sq``  the same of the second moment
``optimizer: update``    an element of the change that is subtracted from the weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from unsilent.errors import UsageError
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.progress import progress
from unsilent.lab.studies.bits.tables import BITS, EFFECTS, KERNELS, MOMENTS, PLACES, STAGES, UPDATE, Trials
from unsilent.lab.studies.job import BETAS, CLIP, EPS, LEARNING_RATE, WEIGHT_DECAY
from unsilent.lab.studies.llama import SHAPES, Attention, Llama, Shape, loss_of
from unsilent.lab.studies.parts import Parts
from unsilent.training.data import TextData, standard_library_text
from unsilent.training.rate import rate


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``elements`` flips for each stage, kernel and bit, from a state ``trained`` steps old, in turn on the next
    ``batches`` batches."""

    shape: Shape = SHAPES["small"]
    seed: int = 0
    trained: int = 300
    batches: int = 5
    elements: int = 10


QUICK = Plan(
    shape=replace(SHAPES["small"], name="tiny", layers=1, samples=1, length=16), trained=40, batches=2, elements=1
)


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One flipped bit. ``target`` names a module (forward, backward), a weight, or one of the two scalars of clipping;
    ``draw`` chooses the element of a tensor."""

    stage: str
    kernel: str
    target: str
    bit: int
    draw: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step came to.

    Attributes:
        weights: fp32[parameters], after the update.
        loss, norm, logit: the step's loss, its gradient's norm before clipping, and the largest attention logit.
        next_loss, next_logit: those of a forward with the new weights, on a batch that is never trained on.
    """

    weights: torch.Tensor
    loss: float
    norm: float
    logit: float
    next_loss: float
    next_logit: float


class Bench:
    """A model whose weights, moments and gradient lie in flat tensors, so that a step can be hit anywhere and tried again.

    The update is AdamW behind clipping by the total norm, written out as torch does it, so that each of its values can be
    reached.
    """

    def __init__(self, plan: Plan, text: bytes) -> None:
        shape, self.trained = plan.shape, plan.trained
        self.model = Llama(shape, seed=plan.seed, scores=True)
        self.data = TextData(text, sequence_length=shape.length, global_batch=shape.samples, seed=plan.seed)
        self.held_out = self.data.evaluation_batch(shape.samples)
        parameters = dict(self.model.named_parameters())
        self.names, self.sizes = list(parameters), [p.numel() for p in parameters.values()]
        self.weights = torch.cat([p.detach().flatten() for p in parameters.values()])
        self.gradient = torch.zeros_like(self.weights)
        self.moments = {key: torch.zeros_like(self.weights) for key in MOMENTS}
        for parameter, weight, gradient in zip(
            parameters.values(), self.weights.split(self.sizes), self.gradient.split(self.sizes), strict=True
        ):
            parameter.data, parameter.grad = weight.view(parameter.shape), gradient.view(parameter.shape)
        self._attentions = [module for module in self.model.modules() if isinstance(module, Attention)]

    def train(self, advance: Callable[[], None]) -> None:
        """The steps before the trials."""
        for step in range(self.trained):
            self._compute(step)
            self.weights.copy_(self._updated(step, self._clipped(None)[0], self.moments, None))
            advance()

    def step(self, step: int, flip: Flip | None, clean: tuple[torch.Tensor, Step] | None = None) -> Step:
        """The step from the state as it is, which it leaves as it was but for ``gradient``.

        Args:
            clean: gradient and outcome of the same step without a flip; a flip behind the backward begins from there.
        """
        if clean is not None and flip is not None and flip.stage not in ("forward", "backward"):
            self.gradient.copy_(clean[0])
            loss, logit = clean[1].loss, clean[1].logit
        else:
            loss, logit = self._compute(step, flip)
        gradient, norm = self._clipped(flip)
        moments = {key: moment.clone() for key, moment in self.moments.items()}
        before, after = self.weights.clone(), self._updated(step, gradient, moments, flip)
        self.weights.copy_(after)
        with torch.no_grad():
            next_loss = float(loss_of(self.model, self.held_out))
        next_logit = self._largest_logit()
        self.weights.copy_(before)
        return Step(weights=after, loss=loss, norm=norm, logit=logit, next_loss=next_loss, next_logit=next_logit)

    def targets(self, stage: str, kernel: str) -> list[str]:
        """What a flip of that stage and kernel may hit; empty where the kernel has nothing there."""
        if stage in ("forward", "backward"):
            modules = [name for name, _ in self.model.named_modules()]
        else:
            modules = [name.removesuffix(".weight") for name in self.names]
        return [name for name in modules if name.endswith(KERNELS[kernel])] if kernel in KERNELS else [kernel]

    def _compute(self, step: int, flip: Flip | None = None) -> tuple[float, float]:
        """Forward and backward; the gradient goes into ``gradient``. Returns loss and largest attention logit."""
        self.gradient.zero_()
        batch = self.data.batch(step)
        if flip is None:
            loss = loss_of(self.model, batch)
            loss.backward()
        else:
            fault = Fault(site=flip.stage, target=flip.target, pattern="bit_flip", bit=flip.bit, rank=0, step=step,
                          seed=flip.draw)  # fmt: skip
            with Injector(self.model, None, fault, rank=0, world_size=1) as injector:
                injector.begin_step(step)
                loss = loss_of(self.model, batch)
                loss.backward()
            assert injector.fired == 1
        return float(loss.detach()), self._largest_logit()

    def _clipped(self, flip: Flip | None) -> tuple[torch.Tensor, float]:
        """The gradient, clipped by its total norm as ``clip_grad_norm_`` does it; and that norm."""
        hit = flip if flip is not None and flip.stage == "clipping" else None
        norms = torch.stack(torch._foreach_norm(self.gradient.split(self.sizes)))
        if hit is not None and hit.kernel in KERNELS:
            flip_bit(norms, self.names.index(f"{hit.target}.weight"), hit.bit)
        total = norms.norm()
        if hit is not None and hit.target == "total norm":
            flip_bit(total, 0, hit.bit)
        coefficient = (CLIP / (total + 1e-6)).clamp(max=1.0)
        if hit is not None and hit.target == "coefficient":
            flip_bit(coefficient, 0, hit.bit)
        return self.gradient * coefficient, float(total)

    def _updated(
        self, step: int, gradient: torch.Tensor, moments: dict[str, torch.Tensor], flip: Flip | None
    ) -> torch.Tensor:
        """The new weights by AdamW; ``moments`` are changed."""
        for key, stage in MOMENTS.items():
            if flip is not None and flip.stage == stage:
                self._flip_part(moments[key], flip)
        first, second = moments["exp_avg"], moments["exp_avg_sq"]
        first.lerp_(gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        learning_rate = LEARNING_RATE * rate(step, warmup=50, steps=10 * self.trained)
        root = second.sqrt() / (1 - BETAS[1] ** (step + 1)) ** 0.5 + EPS
        change = first / root * (learning_rate / (1 - BETAS[0] ** (step + 1)))
        if flip is not None and flip.stage == UPDATE:
            self._flip_part(change, flip)
        return self.weights * (1 - learning_rate * WEIGHT_DECAY) - change

    def _flip_part(self, flat: torch.Tensor, flip: Flip) -> None:
        """Flip a bit in the part of a flat tensor that belongs to the target."""
        part = flat.split(self.sizes)[self.names.index(f"{flip.target}.weight")]
        flip_bit(part, flip.draw % part.numel(), flip.bit)

    def _largest_logit(self) -> float:
        return float(np.max([attention.largest_logit for attention in self._attentions]))


def study(plan: Plan, out: Path) -> Trials:
    """All trials: per flip its place (``stage``, ``kernel``, ``bit``) and what it changed (``tables.EFFECTS``), and of
    the steps without a flip ``clean_norm`` and ``clean_loss``.

    The trained state and the trials are kept in OUT and taken from there by a later start with the same plan.

    Raises:
        UsageError: a step without a flip does not repeat bit for bit here, or OUT cannot be written.
    """
    parts = Parts(out / "parts", plan)
    done = parts.get("trials")
    if done is not None:
        return done
    bench = Bench(plan, standard_library_text())
    _train(bench, plan, out)
    clean: list[tuple[torch.Tensor, Step]] = []
    for step in range(plan.trained, plan.trained + plan.batches):
        right = bench.step(step, None)
        clean.append((bench.gradient.clone(), right))
        if not torch.equal(bench.step(step, None).weights, right.weights):
            raise UsageError("a step without a flip gives other bits when repeated: set OMP_NUM_THREADS=1")
    flips = list(_flips(bench, plan))
    rows: list[tuple[float, ...]] = []
    with progress("bits", len(flips)) as advance:
        for i, flip in enumerate(flips):
            at = i % plan.batches
            rows.append(_effect(bench.weights, clean[at][1], bench.step(plan.trained + at, flip, clean[at])))
            advance()
    columns = {name: np.array(column) for name, column in zip(EFFECTS, zip(*rows, strict=True), strict=True)}
    places = {name: np.array([getattr(flip, name) for flip in flips]) for name in ("stage", "kernel", "bit")}
    norms, losses = (np.array([getattr(right, name) for _, right in clean]) for name in ("norm", "loss"))
    return parts.keep("trials", {**places, **columns, "clean_norm": norms, "clean_loss": losses})


def _train(bench: Bench, plan: Plan, out: Path) -> None:
    """Bring the bench to the trained state, or take that from an earlier start."""
    parts = Parts(out / "parts", replace(plan, batches=0, elements=0))
    tensors = {"weights": bench.weights, **bench.moments}
    kept = parts.get("state")
    if kept is not None:
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(kept[name]))
        return
    with progress("training", plan.trained) as advance:
        bench.train(advance)
    parts.keep("state", {name: tensor.numpy() for name, tensor in tensors.items()})


def _flips(bench: Bench, plan: Plan) -> Iterator[Flip]:
    random = np.random.default_rng(plan.seed)
    for stage in STAGES:
        for kernel in PLACES:
            among = bench.targets(stage, kernel) if kernel in KERNELS or stage == "clipping" else []
            for bit in range(BITS if among else 0):
                for _ in range(plan.elements):
                    target = among[int(random.integers(len(among)))]
                    yield Flip(stage=stage, kernel=kernel, target=target, bit=bit, draw=int(random.integers(1 << 31)))


def _effect(before: torch.Tensor, right: Step, wrong: Step) -> tuple[float, ...]:
    """The values of ``EFFECTS``, in order; infinite where something is not finite."""
    astray = wrong.weights.double() - right.weights.double()
    moved = right.weights.double() - before.double()
    values = (
        float(astray.norm() / moved.norm()),
        float(astray.abs().max()),
        float((astray != 0).double().mean()),
        abs(wrong.loss - right.loss),
        abs(wrong.norm / right.norm - 1),
        abs(wrong.logit / right.logit - 1),
        abs(wrong.next_loss - right.next_loss),
        abs(wrong.next_logit / right.next_logit - 1),
    )
    return tuple(value if np.isfinite(value) else np.inf for value in values)


def flip_bit(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element of a contiguous fp32 tensor, in place."""
    bits = tensor.detach().view(torch.int32).view(-1)
    bits[element] ^= (1 << bit) if bit < BITS - 1 else -(1 << bit)
