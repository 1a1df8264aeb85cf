"""What a campaign's trials are counted as, and the tables of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.lab.campaign.outcome import (
    CAUGHT,
    Class,
    Named,
    Observed,
    Said,
    classify,
    named,
    steps_to_detection,
    why_missed,
)
from unsilent.lab.campaign.runner import result_from
from unsilent.lab.campaign.tables import ALL, Result, rate, tables
from unsilent.lab.rates import wilson

NOBODY: tuple[int, ...] = ()


def said(step: int = 3, *ranks: int, action: str = "REPAIR", kind: str = "TRANSIENT") -> Said:
    return Said(step=step, kind=kind, site="forward", check="audit", action=action, ranks=ranks, reason="because")


def observed(*verdicts: Said, **changes: Any) -> Observed:
    """A fault of rank 1 in step 3 that nobody noticed, and that left other weights, unless ``changes`` says otherwise."""
    plain: dict[str, Any] = {
        "fault": True, "faulty": (1,), "computed": True, "sound": False, "lasting": False, "fired": (3,), "felt": 0.01, "after_update": False,
        "said": verdicts, "ended": "finished", "end": "", "identical": False, "identical_at_end": False, "loss": 4.0,
        "loss_limit": 4.1, "ran": {"audit": (3, 7), "replicas": (1, 3, 5, 7)}, "off": (), "steps": 8, "seconds": 1.0,
    }  # fmt: skip
    return Observed(**{**plain, **changes})


RIGHT = {"identical": True, "identical_at_end": True}
STOPPED = {"ended": "stopped", "end": "restart without node-1"}


@pytest.mark.parametrize(
    ("trial", "counted_as"),
    [
        (observed(said(3, 1), **RIGHT), Class.REPAIRED),
        # Rolled back: wrong for a while, and right in the end.
        (observed(said(4, 1, action="ROLLBACK"), identical_at_end=True), Class.REPAIRED),
        (observed(said(3, 1, action="QUARANTINE"), **STOPPED), Class.STOPPED),
        (observed(said(3, 1, 2), **STOPPED), Class.STOPPED),
        (observed(said(3), faulty=NOBODY, **STOPPED), Class.STOPPED),
        (observed(said(3, kind="SOFTWARE", action="STOP"), **STOPPED), Class.UNNAMED),
        # A device whose comparison lies may be taken out; to stop what was sound is not right.
        (observed(said(3, 1, action="STOP"), sound=True, **STOPPED), Class.NEEDLESS),
        (observed(said(3, 1, action="QUARANTINE"), sound=True, **STOPPED), Class.STOPPED),
        (observed(said(3, 1)), Class.INEXACT),
        (observed(said(3, kind="INCONCLUSIVE", action="CONTINUE")), Class.INEXACT),
        (observed(said(3, 2), **RIGHT), Class.WRONG_DEVICE),
        (observed(said(3, 1), said(4, 2), **RIGHT), Class.WRONG_DEVICE),
        (observed(said(3, 1), faulty=NOBODY, **RIGHT), Class.WRONG_DEVICE),
        (observed(said(3, 1, 2, action="QUARANTINE"), **STOPPED), Class.WRONG_DEVICE),
        (observed(**RIGHT), Class.MASKED),
        # Right in the end by chance, but not all the way.
        (observed(identical_at_end=True), Class.MISSED_SMALL),
        (observed(felt=0.1), Class.MISSED_SMALL),
        (observed(felt=0.11), Class.MISSED_HARMFUL),
        (observed(felt=1e308), Class.MISSED_HARMFUL),
        (observed(loss=4.2), Class.MISSED_SMALL),
        (observed(loss=4.2, lasting=True), Class.MISSED_HARMFUL),
        (observed(loss=4.1, lasting=True), Class.MISSED_SMALL),
        (observed(said(2, 1), **RIGHT), Class.FALSE_ALARM),
        (observed(said(2, 2), said(3, 1), **RIGHT), Class.FALSE_ALARM),
        # A weight that flips after its update cannot be what a verdict of that step is about.
        (observed(said(3, 1), after_update=True, **RIGHT), Class.FALSE_ALARM),
        (observed(said(4, 1), after_update=True, **RIGHT), Class.REPAIRED),
        (observed(said(4, 1), fired=(), **RIGHT), Class.FALSE_ALARM),
        (observed(fired=(), **RIGHT), Class.NEVER_FIRED),
        (observed(fault=False, faulty=NOBODY, fired=(), **RIGHT), Class.CLEAN),
        (observed(said(5, 0), fault=False, faulty=NOBODY, fired=(), **RIGHT), Class.FALSE_ALARM),
        (observed(fault=False, faulty=NOBODY, fired=()), Class.ERROR),
        (observed(said(3, 1), ended="hang"), Class.HANG),
        (observed(ended="error", fired=()), Class.ERROR),
    ],
)  # fmt: skip
def test_what_a_trial_is_counted_as(trial: Observed, counted_as: Class) -> None:
    assert classify(trial) is counted_as


@pytest.mark.parametrize(
    ("ranks", "who"),
    [
        ([], Named.NOBODY),
        ([()], Named.NOBODY),
        ([(1,)], Named.RIGHT),
        ([(), (1,)], Named.RIGHT),
        ([(1,), (1, 2)], Named.AMONG),
        ([(1,), (2,)], Named.WRONG),
    ],
)
def test_of_all_verdicts_the_worst_naming_counts(ranks: list[tuple[int, ...]], who: Named) -> None:
    assert named(observed(*(said(3, *one) for one in ranks))) is who


def test_steps_to_detection_are_counted_from_the_first_firing() -> None:
    assert steps_to_detection(observed(said(3, 1))) == 0
    assert steps_to_detection(observed(said(2, 1), said(7, 1), said(8, 1))) == 4
    assert steps_to_detection(observed()) is None
    assert steps_to_detection(observed(fired=())) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"faulty": NOBODY}, "all ranks got the same wrong sum"),
        ({"fired": (4,)}, "fired in no audited step"),
        ({"fired": (4, 7)}, "fired in an audited step, and the audit saw nothing"),
        ({"fired": (6,), "after_update": True}, "the votes after it"),
        ({"fired": (5,), "computed": False}, "a vote ran in that step and saw nothing"),
        ({"fired": (6,), "computed": False}, "no vote ran in that step"),
    ],
)
def test_why_a_fault_was_missed(changes: dict[str, Any], reason: str) -> None:
    assert reason in why_missed(observed(**changes))


# ---- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    # Computed by the formula in exact arithmetic; 8 of 10 is the textbook's 0.490 … 0.943.
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
        (50, 100, 0.4038, 0.5962),
    ],
)
def test_wilson_intervals(count: int, of: int, low: float, high: float) -> None:
    assert wilson(count, of) == pytest.approx((low, high), abs=5e-5)


def test_nothing_tried_says_nothing() -> None:
    assert rate(0, 0) == {"count": 0, "of": 0, "rate": None, "low": 0.0, "high": 1.0}


@given(st.integers(0, 500), st.integers(1, 500))
def test_an_interval_holds_its_rate_and_grows_narrower(count: int, more: int) -> None:
    of = count + more
    low, high = wilson(count, of)
    assert 0 <= low <= count / of <= high <= 1
    wide = wilson(4 * count, 4 * of)
    assert wide[1] - wide[0] < high - low


def result(trial: Observed, *, checks: str = "default", site: str = "forward", kind: str = "bit", n: int = 0) -> Result:
    return Result(name=f"ddp-3/{checks}/{site}/{kind}/{n}", parallelism="ddp-3", checks=checks, site=site, kind=kind,
                  seed=n, fault="a bit", observed=trial)  # fmt: skip


RESULTS = [
    result(observed(said(3, 1), **RIGHT, felt=0.5), n=0),
    result(observed(said(7, 1), identical_at_end=True), n=1),
    result(observed(felt=0.5, fired=(4,)), n=2),
    result(observed(**RIGHT), n=3),
    result(observed(fired=(), **RIGHT), n=4),
    result(observed(fault=False, faulty=NOBODY, fired=(), **RIGHT), site="none", kind="none", n=5),
    result(observed(said(3, 2), **RIGHT), checks="light", n=6),
    result(observed(said(1, 2), **RIGHT), checks="light", n=7),
]


def test_the_coverage_of_a_cell_is_what_was_caught_of_what_mattered() -> None:
    cells = {(r["checks"], r["site"], r["fault"]): r for r in tables(RESULTS)["coverage"]}
    cell = cells["default", "forward", "bit"]
    assert (cell["trials"], cell["masked"], cell["missed_harmful"], cell["other"]) == (5, 1, 1, 1)
    assert (cell["caught"]["count"], cell["caught"]["of"]) == (2, 3)
    assert cell["median_steps"] == 2
    assert cells[ALL, "forward", ALL]["trials"] == 7
    assert not any(site == "none" for _, site, _ in cells)


def test_every_trial_is_counted_once_in_every_set_of_checks_and_in_all() -> None:
    rows = tables(RESULTS)["classes"]
    for checks, n in ((ALL, 8), ("default", 6), ("light", 2)):
        mine = [row for row in rows if row["checks"] == checks]
        assert [row["class"] for row in mine] == [one.value for one in Class]
        assert sum(row["count"] for row in mine) == n == mine[0]["of"]


def test_confusion_false_alarms_and_what_must_be_explained() -> None:
    found = tables(RESULTS)
    assert found["confusion"] == [
        {"faulty": "rank 1", "named": "rank 1", "trials": 2},
        {"faulty": "rank 1", "named": "rank 2", "trials": 1},
    ]
    # 3 healthy steps before the fault of step 3, 4 before that of step 4, and all 8 where nothing fired.
    assert found["false_alarms"] == {"clean_steps": 3 + 3 + 4 + 3 + 8 + 8 + 3 + 3, "alarms": 1, "bound": None}
    assert [row["class"] for row in found["unexpected"]] == [Class.WRONG_DEVICE.value, Class.FALSE_ALARM.value]
    assert found["missed"] == [
        {"checks": "default", "site": "forward", "harmful": 1, "small": 0,
         "reason": "it fired in no audited step, and what votes compare was alike on all ranks"}
    ]  # fmt: skip
    assert found["single_steps"] == [{"site": "forward", "audited": rate(3, 3), "not_audited": rate(0, 1)}]


def test_results_survive_json() -> None:
    for one in RESULTS:
        again = result_from(json.loads(json.dumps(asdict(one))))
        assert again.counted_as is one.counted_as
        assert json.dumps(asdict(again)) == json.dumps(asdict(one))


def test_the_schema_is_sound_and_knows_the_same_classes() -> None:
    schema = json.loads(files("unsilent.schemas").joinpath("campaign.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$defs"]["class"]["enum"] == [one.value for one in Class]
    assert set(CAUGHT) < set(Class)
