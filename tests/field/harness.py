"""A short training run on each rank of a pool, guarded or not, and what is asserted of it.

Everything that a :class:`Case` names must be importable, since the ranks are processes of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import unsilent
from unsilent.generators import read_generators
from unsilent.inventory import Inventory
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import RankPool
from unsilent.records import Verdict
from unsilent.sharding import local

EVERY_STEP = {"audit_every": 1, "replicas_every": 1}


@dataclass
class Session:
    """The live objects of one rank, for a case that must do something by hand. ``ddp`` is what the loop trains."""

    rank: int
    size: int
    inner: nn.Module
    ddp: nn.Module
    optimizer: torch.optim.Optimizer
    guard: unsilent.Guard | None = None


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))


def noise(step: int, rank: int) -> torch.Tensor:
    """Other data on every rank and in every step, the same in every run."""
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 100 + rank))


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    ``before`` is called with the session when model, DDP and optimizer stand, before the guard is made;
    ``before_step`` with the session and the step; ``scaler`` with the rank. ``sharded`` takes FSDP2 in place of DDP.
    """

    model: Callable[[], nn.Module] = mlp
    loss: Callable[[Any, Any], torch.Tensor] = square
    batch: Callable[[int, int], Any] = noise
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    scaler: Callable[[int], torch.amp.GradScaler] | None = None
    before: Callable[[Session], None] | None = None
    before_step: Callable[[Session, int], None] | None = None
    ddp: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    fault: Mapping[str, Any] | None = None
    steps: int = 6
    threads: int = 1
    guarded: bool = True
    sharded: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    step: int
    verdict: Verdict
    action: str

    @property
    def ranks(self) -> list[int | None]:
        return [s.rank for s in self.verdict.suspects]

    @property
    def devices(self) -> list[str]:
        """Whoever is blamed as a device or a host."""
        return [s.device or s.node or "" for s in self.verdict.suspects if s.device or s.node]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one rank has to tell.

    ``bits`` is over weights, buffers, optimizer state, generators and plain attributes of modules, at the end;
    ``weights`` lists the weights' hash when each step began, and at the end.
    """

    bits: str
    weights: list[str]
    found: list[Found]
    steps: int
    error: BaseException | None
    said: str
    coverage: str
    fired: int
    last_step_s: float

    @property
    def only(self) -> Found:
        (found,) = self.found
        return found


def train(rank: int, size: int, case: Case) -> Result:
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return _train(rank, size, case, said)
    finally:
        torch.set_num_threads(threads)


def _train(rank: int, size: int, case: Case, said: io.StringIO) -> Result:
    torch.manual_seed(0)
    inner = case.model()
    ddp: nn.Module = (
        fully_shard(inner, mesh=init_device_mesh("cpu", (size,)))
        if case.sharded
        else DistributedDataParallel(inner, **case.ddp)
    )
    session = Session(rank, size, inner, ddp, case.optimizer(inner.parameters()))
    torch.manual_seed(1000 + rank)
    random.seed(1000 + rank)
    np.random.seed(1000 + rank)
    if case.before is not None:
        case.before(session)
    scaler = case.scaler(rank) if case.scaler is not None else None
    found: list[Found] = []
    weights: list[str] = []
    error: BaseException | None = None
    injector: Injector | None = None
    coverage = ""
    steps, began = 0, time.monotonic()
    with contextlib.ExitStack() as stack:
        if case.guarded:
            config = unsilent.GuardConfig(**{"node": f"node{rank}", **case.config})
            guard = session.guard = unsilent.Guard(ddp, session.optimizer, case.loss, scaler=scaler, config=config)
            coverage = " | ".join(f"{row.site} {row.check} {row.how} {row.blind}" for row in guard.coverage())
        if case.fault is not None:
            injector = Injector(
                inner, session.optimizer, Fault(**case.fault), rank=rank, world_size=size,
                replaying=lambda: session.guard is not None and session.guard.replayer.running,
            )  # fmt: skip
            stack.callback(injector.close)
        try:
            with session.guard or contextlib.nullcontext():
                for step in range(case.steps):
                    if case.before_step is not None:
                        case.before_step(session, step)
                    weights.append(_hash(local(p) for p in inner.parameters()))
                    began = time.monotonic()
                    if injector is not None:
                        injector.begin_step(step)
                    if session.guard is None:
                        _unguarded_step(session, case, scaler, step)
                    else:
                        outcome = session.guard.step(case.batch(step, rank))
                        if outcome.verdict is not None:
                            found.append(Found(step=step, verdict=outcome.verdict, action=outcome.action.value))
                    if injector is not None:
                        injector.after_update(step)
                    steps += 1
        except unsilent.CorruptionError as caught:
            found.append(Found(step=steps, verdict=caught.verdict, action="STOP"))
            error = caught
        except Exception as caught:  # noqa: BLE001 - the test asserts which one it was
            error = caught
    seconds = time.monotonic() - began
    weights.append(_hash(local(p) for p in inner.parameters()))
    return Result(
        bits=_bits(session), weights=weights, found=found, steps=steps, error=error, said=said.getvalue(),
        coverage=coverage, fired=injector.fired if injector else 0, last_step_s=seconds,
    )  # fmt: skip


def _unguarded_step(session: Session, case: Case, scaler: torch.amp.GradScaler | None, step: int) -> None:
    session.optimizer.zero_grad(set_to_none=True)
    loss = case.loss(session.ddp, case.batch(step, session.rank))
    if scaler is None:
        loss.backward()
        session.optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(session.optimizer)
        scaler.update()


def _bits(session: Session) -> str:
    entries = Inventory(session.inner, session.optimizer).entries()
    own = "; ".join(f"{name}: {_plain(module)}" for name, module in session.inner.named_modules())
    return f"{_hash(e.tensor for e in entries)} {read_generators().digest[:8]} {_text(own)}"


def _plain(value: Any) -> str:
    """Everything that a module or another object keeps in plain attributes, as text."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {_hash([value])}"
    if isinstance(value, torch.Generator):
        return _hash([value.get_state()])
    if isinstance(value, random.Random):
        return _text(repr(value.getstate()))
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return _text(repr(value.get_state()))
    if isinstance(value, (list, tuple, deque, set)):
        return f"{type(value).__name__}[{', '.join(map(_plain, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_plain(v)}' for k, v in value.items())}}}"
    if isinstance(value, nn.Module):
        extra = type(value).get_extra_state is not nn.Module.get_extra_state
        torchs = vars(nn.Module())
        own = {k: v for k, v in vars(value).items() if k not in torchs and not k.startswith("__composable_api")}
        return _plain(own) + (_plain(value.get_extra_state()) if extra else "")
    return "" if callable(value) else repr(value)


