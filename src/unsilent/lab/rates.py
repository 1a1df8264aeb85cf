"""What the lab's tables share: rates with their counts and intervals, and from where on a wrong step counts as harmful."""

from __future__ import annotations

import math
from typing import Any

HARMFUL = 0.1
"""d1 = ‖Δw − Δw*‖ / ‖Δw*‖, the deviation of one update from the right one, above which a fault is called harmful."""

_Z = 1.959964


def wilson(count: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson's score (Wilson 1927); (0, 1) where nothing was tried."""
    if of == 0:
        return 0.0, 1.0
    share, z2 = count / of, _Z * _Z
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = _Z / (1 + z2 / of) * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    # At the ends rounding would leave the share just outside.
    return (0.0 if count == 0 else max(0.0, middle - half)), (1.0 if count == of else min(1.0, middle + half))


def rate_of(count: int, of: int) -> dict[str, Any]:
    """``count`` of ``of`` as a share with its 95 % interval; the share of none is 0."""
    return {"count": count, "of": of, "share": count / of if of else 0.0, "interval": list(wilson(count, of))}


def rate(flags: Any) -> dict[str, Any]:
    """How many of these flags (any sequence of them) are true, as :func:`rate_of`."""
    each = [bool(flag) for flag in flags]
    return rate_of(sum(each), len(each))


def poisson_interval(count: int) -> tuple[float, float]:
    """The exact 95 % interval of the mean of a Poisson count (Garwood 1936), by bisection to 1e-9."""

    def at_most(k: int, mean: float) -> float:
        if k < 0 or mean == 0.0:
            return float(k >= 0)
        return sum(math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(k + 1))

    def solve(k: int, probability: float) -> float:
        low, high = 0.0, 10.0 + 4.0 * count
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(k, middle) > probability else (low, middle)
        return low

    return (solve(count - 1, 0.975) if count else 0.0), solve(count, 0.025)
