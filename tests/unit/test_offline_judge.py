"""What reruns after the fact say: every row of the two tables, with its exit code and its words."""

from __future__ import annotations

from typing import Any

import pytest

from unsilent.offline.judge import Outcome, judge_finding, judge_stretch
from unsilent.offline.prints import Difference

RIGHT, WRONG, THIRD = "aaaa", "bbbb", "cccc"
UNLIKE = ["threads is 1 here and was 4 there"]
AT_6 = Difference(sites=("weights",), after=7, equal=6)
AT_8 = Difference(sites=("weights",), after=9, equal=8)


def run(rank: int, digest: str | None, *, recorded: bool = False) -> dict[str, Any]:
    return {"rank": rank, "digest": digest, "recorded": recorded}


FAULTY = [run(2, WRONG, recorded=True), run(0, RIGHT), run(0, RIGHT), run(2, RIGHT)]
AUDITOR_FAULTY = [run(2, RIGHT, recorded=True), run(0, WRONG), run(2, RIGHT), run(1, RIGHT)]
SOFTWARE = [run(2, RIGHT, recorded=True), run(0, RIGHT)]
UNSETTLED = [run(2, WRONG, recorded=True), run(0, RIGHT)]


@pytest.mark.parametrize(
    ("executions", "agreed", "reruns", "outcome", "code", "word"),
    [
        (FAULTY, RIGHT, [RIGHT, RIGHT], Outcome.AS_REPLAYED, 0, "does not come out again"),
        (FAULTY, RIGHT, [WRONG, WRONG], Outcome.AS_RECORDED, 10, "this machine is the faulty one"),
        (FAULTY, RIGHT, [THIRD, THIRD], Outcome.OTHERWISE, 12, "no execution of the run gave"),
        (FAULTY, RIGHT, [RIGHT, WRONG], Outcome.UNKNOWN, 12, "although devices of the run repeated it"),
        (FAULTY, RIGHT, [THIRD, WRONG], Outcome.UNKNOWN, 12, "2 reruns gave 2 values"),
        (AUDITOR_FAULTY, RIGHT, [RIGHT, RIGHT], Outcome.AS_RECORDED, 0, "rank 0 gave a wrong one"),
        (AUDITOR_FAULTY, RIGHT, [WRONG, WRONG], Outcome.OTHERWISE, 10, "rank 0 gave alone"),
        (SOFTWARE, RIGHT, [RIGHT, RIGHT], Outcome.AS_RECORDED, 0, "in the code or the data"),
        (UNSETTLED, None, [WRONG, WRONG], Outcome.AS_RECORDED, 12, "could not tell the right one"),
        (UNSETTLED, None, [RIGHT, RIGHT], Outcome.AS_REPLAYED, 12, "rank 0's replay"),
        (UNSETTLED, None, [THIRD, THIRD], Outcome.OTHERWISE, 12, "an environment like the run's"),
        (UNSETTLED, None, [RIGHT, THIRD], Outcome.UNKNOWN, 12, "does not repeat here"),
    ],
)
def test_a_finding(
    executions: list[dict[str, Any]], agreed: str | None, reruns: list[str], outcome: Outcome, code: int, word: str
) -> None:
    answer = judge_finding(executions, agreed, reruns, unlike=[])
    assert (answer.outcome, answer.exit_code) == (outcome, code)
    assert word in answer.reason


@pytest.mark.parametrize("reruns", [[THIRD, THIRD], [THIRD, RIGHT]])
def test_an_unlike_environment_is_named_where_it_can_explain_the_value(reruns: list[str]) -> None:
    answer = judge_finding(FAULTY, RIGHT, reruns, unlike=UNLIKE)
    assert answer.exit_code == 12
    assert UNLIKE[0] in answer.reason


def test_the_same_bits_are_the_same_bits_in_any_environment() -> None:
    assert judge_finding(FAULTY, RIGHT, [RIGHT, RIGHT], unlike=UNLIKE).outcome is Outcome.AS_REPLAYED
    assert judge_finding(FAULTY, RIGHT, [WRONG, WRONG], unlike=UNLIKE).exit_code == 10


def stretch(first: Difference | None, second: Difference | None = None, **more: Any) -> tuple[Outcome, int, str]:
    options: dict[str, Any] = {"reruns_differ": None, "found": [], "unlike": [], "unsteady": ""} | more
    answer = judge_stretch(first, second, **options)
    return answer.outcome, answer.exit_code, answer.reason


def test_a_stretch_that_comes_out_the_same_says_what_that_does_not_exclude() -> None:
    outcome, code, reason = stretch(None, unlike=UNLIKE)
    assert (outcome, code) == (Outcome.SAME, 0)
    assert "unless it is this one and it repeats its error exactly" in reason
    assert "look at data and code" in reason


def test_a_stretch_that_differs_twice_alike_was_wrong_in_the_run() -> None:
    outcome, code, reason = stretch(AT_6, AT_6)
    assert (outcome, code) == (Outcome.DIFFERENT, 10)
    assert "so step 6" in reason


@pytest.mark.parametrize("second", [None, AT_8])
def test_reruns_that_differ_from_one_another_blame_nobody(second: Difference | None) -> None:
    outcome, code, reason = stretch(AT_6, second, reruns_differ=AT_6)
    assert (outcome, code) == (Outcome.UNKNOWN, 12)
    assert "does not repeat here" in reason
    assert ("the second gave the run's values" in reason) == (second is None)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"unlike": UNLIKE}, "threads is 1 here"),
        ({"unsteady": "audits compared the loss only"}, "the loss only"),
        ({"found": ["step 5, TRANSIENT: rank 1 holds other weights"]}, "rank 1 holds other weights"),
    ],
)
def test_what_may_explain_a_difference_leaves_it_open(more: dict[str, Any], word: str) -> None:
    outcome, code, reason = stretch(AT_6, AT_6, **more)
    assert (outcome, code) == (Outcome.UNKNOWN, 12)
    assert word in reason