def _hash(tensors: Any) -> str:
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:12]


def _text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


# ---- what is asserted ------------------------------------------------------------------------------------------------


def run(pool: RankPool, case: Case, **changes: Any) -> list[Result]:
    return pool.results(train, replace(case, **changes) if changes else case)


def assert_quiet(pool: RankPool, case: Case) -> list[Result]:
    """No verdict, no error, and the bits of the same run without a guard, on every rank."""
    results, reference = run(pool, case), run(pool, case, guarded=False)
    for rank, (result, plain) in enumerate(zip(results, reference, strict=True)):
        assert result.error is None and plain.error is None, f"rank {rank}: {result.error} {plain.error}"
        assert result.found == [], f"rank {rank}: {result.said}"
        assert result.steps == case.steps
        assert result.bits == plain.bits, f"rank {rank} ends with other bits"
        assert result.weights == plain.weights, f"rank {rank} went another way"
    return results


def assert_stopped_before_update(results: list[Result], step: int) -> Found:
    """All ranks stopped together in that step with the same verdict, and the update of the step was not made."""
    for rank, result in enumerate(results):
        assert isinstance(result.error, unsilent.IntegrityLost), f"rank {rank}: {result.error!r} {result.said}"
        assert result.steps == step and result.only.step == step == result.only.verdict.step
        assert result.weights[-1] == result.weights[step], "something was updated"
        assert result.only.verdict == results[0].only.verdict
    return results[0].only
