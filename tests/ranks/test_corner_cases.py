"""Corners that a review found: each once let a bad value pass, hung, or stopped a run without need."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unsilent
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import RankPool

STEPS = 8


class Net(nn.Module):
    """Three layers and a buffer; ``gathers`` makes its forward communicate over the job's own group."""

    def __init__(self, *, gathers: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.norm = nn.BatchNorm1d(16)
        self.gathers = gathers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.norm(x)
        if self.gathers:
            # Not symmetric in the ranks: a replay of a neighbour's work gives another value.
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, x.detach().contiguous())
            x = x * (1 + sum(i * part.mean() for i, part in enumerate(parts)))
        return x.square().mean() + x.mean()


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


def run(
    rank: int,
    size: int,
    fault: dict[str, Any] | None,
    config: dict[str, Any],
    *,
    gathers: bool = False,
    parts: tuple[int, ...] = (),
    broadcast_buffers: bool = True,
    guarded: bool = True,
) -> dict[str, Any]:
    """One short run; ``parts`` gives the number of micro-batches of each rank."""
    torch.manual_seed(0)
    model = Net(gathers=gathers)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, broadcast_buffers=broadcast_buffers)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options = {"node": f"n{rank}", "audit_every": 2, "replicas_every": 1, **config}
    said, found, ended = io.StringIO(), [], ""
    with contextlib.redirect_stderr(said):
        guard = unsilent.Guard(ddp, optimizer, loss_fn, config=unsilent.GuardConfig(**options)) if guarded else None
        injector = None
        if fault is not None:
            assert guard is not None
            injector = Injector(
                model, optimizer, Fault(**fault), rank=rank, world_size=size,
                replaying=lambda: guard.replayer.running,
            )  # fmt: skip
        try:
            for step in range(STEPS):
                batch = torch.randn(6, 16, generator=torch.Generator().manual_seed(step * 10 + rank))
                if injector is not None:
                    injector.begin_step(step)
                if guard is None:
                    optimizer.zero_grad()
                    loss_fn(ddp, batch).backward()
                    optimizer.step()
                    continue
                many = [batch + i for i in range(parts[rank])] if parts else None
                outcome = guard.step(micro_batches=many) if many else guard.step(batch)
                if injector is not None:
                    injector.after_update(step)
                if outcome.verdict is not None:
                    found.append((step, outcome.action.value, outcome.verdict.kind.value))
        except unsilent.CorruptionError as error:
            ended = type(error).__name__
        if injector is not None:
            injector.close()
        if guard is not None:
            guard.close()
    return {
        "finite": all(bool(torch.isfinite(p).all()) for p in model.parameters()),
        "bits": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "found": found,
        "ended": ended,
        "said": said.getvalue(),
        "fired": injector.fired if injector is not None else 0,
        "strength": guard.audit.strength.value if guard is not None else "",
    }


ONCE = {"site": "forward", "target": "layers.1", "pattern": "scale", "factor": 3.0, "rank": 1, "step": 5}


@pytest.fixture(scope="module")
def pool2() -> Any:
    with RankPool(2) as pool:
        yield pool


def test_a_nan_does_not_pass_because_a_vote_has_no_majority(pool2: RankPool) -> None:
    """Two ranks: a weight becomes NaN on rank 1, nobody can be named: both go back to the state they agreed on."""
    fault = {"site": "weight", "target": "layers.1.weight", "pattern": "nan", "rank": 1, "step": 3}
    clean = pool2.results(run, None, {})
    for answer, bare in zip(pool2.results(run, fault, {"recomputes": 1}), clean, strict=True):
        assert answer["found"] == [(4, "ROLLBACK", "INCONCLUSIVE")] and not answer["ended"]
        assert answer["bits"] == bare["bits"]


def test_and_stops_the_run_where_nothing_leads_back(pool2: RankPool) -> None:
    fault = {"site": "weight", "target": "layers.1.weight", "pattern": "nan", "rank": 1, "step": 3}
    for answer in pool2.results(run, fault, {"recomputes": 1, "snapshot_every": None}):
        assert answer["ended"] in ("IntegrityLost", "Inconclusive"), answer["found"]


