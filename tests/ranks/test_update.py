"""A spike in one rank's own step: all ranks audit that very step. A fault is repaired, a real spike stays."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unsilent
from tests.promises.job import state_parts
from unsilent.events import read
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import RankPool
from unsilent.records import SpikeEvidence

WIDTH, STEPS, AT = 24, 60, 57
FAULT = {"site": "gradient", "target": "body.2.weight", "pattern": "scale", "factor": 300.0, "count": 200, "seed": 1,
         "rank": 1, "step": AT}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.body = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2], nn.Tanh(), nn.Dropout(0.1))
        self.head = layers[3]

    def forward(self, x: torch.Tensor, odd: float) -> torch.Tensor:
        hidden = self.body(x)
        return (self.head(hidden) - x).square().mean() + odd * hidden.square().mean()


@dataclass(frozen=True, kw_only=True)
class Job:
    """``odd`` is a batch of rank 1 at step ``AT`` that is unlike all others: its loss has a term of this weight; ``times``
    multiplies its loss."""

    guarded: bool = True
    update: dict[str, Any] | None = field(default_factory=lambda: {"rule": "robust", "sensitivity": 0.02})
    fault: dict[str, Any] | None = None
    odd: float = 0.0
    times: float = 1.0
    micro_batches: int = 1
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    nodes: int = 8
    off: bool = False


def loss_fn(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return model(batch["x"], batch["odd"]) * batch["times"]


def batches(job: Job, rank: int, step: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for part in range(job.micro_batches):
        generator = torch.Generator().manual_seed(10_000 * step + 100 * part + rank)
        here = rank == 1 and step == AT
        out.append({"x": torch.randn(64, WIDTH, generator=generator), "odd": job.odd if here else 0.0,
                    "times": job.times if here else 1.0})  # fmt: skip
    return out


def train(rank: int, size: int, job: Job, directory: str | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    inner = Net()
    model: nn.Module = inner if size == 1 else DistributedDataParallel(inner, bucket_cap_mb=0.003)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    found: list[Any] = []
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        guard = None
        if job.guarded:
            options = {"audit_every": 1000, "replicas_every": 1000, "timeout_s": 20.0} | job.config
            config = unsilent.GuardConfig(
                node=f"n{rank % job.nodes}",
                update=None if job.update is None else unsilent.UpdateConfig(**job.update),
                directory=directory,
                **options,
            )
            guard = unsilent.Guard(model, optimizer, loss_fn, clip_norm=1.0, config=config)
        replaying = (lambda: guard.replayer.running) if guard is not None else (lambda: False)
        injector = None
        if job.fault is not None:
            injector = Injector(inner, optimizer, Fault(**job.fault), rank=rank, world_size=size, replaying=replaying)
        for step in range(STEPS):
            if injector is not None:
                injector.begin_step(step)
            parts = batches(job, rank, step)
            if guard is None:
                optimizer.zero_grad(set_to_none=True)
                for i, part in enumerate(parts):
                    last = i == len(parts) - 1
                    with contextlib.nullcontext() if last or size == 1 else model.no_sync():
                        loss = loss_fn(model, part)
                        (loss / len(parts) if len(parts) > 1 else loss).backward()
                torch.nn.utils.clip_grad_norm_(inner.parameters(), 1.0)
                optimizer.step()
                continue
            if job.off and step == AT:
                guard.audit.strength = type(guard.audit.strength).OFF
            outcome = guard.step(micro_batches=parts)
            if outcome.verdict is not None:
                suspects = tuple(s.rank for s in outcome.verdict.suspects)
                found.append((step, outcome.action.value, outcome.verdict.kind.value, suspects, outcome.verdict.check))
        parts_of_state = state_parts(model, optimizer)
        fired = 0 if injector is None else injector.fired
        if injector is not None:
            injector.close()
        if guard is not None:
            guard.close()
    return {"parts": parts_of_state, "found": found, "fired": fired, "said": said.getvalue()}


def spikes(directory: Path) -> list[Any]:
    return [e for e in read(directory).events if e.kind == "spike_confirmed"]


def assert_same_bits(guarded: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    assert [r["parts"] for r in guarded] == [r["parts"] for r in plain]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_fault_between_audits_is_found_in_its_own_step_and_repaired(
    pool: RankPool, tmp_path: Path, micro_batches: int
) -> None:
    job = Job(fault=FAULT, micro_batches=micro_batches)
    ranks = pool.results(train, job, str(tmp_path))
    assert [r["fired"] for r in ranks] == [int(rank == 1) for rank in range(pool.size)]
    assert all(r["found"] == [(AT, "REPAIR", "TRANSIENT", (1,), "audit")] for r in ranks), ranks[0]
    assert_same_bits(ranks, pool.results(train, Job(guarded=False, micro_batches=micro_batches)))
    assert all(e.step != AT for e in spikes(tmp_path))


def test_without_the_check_the_same_fault_passes(pool4: RankPool) -> None:
    ranks = pool4.results(train, Job(fault=FAULT, update=None))
    assert all(r["found"] == [] for r in ranks)


@pytest.mark.parametrize(
    ("update", "odd", "times"),
    [
        ({"rule": "robust", "sensitivity": 0.02}, 300.0, 1.0),
        ({"rule": "harmful", "sensitivity": 5.0}, 0.0, 500.0),
        ({"rule": "ema", "sensitivity": 0.01}, 0.0, 500.0),
    ],
    ids=["robust", "harmful", "ema"],
)
def test_a_real_spike_is_confirmed_and_changes_nothing(
    pool: RankPool, tmp_path: Path, update: dict[str, Any], odd: float, times: float
) -> None:
    job = Job(update=update, odd=odd, times=times, config={"audit_every": None})
    ranks = pool.results(train, job, str(tmp_path))
    assert all(r["found"] == [] for r in ranks)
    assert_same_bits(ranks, pool.results(train, Job(guarded=False, odd=odd, times=times)))
    confirmed = [e for e in spikes(tmp_path) if e.step == AT]
    assert len(confirmed) == 1 and 1 in confirmed[0].fields["ranks"]
    assert "audited bit by bit" in confirmed[0].fields["reason"]


def test_the_loss_that_all_tensors_share_is_no_spike_for_robust(pool3: RankPool, tmp_path: Path) -> None:
    ranks = pool3.results(train, Job(times=500.0), str(tmp_path))
    assert all(r["found"] == [] for r in ranks) and all(e.step != AT for e in spikes(tmp_path))


@pytest.mark.parametrize("mode", ["all", "rotating"])
def test_a_fault_in_a_step_whose_audit_was_planned_is_one_finding(pool3: RankPool, tmp_path: Path, mode: str) -> None:
    config = {"audit_every": AT + 1, "audit": unsilent.AuditConfig(micro_batch=mode)}
    job = Job(fault=FAULT, micro_batches=2, config=config)
    ranks = pool3.results(train, job, str(tmp_path))
    assert all(r["found"] == [(AT, "REPAIR", "TRANSIENT", (1,), "audit")] for r in ranks), ranks[0]
    assert_same_bits(ranks, pool3.results(train, Job(guarded=False, micro_batches=2)))


def test_where_audits_are_off_each_rank_reruns_its_own_step(pool3: RankPool, tmp_path: Path) -> None:
    """A real spike comes again; one that does not is nobody's fault that could be named."""
    ranks = pool3.results(train, Job(odd=300.0, off=True), str(tmp_path / "real"))
    assert all(r["found"] == [] for r in ranks)
    assert ["spikes again" in e.fields["reason"] for e in spikes(tmp_path / "real") if e.step == AT] == [True]
    ranks = pool3.results(train, Job(fault=FAULT, off=True), str(tmp_path / "fault"))
    assert all(r["found"] == [(AT, "CONTINUE", "INCONCLUSIVE", (), "update")] for r in ranks), ranks[0]


