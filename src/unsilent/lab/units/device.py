"""A sick device at work: while a model computes on it, operations inside its attention and feed-forward sub-modules give
wrong results, in bursts, as its unit says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from unsilent.lab.corruption import bits, positions_at_rate, seeded
from unsilent.lab.operations import Operation, Operations
from unsilent.lab.units import PLACES, Law, Unit, law

_SUB_MODULES = {"attention": "attention", "self_attn": "attention", "ffn": "ffn", "mlp": "ffn"}
_OUTPUTS = ("o", "o_proj", "down", "down_proj")
_INPUTS = ("q", "k", "v", "gate", "up", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_PRODUCTS = ("mm", "addmm", "bmm")


class SickDevice:
    """``unit``, on which ``model`` is trained.

    Args:
        seed: of the bursts and of what they hit; the same seed gives the same wrong bits.
        rank: of a device of several that share the seed: their bursts come together, what they hit differs.

    Attributes:
        bursts: (step, place) of every burst that hit something.
        changed: how many elements were given other bits, in all.
    """

    def __init__(self, unit: Unit, model: nn.Module, *, seed: int, rank: int = 0) -> None:
        self.unit, self.law = unit, law()
        self.bursts: list[tuple[int, str]] = []
        self.changed = 0
        self._seed, self._rank = seed, rank
        self._step, self._attempts, self._executions = 0, 0, 0
        self._on: frozenset[str] = frozenset()
        self._operations = Operations(model)
        self._inside: AbstractContextManager[None] | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """One step's forward and backward on this device."""
        self.begin_step(step)
        try:
            yield
        finally:
            self.after_update(step)

    def begin_step(self, step: int) -> None:
        """For loops that call an ``Injector``: from here on what is computed belongs to ``step``."""
        self.after_update(step)
        # A step that is run again is a new try: it meets the same burst, and other errors in it.
        self._attempts = self._attempts + 1 if step == self._step else 0
        self._step, self._executions = step, 0
        self._on = frozenset(place for place in PLACES if self.unit.in_burst(place, step, seed=self._seed))
        if self._on:
            self._inside = self._operations.seen(self._err)
            self._inside.__enter__()

    def after_update(self, step: int) -> None:
        """The step is over."""
        if self._inside is not None:
            self._inside.__exit__(None, None, None)
            self._inside = None

    @property
    def fired(self) -> int:
        """In how many steps and places something was hit."""
        return len(self.bursts)

    def close(self) -> None:
        """Take all hooks out again."""
        self.after_update(self._step)
        self._operations.close()

    @torch.no_grad()
    def _err(self, operation: Operation, result: torch.Tensor) -> None:
        place = place_of(operation, where=self.unit.where)
        if place is None or place not in self._on:
            return
        rate = self.unit.rate(place)
        self._executions += 1
        generator = seeded(self._seed, self.unit.number, self._rank, self._step, self._attempts, self._executions)
        elements = positions_at_rate(result.numel(), rate.share, generator)
        explode = int(torch.poisson(torch.tensor(rate.explosions, dtype=torch.float64), generator=generator))
        elements = torch.cat([elements, torch.randint(result.numel(), (explode,), generator=generator)])
        if len(elements) == 0:
            return
        grid = torch.unravel_index(elements.to(result.device), result.shape)
        right = result[grid].cpu()
        backward = operation.phase == "backward"
        wrong = wrong_values(right, explode, self.law, generator, backward=backward)
        result[grid] = wrong.to(result.device)
        changed = int((bits(right) != bits(wrong)).sum())
        self.changed += changed
        if changed and (self._step, place) not in self.bursts[-len(PLACES) :]:
            self.bursts.append((self._step, place))


def place_of(operation: Operation, *, where: str) -> str | None:
    """Where in the model an operation stands, if it is one of those that err: one of ``PLACES``, else None."""
    if operation.phase == "optimizer":
        return None
    *path, last = operation.module.split(".")
    kind = next((_SUB_MODULES[name] for name in (last, *reversed(path)) if name in _SUB_MODULES), None)
    if kind is None:
        return None
    backward = operation.phase == "backward"
    product = operation.name in _PRODUCTS
    errs = product and last in (_INPUTS if backward else _OUTPUTS) if where == "output" else not product
    return f"{'backward' if backward else 'forward'}_{kind}" if errs else None


def wrong_values(
    right: torch.Tensor, exploding: int, law: Law, generator: torch.Generator, *, backward: bool
) -> torch.Tensor:
    """What stands where ``right`` (one-dimensional, on the CPU) would be right: relative errors of either sign of the bulk,
    and the last ``exploding`` elements off by powers of ten."""
    normal = torch.randn(right.shape, dtype=torch.float64, generator=generator)
    either = torch.where(torch.rand(right.shape, dtype=torch.float64, generator=generator) < 0.5, -1.0, 1.0)
    factor = 1 + either * law.bulk * torch.exp(law.spread * normal)
    if backward:
        factor = factor.clamp(-law.largest_backward, law.largest_backward)
    elif exploding:
        low, high = (math.log10(limit) for limit in law.explosion)
        powers = low + (high - low) * torch.rand(exploding, dtype=torch.float64, generator=generator)
        factor[-exploding:] = either[-exploding:] * 10**powers
    largest = torch.finfo(right.dtype).max
    return (right.double() * factor).clamp(-largest, largest).to(right.dtype)
