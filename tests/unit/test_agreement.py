"""The agreed vector: fixed size, MIN and MAX in one all-reduce, and a header that must be the same everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unsilent.agreement import WORDS, Agreement, Declaration
from unsilent.errors import UsageError

AGREEMENT = Agreement(
    {"finite": Declaration(flags=("local", "reduced")), "replicas": Declaration(digests=("weights", "counters"))}
)
DIGESTS = st.integers(min_value=0, max_value=2**63 - 1)


def reduced(*vectors: torch.Tensor) -> torch.Tensor:
    """What an all-reduce with MAX gives."""
    return torch.stack(vectors).max(dim=0).values


def vector(step: int = 3, phase: int = 1, *, up: bool = False, weights: int = 5) -> torch.Tensor:
    return AGREEMENT.pack(
        step=step, phase=phase, flags={("finite", "local"): up}, digests={("replicas", "weights"): weights}
    )


def test_its_size_is_one_kilobyte_whatever_is_declared() -> None:
    for agreement in (AGREEMENT, Agreement({})):
        packed = agreement.pack(step=0, phase=1, flags={}, digests={})
        assert packed.dtype == torch.int64 and packed.numel() * 8 == 1024 == WORDS * 8


def test_a_flag_of_one_rank_is_known_to_all() -> None:
    agreed = AGREEMENT.unpack(reduced(vector(), vector(up=True), vector()))
    assert agreed.raised("finite", "local") and not agreed.raised("finite", "reduced")


@given(st.lists(DIGESTS, min_size=1, max_size=8))
def test_digests_differ_exactly_when_two_ranks_hold_different_ones(values: list[int]) -> None:
    agreed = AGREEMENT.unpack(reduced(*(vector(weights=value) for value in values)))
    assert agreed.differs("replicas", "weights") == (len(set(values)) > 1)
    assert not agreed.differs("replicas", "counters")
    assert not agreed.flags and bool(agreed.differing) == (len(set(values)) > 1)


@pytest.mark.parametrize(("one", "other", "word"), [((3, 1), (4, 1), "step"), ((3, 1), (3, 2), "phase")])
def test_ranks_in_different_places_get_a_clear_error(one: tuple[int, int], other: tuple[int, int], word: str) -> None:
    with pytest.raises(RuntimeError, match=f"not in the same place: {word}"):
        AGREEMENT.unpack(reduced(vector(*one), vector(*other)))


def test_more_than_it_can_hold_is_refused() -> None:
    with pytest.raises(UsageError, match="agreed vector"):
        Agreement({"greedy": Declaration(digests=tuple(f"d{i}" for i in range(70)))})
