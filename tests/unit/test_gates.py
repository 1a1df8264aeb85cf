"""The gate-level mix: its shares follow the study, its places repeat as the study says, and a seed gives the same bits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from unsilent.lab.corruption import bits, corrupted_values, positions, positions_at_rate, seeded
from unsilent.lab.faults import PERIODS, Fault
from unsilent.lab.gates import NOT_FINITE, OTHER, SINGLE_BIT, ZEROED

# The 99.9 % point of the chi-square distribution with two and with one degree of freedom.
LIMIT = {1: 10.83, 2: 13.82}


def gates(**options: object) -> Fault:
    return Fault(site="forward", target="x", pattern="gates", rank=0, from_step=0, **options)  # type: ignore[arg-type]


def chi_square(counts: list[int], shares: list[float]) -> float:
    total = sum(counts)
    return sum((n - total * share) ** 2 / (total * share) for n, share in zip(counts, shares, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_shares_of_wrong_values_follow_the_study(dtype: torch.dtype) -> None:
    values = torch.randn(60_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[values == 0] = 1.0
    wrong = corrupted_values(values, gates(), seeded("shares", str(dtype)))
    zeroed = int((wrong == 0).sum())
    not_finite = int((~torch.isfinite(wrong)).sum())
    # A flip can make a zero, too, but only of a number with one bit set: too rare to matter here.
    counts = [zeroed, len(values) - zeroed - not_finite, not_finite]
    assert chi_square(counts, [ZEROED, OTHER, NOT_FINITE]) < LIMIT[2], counts

    other = torch.isfinite(wrong) & (wrong != 0)
    changed = (bits(values) ^ bits(wrong))[other]
    width = 8 * values.dtype.itemsize
    flips = sum(((changed.long() >> n) & 1) for n in range(width))
    single = int((flips == 1).sum())
    assert int((flips == 0).sum()) == 0
    assert chi_square([single, len(changed) - single], [SINGLE_BIT, 1 - SINGLE_BIT]) < LIMIT[1]
    assert single / len(changed) < 0.40


def test_the_shares_add_up_to_those_of_the_study() -> None:
    assert (ZEROED, OTHER, NOT_FINITE) == (0.5068, 0.4831, 0.0101)
    assert pytest.approx(1.0) == ZEROED + OTHER + NOT_FINITE


@pytest.mark.parametrize("period", PERIODS)
def test_wrong_addresses_repeat_within_groups_of_32(period: int) -> None:
    found = positions(torch.Size([64, 32]), gates(period=period, count=5, seed=3))
    assert len(found) == 5 * 32 // period
    groups = {int(n) // 32 for n in found}
    assert len(groups) == 5
    for group in groups:
        inside = sorted(int(n) % 32 for n in found if int(n) // 32 == group)
        assert {b - a for a, b in itertools.pairwise(inside)} <= {period}


def test_a_group_that_the_tensor_cuts_off_is_cut_off() -> None:
    found = positions(torch.Size([40]), gates(period=2, count=2))
    assert int(found.max()) < 40


@pytest.mark.parametrize("share", [0.2, 0.5, 0.75])
def test_a_tile_is_one_piece(share: float) -> None:
    found = positions(torch.Size([10, 100]), gates(share=share))
    assert len(found) == round(1000 * share)
    assert int(found[-1] - found[0]) == len(found) - 1


def test_the_same_seed_gives_the_same_bits() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    one, two = (corrupted_values(values, gates(), seeded("same")) for _ in range(2))
    assert torch.equal(bits(one), bits(two))
    other = corrupted_values(values, gates(), seeded("other"))
    assert not torch.equal(bits(one), bits(other))


def test_a_rate_hits_as_many_elements_as_it_says_also_where_it_is_tiny() -> None:
    counts = [len(positions_at_rate(1_000_000, 1e-6, seeded("rate", n))) for n in range(2000)]
    mean = sum(counts) / len(counts)
    assert mean == pytest.approx(1.0, abs=4 / math.sqrt(2000))
    # 2e-9 of a thousand million elements are two on average; no tensor of that size is needed to count them.
    tiny = [len(positions_at_rate(1_000_000_000, 2e-9, seeded("tiny", n))) for n in range(2000)]
    assert sum(tiny) / 2000 == pytest.approx(2.0, abs=4 * math.sqrt(2 / 2000))


def test_values_outside_the_range_stay_right() -> None:
    values = torch.tensor([0.1, -0.5, 1.0, -2.0, 4.0, math.inf, math.nan])
    fault = Fault(site="forward", target="x", pattern="zero", rank=0, from_step=0, at_least=0.5, below=2.0)
    wrong = corrupted_values(values, fault, seeded(0))
    assert wrong.tolist()[:6] == [pytest.approx(0.1), 0.0, 0.0, -2.0, 4.0, math.inf]
    assert math.isnan(float(wrong[6]))


@pytest.mark.parametrize(("high", "expected"), [(True, [1.5, 1.5]), (False, [1.0, 1.0])])
def test_a_sticky_bit_reads_the_same_whatever_was_written(high: bool, expected: list[float]) -> None:
    fault = Fault(site="weight", target="x", pattern="stuck_bit", bit=22, high=high, rank=0, from_step=0)
    assert corrupted_values(torch.tensor([1.0, 1.5]), fault, seeded(0)).tolist() == expected
