"""F10: ranks on unlike CPUs (or with other thread counts) compute other bits."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.field.harness import EVERY_STEP, Case, Result, assert_quiet, run, train
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


def test_no_bits_are_compared_between_them_and_it_is_said(unlike):
    results = assert_quiet(unlike, Case(config=EVERY_STEP))
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
    reference = run(unlike, Case(guarded=False))
    for result, clean in zip(run(unlike, Case(config=EVERY_STEP, fault=fault)), reference, strict=True):
        assert result.error is None and result.only.ranks == [2] and result.only.step == 3
        assert result.only.verdict.kind is Kind.TRANSIENT and result.bits == clean.bits


def test_the_odd_one_is_replayed_on_its_own_device(unlike):
    """A one-shot error on rank 1 is seen by its own replays, though nobody else could judge its bits."""
    fault = {"site": "forward", "target": "2", "pattern": "scale", "factor": 3.0, "rank": 1, "step": 3}
    reference = run(unlike, Case(guarded=False))
    for result, clean in zip(run(unlike, Case(config=EVERY_STEP, fault=fault)), reference, strict=True):
        assert result.error is None and result.only.ranks == [1] and result.only.verdict.kind is Kind.TRANSIENT
        assert result.bits == clean.bits
