"""F8 (plain, DDP): sparse gradients: their values are looked at coalesced, a rank may have none, and nothing crashes.

``isfinite`` raises on a sparse tensor; its values may be finite while their sum is not.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unsilent
from tests.field.harness import EVERY_STEP, Case, assert_quiet, assert_stopped_before_update, run, train
from unsilent.checks.finite import Finite, FiniteConfig, extremes
from unsilent.checks.update import UpdateConfig
from unsilent.fingerprints import elements, sums_of_gradients
from unsilent.inventory import Inventory
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.records import Kind

LARGE = 6e4  # finite in fp16, and twice it is not
STEPS, HIT = 5, 3


class Table(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True, dtype=dtype)
        self.head = nn.Linear(8, 4, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).sum(0))


class Lookup(nn.Module):
    """The gradient of each row that was looked up is what came with it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2, sparse=True, dtype=dtype)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids, gradients = batch
        return (self.table(ids).float() * gradients).sum()


def ids(step: int, rank: int) -> torch.Tensor:
    """Each index may come twice; in every step one of the ranks has none at all."""
    count = 0 if step % 3 == rank else 12
    return torch.randint(0, 9, (count,), generator=torch.Generator().manual_seed(100 * step + rank))


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def itself(model: nn.Module, batch: object) -> torch.Tensor:
    return model(batch)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01)  # type: ignore[arg-type]


