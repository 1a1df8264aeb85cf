"""The small training job on which the promises are tested; it runs on every rank of a pool, guarded or not."""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import unsilent
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector

WIDTH = 32


class Net(nn.Module):
    """Linear layers with dropout, and BatchNorm at the end, whose buffers every forward writes.

    ``spare`` is used by rank 0 only, ``never`` by nobody: for find_unused_parameters.
    """

    def __init__(self, *, unused: bool = False, rank: int = 0, spare: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(WIDTH)
        if unused:
            self.spare, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.uses_spare = unused and spare

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        if self.uses_spare and rank == 0:
            x = x + self.spare(x)
        return self.norm(x.float()).square().mean() + x.float().mean()


class Checkpointed(nn.Module):
    """Activation checkpointing over dropout, reentrant or not."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
        )
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


class Convolutions(nn.Module):
    """channels_last weights: the layout of gradients inside a bucket is not the default one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        image = torch.cat([x, x], 1).reshape(x.shape[0], 2, 4, 8).to(memory_format=torch.channels_last)
        return self.body(nn.functional.pad(image, (2, 2, 2, 2))).square().mean()


class Recurrent(nn.Module):
    """An LSTM keeps its own flat list of weights beside the registered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        return self.lstm(x.reshape(x.shape[0], 4, 8))[0].square().mean()


class Tied(nn.Module):
    """One weight under two names, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        return self.b(torch.tanh(self.frozen(self.a(x)))).square().mean()


class Spectral(nn.Module):
    """Spectral norm changes buffers in the forward, and its weight is computed by a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.old = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        return self.old(torch.tanh(self.layer(x))).square().mean()


class OtherRandomness(nn.Module):
    """Draws from Python's and NumPy's generators in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        noise = torch.from_numpy(np.random.rand(WIDTH).astype(np.float32))
        return self.layer(x + noise).square().mean() * (1 + random.random())


class _NoisyGradient(torch.autograd.Function):
    """The value is passed on as it is; the gradient is scaled otherwise each time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 + random.SystemRandom().random())


class UnrepeatableBackward(nn.Module):
    """The loss repeats and the gradients do not, on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        return _NoisyGradient.apply(self.layer(x)).square().mean()


class Unrepeatable(nn.Module):
    """Work that gives other bits each time, on every rank: its own source of noise outside all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
        noise = random.SystemRandom().random()
        return self.layer(x).square().mean() * (1 + noise)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "unused": lambda: Net(unused=True),
    "never used": lambda: Net(unused=True, spare=False),
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "reentrant": lambda: Checkpointed(reentrant=True),
    "channels_last": Convolutions,
    "lstm": Recurrent,
    "tied and frozen": Tied,
    "spectral norm": Spectral,
    "python and numpy randomness": OtherRandomness,
    "unrepeatable": Unrepeatable,
    "unrepeatable backward": UnrepeatableBackward,
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run. ``config`` are options of GuardConfig; a node is named for each rank unless ``nodes`` says so."""

    guarded: bool = True
    steps: int = 8
    model: str = "net"
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    ddp: dict[str, Any] | None = field(default_factory=dict[str, Any])
    fault: dict[str, Any] | None = None
    micro_batches: int = 1
    autocast: bool = False
    scaler: bool = False
    clip: bool = False
    scheduler: bool = False
    scaled_by_hook: bool = False
    nodes: tuple[str, ...] = ()
    save_to: str | None = None
    save_at: int = 0

    def unguarded(self) -> Job:
        """The same job without guard and without fault."""
        return replace(self, guarded=False, fault=None, save_to=None)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one rank saw. ``parts`` are digests by kind of state; ``bits`` is one over all of them."""

    parts: dict[str, str]
    losses: tuple[float, ...]
    found: tuple[tuple[int, str, str, tuple[int | None, ...]], ...]  # step, action, kind, ranks of suspects
    reasons: tuple[str, ...]
    nodes: tuple[tuple[str | None, ...], ...]  # of the suspects, beside ``found``
    fired: int
    error: str
    said: str
    coverage: tuple[Any, ...] = ()
    counts: dict[str, int] = field(default_factory=dict[str, int])
    strength: str = ""

    @property
    def bits(self) -> str:
        return hashlib.sha256(repr(sorted(self.parts.items())).encode()).hexdigest()


def loss_of(autocast: bool, rank: int) -> Callable[[Any, Any], torch.Tensor]:
    """The user's loss function; the batch says which rank it is of, since a neighbour replays it too."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(batch["x"], batch["rank"])

    return loss


def batch_of(rank: int, step: int, part: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * part + rank)
    return {"x": torch.randn(8, WIDTH, generator=generator), "rank": rank}


def sha(*values: Any) -> str:
    hashed = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        hashed.update(value if isinstance(value, bytes) else pickle.dumps(value))
    return hashed.hexdigest()[:16]


def generators() -> str:
    numpy = np.random.get_state()
    return sha(torch.get_rng_state(), random.getstate(), numpy[0], numpy[1].tobytes(), numpy[2:])


def state_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digests of everything that a run leaves behind."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    states = [optimizer.state.get(p, {}) for p in inner.parameters()]
    moments = [v for state in states for _, v in sorted(state.items()) if isinstance(v, torch.Tensor)]
    gradients = [(n, p.grad is None) for n, p in inner.named_parameters()]
    return {
        "weights": sha(*inner.parameters()),
        "moments": sha(*moments),
        "buffers": sha(*inner.buffers()),
        "generators": generators(),
        "gradients": sha(gradients, *[p.grad for p in inner.parameters() if p.grad is not None]),
        "training": sha([m.training for m in inner.modules()]),
        "settings": sha([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]),
    }


def build(job: Job, rank: int) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """(what is trained, the inner module, the optimizer), the same weights on every rank."""
    torch.manual_seed(0)
    inner = MODELS[job.model]()
    if job.scaled_by_hook:
        for parameter in inner.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)
    model = inner if job.ddp is None else DistributedDataParallel(inner, bucket_cap_mb=0.01, **job.ddp)
    trained = [p for p in inner.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    np.random.seed(1 + rank)
    return model, inner, optimizer


def parts_of(job: Job, rank: int, step: int) -> list[Any]:
    return [batch_of(rank, step, part) for part in range(job.micro_batches)]


def guard_of(job: Job, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> unsilent.Guard:
    node = job.nodes[rank] if job.nodes else f"n{rank}"
    config = unsilent.GuardConfig(
        **{"audit_every": 2, "replicas_every": 2, "timeout_s": 20.0, "node": node} | job.config
    )
    return unsilent.Guard(model, optimizer, loss_of(job.autocast, rank), config=config, **more)


def train(rank: int, size: int, job: Job) -> Result:
    """Run the job on this rank; a CorruptionError ends it and is reported in the result."""
    model, inner, optimizer = build(job, rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) if job.scaler else None
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9) if job.scheduler else None
    more = {"scaler": scaler, "scheduler": scheduler, "clip_norm": 0.5 if job.clip else None}
    losses: list[float] = []
    found: list[Any] = []
    reasons: list[str] = []
    nodes: list[tuple[str | None, ...]] = []
    error = ""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        guard = guard_of(job, rank, model, optimizer, **more) if job.guarded else None
        injector = None
        if job.fault is not None:
            replaying = (lambda: guard.replayer.running) if guard is not None else (lambda: False)
            injector = Injector(inner, optimizer, Fault(**job.fault), rank=rank, world_size=size, replaying=replaying)
        try:
            for step in range(job.steps):
                if injector is not None:
                    injector.begin_step(step)
                if guard is None:
                    losses.append(plain_step(job, rank, step, model, optimizer, **more))
                else:
                    outcome = guard.step(micro_batches=parts_of(job, rank, step))
                    losses.append(outcome.loss.item())
                    if outcome.verdict is not None:
                        suspects = tuple(s.rank for s in outcome.verdict.suspects)
                        found.append((step, outcome.action.value, outcome.verdict.kind.value, suspects))
                        reasons.append(outcome.verdict.reason)
                        nodes.append(tuple(s.node for s in outcome.verdict.suspects))
                if injector is not None:
                    injector.after_update(step)
                if guard is not None and job.save_to is not None and step + 1 == job.save_at:
                    found.append((step, "saved", str(guard.save(job.save_to) is not None), ()))
        except unsilent.CorruptionError as raised:
            error = f"{type(raised).__name__}: {raised}"
            verdict = raised.verdict
            found.append((step, type(raised).__name__, verdict.kind.value, tuple(s.rank for s in verdict.suspects)))
            reasons.append(verdict.reason)
            nodes.append(tuple(s.node for s in verdict.suspects))
        parts = state_parts(model, optimizer)
        parts["counters"] = sha([None if one is None else one.state_dict() for one in (scaler, scheduler)])
        if injector is not None:
            injector.close()
        if guard is not None:
            guard.close()
    return Result(
        parts=parts, losses=tuple(losses), found=tuple(found), reasons=tuple(reasons), nodes=tuple(nodes),
        fired=0 if injector is None else injector.fired, error=error, said=said.getvalue(),
        coverage=() if guard is None else guard.coverage(),
        counts={} if guard is None else guard.counts,
        strength="" if guard is None else guard.audit.strength.value,
    )  # fmt: skip


def plain_step(
    job: Job, rank: int, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, *,
    scaler: Any, scheduler: Any, clip_norm: float | None,
) -> float:  # fmt: skip
    """The loop that a user writes without a guard."""
    optimizer.zero_grad(set_to_none=True)
    loss_fn = loss_of(job.autocast, rank)
    losses: list[torch.Tensor] = []
    parts = parts_of(job, rank, step)
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        with contextlib.nullcontext() if last or job.ddp is None else model.no_sync():
            loss = loss_fn(model, part)
            losses.append(loss.detach())
            loss = loss / len(parts) if len(parts) > 1 else loss
            (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None and clip_norm is not None:
        scaler.unscale_(optimizer)
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return torch.stack(losses).mean().item() if len(losses) > 1 else losses[0].item()


def with_and_without_guard(rank: int, size: int, job: Job) -> tuple[Result, Result]:
    """The job as it is, and the same without a guard but with the same fault."""
    return train(rank, size, job), train(rank, size, replace(job, guarded=False, save_to=None))


def both(rank: int, size: int, job: Job) -> tuple[Result, Result]:
    """The job as it is, and its unguarded, faultless twin."""
    return train(rank, size, job), train(rank, size, job.unguarded())
