"""The learning rate over a run."""

from __future__ import annotations

import math


def rate(step: int, *, warmup: int, steps: int) -> float:
    """The share of the highest rate: linear warm-up, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * share))
