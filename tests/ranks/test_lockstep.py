"""Two tensor-parallel groups in lock step: where the taps stand, and what they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from unsilent.lab.pool import RankPool
from unsilent.lab.studies.llama import Llama, Shape, loss_of
from unsilent.lab.studies.submodule import study as submodule
from unsilent.lab.studies.submodule.lockstep import GROUP, Comparison, Run, Tap, bits_differ, parallelize, run_rank
from unsilent.lab.studies.submodule.readings import WEIGHTS, Readings
from unsilent.lab.units import HEALTHY, PLACES, unit

SHAPE = Shape(name="tiny", hidden=16, layers=2, heads=4, kv_heads=2, ffn=24, samples=2, length=8)
STEPS = 6


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def healthy(pool: RankPool) -> list[Readings]:
    return pool.results(run_rank, Run(unit=HEALTHY[0], shape=SHAPE, seed=3, steps=STEPS))


@pytest.fixture(scope="module")
def sick(pool: RankPool) -> list[Readings]:
    return pool.results(run_rank, sick_run())


def sick_run() -> Run:
    """Unit 11, but so that every step has a burst in every place."""
    rates = {place: replace(unit(11).rate(place), chance=1.0, share=0.05) for place in PLACES}
    return Run(unit=replace(unit(11), **rates), shape=SHAPE, seed=3, steps=STEPS)


def test_healthy_twins_have_the_same_bits(healthy: list[Readings]) -> None:
    for well, other in zip(healthy[:GROUP], healthy[GROUP:], strict=True):
        assert not other.differing.any() and not other.weights.any()
        assert np.array_equal(well.prints, other.prints) and np.array_equal(well.abft, other.abft)
        assert other.prints.any(-1).all(), "a tap was not reached"


def test_every_rank_reaches_its_taps_in_the_same_order_forward_and_backward(healthy: list[Readings]) -> None:
    """Attention and FFN of each layer going up, then FFN and attention of each layer coming down."""
    assert [rank.order for rank in healthy] == [[0, 1, 4, 5, 7, 6, 3, 2]] * 4


def test_a_sick_group_differs_where_it_errs_and_nowhere_else(sick: list[Readings]) -> None:
    for rank in sick[GROUP:]:
        assert {place for _, place in rank.bursts} == set(PLACES)
        assert rank.differing.sum((0, 1)).all()
        assert rank.weights[:, :2].any() and not rank.weights[:, WEIGHTS.index("other")].any()
        assert (rank.differing >= rank.left_out + rank.not_finite).all()
        assert rank.histogram.sum() == (rank.differing - rank.left_out - rank.not_finite).sum()


def test_no_error_gets_past_a_tap(sick: list[Readings], healthy: list[Readings]) -> None:
    """Every rank of both groups trains as a healthy one does: only what the sick ranks compute themselves differs."""
    for rank in sick:
        assert np.array_equal(rank.loss, healthy[0].loss)
    for well, rank in zip(healthy[:GROUP], sick[:GROUP], strict=True):
        assert np.array_equal(well.prints, rank.prints)


def test_fingerprints_differ_exactly_where_elements_do(sick: list[Readings]) -> None:
    for well, rank in zip(sick[:GROUP], sick[GROUP:], strict=True):
        assert np.array_equal((well.prints != rank.prints).any(-1), rank.differing > 0)


def test_the_same_run_gives_the_same_readings(pool: RankPool, sick: list[Readings]) -> None:
    again = pool.results(run_rank, sick_run())
    for one, other in zip(sick, again, strict=True):
        assert np.array_equal(one.prints, other.prints) and np.array_equal(one.severity, other.severity)


def test_one_wrong_element_shows_as_exactly_one(pool: RankPool) -> None:
    for place in range(len(PLACES)):
        readings = pool.results(_one_wrong_element, place)
        assert [int(rank.differing.sum()) for rank in readings] == [0, 0, 1, 0]
        assert readings[2].differing[1, 1, place] == 1
        assert readings[2].severity[1, 1, place] == 3.0


def test_gradients_are_those_of_the_model_on_one_device(pool: RankPool) -> None:
    assert max(pool.results(_distance_to_one_device)) < 1e-6


@pytest.mark.parametrize("placement", ["replicated", "partial"])
def test_a_tap_that_does_not_stand_on_a_partial_refuses(pool: RankPool, placement: str) -> None:
    answers = pool.results(_tap_on, placement)
    if placement == "partial":
        assert answers == [""] * 4
    else:
        assert all("not on a Partial" in answer for answer in answers)


def test_the_study_runs_a_healthy_unit_beside_the_others_and_writes_its_figures(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(submodule, "RankPool", lambda size: nullcontext(pool))
    record = submodule.run(
        out=tmp_path, units=[unit(2)], shape=SHAPE, seed=1, steps=2, quick=True, command="unsilent study submodule"
    )
    assert [one["healthy"] for one in record["units"]] == [True, True]
    assert all(goal["met"] for goal in record["goals"])
    assert json.loads((tmp_path / "submodule.json").read_text()) == record
    assert "figures mean nothing" in (tmp_path / "submodule.html").read_text()


# ---- what the ranks run ----------------------------------------------------------------------------------------------


def _one_wrong_element(rank: int, size: int, place: int) -> Readings:
    """A healthy unit; rank 2's value at one tap of layer 1 in step 1 is wrong in one element."""
    tapped = Comparison.tapped

    def spoiled(self: Comparison, layer: int, at: int, value: torch.Tensor, products: Any) -> torch.Tensor:
        if rank == 2 and self._step == 1 and (layer, at) == (1, place):
            value = value.clone()
            value.view(-1)[7] *= 4.0
        return tapped(self, layer, at, value, products)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comparison, "tapped", spoiled)
        return run_rank(rank, size, Run(unit=HEALTHY[0], shape=SHAPE, seed=3, steps=2))


def _distance_to_one_device(rank: int, size: int) -> float:
    """The largest relative difference of a parameter's gradient."""
    model, alone = Llama(SHAPE, seed=5), Llama(SHAPE, seed=5)
    parallelize(model, Comparison(SHAPE, 1))
    batch = torch.randint(256, (SHAPE.samples, SHAPE.length + 1), generator=torch.Generator().manual_seed(0))
    loss_of(model, batch).backward()
    loss_of(alone, batch).backward()
    distances = []
    for ours, right in zip(model.parameters(), alone.parameters(), strict=True):
        gradient: Any = ours.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        distances.append(float((whole - right.grad).norm() / right.grad.norm()))
    return max(distances)


def _tap_on(rank: int, size: int, placement: str) -> str:
    comparison = Comparison(SHAPE, 1)
    tap = Tap(comparison, 0, PLACES[0])
    tap.products.append((torch.ones(4, 2), torch.ones(2, 4)))
    where = Partial() if placement == "partial" else Replicate()
    value = DTensor.from_local(torch.full((4, 4), 2.0), comparison.mesh["tp"], [where], run_check=False)
    try:
        tapped = tap(value)
    except RuntimeError as error:
        return str(error)
    assert not bits_differ(tapped.to_local(), value.to_local()).any()
    return ""