def eight_large_ones_on_rank_1(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp32, since gloo adds no sparse tensors in fp16."""
    large = 3e38 if step == 1 and rank == 1 else 1.0
    return torch.full((8,), 2), torch.full((8, 1), large)


CASE = Case(model=Table, loss=squared, batch=ids, optimizer=sgd, steps=STEPS, config=EVERY_STEP)


def sparse(indices: list[int], values: list[list[float]], dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([indices], dtype=torch.int64), torch.tensor(values, dtype=dtype).reshape(-1, 2), (5, 2),
        check_invariants=True,
    )  # fmt: skip


# ---- what is looked at -----------------------------------------------------------------------------------------------


def test_values_of_one_index_are_added_before_they_are_looked_at() -> None:
    once, twice = sparse([1, 2], [[LARGE, 0.0], [LARGE, 1.0]]), sparse([2, 2], [[LARGE, 0.0], [LARGE, 1.0]])
    assert all(bool(torch.isfinite(e)) for e in extremes([once]))
    assert not all(bool(torch.isfinite(e)) for e in extremes([twice]))
    assert not bool(torch.isfinite(elements(twice)).all()) and bool(torch.isfinite(twice._values()).all())


def test_one_without_any_index_is_fine_and_counts_as_zeros_do() -> None:
    empty = sparse([], [])
    assert extremes([empty]) == []
    assert torch.equal(sums_of_gradients([empty]), sums_of_gradients([torch.zeros(5, 2)]))


def test_equal_gradients_have_equal_sums_however_they_lie_and_unlike_ones_do_not() -> None:
    rows = sums_of_gradients(
        [
            sparse([3, 1, 3], [[1, 2], [3, 4], [5, 6]]),
            sparse([1, 3], [[3, 4], [6, 8]]),
            sparse([1, 4], [[3, 4], [6, 8]]),  # another index
            sparse([1, 3], [[3, 4], [6, 8.01]]),  # another value
            sparse([0, 1, 3], [[0, 0], [3, 4], [6, 8]]),  # a row of zeros that an optimizer would step on
        ]
    )
    assert torch.equal(rows[0], rows[1])
    assert len({tuple(row.tolist()) for row in rows}) == 4


def test_finite_reads_a_plain_model_without_a_crash() -> None:
    model = Lookup(torch.float16)
    check = Finite(Inventory(model, None), FiniteConfig(), reduces=False, scaler=False, clips=True)
    for large, bad in ((1.0, False), (LARGE, True)):
        model.zero_grad()
        model((torch.tensor([2, 2]), torch.full((2, 1), large))).backward()
        check._look_at_reduced()
        assert check.fill()[0]["local"] is bad
        assert check.details()[2] == (("gradient.table.weight",) if bad else ())


# ---- guarded runs ----------------------------------------------------------------------------------------------------


def test_a_plain_model_is_guarded() -> None:
    weights: list[torch.Tensor] = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = Table()
        optimizer = sgd(model.parameters())
        guard = None
        if guarded:
            config = unsilent.GuardConfig(audit_every=1, replicas_every=1)
            guard = unsilent.Guard(model, optimizer, squared, config=config)
        for step in range(STEPS):
            if guard is not None:
                assert guard.step(ids(step, 1)).verdict is None
                continue
            optimizer.zero_grad(set_to_none=True)
            squared(model, ids(step, 1)).backward()
            optimizer.step()
        if guard is not None:
            assert guard.counts["audit"] == STEPS and guard.checks.keys() == {"finite", "replicas", "audit"}
            guard.close()
        weights.append(model.table.weight.detach().clone())
    assert torch.equal(*weights)


@pytest.mark.parametrize("optimizer", [sgd, "SparseAdam"], ids=["SGD", "SparseAdam"])
def test_under_ddp_it_is_quiet_and_changes_no_bit(pool, optimizer) -> None:
    case = CASE
    if optimizer == "SparseAdam":
        config = {**EVERY_STEP, "update": UpdateConfig()}
        case = replace(CASE, optimizer=adam, model=Only, config=config)
    results = assert_quiet(pool, case)
    assert "off" not in results[0].said and "failed" not in results[0].said


def test_finite_values_whose_sum_is_not_name_their_rank_before_the_update(pool3) -> None:
    case = Case(model=Lookup, loss=itself, batch=eight_large_ones_on_rank_1, optimizer=sgd, steps=3)
    found = assert_stopped_before_update(run(pool3, case), step=1)
    assert found.ranks == [1] and found.verdict.kind is Kind.SOFTWARE and found.devices == []


@pytest.mark.parametrize("site", ["gradient", "forward"])
@pytest.mark.parametrize("config", [EVERY_STEP, {"audit_every": 2, "replicas_every": 2}], ids=["each", "every other"])
def test_a_wrong_value_names_its_rank_and_is_repaired(pool, site, config) -> None:
    target = "table.weight" if site == "gradient" else "table"
    fault = {"site": site, "target": target, "pattern": "scale", "factor": 3.0, "rank": 1, "step": HIT}
    repaired, plain = run(pool, CASE, fault=fault, config=config), run(pool, CASE, guarded=False)
    assert [r.fired for r in repaired][:3] == [0, 1, 0]
    for result, reference in zip(repaired, plain, strict=True):
        assert result.error is None, result.said
        assert (result.only.step, result.only.verdict.kind, result.only.action) == (HIT, Kind.TRANSIENT, "REPAIR")
        assert result.only.ranks == [1]
        assert result.bits == reference.bits


def test_a_nan_in_a_step_that_no_audit_was_planned_for_is_repaired_too(pool3) -> None:
    fault = {"site": "gradient", "target": "table.weight", "pattern": "nan", "rank": 1, "step": 2}
    quiet = {"audit_every": 100, "replicas_every": 100}
    for result, reference in zip(
        run(pool3, CASE, fault=fault, config=quiet), run(pool3, CASE, guarded=False), strict=True
    ):
        assert result.only.action == "REPAIR" and result.only.ranks == [1] and result.bits == reference.bits


def test_a_weight_that_flipped_is_undone_from_the_kept_steps(pool3) -> None:
    """The steps since are run again, with their sparse gradients."""
    fault = {"site": "weight", "target": "table.weight", "pattern": "bit_flip", "bit": 20, "rank": 1, "step": 1}
    config = {"audit_every": 2, "replicas_every": 3, "snapshot_every": 3}
    for result, reference in zip(
        run(pool3, CASE, fault=fault, config=config, steps=6), run(pool3, CASE, guarded=False, steps=6), strict=True
    ):
        assert result.error is None, result.said
        assert "ROLLBACK" in [f.action for f in result.found] and result.bits == reference.bits


class Only(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).sum(0)


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(parameters), 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("micro_batch", ["all", "rotating"])
def test_sums_over_micro_batches_are_audited_and_repaired(pool3, micro_batch) -> None:
    plain, clean, hit = (pool3.results(_accumulate, micro_batch, *how) for how in ((False,), (True,), (True, True)))
    for one, two, three in zip(plain, clean, hit, strict=True):
        assert two[1] == [] and torch.equal(one[0], two[0])
        assert three[1] == [(3, "REPAIR", [1])] and torch.equal(one[0], three[0])


def _accumulate(rank: int, size: int, micro_batch: Any, guarded: bool, fault: bool = False) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Table())
    optimizer = sgd(model.parameters())
    found: list[Any] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        guard, injector = None, None
        if guarded:
            config = unsilent.GuardConfig(
                node=f"node{rank}", audit_every=4, replicas_every=2, audit=unsilent.AuditConfig(micro_batch=micro_batch)
            )
            guard = stack.enter_context(unsilent.Guard(model, optimizer, squared, config=config))
        if fault:
            wrong = Fault(site="forward", target="table", pattern="scale", factor=3.0, rank=1, step=3)
            injector = Injector(model.module, optimizer, wrong, rank=rank, world_size=size,
                                replaying=lambda: guard.replayer.running)  # fmt: skip
        for step in range(STEPS):
            if injector is not None:
                injector.begin_step(step)
            parts = [ids(step + part, rank) for part in range(3, 5)]
            if guard is not None:
                outcome = guard.step(micro_batches=parts)
                if outcome.verdict is not None:
                    found.append((step, outcome.action.value, [s.rank for s in outcome.verdict.suspects]))
                continue
            optimizer.zero_grad(set_to_none=True)
            with model.no_sync():
                (squared(model, parts[0]) / 2).backward()
            (squared(model, parts[1]) / 2).backward()
            optimizer.step()
        if injector is not None:
            injector.close()
    return model.module.table.weight.detach().clone(), found


def test_under_fsdp2_they_are_refused(pool3) -> None:
    """A reduce-scatter of sparse gradients does not exist in torch."""
    for answer in pool3.run(train, replace(CASE, sharded=True)):
        assert answer.kind == "UsageError" and "fully_shard cannot reduce: set sparse=False" in answer.text
