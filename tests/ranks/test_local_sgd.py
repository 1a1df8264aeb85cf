"""Local SGD: every rank trains by itself, and the run averages the weights every few steps."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unsilent
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import Failed, RankPool

EVERY, STEPS = 4, 12
AVERAGED, APART = 4, 6  # a step that begins with averaged weights, and one that does not


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 11), nn.BatchNorm1d(11), nn.Linear(11, 3)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def loss_fn(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 7, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def count(module: Any, args: Any, output: Any) -> None:
    module.calls += 1


def train(
    rank: int, size: int, guarded: bool, fault: dict[str, Any] | None = None, counts: bool = True, steps: int = STEPS
) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = Model()
    model.norm.calls = 0
    if counts:
        model.norm.register_forward_hook(count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(5 + rank)
    said: list[Any] = []
    guard = injector = None
    stopped = ""
    with contextlib.redirect_stderr(io.StringIO()):
        if guarded:
            config = unsilent.GuardConfig(
                node=f"node-{rank}", averaged_every=EVERY, audit_every=EVERY, replicas_every=EVERY, timeout_s=10.0
            )
            guard = unsilent.Guard(model, optimizer, loss_fn, config=config)
            here = guard
            if fault is not None:
                injector = Injector(
                    model, optimizer, Fault(**fault), rank=rank, world_size=size, node=f"node-{rank}",
                    replaying=lambda: here.replayer.running,
                )  # fmt: skip
        for step in range(steps):
            if injector is not None:
                injector.begin_step(step)
            if guard is None:
                optimizer.zero_grad(set_to_none=True)
                loss_fn(model, batch(rank, step)).backward()
                optimizer.step()
            else:
                try:
                    outcome = guard.step(batch(rank, step))
                except unsilent.IntegrityLost as error:
                    stopped = str(error)
                    break
                if (verdict := outcome.verdict) is not None:
                    ranks = sorted(s.rank for s in verdict.suspects if s.rank is not None)
                    said.append((step, verdict.check, verdict.kind.value, outcome.action.value, ranks))
            if (step + 1) % EVERY == 0:
                average(model)
            if injector is not None:
                injector.after_update(step)
        if injector is not None:
            injector.close()
        coverage = [] if guard is None else [(row.site, row.how, row.when) for row in guard.coverage()]
        if guard is not None:
            guard.close()
    state = [value for s in optimizer.state.values() for value in s.values()]
    return {
        "bits": [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *state)],
        "calls": model.norm.calls,
        "said": said,
        "stopped": stopped,
        "coverage": coverage,
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    bits = zip(one["bits"], other["bits"], strict=True)
    return one["calls"] == other["calls"] and all(torch.equal(a, b) for a, b in bits)


@pytest.fixture(scope="module", params=[3, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param) as pool:
        yield pool


@pytest.mark.parametrize("steps", [STEPS, STEPS - 2])  # the end of a run need not be an average
def test_a_clean_run_is_quiet_and_changes_no_bit(pool: RankPool, steps: int) -> None:
    plain, guarded = (pool.results(partial(train, steps=steps), guarded) for guarded in (False, True))
    for one, other in zip(plain, guarded, strict=True):
        assert other["said"] == [] and same(one, other)
        assert ("weights", "bitwise vote over all ranks", "every 4 steps, after they were averaged") in other[
            "coverage"
        ]


ONCE = {"site": "forward", "target": "first", "pattern": "relative", "relative": 0.5, "count": 1}


@pytest.mark.parametrize(
    ("fault", "check", "kind", "action", "ranks"),
    [
        pytest.param({**ONCE, "rank": 1, "step": AVERAGED}, "audit", "TRANSIENT", "REPAIR", [1], id="forward"),
        pytest.param(
            {**ONCE, "site": "backward", "rank": 1, "step": AVERAGED}, "audit", "TRANSIENT", "REPAIR", [1], id="backward"
        ),
        pytest.param(
            {"site": "weight", "target": "last.weight", "pattern": "bit_flip", "bit": 20, "rank": 2, "step": AVERAGED - 1},
            "replicas", "TRANSIENT", "HEAL", [2], id="a weight after it was averaged",
        ),
        pytest.param(
            {"site": "forward", "target": "first", "pattern": "nan", "rank": 0, "step": APART},
            "finite", "INCONCLUSIVE", "RECOMPUTE", [], id="NaN between two averages",
        ),
    ],
)  # fmt: skip
def test_a_fault_is_put_right(
    pool: RankPool, fault: dict[str, Any], check: str, kind: str, action: str, ranks: list[int]
) -> None:
    plain = pool.results(train, False)
    hit = pool.results(train, True, fault)
    for one, other in zip(plain, hit, strict=True):
        at = AVERAGED if fault["site"] == "weight" else fault["step"]
        assert other["said"] == [(at, check, kind, action, ranks)]
        assert same(one, other)


def test_a_device_that_always_errs_is_named_where_its_steps_are_looked_at_and_is_repaired_there(pool: RankPool) -> None:
    at = 2 * EVERY
    stuck = {"site": "forward", "target": "first", "pattern": "stuck_lane", "rank": 1, "from_step": at}
    steps = partial(train, counts=False, steps=at + 1)
    for one, other in zip(pool.results(steps, False), pool.results(steps, True, stuck), strict=True):
        assert other["said"] == [(at, "audit", "PERSISTENT", "REPAIR", [1])]
        assert same(one, other)


def _refused(rank: int, size: int, how: str) -> None:
    torch.manual_seed(0)
    model: Any = Model()
    if how == "DDP":
        model = DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu") if how == "scaler" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = unsilent.GuardConfig(averaged_every=EVERY, audit_every=EVERY, replicas_every=EVERY)
    guard = unsilent.Guard(model, optimizer, loss_fn, scaler=scaler, config=config)
    guard.step(batch(rank, 0))
    guard.save("nowhere")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("DDP", "gradients are reduced in every step"),
        ("scaler", "whose scale would differ from rank to rank"),
        ("saving", "no checkpoint is certified"),
    ],
)
def test_what_does_not_go_with_it_is_refused_with_the_reason(pool: RankPool, how: str, why: str) -> None:
    for answer in pool.run(_refused, how):
        assert isinstance(answer, Failed) and why in str(answer)


@pytest.mark.parametrize("wrong", [{"audit_every": 6}, {"replicas_every": 10}, {"save_every": 4}])
def test_periods_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(unsilent.UsageError):
        unsilent.GuardConfig(**{"averaged_every": 4, "audit_every": 4, "replicas_every": 4, **wrong})  # type: ignore[arg-type]
