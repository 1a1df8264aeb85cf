"""F10: ranks on unlike CPUs (or with other thread counts) compute other bits."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.field.harness import EVERY_STEP, Case, Result, run, train
from unsilent.lab.pool import RankPool
from unsilent.records import Kind


@pytest.fixture(scope="module")
def unlike() -> Iterator[RankPool]:
    """Four ranks, of which rank 1 computes without vector instructions."""
    with RankPool(4, environment={1: {"ATEN_CPU_CAPABILITY": "default"}}) as pool:
        yield pool


def matmul_bits(rank: int, size: int) -> str:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    return str(torch.nn.functional.softmax(x.exp().log1p(), dim=1).sum(0).view(torch.int32).tolist())


def with_three_threads_on_rank_1(rank: int, size: int, case: Case) -> Result:
    return train(rank, size, replace(case, threads=3 if rank == 1 else 1))


def test_the_ranks_really_compute_other_bits(unlike):
    bits = unlike.results(matmul_bits)
    assert bits[0] == bits[2] == bits[3] != bits[1]


def assert_told_once(results: list[Result], reference: list[Result]) -> None:
    """The update gives other bits there too, so the replicas drift: said once, nobody is blamed, nothing is changed."""
    for result, plain in zip(results, reference, strict=True):
        (told,) = [found for found in result.found if found.verdict.check == "replicas"]
        assert told.verdict.kind is Kind.INCONCLUSIVE and told.verdict.suspects == () and told.action == "CONTINUE"
        assert "unlike environments" in told.verdict.reason and "nobody is blamed" in told.verdict.reason
        assert result.error is None and result.bits == plain.bits


def test_no_bits_are_compared_between_them_and_it_is_said(unlike):
    results = run(unlike, Case(config=EVERY_STEP))
    assert_told_once(results, run(unlike, Case(guarded=False)))
    assert [len(result.found) for result in results] == [1] * 4
    assert "ranks [1] have no partner of like environment" in results[0].said
    assert "ranks [1] have no partner of like environment" in results[0].coverage


def test_another_number_of_threads_is_another_environment(pool3):
    case = Case(config=EVERY_STEP)
    results = pool3.results(with_three_threads_on_rank_1, case)
    reference = pool3.results(with_three_threads_on_rank_1, replace(case, guarded=False))
    for result, plain in zip(results, reference, strict=True):
        assert result.error is None and result.found == [] and result.bits == plain.bits
    assert "ranks [1] have no partner of like environment" in results[0].said


def test_the_likes_still_audit_one_another(unlike):
    fault = {"site": "forward", "target": "2", "pattern": "scale", "factor": 3.0, "rank": 2, "step": 3}
    results = run(unlike, Case(config=EVERY_STEP, fault=fault))
    assert_told_once(results, run(unlike, Case(guarded=False)))
    for result in results:
        (found,) = [found for found in result.found if found.verdict.check == "audit"]
        assert found.ranks == [2] and found.step == 3 and found.verdict.kind is Kind.TRANSIENT


def test_the_odd_one_is_replayed_on_its_own_device(unlike):
    """A one-shot error on rank 1 is seen by its own replays, though nobody else could judge its bits."""
    fault = {"site": "forward", "target": "2", "pattern": "scale", "factor": 3.0, "rank": 1, "step": 3}
    results = run(unlike, Case(config=EVERY_STEP, fault=fault))
    assert_told_once(results, run(unlike, Case(guarded=False)))
    for result in results:
        (found,) = [found for found in result.found if found.verdict.check == "audit"]
        assert found.ranks == [1] and found.step == 3 and found.verdict.kind is Kind.TRANSIENT


def test_a_wrong_weight_among_the_likes_is_still_outvoted(unlike):
    fault = {"site": "weight", "target": "2.weight", "pattern": "bit_flip", "bit": 22, "rank": 3, "step": 3}
    results = run(unlike, Case(config=EVERY_STEP, fault=fault))
    for result in results:
        (found,) = [found for found in result.found if found.verdict.kind is Kind.TRANSIENT]
        assert found.ranks == [3] and found.step == 4 and found.verdict.tensors == ("model.2.weight",)
