"""The update rules: what each alarms on, what a sensitivity means to it, and when a baseline begins anew."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import unsilent
from unsilent.checks.update_rules import (
    PRESETS,
    RULES,
    Observation,
    SDCDetector,
    Watch,
    default_sensitivity,
    make_rule,
)

NAMES = ["embedding", "layer.0.weight", "layer.1.weight", "head", "norm"]
SIZES = [100, 400, 400, 200, 10]


def steps(count: int, *, seed: int = 0) -> list[Observation]:
    """Clean steps: each tensor has a size of its own, varies by a few per cent, and all share a factor per step."""
    random = np.random.default_rng(seed)
    size = np.array([1e-3, 2e-2, 3e-2, 5e-1, 1.0])
    out: list[Observation] = []
    for _ in range(count):
        shared = math.exp(random.normal(0, 0.3))
        gradient = size * shared * np.exp(random.normal(0, 0.05, len(size)))
        update = 1e-4 * np.exp(random.normal(0, 0.02, len(size)))
        out.append(Observation(gradient=gradient, update=update, norm=float(np.linalg.norm(gradient))))
    return out


def taught(rule: str, count: int = 60, **options: Any) -> Watch:
    watch = Watch(rule, **({"sensitivity": 0.03} | options), names=NAMES, sizes=SIZES, ranks=4)
    for seen in steps(count):
        watch.follow(1e-3)
        watch.learn(seen)
    return watch


def hit(seen: Observation, tensor: int, times: float) -> Observation:
    """The step with one tensor's gradient and update multiplied."""
    factor = np.ones(len(NAMES))
    factor[tensor] = times
    gradient = seen.gradient * factor
    return Observation(gradient=gradient, update=seen.update * factor, norm=float(np.linalg.norm(gradient)))


@pytest.mark.parametrize("times", [0.0, 0.1, 3.0, 1e6])
def test_robust_names_the_tensor_that_grew_or_shrank(times: float) -> None:
    alarm = taught("robust").look(60, hit(steps(61)[-1], 2, times))
    assert alarm is not None and alarm.tensor == "layer.1.weight" and "of its usual deviations" in alarm.reason


def test_robust_takes_out_what_all_tensors_share() -> None:
    seen = steps(61)[-1]
    loud = Observation(gradient=seen.gradient * 1e4, update=seen.update, norm=seen.norm * 1e4)
    watch = taught("robust")
    assert watch.look(60, seen) is None and watch.look(60, loud) is None


@pytest.mark.parametrize("rule", RULES)
def test_looking_changes_nothing(rule: str) -> None:
    watch, seen = taught(rule), steps(61)[-1]
    one = watch.rule.look(seen)
    for _ in range(3):
        watch.look(60, hit(seen, 1, 1e3))
    assert watch.rule.look(seen) == one


@pytest.mark.parametrize("rule", RULES)
def test_a_greater_error_needs_no_greater_sensitivity(rule: str) -> None:
    watch, seen = taught(rule), steps(61)[-1]
    needed = [watch.rule.look(hit(seen, 3, times)).needed for times in (2.0, 10.0, 100.0, 1e4)]
    assert needed == sorted(needed, reverse=True) and needed[-1] < needed[0]


@pytest.mark.parametrize("rule", RULES)
def test_it_alarms_exactly_from_the_needed_sensitivity_on(rule: str) -> None:
    seen = hit(steps(61)[-1], 3, 50.0)
    needed = taught(rule).rule.look(seen).needed
    assert math.isfinite(needed)
    assert taught(rule, sensitivity=needed * 1.0001).look(60, seen) is not None
    assert taught(rule, sensitivity=needed * 0.9999).look(60, seen) is None


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_neither_judged_nor_learned(rule: str, bad: float) -> None:
    watch, seen = taught(rule), steps(61)[-1]
    wrong = hit(seen, 0, bad)
    before = watch.rule.look(seen)
    assert watch.look(60, wrong) is None
    watch.learn(wrong)
    assert watch.rule.look(seen) == before


def test_robust_is_silent_until_it_knows_fifty_steps() -> None:
    watch = Watch("robust", 0.3, names=NAMES, sizes=SIZES, ranks=4)
    for i, seen in enumerate(steps(51)):
        assert watch.look(i, hit(seen, 2, 1e6)) is None
        watch.learn(seen)
    assert watch.look(51, hit(steps(52)[-1], 2, 1e6)) is not None


def test_a_gradient_that_is_always_zero_is_no_alarm_and_one_that_appears_is() -> None:
    watch = Watch("robust", 0.03, names=NAMES, sizes=SIZES, ranks=4)
    for seen in steps(60):
        watch.learn(hit(seen, 0, 0.0))
    assert watch.look(60, hit(steps(61)[-1], 0, 0.0)) is None
    found = watch.look(60, steps(61)[-1])
    assert found is not None and found.tensor == "embedding"


def test_on_more_ranks_each_must_be_surer() -> None:
    few, many = (make_rule("robust", [1.0] * 5, sizes=SIZES, ranks=ranks) for ranks in (4, 400))
    for seen in steps(60):
        few.learn(seen)
        many.learn(seen)
    seen = hit(steps(61)[-1], 1, 1.6)
    assert many.look(seen).needed == pytest.approx(100 * few.look(seen).needed)


