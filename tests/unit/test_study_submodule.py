"""Figures and pages of the studies of sub-modules and of single steps, and the correction of the fit."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from unsilent.cli import app
from unsilent.errors import UsageError
from unsilent.lab.rates import poisson_interval
from unsilent.lab.studies.llama import SHAPES, Shape
from unsilent.lab.studies.step import page as step_page
from unsilent.lab.studies.step import study as step
from unsilent.lab.studies.step.study import noise_to_signal
from unsilent.lab.studies.step.tables import goals as step_goals
from unsilent.lab.studies.step.tables import standing
from unsilent.lab.studies.step.tables import unit_figures as step_figures
from unsilent.lab.studies.submodule import page as submodule_page
from unsilent.lab.studies.submodule import study as submodule
from unsilent.lab.studies.submodule.readings import Readings, bin_edges, quantile
from unsilent.lab.studies.submodule.tables import STORED, goals, unit_figures
from unsilent.lab.units import HEALTHY, PLACES, unit
from unsilent.lab.units.fit import corrected, log_row

STEPS, LAYERS, ELEMENTS = 10, 2, 100


def readings() -> Readings:
    """Of a rank that saw nothing."""
    read = Readings.empty(steps=STEPS, layers=LAYERS)
    read.elements[:] = ELEMENTS
    read.weight_elements[:] = 50
    read.abft[:] = 0.25
    return read


def hit(*, step: int, place: int, wrong: list[float], star: list[float], abft: float = 0.25) -> list[Readings]:
    """Of two ranks, the first of which saw these wrong elements in layer 1."""
    first = readings()
    first.add((step, 1, place), np.array(wrong), np.array(star))
    first.prints[step, 1, place] = 1
    first.abft[step, 1, place] = abft
    first.bursts.append((step, PLACES[place]))
    return [first, readings()]


def test_a_reading_counts_severities_zeros_and_what_is_not_finite() -> None:
    read = readings()
    read.add((0, 0, 1), np.array([2.0, 1.0, np.inf, 5.0]), np.array([1.0, 4.0, 1.0, 0.0]))
    at = (0, 0, 1)
    assert (read.differing[at], read.left_out[at], read.not_finite[at]) == (4, 1, 1)
    assert read.severity[at] == 1.75 and read.worst[at] == 1.0
    assert read.histogram[1].sum() == 2 and not read.histogram[0].any()


def test_severities_beyond_the_histogram_are_in_its_outer_bins() -> None:
    read = readings()
    read.add((0, 0, 0), np.array([1e30, 1 + 1e-12]), np.array([1.0, 1.0]))
    assert read.histogram[0, 0] == read.histogram[0, -1] == 1


def test_a_quantile_is_exact_to_its_bin() -> None:
    edges = bin_edges()
    values = np.logspace(-3, 3, 10_001)
    histogram = np.histogram(values, edges)[0]
    for share in (0.1, 0.5, 0.9):
        assert quantile(histogram, share) == pytest.approx(np.quantile(values, share), rel=0.13)
    assert math.isnan(quantile(np.zeros(len(edges) - 1, int), 0.5))


@pytest.mark.parametrize(("count", "low", "high"), [(0, 0.0, 3.689), (1, 0.0253, 5.572), (20, 12.217, 30.888)])
def test_the_poisson_interval_is_garwoods(count: int, low: float, high: float) -> None:
    assert poisson_interval(count) == pytest.approx((low, high), abs=1e-3)


def test_the_frequency_is_the_share_of_all_elements_of_all_steps_layers_and_ranks() -> None:
    figures = unit_figures(unit(1), [readings(), readings()], hit(step=3, place=2, wrong=[2.0, 3.0], star=[1.0, 1.0]))
    place = figures["places"]["backward_attention"]
    assert place["elements"] == 2 * STEPS * LAYERS * ELEMENTS
    assert place["frequency"] == 2 / place["elements"]
    assert place["severity"]["mean"] == 1.5 and place["severity"]["largest"] == 2.0
    low, high = place["interval"]
    assert low / place["frequency"] == pytest.approx(0.0253, abs=1e-3)
    assert high / place["frequency"] == pytest.approx(5.572, abs=1e-3)
    assert figures["over_time"]["backward_attention"] == [[3, 2 / (2 * LAYERS * ELEMENTS), 1.5]]
    assert figures["places"]["forward_ffn"]["interval"] is None


@pytest.mark.parametrize(("abft", "flagged"), [(0.25, 0), (0.26, 1)])
def test_abft_flags_what_exceeds_the_healthy_groups_largest_residual(abft: float, flagged: int) -> None:
    sick = hit(step=3, place=0, wrong=[2.0], star=[1.0], abft=abft)
    seen = unit_figures(unit(1), [readings(), readings()], sick)["places"]["forward_attention"]["flagged"]
    assert (seen["bursts"], seen["reached"], seen["fingerprints"], seen["abft"]) == (1, 1, 1, flagged)
    assert (seen["tensors"], seen["tensors_abft"]) == (1, flagged)
    assert seen["alarms_without_burst"] == {"fingerprints": 0, "abft": 0}


def test_a_burst_that_reached_no_tap_is_counted_as_such() -> None:
    sick = [readings(), readings()]
    sick[1].bursts.append((4, "backward_ffn"))
    seen = unit_figures(unit(1), [readings(), readings()], sick)["places"]["backward_ffn"]["flagged"]
    assert (seen["bursts"], seen["reached"], seen["fingerprints"]) == (1, 0, 0)


def test_a_burst_of_several_steps_is_one_event() -> None:
    lasting = replace(unit(1), burst_steps=5)
    sick = [readings(), readings()]
    sick[0].bursts.extend((step, PLACES[0]) for step in range(2, 7))
    place = unit_figures(lasting, [readings(), readings()], sick)["places"][PLACES[0]]
    assert place["events"] == 1 and place["flagged"]["bursts"] == 5


def test_goals_are_missed_by_a_factor_of_more_than_three_or_by_a_healthy_unit_that_differs() -> None:
    figures = unit_figures(unit(10), [readings(), readings()], [readings(), readings()])
    for place, stored in zip(PLACES, STORED[10], strict=True):
        figures["places"][place]["frequency"] = 2.9 * stored
    assert goals([figures])[0]["met"]
    figures["places"]["forward_ffn"]["frequency"] = 3.1 * STORED[10][1]
    assert not goals([figures])[0]["met"]

    quiet = unit_figures(unit(2), [readings(), readings()], [readings(), readings()])
    assert goals([quiet])[0]["met"]
    loud = unit_figures(HEALTHY[0], [readings(), readings()], hit(step=1, place=1, wrong=[1.0], star=[2.0]))
    assert not goals([loud])[0]["met"]


def test_the_fit_scales_each_share_by_stored_over_measured() -> None:
    measured = dict(zip(PLACES, (STORED[11][0] / 2, STORED[11][1], STORED[11][2] * 4, 0.0), strict=True))
    one = unit(11)
    fitted = corrected(one, log_row(one, measured))
    ratios = [fitted.rate(place).share / one.rate(place).share for place in PLACES]
    assert ratios == pytest.approx([2.0, 1.0, 0.25, 1.0], rel=5e-3)
    assert [fitted.rate(place).chance for place in PLACES] == [one.rate(place).chance for place in PLACES]


def test_a_step_with_both_directions_counts_for_neither() -> None:
    noise = np.array([0.0, 0.1, 0.2, 0.4, np.nan])
    bursts = [
        (1, "forward_ffn"),
        (2, "backward_ffn"),
        (3, "forward_attention"),
        (3, "backward_ffn"),
        (4, "forward_ffn"),
    ]
    figures = step_figures(unit(1), 256, noise, bursts)
    assert figures["all"]["worst"] == 0.4 and figures["not_finite"] == 1
    assert figures["forward"] == {"steps": 2, "worst": 0.1, "median": 0.1}
    assert figures["backward"] == {"steps": 1, "worst": 0.2, "median": 0.2}
    assert figures["bursts"]["steps"] == 4 and figures["outside_bursts"] == 0


@pytest.mark.parametrize(("worst", "met"), [(0.0625, True), (0.13, False), (0.03, False)])
def test_the_law_is_met_within_a_factor_of_two_of_one_over_the_root_of_the_tokens(worst: float, met: bool) -> None:
    figures = step_figures(unit(1), 256, np.array([worst]), [(0, "forward_ffn")])
    assert [goal["met"] for goal in step_goals([figures])] == [met]


def test_a_worst_is_called_consistent_within_a_factor_of_three() -> None:
    assert standing({"number": 1, "all": {"worst": 0.1}}).startswith("consistent")
    assert standing({"number": 1, "all": {"worst": 0.2}}).startswith("not consistent")
    assert standing({"number": 7, "all": {"worst": 0.2}}) == "—"


def test_only_a_sick_unit_in_a_burst_makes_noise_and_it_does_not_reach_the_next_step() -> None:
    """The run is the healthy one whoever else is played in it."""
    shape = Shape(name="tiny", hidden=16, layers=1, heads=2, kv_heads=2, ffn=24, samples=2, length=8)
    rates = {place: replace(unit(11).rate(place), chance=0.3, share=0.1) for place in PLACES}
    sick, quiet = replace(unit(11), **rates), unit(2)
    noise, bursts = noise_to_signal([sick, quiet], shape, seed=1, steps=12)
    hit = {step for step, _ in bursts[0]}
    assert 0 < len(hit) < 12
    assert {int(step) for step in np.flatnonzero(noise[0])} == hit
    assert not noise[1].any() and not bursts[1]
    alone, _ = noise_to_signal([sick], shape, seed=1, steps=12)
    assert np.array_equal(alone[0], noise[0])


def test_the_study_of_steps_writes_its_figures_at_two_batch_sizes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shape = Shape(name="tiny", hidden=16, layers=1, heads=2, kv_heads=2, ffn=24, samples=1, length=8)
    made = step.run(
        out=tmp_path, units=[unit(2)], shape=shape, seed=1, steps=3, quick=True, command="unsilent study step"
    )
    assert [(one["number"], one["tokens"]) for one in made["units"]] == [(0, 8), (2, 8), (0, 32), (2, 32)]
    assert json.loads((tmp_path / "step.json").read_text()) == made
    assert "figures mean nothing" in (tmp_path / "step.html").read_text()


@pytest.mark.parametrize("study", [submodule, step])
def test_a_shape_for_gpus_and_a_run_of_no_steps_are_refused_before_anything_runs(study: Any, tmp_path: Path) -> None:
    for shape, steps, reason in (("paper", 1, "does not fit"), ("small", 0, "at least 1 step")):
        with pytest.raises(UsageError, match=reason):
            study.run(out=tmp_path, units=[unit(2)], shape=SHAPES[shape], seed=1, steps=steps, quick=True, command="x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["x", "1,", "99"])
def test_the_command_refuses_units_that_there_are_not(text: str, tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["study", "submodule", "--units", text, "--out", str(tmp_path)])
    assert answer.exit_code == 2 and text.strip(",") in answer.stderr


def submodule_record() -> dict[str, Any]:
    units = [
        unit_figures(unit(1), [readings(), readings()], hit(step=3, place=0, wrong=[2.0, 1e9], star=[1.0, 1.0])),
        unit_figures(HEALTHY[0], [readings(), readings()], [readings(), readings()]),
    ]
    return record(units, goals(units))


def step_record() -> dict[str, Any]:
    units = [
        step_figures(unit(1), 256, np.array([0.0, 0.05]), [(1, "forward_ffn")]),
        step_figures(unit(1), 1024, np.array([0.0, 0.03]), [(1, "forward_ffn")]),
        step_figures(unit(2), 256, np.zeros(2), []),
    ]
    return record(units, step_goals(units))


def record(units: list[Any], met: list[Any]) -> dict[str, Any]:
    return {"quick": True, "shape": asdict(SHAPES["small"]), "seed": 0, "steps": STEPS, "pools_replaced": 0, "conditions": {"command": "x"},
            "goals": met, "units": units}  # fmt: skip


@pytest.mark.parametrize("kind", ["submodule", "step"])
def test_the_page_is_written_from_what_the_json_holds_and_says_what_is_simulated(kind: str) -> None:
    pytest.importorskip("matplotlib")
    page, made = {"submodule": (submodule_page.page, submodule_record()), "step": (step_page.page, step_record())}[kind]
    written = page(json.loads(json.dumps(made)))
    html = written.html()
    assert "figures mean nothing" in html and "shape small" in html.lower() and "stand in for that" in html
    for part in written.parts:
        if part.plot:
            assert "simulated" in part.caption.lower()


def test_a_study_of_nothing_but_silent_units_has_a_page_too() -> None:
    pytest.importorskip("matplotlib")
    quiet = [unit_figures(unit(2), [readings(), readings()], [readings(), readings()])]
    assert "unit 2 showed no wrong bit" in submodule_page.page(record(quiet, goals(quiet))).html()
    silent = [step_figures(unit(2), 256, np.zeros(2), [])]
    assert "no burst, no noise" in step_page.page(record(silent, step_goals(silent))).html()
