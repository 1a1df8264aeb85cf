"""A global batch that does not divide over the ranks: every sample counts alike, audits and repairs stay bit-exact."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unsilent
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import RankPool

STEPS, GLOBAL, WIDTH = 6, 8, 16
FAULT = {"site": "backward", "target": "1", "pattern": "scale", "factor": 1.5, "rank": 1, "step": 4}


def build(*, dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), nn.Tanh(), nn.Linear(WIDTH, 1)
    )


def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def everything(step: int) -> torch.Tensor:
    return torch.randn(GLOBAL, WIDTH, generator=torch.Generator().manual_seed(step))


def mine(step: int, rank: int, size: int, micro_batch: int) -> list[torch.Tensor]:
    """This rank's samples in micro-batches: 3, 3, 2 at three ranks."""
    return list(everything(step).tensor_split(size)[rank].split(micro_batch))


def train(rank: int, size: int, options: dict[str, Any]) -> dict[str, Any]:
    model = build(dropout=options.get("dropout", 0.0))
    torch.manual_seed(1 + rank)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    config = unsilent.GuardConfig(node=f"n{rank}", audit_every=1, replicas_every=1, timeout_s=20, **options["config"])
    losses, gradients, found = [], [], []
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(ddp, optimizer, loss_fn, config=config)
        injector = None
        if "fault" in options:
            replaying = lambda: guard.replayer.running  # noqa: E731
            fault = Fault(**options["fault"])
            injector = Injector(model, optimizer, fault, rank=rank, world_size=size, replaying=replaying)
        for step in range(STEPS):
            if injector is not None:
                injector.begin_step(step)
            parts = mine(step, rank, size, options["micro_batch"])
            outcome = guard.step(micro_batches=parts, samples=[len(p) for p in parts])
            losses.append((outcome.loss.item(), sum(len(p) for p in parts)))
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            if outcome.verdict is not None:
                found.append((step, outcome.action.value, outcome.verdict.kind.value))
        if injector is not None:
            injector.close()
        guard.close()
    return {
        "losses": losses,
        "gradients": gradients,
        "found": found,
        "weights": [p.detach().clone() for p in model.parameters()],
        "strength": guard.audit.strength.value,
        "audits": guard.counts["audit"],
    }


def alone() -> tuple[list[float], list[list[torch.Tensor]]]:
    """The same steps in one process, each over all samples at once."""
    model = build(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model, everything(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return losses, gradients


@pytest.mark.parametrize("micro_batch", [8, 2], ids=["one micro-batch", "unequal counts"])
def test_the_gradient_is_that_of_the_mean_over_all_samples(pool: RankPool, micro_batch: int) -> None:
    losses, gradients = alone()
    answers = pool.results(train, {"micro_batch": micro_batch, "config": {}})
    for step in range(STEPS):
        for answer in answers:
            for got, expected in zip(answer["gradients"][step], gradients[step], strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        mean = sum(loss * n for loss, n in (answer["losses"][step] for answer in answers)) / GLOBAL
        assert mean == pytest.approx(losses[step], rel=1e-4)
    for answer in answers:
        assert answer["found"] == [] and answer["strength"] == "bitwise" and answer["audits"] == STEPS


@pytest.mark.parametrize("audit", ["accumulated", "rotating"])
def test_a_fault_is_repaired_bit_for_bit(pool: RankPool, audit: str) -> None:
    config = {} if audit == "accumulated" else {"audit": unsilent.AuditConfig(micro_batch="rotating")}
    options = {"micro_batch": 2, "config": config, "dropout": 0.1}
    clean = pool.results(train, options)
    repaired = pool.results(train, {**options, "fault": FAULT})
    for answer, other in zip(repaired, clean, strict=True):
        assert other["found"] == [] and answer["found"] == [(4, "REPAIR", "TRANSIENT")]
        assert all(torch.equal(a, b) for a, b in zip(answer["weights"], other["weights"], strict=True))
        assert answer["losses"] == other["losses"]


def _refused(rank: int, size: int, case: str) -> str:
    """What every rank is told; the case's mistake is made on rank 1 alone."""
    model = build(dropout=0.0)
    ddp = DistributedDataParallel(model)
    config = unsilent.GuardConfig(node=f"n{rank}", timeout_s=20)
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(ddp, torch.optim.SGD(model.parameters(), 1e-2), loss_fn, config=config)
        parts, samples = mine(0, rank, size, 8), None if case == "missing" and rank == 1 else [4]
        if case == "later":
            guard.step(micro_batches=parts, samples=samples)
            samples = None
        if case == "none" and rank == 1:
            parts, samples = [], []
        if case == "lengths" and rank == 1:
            samples = [2, 2]
        try:
            guard.step(micro_batches=parts, samples=samples)
        except unsilent.UnsilentError as error:
            told = f"{type(error).__name__}: {error}"
        else:
            told = "nothing"
        guard.detach(together=False)
    return told


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("missing", "UsageError: samples is not given on ranks [1], but on the others"),
        ("none", "UsageError: rank 1 has no micro-batch in this step"),
        ("lengths", "UsageError: rank 1 gives 2 numbers of samples for 1 micro-batches"),
    ],
)
def test_what_does_not_fit_on_one_rank_is_refused_on_all(pool3: RankPool, case: str, told: str) -> None:
    for answer in pool3.results(_refused, case):
        assert answer.startswith(told)


def test_samples_in_some_steps_only_are_refused(pool3: RankPool) -> None:
    assert any("not given in this step and was given before" in told for told in pool3.results(_refused, "later"))
