"""Random faults of a forward or backward, with the mix that gate-level studies of GPUs report: half of the wrong values
are zeroed, half take other values, one in a hundred is NaN or Inf; single elements, neighbours, lanes with a period, and
large parts of a tensor. The sizes of errors are ours: log-uniform, from a tenth of a per cent to a million times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injection

GROSS = 1e3
_SITES = ("forward", "backward", "gradient")
_TOP_EXPONENT_BIT = 30


@dataclass(frozen=True)
class Target:
    """A matrix product's weight and module, with how many elements its output has."""

    module: str
    parameter: str
    parameter_size: int
    output_size: int


def targets(model: nn.Module, tokens: int) -> list[Target]:
    """The Linear layers of a model that reads so many tokens per rank and step."""
    return [
        Target(name, f"{name}.weight", module.weight.numel(), tokens * module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]


def draw(random: np.random.Generator, among: list[Target], *, step: int, rank: int, steps: int = 1) -> Fault:
    """A fault of ``rank`` that begins at ``step`` and lasts ``steps`` steps."""
    target = among[int(random.integers(len(among)))]
    site = _SITES[int(random.integers(len(_SITES)))]
    size = target.parameter_size if site == "gradient" else target.output_size
    name = target.parameter if site == "gradient" else target.module
    options = {
        "site": site, "target": name, "rank": rank, "step": step, "steps": steps,
        "seed": int(random.integers(1 << 31)),
    }  # fmt: skip
    kind = random.random()
    if kind < 0.507:
        return Fault(pattern="zero", **_extent(random, size), **options)
    if kind > 0.99:
        return Fault(pattern=("nan", "inf")[int(random.integers(2))], **options)
    match int(random.integers(4)):
        case 0:
            return Fault(pattern="bit_flip", bit=int(random.integers(18, 32)), **_extent(random, size), **options)
        case 1:
            return Fault(pattern="scale", factor=_either_sign(random, -1, 6), **_extent(random, size), **options)
        case 2:
            every = int(2 ** random.integers(1, 6))
            return Fault(pattern="stuck_lane", every=every, relative=_either_sign(random, -3, 6), **options)
        case _:
            highest = int(random.integers(22, 31))
            return Fault(pattern="random_bits", bit=highest, **_extent(random, size), **options)


def is_gross(fault: Fault, record: list[Injection]) -> bool:
    """Whether a value grew by a factor of a thousand or more, or the top bit of an exponent was touched."""
    if fault.bit is not None and (fault.bit == _TOP_EXPONENT_BIT if fault.pattern == "bit_flip" else fault.bit >= 30):
        return True
    for one in record:
        right, wrong = one.pristine.abs().double(), one.corrupted.abs().double()
        known = right > 0
        if bool(((wrong[known] / right[known]) >= GROSS).any()):
            return True
    return False


def is_finite(record: list[Injection]) -> bool:
    """Whether all values that were put in are finite."""
    return all(bool(torch.isfinite(one.corrupted).all()) for one in record)


def _extent(random: np.random.Generator, size: int) -> dict[str, int]:
    """From one element to three quarters of the tensor, in groups of 1 to 32 neighbours."""
    lane = int(2 ** random.integers(0, 6))
    count = round(math.exp(random.uniform(0.0, math.log(0.75 * size / lane))))
    return {"lane": lane, "count": max(1, count)}


def _either_sign(random: np.random.Generator, low: float, high: float) -> float:
    """Log-uniform between 10^low and 10^high, negative in half of the cases."""
    return float(10 ** random.uniform(low, high)) * (-1.0 if random.random() < 0.5 else 1.0)
