"""Scores of gradient norms, the published rule, and a job without and with a fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from unsilent.lab.studies.norms.study import KINDS, QUICK, measure, study
from unsilent.lab.studies.norms.tables import scores, tables


def test_a_score_is_the_distance_from_the_median_in_median_deviations() -> None:
    assert scores(np.array([1.0, 2.0, 3.0, 4.0, 10.0])).tolist() == [2.0, 1.0, 0.0, 1.0, 7.0]


def test_agreement_of_all_others_and_norms_that_are_not_finite_give_infinite_scores() -> None:
    assert scores(np.array([2.0, 2.0, 2.0, 2.5])).tolist() == [0.0, 0.0, 0.0, np.inf]
    assert scores(np.array([1.0, 2.0, 3.0, np.nan]))[3] == np.inf


def test_the_threshold_is_set_on_the_first_steps_and_counted_on_the_others() -> None:
    quiet = np.tile(np.array([1.0, 2.0, 3.0, 4.0, 6.0]), (10, 1))  # the highest score is 3
    norms = np.concatenate([quiet, quiet])
    norms[15, 4] = 9.0  # 6 median deviations
    trials = [
        {"kind": "a", "step": 12, "rank": 0, "norm": -2.0, "d1": 0.5},  # 5 of them
        {"kind": "a", "step": 12, "rank": 0, "norm": 1.5, "d1": 0.5},
        {"kind": "b", "step": 12, "rank": 1, "norm": 2.0, "d1": 0.01},
        {"kind": "b", "step": 12, "rank": 1, "norm": np.inf, "d1": np.inf},
    ]
    found = tables(norms, trials, kinds=("a", "b"), learning=10)
    assert found["healthy"]["threshold"] == 4.5 and found["healthy"]["largest"] == 6.0
    assert (found["healthy"]["false_alarms"]["count"], found["healthy"]["false_alarms"]["of"]) == (1, 10)
    assert found["faults"]["a"]["found"]["count"] == 1 and found["faults"]["a"]["harmful"] == 2
    assert found["all"]["trials"] == 3 and found["not_finite"] == 1 and found["all"]["above_all_healthy"]["count"] == 0


def test_a_study_repeats_and_its_trials_leave_the_run_as_it_was(tmp_path: Path) -> None:
    plan = replace(QUICK, ranks=3, learning=3, steps=8)
    norms, trials = study(plan, tmp_path)
    again, other = measure(plan)
    clean, none = measure(replace(plan, trials_per_step=0.0))
    assert np.array_equal(norms, again) and trials == other == study(plan, tmp_path)[1]
    assert np.array_equal(norms, clean) and not none
    assert norms.shape == (8, 3) and trials and {trial["kind"] for trial in trials} <= set(KINDS)
