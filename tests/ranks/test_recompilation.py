"""A step that is run again reuses the compiled graphs with new inputs: after the first audit nothing is compiled any more.

An audited step runs with deterministic kernels, and torch keeps a graph of its own for that mode: so the first step
compiles once, the first audited one (which is the second) once more, and a replay in either mode finds its graph there.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.parallel import DistributedDataParallel

import unsilent
from tests.promises.job import sha
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import RankPool

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks, a layer that is not compiled (faults are put there by hooks), and BatchNorm, whose buffers are written."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last, self.batch = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.batch(self.last(x)).square().mean()


def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def compile_blocks(net: Net, backend: Any) -> nn.Module:
    for block in net.blocks:
        block.compile(backend=backend)
    return net


def compile_in_place(net: Net, backend: Any) -> nn.Module:
    net.compile(backend=backend)
    return net


def compile_wrapped(net: Net, backend: Any) -> nn.Module:
    return torch.compile(net, backend=backend)  # type: ignore[return-value]


HOW: dict[str, Callable[[Net, Any], nn.Module]] = {
    "blocks": compile_blocks, "in place": compile_in_place, "wrapped": compile_wrapped
}  # fmt: skip
#: audits are due at odd steps, votes at even ones: each fault with the step in which it is found, and what is done then
FAULTS: dict[tuple[int, str], dict[str, Any]] = {
    (9, "REPAIR"): {
        "site": "gradient",
        "target": "last.weight",
        "pattern": "scale",
        "factor": 1.5,
        "rank": 2,
        "step": 9,
    },
    (12, "RECOMPUTE"): {"site": "reduction", "pattern": "nan", "step": 12},
    (16, "ROLLBACK"): {
        "site": "weight",
        "target": "last.weight",
        "pattern": "bit_flip",
        "bit": 21,
        "rank": 1,
        "step": 15,
    },
}
WARM, STEPS = 2, 18

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # importing the compiler on three ranks takes its time


def run(rank: int, size: int, how: str, backend: str, faulty: bool) -> dict[str, Any]:
    """The steps in which a graph was compiled, what was done, and the bits at the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled: list[int] = []
    step = -1
    compiler = lookup_backend(backend)

    def counting(graph: Any, inputs: Any, **options: Any) -> Any:
        compiled.append(step)
        return compiler(graph, inputs, **options)

    net = Net()
    inner = HOW[how](net, counting)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(rank)
    done: list[tuple[int, str]] = []
    config = unsilent.GuardConfig(
        node=f"n{rank}", audit_every=2, replicas_every=2, snapshot_every=4, total_steps=STEPS, timeout_s=60.0
    )
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(model, optimizer, loss_fn, config=config)
        injectors: list[Injector] = []
        for options in FAULTS.values() if faulty else ():
            named = {k: f"_orig_mod.{v}" if how == "wrapped" and k == "target" else v for k, v in options.items()}
            injectors.append(
                Injector(guard.inner, optimizer, Fault(**named), rank=rank, world_size=size,
                         replaying=lambda: guard.replayer.running)
            )  # fmt: skip
        for step in range(STEPS):
            for injector in injectors:
                injector.begin_step(step)
            outcome = guard.step(batch_of(rank, step))
            if outcome.verdict is not None:
                done.append((step, outcome.action.value))
            for injector in injectors:
                injector.after_update(step)
        for injector in injectors:
            injector.close()
        guard.close()
    state = [t.detach() for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    return {
        "compiled": compiled,
        "done": done,
        "fired": [i.fired for i in injectors],
        "bits": sha(*state, *net.buffers()),
    }


def check(pool: RankPool, how: str, backend: str) -> None:
    clean = pool.results(run, how, backend, False, timeout=250)
    faulty = pool.results(run, how, backend, True, timeout=250)
    assert all(sum(fired) for fired in zip(*(result["fired"] for result in faulty), strict=True))
    for result, twin in zip(faulty, clean, strict=True):
        assert result["done"] == list(FAULTS) and twin["done"] == []
        for one in (result, twin):
            assert one["compiled"] and [step for step in one["compiled"] if step >= WARM] == []
        assert result["bits"] == twin["bits"]


@pytest.mark.parametrize("how", HOW)
def test_audits_and_repairs_compile_nothing_once_the_run_is_warm(pool3: RankPool, how: str) -> None:
    check(pool3, how, "aot_eager")


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on a CPU")
def test_nor_with_inductor(pool3: RankPool) -> None:
    check(pool3, "blocks", "inductor")
