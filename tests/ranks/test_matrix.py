"""Every way of spreading a model over ranks × dtype × fault: quiet without one, the true rank named, the bits of a clean run.

Cells that cannot give that say so in the coverage table before training; these tests look for the notice and for the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.parallel import train
from unsilent.lab.pool import RankPool

WAYS = ("ddp", "zero1", "fsdp2", "hsdp", "tp", "pp", "cp")
TEAMS = ("tp", "pp", "cp")  # two ranks compute a batch together, and two such pairs share the data
MORE = ("sp", "tp fsdp2", "sp fsdp2", "pp fsdp2", "cp fsdp2", "ep", "ep fsdp2")
DTYPES = ("fp32", "bf16")

FORWARD = {
    "site": "forward",
    "target": "blocks.1.up",
    "pattern": "relative",
    "relative": 0.5,
    "count": 1,
    "rank": 1,
    "step": 3,
}
BACKWARD = {**FORWARD, "site": "backward"}
STUCK = {"site": "forward", "target": "blocks.1.up", "pattern": "stuck_lane", "rank": 1, "from_step": 3}
WEIGHT = {"site": "weight", "target": "blocks.1.up.weight", "pattern": "bit_flip", "bit": 20, "rank": 1, "step": 3}

Plain = Callable[[RankPool, str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def plain() -> Plain:
    """The run without a guard, made once for each way, dtype and number of ranks."""
    made: dict[tuple[int, str, str], list[dict[str, Any]]] = {}

    def run(pool: RankPool, way: str, dtype: str) -> list[dict[str, Any]]:
        key = (pool.size, way, dtype)
        if key not in made:
            made[key] = pool.results(train, way, dtype, None)
        return made[key]

    return run


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x["bits"], y["bits"], strict=True)
    )


def said(answers: list[dict[str, Any]]) -> list[tuple[int, str, str, str, list[int]]]:
    """What the guard said, alike on all ranks."""
    assert all(answer["said"] == answers[0]["said"] for answer in answers)
    return answers[0]["said"]


def uncovered(answers: list[dict[str, Any]], site: str) -> str:
    """What the coverage table says is not seen at a site."""
    return " | ".join(row.blind for row in answers[0]["coverage"] if row.site == site)


@pytest.mark.parametrize(
    ("way", "dtype"), [*((way, d) for way in WAYS for d in DTYPES), *((way, "fp32") for way in MORE)]
)
def test_a_clean_run_is_quiet_and_changes_no_bit(
    pool4: RankPool, plain: Plain, tmp_path: Path, way: str, dtype: str
) -> None:
    guarded = pool4.results(train, way, dtype, str(tmp_path))
    assert said(guarded) == [] and guarded[0]["audit"] == "bitwise"
    assert same(plain(pool4, way, dtype), guarded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [FORWARD, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("way", WAYS)
def test_one_wrong_value_names_its_rank_and_ends_bit_identical(
    pool4: RankPool, plain: Plain, tmp_path: Path, way: str, dtype: str, fault: dict[str, Any]
) -> None:
    guarded = pool4.results(train, way, dtype, str(tmp_path), fault)
    assert guarded[1]["fired"]
    assert said(guarded) == [(3, "TRANSIENT", "gradient", "REPAIR", [1])]
    assert same(plain(pool4, way, dtype), guarded)


@pytest.mark.parametrize(("way", "fault"), [(way, (FORWARD, BACKWARD)[i % 2]) for i, way in enumerate(MORE)])
def test_also_in_what_shards_and_computes_together(
    pool4: RankPool, plain: Plain, tmp_path: Path, way: str, fault: dict[str, Any]
) -> None:
    guarded = pool4.results(train, way, "fp32", str(tmp_path), fault)
    assert said(guarded) == [(3, "TRANSIENT", "gradient", "REPAIR", [1])]
    assert same(plain(pool4, way, "fp32"), guarded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [way for way in WAYS if way not in TEAMS])
def test_a_device_that_always_errs_is_named(
    pool4: RankPool, plain: Plain, tmp_path: Path, way: str, dtype: str
) -> None:
    guarded = pool4.results(train, way, dtype, str(tmp_path), STUCK)
    assert [(step, kind, who) for step, kind, _, _, who in said(guarded)] == [(s, "PERSISTENT", [1]) for s in (3, 4)]
    assert same(plain(pool4, way, dtype), guarded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", TEAMS)
def test_with_two_teams_both_sides_are_named_and_coverage_says_so(
    pool4: RankPool, tmp_path: Path, way: str, dtype: str
) -> None:
    guarded = pool4.results(train, way, dtype, str(tmp_path), STUCK)
    other = 0 if way == "pp" else 3  # who does the same work in the other team
    assert said(guarded)[0] == (3, "INCONCLUSIVE", "gradient", "CONTINUE", sorted([1, other]))
    assert "no third node could tell which one is right" in guarded[0]["reasons"][0]
    assert "with 2 nodes a fault that repeats names both sides" in uncovered(guarded, "forward")


@pytest.fixture(scope="module")
def pool6() -> Iterator[RankPool]:
    with RankPool(6) as pool:
        yield pool


@pytest.mark.parametrize("way", TEAMS)
def test_with_three_teams_the_one_rank_is_named(pool6: RankPool, plain: Plain, tmp_path: Path, way: str) -> None:
    guarded = pool6.results(train, way, "fp32", str(tmp_path), STUCK)
    assert [(step, kind, who) for step, kind, _, _, who in said(guarded)] == [(s, "PERSISTENT", [1]) for s in (3, 4)]
    assert "rank 1 was the first of them to differ, in what it gave into" in guarded[0]["reasons"][0]
    assert same(plain(pool6, way, "fp32"), guarded)


wrong_weight = partial(train, replicas_every=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("way", "action"), [("ddp", "HEAL"), ("zero1", "HEAL"), ("cp", "ROLLBACK")])
def test_a_wrong_weight_of_four_copies_is_outvoted(
    pool4: RankPool, plain: Plain, tmp_path: Path, way: str, action: str, dtype: str
) -> None:
    guarded = pool4.results(wrong_weight, way, dtype, str(tmp_path), WEIGHT)
    assert said(guarded) == [(4, "TRANSIENT", "weights", action, [1])]
    assert same(plain(pool4, way, dtype), guarded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["hsdp", "tp", "pp"])
def test_a_wrong_weight_of_two_copies_blames_nobody_and_goes_back(
    pool4: RankPool, plain: Plain, tmp_path: Path, way: str, dtype: str
) -> None:
    guarded = pool4.results(wrong_weight, way, dtype, str(tmp_path), WEIGHT)
    assert said(guarded) == [(4, "INCONCLUSIVE", "weights", "ROLLBACK", [])]
    assert "two ranks cannot outvote each other" in guarded[0]["reasons"][0]
    assert "with 2 copies nobody is named" in uncovered(guarded, "weights")
    assert same(plain(pool4, way, dtype), guarded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["fsdp2", "tp fsdp2", "pp fsdp2", "cp fsdp2"])
def test_a_wrong_weight_with_a_single_owner_is_not_seen_and_coverage_says_so(
    pool4: RankPool, tmp_path: Path, way: str, dtype: str
) -> None:
    guarded = pool4.results(wrong_weight, way, dtype, str(tmp_path), WEIGHT)
    assert guarded[1]["fired"] and said(guarded) == []
    assert "single owner" in uncovered(guarded, "weights")


def test_what_a_tensor_parallel_pair_both_hold_is_compared_there_too(
    pool4: RankPool, plain: Plain, tmp_path: Path
) -> None:
    """A norm is on all four ranks, whatever its placement says: the one that differs is outvoted."""
    fault = {**WEIGHT, "target": "blocks.1.norm.weight"}
    guarded = pool4.results(wrong_weight, "sp", "fp32", str(tmp_path), fault)
    assert said(guarded) == [(4, "TRANSIENT", "weights", "ROLLBACK", [1])]
    assert same(plain(pool4, "sp", "fp32"), guarded)


def test_a_nan_in_a_step_that_no_audit_was_planned_for_names_the_team(
    pool4: RankPool, plain: Plain, tmp_path: Path
) -> None:
    """Where it was first in the step was not noted, so nobody can tell which member of the team erred."""
    fault = {"site": "forward", "target": "blocks.1.up", "pattern": "nan", "rank": 1, "step": 2}
    guarded = pool4.results(train, "tp", "fp32", str(tmp_path), fault)
    assert [(step, kind, action, who) for step, kind, _, action, who in said(guarded)] == [
        (2, "TRANSIENT", "REPAIR", [0, 1])
    ]
    assert "nobody can tell which of them erred" in guarded[0]["reasons"][0]
    assert same(plain(pool4, "tp", "fp32"), guarded)


@pytest.mark.parametrize(
    ("way", "target", "rank"),
    [("pp", "", 3), ("ep", "blocks.1.down.1.expert", 1), ("tp", "blocks.1.up", 1), ("cp", "blocks.1.attention.qkv", 1)],
)
def test_a_wrong_gradient_of_an_input_is_not_held_against_who_gets_it(
    pool4: RankPool, plain: Plain, tmp_path: Path, way: str, target: str, rank: int
) -> None:
    """It leaves the rank at once: to the stage before, to the token's own rank, into the sum over the parts."""
    fault = {"site": "input gradient", "target": target, "rank": rank, "step": 3}
    guarded = pool4.results(train, way, "fp32", str(tmp_path), fault)
    assert said(guarded) == [(3, "TRANSIENT", "gradient", "REPAIR", [rank])]
    assert same(plain(pool4, way, "fp32"), guarded)


def test_an_expert_is_compared_with_its_copy_only(pool4: RankPool, plain: Plain, tmp_path: Path) -> None:
    fault = {**WEIGHT, "target": "blocks.1.down.1.expert.weight"}
    guarded = pool4.results(wrong_weight, "ep", "fp32", str(tmp_path), fault)
    assert said(guarded) == [(4, "INCONCLUSIVE", "weights", "ROLLBACK", [])]
    assert same(plain(pool4, "ep", "fp32"), guarded)


def test_weights_of_two_stages_that_were_declared_alike_are_compared(pool4: RankPool, tmp_path: Path) -> None:
    assert said(pool4.results(wrong_weight, "tied pp", "fp32", str(tmp_path / "clean"))) == []
    fault = {**WEIGHT, "target": "embedding.weight"}
    guarded = pool4.results(wrong_weight, "tied pp", "fp32", str(tmp_path / "wrong"), fault)
    assert said(guarded) == [(4, "TRANSIENT", "weights", "ROLLBACK", [1])]
    assert "embedding.weight" in guarded[0]["reasons"][0]
