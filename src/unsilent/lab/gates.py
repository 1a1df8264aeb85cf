"""Faults as they come out of failing gates: the mix of a gate-level study of a data-centre GPU (arXiv 2605.04213).

Of the corrupted values 50.68 % are zeroed, 48.31 % take other values and 1.01 % are NaN or Inf; fewer than 40 % of the
events that change bits change a single one. Wrong addresses repeat with a period of 2, 4, 8 or 16 within groups of 32;
faults of the control logic spoil 20 to 75 % of a unit's output tile. What the study leaves open is ours: how often each
kind of address comes, and in how many groups at once.
"""

from __future__ import annotations

import math
import random
from typing import Any

from unsilent.lab.faults import PERIODS

ZEROED, OTHER, NOT_FINITE = 0.5068, 0.4831, 0.0101
SINGLE_BIT = 0.38
"""Of the values that change bits, how many change just one: the study says fewer than 40 %."""
TILE = (0.20, 0.75)


def event(draw: random.Random, *, size: int) -> dict[str, Any]:
    """The options of one ``gates`` fault in a tensor of ``size`` elements: one element, a periodic address, or a tile.

    Args:
        draw: the generator; the same state gives the same event.
    """
    match draw.randrange(3):
        case 0:
            return {"pattern": "gates"}
        case 1:
            groups = max(1, size // 32)
            count = round(math.exp(draw.uniform(0.0, math.log(max(1.0, groups / 4)))))
            return {"pattern": "gates", "period": draw.choice(PERIODS), "count": max(1, count)}
        case _:
            return {"pattern": "gates", "share": draw.uniform(*TILE)}