def test_a_forward_that_communicates_switches_audits_off_and_training_goes_on(pool3: RankPool) -> None:
    """No rank may rerun such work alone: it would wait for the others. The coverage that is lost is said."""
    guarded = pool3.results(_gathering, None, True)
    bare = pool3.results(_gathering, None, False)
    for answer, other in zip(guarded, bare, strict=True):
        assert answer["strength"] == "off" and not answer["ended"], answer["found"]
        assert answer["bits"] == other["bits"]
    assert "audits are off" in guarded[0]["said"]


def test_and_a_nan_in_it_stops_the_run_instead_of_hanging(pool3: RankPool) -> None:
    fault = {"site": "backward", "target": "layers.1", "pattern": "nan", "rank": 1, "step": 5}
    for answer in pool3.results(_gathering, fault, True, timeout=60):
        assert answer["finite"]
        assert answer["ended"] or answer["found"]


def _gathering(rank: int, size: int, fault: dict[str, Any] | None, guarded: bool) -> dict[str, Any]:
    return run(rank, size, fault, {}, gathers=True, guarded=guarded)


def test_without_recomputations_a_repair_is_still_looked_at_and_kept(pool3: RankPool) -> None:
    clean = pool3.results(run, None, {})
    for answer, other in zip(pool3.results(run, ONCE, {"recomputes": 0}), clean, strict=True):
        assert answer["found"] == [(5, "REPAIR", "TRANSIENT")] and answer["bits"] == other["bits"]


def _uneven(rank: int, size: int) -> dict[str, Any]:
    config = {"audit": unsilent.AuditConfig(micro_batch="rotating")}
    return run(rank, size, None, config, parts=(3, 1, 2))


def test_ranks_with_unequal_numbers_of_micro_batches_are_audited_whole(pool3: RankPool) -> None:
    for answer in pool3.results(_uneven):
        assert not answer["found"] and not answer["ended"] and answer["strength"] == "bitwise"


def _buffer_flip(rank: int, size: int, flips: bool) -> tuple[list[Any], list[float]]:
    """A replicated buffer flips on rank 2 between two steps."""
    torch.manual_seed(0)
    model = Net()
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    config = unsilent.GuardConfig(
        node=f"n{rank}", audit_every=2, replicas_every=1, replicated_buffers=("norm.running_var",)
    )
    found: list[Any] = []
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(ddp, optimizer, loss_fn, config=config)
        for step in range(STEPS):
            if flips and step == 4 and rank == 2:
                model.norm.running_var.view(torch.int32)[3] ^= 1 << 20
            outcome = guard.step(torch.randn(6, 16, generator=torch.Generator().manual_seed(step)))
            if outcome.verdict is not None:
                found.append((step, outcome.action.value, [s.rank for s in outcome.verdict.suspects]))
        guard.close()
    return found, [
        *model.norm.running_var.tolist(),
        *torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
    ]


def test_a_replicated_buffer_that_flipped_is_not_healed_from_a_capture_that_holds_it(pool3: RankPool) -> None:
    """The step's own capture has the wrong value, so the run goes back to one from before."""
    for flipped, clean in zip(pool3.results(_buffer_flip, True), pool3.results(_buffer_flip, False), strict=True):
        assert flipped[0] == [(4, "ROLLBACK", [2])] and clean[0] == []
        assert flipped[1] == clean[1]


def _failing_audit(rank: int, size: int, root: str) -> tuple[list[str], list[str]]:
    """The audit raises on rank 1 in the step before a save."""
    torch.manual_seed(0)
    model = Net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    config = unsilent.GuardConfig(node=f"n{rank}", audit_every=100, replicas_every=1, save_every=4)
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(ddp, optimizer, loss_fn, config=config)
        for step in range(4):
            if step == 3 and rank == 1:

                def broken(*_: Any, **__: Any) -> None:
                    raise ValueError("a fault of the guard itself")

                guard.audit.compare = broken  # type: ignore[method-assign]
            guard.step(torch.randn(6, 16, generator=torch.Generator().manual_seed(step * 10 + rank)))
        guard.save(root)
        saved = [s.status.value for s in guard.standing.store(root).candidates() if s.status is not None]
        checks = sorted(guard.checks)
        guard.close()
    return saved, checks


def test_an_audit_that_failed_certifies_nothing(pool3: RankPool, tmp_path: Any) -> None:
    for saved, checks in pool3.results(_failing_audit, str(tmp_path)):
        assert saved == ["candidate"] and "audit" not in checks
