"""Faults as they come out of failing gates: the mix of a gate-level study of a data-centre GPU (arXiv 2605.04213).

Of the corrupted values 50.68 % are zeroed, 48.31 % take other values and 1.01 % are NaN or Inf; fewer than 40 % of the
events that change bits change a single one. Wrong addresses repeat with a period of 2, 4, 8 or 16 within groups of 32;
faults of the control logic spoil 20 to 75 % of a unit's output tile. A specification draws
periods and tiles from lists of its own, since the study does not say how often each comes.
"""

from __future__ import annotations

ZEROED, OTHER, NOT_FINITE = 0.5068, 0.4831, 0.0101
SINGLE_BIT = 0.38
"""Of the values that change bits, how many change just one: the study says fewer than 40 %."""
