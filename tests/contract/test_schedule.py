"""The schedule: no two expensive checks on one step where that is possible, and each one in its turn."""

from __future__ import annotations

from math import gcd

from hypothesis import given
from hypothesis import strategies as st

from unsilent.schedule import Schedule

PERIODS = st.integers(min_value=1, max_value=60)


@given(PERIODS, PERIODS)
def test_two_checks_never_meet_where_their_periods_leave_room(audit: int, replicas: int) -> None:
    schedule = Schedule({"audit": audit, "replicas": replicas})
    meet = any(len(schedule.due(step)) == 2 for step in range(2 * audit * replicas))
    if min(audit, replicas) > 1 and gcd(audit, replicas) > 1:
        assert not meet


@given(PERIODS, PERIODS, st.integers(min_value=0, max_value=10_000))
def test_each_check_runs_exactly_once_in_its_period(audit: int, replicas: int, start: int) -> None:
    schedule = Schedule({"audit": audit, "replicas": replicas})
    for name, period in (("audit", audit), ("replicas", replicas)):
        assert sum(name in schedule.due(step) for step in range(start, start + period)) == 1


@given(PERIODS, st.integers(min_value=0, max_value=10_000))
def test_the_first_one_runs_when_the_updates_are_a_multiple_of_its_period(period: int, step: int) -> None:
    assert ("audit" in Schedule({"audit": period, "replicas": 10}).due(step)) == ((step + 1) % period == 0)


def test_a_forced_step_runs_everything() -> None:
    assert Schedule({"audit": 7, "replicas": 3}).due(0, forced=True) == {"audit", "replicas"}
