"""Algorithm-based fault tolerance, the baseline: a matrix product is checked by its row sums.

For y = x·w the sums of y's rows must be x·(w·1), up to rounding. As in the study that is repeated here, y's sums are taken from
outputs that were rounded to bfloat16, and so the bound of that rounding hides every error below it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

UNIT_ROUNDOFF = 2.0**-8
"""Of bfloat16: the largest relative error of rounding to the nearest."""


def largest_residual(products: Sequence[tuple[torch.Tensor, torch.Tensor]], output: torch.Tensor) -> float:
    """How far the worst row sum is off, in units of the bound of rounding the row's elements.

    The residual of a row is |Σ_j bf16(y_j) − Σ_k x_k·(w_k·1)|, and its bound u·Σ_j |y_j| with bfloat16's u. Without a fault
    the result is below 1, apart from the rounding of the sums themselves, which are taken in ``output``'s own type.

    Args:
        products: the x, [..., inner], and w, [inner, columns], of each product; y is the sum of them all.
        output: y, [..., columns].

    Returns:
        The largest over all rows; infinite where a sum is not finite, or is not zero in a row of zeros.
    """
    expected = sum(x @ w.sum(-1) for x, w in products)
    rounded = output.bfloat16().to(output.dtype)
    residual = (rounded.sum(-1) - expected).abs()
    bound = UNIT_ROUNDOFF * output.abs().sum(-1)
    ratio = torch.where(residual == 0, 0.0, residual / bound)
    return float(ratio.nan_to_num(nan=math.inf, posinf=math.inf).max())
