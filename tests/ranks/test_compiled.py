"""Compiled models: a clean run is quiet and changes no bit, one wrong value is repaired, and reruns run the compiled code.

Faults are put into gradients of parameters, or where weights are sharded into a layer outside the compiled blocks: a hook
that comes after compilation is never called inside a graph. More of DDP, and what reruns compile anew (nothing), is in
test_recompilation.py.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.ranks.loops import HIT, STEPS, Model, batch, heard, injector_of, plain_loss, same
from unsilent import Guard, GuardConfig, UsageError
from unsilent.lab.pool import RankPool
from unsilent.sharding import local

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # importing the compiler on three ranks takes its time


class Counted:
    """A backend that counts the calls of what it has compiled, so that a replay which runs other code would show."""

    def __init__(self, backend: str) -> None:
        self.calls = 0
        self._compile = lookup_backend(backend)

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        compiled = self._compile(graph, inputs, **options)

        def run(*args: Any) -> Any:
            self.calls += 1
            return compiled(*args)

        return run


def blocks_before_sharding(model: Any, backend: Any, size: int) -> Any:
    """As torchtitan does it."""
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return _sharded(model, size)


def whole_after_sharding(model: Any, backend: Any, size: int) -> Any:
    _sharded(model, size).compile(backend=backend)
    return model


def inside_ddp(model: Any, backend: Any, size: int) -> Any:
    return DistributedDataParallel(torch.compile(model, backend=backend))  # type: ignore[arg-type]


def _sharded(model: Any, size: int) -> Any:
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


HOW = {
    "FSDP2, blocks": blocks_before_sharding,
    "FSDP2, whole": whole_after_sharding,
    "DDP": inside_ddp,
}


def train(rank: int, size: int, how: str, backend: str, guarded: bool, fault: bool = False) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    counted = Counted(backend)
    model = HOW[how](Model(spare=False), counted, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(3 + rank)
    said: list[Any] = []
    with contextlib.redirect_stderr(io.StringIO()):
        guard = None
        if guarded:
            config = GuardConfig(node=f"node-{rank}", audit_every=2, replicas_every=2)
            guard = Guard(model, optimizer, plain_loss, config=config)
        injector = None
        if fault:
            where = {"site": "gradient", "target": "_orig_mod.blocks.1.up.weight"}
            injector = injector_of(guard, rank, size, **({"target": "last"} if "FSDP2" in how else where))
        calls: list[int] = []
        for step in range(STEPS):
            if injector is not None:
                injector.begin_step(step)
            if guard is None:
                optimizer.zero_grad(set_to_none=True)
                plain_loss(model, batch(rank, step)).backward()
                optimizer.step()
            else:
                said += heard(guard.step(batch(rank, step)))
            calls.append(counted.calls)
        strength = guard.audit.strength.value if guard is not None else ""
        if injector is not None:
            injector.close()
        if guard is not None:
            guard.close()
    return {
        "weights": [local(p).clone() for p in model.parameters()],
        "buffers": [],
        "said": said,
        "fired": injector.fired if injector is not None else 0,
        "strength": strength,
        "calls": [after - before for before, after in zip([0, *calls], calls, strict=False)],
    }


def check(pool: RankPool, how: str, backend: str) -> None:
    plain = pool.results(train, how, backend, False, timeout=250)
    clean = pool.results(train, how, backend, True, timeout=250)
    hit = pool.results(train, how, backend, True, True, timeout=250)
    assert [one["fired"] for one in hit] == [0, 1, 0]
    for one, two, three in zip(plain, clean, hit, strict=True):
        print(one["calls"], two["calls"], two["strength"])
        assert two["said"] == [] and two["strength"] == "bitwise"
        assert same(one, two)
        assert three["said"] == [(HIT, "TRANSIENT", "REPAIR", [1])]
        assert same(one, three)
        # An audit runs the graphs once more, and in a step without one they run as often as without a guard.
        assert two["calls"][HIT] == 2 * one["calls"][HIT] and two["calls"][2] == one["calls"][2]


@pytest.mark.parametrize("how", HOW)
def test_a_clean_run_is_quiet_and_one_wrong_value_is_repaired(pool3: RankPool, how: str) -> None:
    check(pool3, how, "aot_eager")


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ on a CPU, and there is no compiler")
def test_also_with_inductor(pool3: RankPool) -> None:
    check(pool3, "FSDP2, blocks", "inductor")


def test_a_compiled_wrapper_is_refused(pool3: RankPool) -> None:
    """A replay must not call the wrapper, and the module inside it is not the compiled code."""
    for how in ("function", "in place"):
        assert all("DistributedDataParallel(torch.compile(model))" in text for text in pool3.results(_refused, how))


def _refused(rank: int, size: int, how: str) -> str:
    ddp: Any = DistributedDataParallel(nn.Linear(2, 2))
    if how == "in place":
        ddp.compile(backend="eager")
    else:
        ddp = torch.compile(ddp, backend="eager")
    try:
        Guard(ddp, torch.optim.SGD(ddp.parameters(), 0.1), lambda model, batch: model(batch).sum())
    except UsageError as error:
        return str(error)
    return "it was accepted"
