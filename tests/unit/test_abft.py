"""The ABFT baseline: row sums of products, taken from outputs rounded to bfloat16."""

from __future__ import annotations

import math

import pytest
import torch

from unsilent.lab.studies.submodule.abft import UNIT_ROUNDOFF, largest_residual


def product(*, rows: int = 32, inner: int = 24, columns: int = 64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inner, generator=generator), torch.randn(inner, columns, generator=generator)


@pytest.mark.parametrize("columns", [1, 2, 64, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_without_a_fault_the_residual_is_below_the_rounding_bound(columns: int, seed: int) -> None:
    x, w = product(columns=columns, seed=seed)
    assert largest_residual([(x, w)], x @ w) < 1.01


def test_a_large_error_exceeds_it() -> None:
    x, w = product()
    y = x @ w
    y[3, 5] += 2 * UNIT_ROUNDOFF * float(y[3].abs().sum())
    assert largest_residual([(x, w)], y) > 1.0


def test_an_error_that_rounding_hides_changes_nothing() -> None:
    x, w = product()
    y = x @ w
    before = largest_residual([(x, w)], y)
    y[3, 5] *= 1 + 2.0**-20
    assert largest_residual([(x, w)], y) == pytest.approx(before, rel=1e-3)


def test_the_output_may_be_the_sum_of_several_products() -> None:
    (x, w), (v, u) = product(seed=1), product(inner=7, seed=2)
    y = x @ w + v @ u
    assert largest_residual([(x, w), (v, u)], y) < 1.01
    assert largest_residual([(x, w)], y) > 1.0


def test_leading_dimensions_are_rows() -> None:
    x, w = product(rows=6)
    flat = largest_residual([(x, w)], x @ w)
    assert largest_residual([(x.view(2, 3, -1), w)], (x @ w).view(2, 3, -1)) == pytest.approx(flat)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_an_infinite_residual(value: float) -> None:
    x, w = product()
    y = x @ w
    y[0, 0] = value
    assert largest_residual([(x, w)], y) == math.inf


def test_a_row_of_zeros_has_no_residual() -> None:
    x, w = product()
    x[2] = 0.0
    y = x @ w
    assert largest_residual([(x, w)], y) < 1.01
    assert largest_residual([(torch.zeros(1, 24), w)], torch.zeros(1, 64)) == 0.0
    assert largest_residual([(torch.ones(1, 24), w)], torch.zeros(1, 64)) == math.inf
