"""The free run, and the rates that are taken of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unsilent.errors import UsageError
from unsilent.lab.studies.drift.study import Plan, apart, follow, frequency
from unsilent.lab.studies.drift.tables import rates, tables
from unsilent.lab.studies.free_run import BACK, EVERY, FreeRun, OnceOneElement, Setup
from unsilent.lab.studies.llama import Shape
from unsilent.lab.studies.parts import Parts
from unsilent.lab.units import Rate, Unit

SHAPE = Shape(name="least", hidden=16, layers=1, heads=2, kv_heads=1, ffn=24, samples=2, length=8)
SETUP = Setup(shape=SHAPE, steps=6, warm_up=2)
TEXT = bytes(range(32, 120)) * 40
STEPS = np.arange(200.0)


def weights_of(run: FreeRun) -> list[torch.Tensor]:
    return [step.weights.clone() for step in run]


@pytest.mark.parametrize("optimizer", ["adamw", "sam", "lookahead"])
def test_a_run_repeats_bit_for_bit(optimizer: str) -> None:
    setup = replace(SETUP, optimizer=optimizer)
    one, other = weights_of(FreeRun(setup, TEXT)), weights_of(FreeRun(setup, TEXT))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], one[-1])


def test_one_element_once_changes_bits_and_hardly_more() -> None:
    one, other = weights_of(FreeRun(SETUP, TEXT)), weights_of(FreeRun(SETUP, TEXT, OnceOneElement))
    assert not torch.equal(one[-1], other[-1])
    torch.testing.assert_close(one[-1], other[-1], rtol=0, atol=1e-4)


def test_sam_with_no_radius_is_adamw() -> None:
    alone = weights_of(FreeRun(SETUP, TEXT))
    sam = weights_of(FreeRun(replace(SETUP, optimizer="sam", radius=0.0), TEXT))
    wide = weights_of(FreeRun(replace(SETUP, optimizer="sam", radius=0.5), TEXT))
    assert torch.equal(alone[-1], sam[-1]) and not torch.equal(alone[-1], wide[-1])


def test_lookahead_falls_back_to_the_middle() -> None:
    run = FreeRun(SETUP, TEXT)
    start = run.weights.detach().clone()
    alone, ahead = weights_of(run), weights_of(FreeRun(replace(SETUP, optimizer="lookahead"), TEXT))
    last = EVERY - 1
    assert torch.equal(alone[last - 1], ahead[last - 1])
    torch.testing.assert_close(ahead[last], torch.lerp(start, alone[last], BACK))


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="adamw, sam, lookahead"):
        replace(SETUP, optimizer="sgd")


def test_apart_is_zero_only_for_equal_bits() -> None:
    zero, negative = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
    assert apart(zero, zero) == 0.0 and apart(zero, negative) > 0.0
    assert apart(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])) == 5.0


def test_rates_of_a_growth_that_saturates() -> None:
    distance = np.full(200, 10.0)
    difference = np.where(STEPS < 100, 1e-4 * np.exp(0.1 * (STEPS - 20)), 1 + 0.05 * (STEPS - 100))
    difference[:20] = 0.0
    found = rates(difference, distance)
    assert (found.onset, found.saturated) == (20, 100)
    assert found.growth == pytest.approx(0.1) and found.slope == pytest.approx(0.05)


def test_rates_of_runs_that_never_differ_or_lose_their_numbers() -> None:
    flat = rates(np.zeros(50), np.ones(50))
    assert flat.onset is None and flat.growth is None and flat.slope is None
    lost = np.exp(0.1 * STEPS) * 1e-6
    lost[60:] = np.nan
    found = rates(lost, np.full(200, 1e9))
    assert found.growth == pytest.approx(0.1) and found.saturated is None
    assert rates(np.full(9, np.nan), np.ones(9)).onset == 0


def run_of(difference: np.ndarray, loss: float) -> dict[str, Any]:
    return {"loss": np.full(200, loss), "evaluation": np.full(8, loss), "difference": difference}


def growing(rate: float, onset: int = 0) -> np.ndarray:
    since = STEPS - onset
    return np.where(since >= 0, np.minimum(1e-4 * np.exp(rate * since), 2 + 0.01 * STEPS), 0.0)


def test_goals_say_what_was_measured_and_whether_it_is_met() -> None:
    runs = {
        "healthy": {**run_of(np.zeros(200), 2.0), "distance": np.full(200, 10.0)},
        "again": run_of(np.zeros(200), 2.0),
        "once": run_of(growing(0.1), 2.01),
        "reseeded": run_of(np.full(200, 5.0), 2.5),
        "unit-1": run_of(growing(0.1), 2.01),
        "unit-2": run_of(np.zeros(200), 2.0),
        "unit-11": run_of(growing(0.25), 2.1),
        "unit-13": run_of(growing(0.2, onset=50), 2.01),
    }
    units = {name: int(name.split("-")[1]) for name in runs if name.startswith("unit")}
    frequencies = {"unit-1": 1e-6, "unit-2": 0.0, "unit-11": 1e-2, "unit-13": 1e-5}
    record = tables(runs, units=units, frequency=frequencies, onset_of_13=50)
    assert all(goal["met"] for goal in record["goals"]), record["goals"]
    assert record["growth"]["count"] == 3 and record["growth"]["factor"] == pytest.approx(2.5, rel=0.01)
    runs["unit-11"] = run_of(growing(0.5), 3.0)
    runs["unit-2"] = run_of(growing(0.1), 2.0)
    missed = [
        goal["goal"]
        for goal in tables(runs, units=units, frequency=frequencies, onset_of_13=50)["goals"]
        if not goal["met"]
    ]
    assert len(missed) == 5 and any("growth" in goal for goal in missed) and any("unit 2" in goal for goal in missed)


def test_a_study_goes_on_with_the_runs_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unsilent.lab.studies.drift.study.standard_library_text", lambda: TEXT)
    sick = Unit(number=1, forward_ffn=Rate(chance=1.0, share=0.2))
    first = follow(Plan(setup=SETUP, units=(sick,), late=3), tmp_path)
    assert np.array_equal(first["again"]["difference"], np.zeros(6)) and (first["unit-1"]["difference"] > 0).all()
    assert not first["once-late"]["difference"][:3].any() and first["once-late"]["difference"][3:].all()
    (tmp_path / "parts" / "again.npz").unlink()
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "parts").iterdir()}
    second = follow(Plan(setup=SETUP, units=(sick, Unit(number=2)), late=3), tmp_path)
    assert not second["unit-2"]["difference"].any()
    assert (tmp_path / "parts" / "unit-1.npz").stat().st_mtime_ns == times["unit-1.npz"]
    for name, piece in first.items():
        assert all(np.array_equal(column, second[name][key]) for key, column in piece.items())
    third = follow(Plan(setup=SETUP, units=(replace(sick, forward_ffn=Rate(chance=1.0, share=0.5)),), late=3), tmp_path)
    assert not np.array_equal(third["unit-1"]["difference"], first["unit-1"]["difference"])


def test_a_part_that_was_made_with_something_else_or_is_damaged_is_absent(tmp_path: Path) -> None:
    Parts(tmp_path, "a").keep("x", {"y": np.ones(2)})
    kept = Parts(tmp_path, "a").get("x")
    assert kept is not None and np.array_equal(kept["y"], np.ones(2))
    assert Parts(tmp_path, "b").get("x") is None
    whole = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(whole[: len(whole) // 2])
    assert Parts(tmp_path, "a").get("x") is None


def test_frequency_is_the_long_run_share_of_wrong_elements() -> None:
    unit = Unit(
        number=1, burst_steps=5, forward_ffn=Rate(chance=0.02, share=0.1), backward_ffn=Rate(chance=0.1, share=0.02)
    )
    assert frequency(unit) == pytest.approx((0.02 * 5 * 0.1 + 0.1 * 5 * 0.02) / 4)