def test_one_rank_alone_reruns_its_own_step() -> None:
    with RankPool(1) as pool:
        fault = FAULT | {"rank": 0}
        (alone,) = pool.results(train, Job(fault=fault))
        assert alone["found"] == [(AT, "REPAIR", "TRANSIENT", (0,), "audit")], alone["found"]
        assert_same_bits([alone], pool.results(train, Job(guarded=False)))


def test_observe_mode_says_it_and_changes_nothing(pool3: RankPool) -> None:
    ranks = pool3.results(train, Job(fault=FAULT, config={"mode": "observe"}))
    assert all(r["found"] == [(AT, "CONTINUE", "TRANSIENT", (1,), "audit")] for r in ranks)


def fail_to_look(rank: int, size: int) -> list[tuple[str, ...]]:
    """The check itself fails on rank 1: it goes off on all ranks together, and training goes on."""
    torch.manual_seed(0)
    inner = Net()
    model = DistributedDataParallel(inner)
    with contextlib.redirect_stderr(io.StringIO()):
        config = unsilent.GuardConfig(node=f"n{rank}", update=unsilent.UpdateConfig(rule="robust"), timeout_s=20.0)
        guard = unsilent.Guard(model, torch.optim.AdamW(inner.parameters()), loss_fn, config=config)
        if rank == 1:
            guard.update.fill = lambda: 1 / 0
        on: list[tuple[str, ...]] = []
        for step in range(2):
            guard.step(batches(Job(), rank, step)[0])
            on.append(tuple(guard.checks))
        guard.close()
    return on


def test_a_fault_of_the_check_switches_it_off_on_all_ranks(pool3: RankPool) -> None:
    assert all(on == [("finite", "replicas", "audit")] * 2 for on in pool3.results(fail_to_look))


def test_its_evidence_names_the_ranks_that_stood_out() -> None:
    from unsilent.checks.update import Update, UpdateConfig

    inner = Net()
    check = Update(inner, torch.optim.AdamW(inner.parameters()), UpdateConfig(rule="robust"), reduces=False, scale=1.0,
                   loss_scale=lambda: 1.0, clip_norm=None, ranks=3)  # fmt: skip
    (found,) = check.evidence(4, [None, ("head.weight", "it grew"), None])
    assert found == SpikeEvidence(step=4, rank=1, tensor="head.weight", reason="it grew")
