"""What a log says of a run's values, and where two logs differ first."""

from __future__ import annotations

from typing import Any

import pytest

from unsilent.offline.prints import Start, compare, starts_of
from unsilent.records import Event


def event(kind: str, step: int, run: str = "r", **fields: Any) -> Event:
    return Event(kind=kind, step=step, time=0.0, fields={"run": run, **fields})


def prints(after: int, run: str = "r", gradient: str | None = "g", **fields: Any) -> Event:
    sites = {"weights": f"w{after}", "optimizer_state": f"o{after}", "buffers": None, "gradient": gradient}
    return event("fingerprints", after, run, **{"steps": after, "switched": {}, **sites, **fields})


def start(*events: Event) -> Start:
    (found,) = starts_of(events)
    return found


def test_each_start_is_read_by_itself_and_knows_where_it_began() -> None:
    log = [prints(0), prints(4), prints(2, "s"), event("run_started", 0, "t"), prints(6, "s")]
    one, two = starts_of(log)
    assert (one.run, one.first, max(one.states)) == ("r", 0, 4)
    assert (two.run, two.first, max(two.states)) == ("s", 2, 6)


def test_a_vote_when_saving_and_the_next_steps_vote_are_one_state() -> None:
    found = start(prints(4, gradient=None), prints(4, gradient="g4"), prints(4, gradient=None))
    assert found.states == {4: {"weights": "w4", "optimizer_state": "o4", "gradient": "g4"}}


def test_what_a_rollback_has_undone_holds_no_more() -> None:
    """A wrong state on all ranks alike was logged, and run over again without a vote in each of its steps."""
    found = start(prints(4), prints(6), prints(8, weights="wrong"), prints(9, undone_after=4), prints(10))
    assert list(found.states) == [4, 9, 10]


def test_steps_with_other_kernels_are_known() -> None:
    found = start(prints(4, switched={"deterministic": [1, 3]}), prints(6, switched={"deterministic": [5]}))
    assert found.kernels == {1: "deterministic", 3: "deterministic", 5: "deterministic"}


def test_a_calibration_that_did_not_repeat_and_verdicts_are_remembered() -> None:
    verdict = {"kind": "TRANSIENT", "reason": "rank 2"}
    found = start(
        prints(0),
        event("calibration", 1, check="audit", strength="bitwise"),
        event("check_degraded", 2, check="replicas", reason="other environments"),
        event("verdict", 3, verdict=verdict),
    )
    assert (found.unsteady, found.verdicts) == ("", ["step 3, TRANSIENT: rank 2"])
    loss_only = event("check_degraded", 2, check="audit", strength="loss only")
    assert "loss only" in start(prints(0), loss_only).unsteady


@pytest.mark.parametrize(
    ("changes", "sites", "after", "steps", "words"),
    [
        ({4: {"weights": "x"}}, ("weights",), 4, (2, 3), "a step from 2 to 3"),
        ({5: {"weights": "x", "optimizer_state": "y"}}, ("weights", "optimizer_state"), 5, (4, 4), "so step 4"),
        ({4: {"gradient": "x"}}, ("gradient",), 4, (4, 4), "the reduced gradient of step 4"),
        ({4: {"gradient": "x"}, 5: {"weights": "x"}}, ("gradient",), 4, (4, 4), "step 4"),
    ],
)
def test_the_first_difference_is_named(
    changes: dict[int, dict[str, str]], sites: tuple[str, ...], after: int, steps: tuple[int, int], words: str
) -> None:
    logged = start(*(prints(n) for n in (0, 2, 4, 5, 7)))
    again = start(*(prints(n, **changes.get(n, {})) for n in range(8)))
    compared, difference = compare(logged, again, begin=0, last=6)
    assert difference is not None
    assert (difference.sites, difference.after, difference.steps) == (sites, after, steps)
    assert words in str(difference)
    assert compared[-1] == after


def test_only_the_steps_asked_for_are_compared() -> None:
    logged = start(*(prints(n) for n in range(0, 9, 2)))
    again = start(prints(0, weights="x"), *(prints(n) for n in range(1, 7)), prints(7), prints(8, weights="x"))
    assert compare(logged, again, begin=2, last=5) == ((2, 4, 6), None)


def test_the_gradient_after_the_last_step_is_not_compared() -> None:
    logged = start(prints(4), prints(6))
    assert compare(logged, start(prints(4), prints(6, gradient="x")), begin=4, last=5) == ((4, 6), None)


def test_what_one_log_lacks_is_no_difference() -> None:
    logged = start(prints(4, gradient=None, optimizer_state=None))
    assert compare(logged, start(prints(4)), begin=4, last=5) == ((4,), None)
