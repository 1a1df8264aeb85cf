"""The formula of ``study latency`` against exact enumeration, against chance, and at its ends."""

from __future__ import annotations

import numpy as np
import pytest

from unsilent.lab.studies.latency.formula import Setting, expected, median_steps, simulated
from unsilent.lab.studies.latency.study import Found, mean_of, measured

SETTINGS = [
    Setting(period=period, rate=rate, audits_too=too)
    for period in (1, 2, 7, 16)
    for rate in (1.0, 0.6, 0.1)
    for too in (False, True)
]


def distribution(setting: Setting, longest: int = 4000) -> np.ndarray:
    """P(D = d) for d from 0 on, place by place of the onset and audit by audit."""
    chance = np.zeros(longest)
    for place in range(1, setting.period + 1):
        for missed in range((longest - place - 1) // setting.period + 1):
            chance[place + setting.period * missed] += (1 - setting.seen) ** missed * setting.seen / setting.period
    return chance


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_mean_and_median_are_those_of_the_enumerated_distribution(setting: Setting) -> None:
    chance = distribution(setting)
    assert expected(setting).steps == pytest.approx(float(chance @ np.arange(len(chance))))
    assert median_steps(setting) == int(np.searchsorted(np.cumsum(chance), 0.5 - 1e-12))


@pytest.mark.parametrize("setting", SETTINGS[2:20:5], ids=str)
def test_chance_alone_gives_what_the_formula_says(setting: Setting) -> None:
    of = expected(setting)
    for drawn, mean in zip(simulated(setting, runs=4000, seed=3), (of.steps, of.repaired, of.unrepaired), strict=True):
        error = drawn.std() / len(drawn) ** 0.5
        assert abs(drawn.mean() - mean) <= 4 * error + 1e-9


def test_a_rare_error_costs_k_minus_1_steps_and_a_steady_one_half_of_that() -> None:
    assert expected(Setting(period=100, rate=1.0)).repaired == pytest.approx(49.5)
    assert expected(Setting(period=100, rate=1e-6, audits_too=False)).repaired == pytest.approx(99, rel=1e-5)
    assert expected(Setting(period=1, rate=0.3)).repaired == 0


def test_a_run_counts_what_was_kept() -> None:
    run = Found(onset=4, sick=1, step=11, action="REPAIR", named=(1,), corrupted=(5, 8, 11), audited=(7, 11))
    assert (run.steps, run.kept) == (8, 2)
    left = Found(onset=4, sick=1, step=11, action="CONTINUE", named=(2,), corrupted=(5,), audited=(7, 10))
    assert (left.steps, left.kept) == (8, 1)
    both = measured(Setting(period=4, rate=0.3), [run, left])
    assert both["named_the_sick_rank"] == 1 and not both["audits_on_schedule"]
    assert both["repaired"]["mean"] == 1.5 and both["unrepaired"]["mean"] == 2.0


def test_a_mean_has_its_interval() -> None:
    assert mean_of([1, 2, 3])["interval"] == pytest.approx([2 - 1.96 / 3**0.5, 2 + 1.96 / 3**0.5], abs=1e-3)
