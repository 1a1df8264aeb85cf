"""Strikes that fade over steps and runs, and what a verdict means in the light of earlier ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.records import Kind, Site, Suspect, Verdict
from unsilent.recurrence import (
    COMES_BACK,
    HALF_LIFE_DAYS,
    HALF_LIFE_STEPS,
    REMEMBERED,
    Strike,
    device_of,
    in_hindsight,
    newest,
    seen_again,
    strikes,
)

T, P, S, I = Kind.TRANSIENT, Kind.PERSISTENT, Kind.SOFTWARE, Kind.INCONCLUSIVE  # noqa: E741
DAY = 86_400.0


def strike(kind: Kind = P, *, step: int = 0, time: float = 0.0, run: str = "a") -> Strike:
    return Strike(run=run, kind=kind, step=step, time=time)


def verdict(kind: Kind, *nodes: str, step: int = 7) -> Verdict:
    return Verdict(
        kind=kind, site=Site.GRADIENT, step=step, reason="bits differ", check="audit",
        suspects=tuple(Suspect(rank=i, node=node, device="gpu-1") for i, node in enumerate(nodes)),
    )  # fmt: skip


def test_nothing_is_held_against_a_device_without_a_history() -> None:
    assert strikes([], 5, 5.0) == 0.0


def test_a_persistent_verdict_is_a_strike_and_a_transient_one_a_third() -> None:
    assert strikes([strike(P)], 0, 0.0) == 1.0
    assert strikes([strike(T)], 0, 0.0) == pytest.approx(1 / 3)
    assert strikes([strike(S), strike(I)], 0, 0.0) == 0.0


def test_it_halves_with_each_half_life_of_time_and_of_steps() -> None:
    assert strikes([strike()], 0, HALF_LIFE_DAYS * DAY) == pytest.approx(0.5)
    assert strikes([strike()], HALF_LIFE_STEPS, 0.0) == pytest.approx(0.5)
    assert strikes([strike()], HALF_LIFE_STEPS, HALF_LIFE_DAYS * DAY) == pytest.approx(0.25)


def test_a_run_counts_for_one_strike_at_most_and_runs_add_up() -> None:
    often = [strike(step=step) for step in range(500)]
    assert strikes(often, 500, 0.0) == 1.0
    assert strikes([strike(run=run) for run in "abc"], 0, 0.0) == 3.0
    assert strikes([strike(T, step=step) for step in range(9)], 9, 0.0) == 1.0


def test_clocks_that_run_backwards_do_no_harm() -> None:
    assert strikes([strike(step=900, time=1e9)], 0, 0.0) == 1.0
    assert strikes([strike(step=-(10**9))], 10**9, 1e12) == 0.0


@given(
    st.lists(
        st.builds(
            Strike,
            run=st.sampled_from("ab"),
            kind=st.sampled_from(Kind),
            step=st.integers(-(10**6), 10**6),
            time=st.floats(0, 1e10),
        ),
        max_size=6,
    ),
    st.integers(-(10**6), 10**6),
    st.floats(0, 1e10),
    st.integers(0, 10**5),
    st.floats(0, 1e8),
)
def test_strikes_only_fade_and_only_grow_with_more_history(
    history: list[Strike], step: int, time: float, steps: int, seconds: float
) -> None:
    now = strikes(history, step, time)
    assert 0.0 <= now <= len({s.run for s in history})
    assert strikes(history, step + steps, time + seconds) <= now + 1e-12
    assert strikes([*history, strike(T, run="c")], step, time) >= now
    assert strikes(list(reversed(history)), step, time) == pytest.approx(now)


# ---- in hindsight ----------------------------------------------------------------------------------------------------


def test_the_third_transient_on_a_device_is_persistent() -> None:
    two = strikes([strike(T, step=3), strike(T, step=5)], 7, 0.0)
    assert two >= COMES_BACK > strikes([strike(T, step=3)], 7, 0.0)
    again = in_hindsight(verdict(T, "n1"), strikes=two, blamed_before=())
    assert again.kind is P
    assert again.suspects == verdict(T, "n1").suspects
    assert "comes back" in again.reason and "0.7 strikes" in again.reason and "bits differ" in again.reason
    assert in_hindsight(verdict(T, "n1"), strikes=0.4, blamed_before=()).kind is T


def test_two_transients_long_ago_do_not_make_the_third_persistent() -> None:
    old = strikes([strike(T), strike(T, step=1)], HALF_LIFE_STEPS, 0.0)
    assert in_hindsight(verdict(T, "n1"), strikes=old, blamed_before=()).kind is T


def test_a_step_that_fails_on_whatever_device_is_software_and_nobody_is_blamed() -> None:
    for kind in (T, P):
        judged = in_hindsight(verdict(kind, "n2"), strikes=3.0, blamed_before=["n1 gpu-1"])
        assert judged.kind is S and judged.suspects == () and judged.acquits == ("n1 gpu-1",)
        assert "n1 gpu-1" in judged.reason and "n2 gpu-1" in judged.reason and "step 7" in judged.reason


def test_the_same_device_at_the_same_step_stays_blamed() -> None:
    same = verdict(P, "n1")
    assert in_hindsight(same, strikes=0.0, blamed_before=["n1 gpu-1", "n2 gpu-1"]) == same
    both = verdict(T, "n1", "n2")
    assert in_hindsight(both, strikes=0.0, blamed_before=["n1 gpu-1"]) == both


@pytest.mark.parametrize("kind", [S, I])
def test_verdicts_that_blame_no_device_stay_as_they_are(kind: Kind) -> None:
    found = verdict(kind, "n1")
    assert in_hindsight(found, strikes=9.0, blamed_before=["n2 gpu-1"]) == found


def test_only_a_difference_that_nobody_put_right_is_seen_again() -> None:
    assert seen_again(T, Site.WEIGHTS, acted_on=False)
    assert not seen_again(T, Site.WEIGHTS, acted_on=True)
    assert not seen_again(T, Site.GRADIENT, acted_on=False)
    assert not seen_again(I, Site.WEIGHTS, acted_on=False)


def test_a_batch_is_no_device() -> None:
    assert device_of(Suspect(rank=1, path="batch")) == ""
    assert device_of(Suspect(rank=1, device="cpu:0")) == "cpu:0"


def test_what_is_remembered_of_a_run_makes_its_one_strike() -> None:
    many = [strike(T, step=step, run=run) for run in "ab" for step in range(100)]
    kept = newest(many)
    assert len(kept) == 2 * REMEMBERED and min(s.step for s in kept) == 100 - REMEMBERED
    assert strikes(kept, HALF_LIFE_STEPS, 0.0) == strikes(many, HALF_LIFE_STEPS, 0.0) == 2.0