@pytest.mark.parametrize("rule", RULES)
def test_a_layer_may_alarm_sooner_than_the_others(rule: str) -> None:
    seen = hit(steps(61)[-1], 3, 50.0)
    needed = taught(rule).rule.look(seen).needed
    low = needed / 10
    assert taught(rule, sensitivity=low).look(60, seen) is None
    found = taught(rule, sensitivity=low, layers=[("head*", 30 * low)]).look(60, seen)
    assert found is not None and found.tensor == "head"
    assert taught(rule, sensitivity=low, layers=[("layer.*", 30 * low)]).look(60, seen) is None


def test_critical_phases_raise_the_sensitivity_and_never_lower_it() -> None:
    watch = taught("robust", sensitivity=0.01, critical=[(100, 200), (300, 400)], critical_sensitivity=0.08)
    assert [watch.at(step) for step in (99, 100, 199, 200, 399)] == [0.01, 0.08, 0.08, 0.01, 0.08]
    assert taught("robust", sensitivity=0.3, critical=[(0, 9)]).at(3) == 0.3


@pytest.mark.parametrize(("before", "after", "anew"), [(1e-3, 1.2e-3, False), (1e-3, 1.3e-3, True), (1e-3, 1e-4, True)])
def test_a_learning_rate_that_jumps_begins_a_new_baseline(before: float, after: float, anew: bool) -> None:
    watch = taught("robust")
    watch.follow(before)
    watch.follow(after)
    assert (watch.look(60, hit(steps(61)[-1], 2, 1e6)) is None) == anew


def test_after_a_resume_nothing_is_known() -> None:
    watch = taught("robust")
    watch.reset()
    assert watch.look(60, hit(steps(61)[-1], 2, 1e6)) is None


def test_harmful_is_the_published_rule() -> None:
    """J > mean(J)/(α·√G), worked out by hand."""
    rule = make_rule("harmful", [1.0] * 5, sizes=SIZES, ranks=1)
    largest = [1.0, 1.1, 1.0, 1.1, 1.0, 1.1, 1.0, 1.1, 1.0, 1.1, 1.0]
    for value in largest:
        rule.learn(Observation(gradient=np.ones(5), update=np.full(5, value), norm=2.0))
    seen = Observation(gradient=np.ones(5), update=np.full(5, 1.5), norm=2.25)
    assert rule.look(seen).needed == pytest.approx(0.1 / (0.5 * 0.5))
    calmer = Observation(gradient=np.ones(5), update=np.full(5, 1.5), norm=1.9)
    assert rule.look(calmer).needed == math.inf  # the norm did not grow


def test_ema_turns_the_knob_around() -> None:
    """At the sensitivity 0.05 it is the α of 0.05 that its text recommends; there a smaller α alarms sooner."""
    rule = make_rule("ema", [1.0] * 5, sizes=SIZES, ranks=1)
    for _ in range(12):
        rule.learn(Observation(gradient=np.ones(5), update=np.full(5, 2.0), norm=1.0))

    def needed(times: float) -> float:
        return rule.look(Observation(gradient=np.ones(5), update=np.full(5, 2.0 * times), norm=1.0)).needed

    assert needed(1.05) == pytest.approx(0.05) and needed(0.95) == pytest.approx(0.05)
    assert needed(1.5) == pytest.approx(0.05**2 / 0.5)


def test_the_sample_class_does_what_the_sample_does() -> None:
    """The arithmetic of the sample, spelled out: one average over the mean of all norms, updated before the comparison."""
    random = np.random.default_rng(0)
    detector = SDCDetector(alpha=0.5, window_size=3)
    ema, means, said = None, [], []
    for step in range(12):
        updates = [torch.tensor(random.normal(size=4) * (50.0 if step == 9 else 1.0)) for _ in range(3)]
        norms = [float(np.linalg.norm(u.numpy())) for u in updates]
        mean = float(np.mean(norms))
        ema = mean if ema is None else 0.9 * ema + 0.1 * mean
        means = [*means, mean][-3:]
        said.append(any(abs(n - ema) > max(0.5 * ema, 3 * float(np.std(means))) for n in norms))
        assert detector.check_step(updates) == said[-1]
    assert True in said and False in said
    assert unsilent.SDCDetector().alpha == 0.05 and unsilent.SDCDetector().buffer.maxlen == 100


def test_the_sample_class_takes_arrays_and_refuses_nothing_at_all() -> None:
    assert SDCDetector(alpha=10.0).check_step([np.ones((2, 2)), np.ones(3)]) is False
    with pytest.raises(unsilent.UsageError):
        SDCDetector().check_step([])


def test_presets_lie_in_the_ranges_that_they_are_named_after() -> None:
    assert (
        0.001 <= PRESETS["scarce"] < 0.01 <= PRESETS["default"] < 0.05 <= PRESETS["critical"] < 0.1 < PRESETS["debug"]
    )


def test_defaults_go_by_the_size_of_the_model() -> None:
    assert default_sensitivity("robust", 10**6) == default_sensitivity("robust", 10**10)
    assert default_sensitivity("ema", 60_000_000) > default_sensitivity("ema", 500_000_000) == 0.05
    assert default_sensitivity("harmful", 10**6) == 0.05


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(unsilent.UsageError, match="no update rule"):
        make_rule("magic", [1.0], sizes=[1], ranks=1)
