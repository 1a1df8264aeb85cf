"""What guarding a sharded model costs: FSDP2 and HSDP, guarded and unguarded steps in alternation, in one run.

Three readings of each way, on the same ranks:

* the cost of each kind of step, as in ``overhead_bench.py``: the median of (guarded - unguarded) over pairs;
* what recoveries cost, each against a step without a guard just before it: a wrong value in one step (one pass), and a device
  that errs in every execution (two passes); ``acting`` is the recovery itself, ``with finding out`` all that its step takes
  longer than a clean audited one;
* the peak of the bytes of live tensors on a rank, looked at after every operation of a few steps, an audit among them. (torch's
  own memory tracker allows no second forward in a step, which an audit is.)
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.overhead_bench import CYCLE, summary
from unsilent.lab.pool import RankPool

RANKS = {"fsdp2": 3, "hsdp": 4}
GOAL_MEMORY_MIB, GOAL_MEMORY_SHARE = 1024, 0.03
GOAL_STEPS = {"transient": 1.0, "persistent": 2.0}


def _build(way: str, size: int, preset: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from unsilent.training.model import build_model
    from unsilent.training.presets import preset as preset_of

    model: Any = build_model(preset_of(preset), seed=0)
    mesh = init_device_mesh("cpu", (size,))
    if way == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tokens(rank: int, step: int, batch: int, length: int) -> Any:
    import torch

    return torch.randint(0, 256, (batch, length + 1), generator=torch.Generator().manual_seed(step * 64 + rank))


def _plain_step(model: Any, optimizer: Any, loss_fn: Any, tokens: Any) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss_fn(model, tokens).backward()
    optimizer.step()


def alternate(rank: int, size: int, way: str, preset: str, batch: int, length: int, steps: int) -> dict[str, Any]:
    """``steps`` guarded steps, each after an unguarded one: per-step seconds and what was due."""
    import contextlib
    import io
    import time

    import torch
    import torch.distributed as dist

    import unsilent
    from unsilent.sharding import local
    from unsilent.training.model import make_loss_fn

    loss_fn = make_loss_fn()
    plain, model = _build(way, size, preset), _build(way, size, preset)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = unsilent.GuardConfig(node=f"node-{rank}", audit_every=CYCLE, replicas_every=CYCLE)
    pairs: list[tuple[str, float, float]] = []
    alarms = 0
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(model, optimizer, loss_fn, config=config)
        for step in range(CYCLE + steps):
            tokens = _tokens(rank, step, batch, length)
            dist.barrier()
            begin = time.perf_counter()
            _plain_step(plain, plain_optimizer, loss_fn, tokens)
            dist.barrier()
            middle = time.perf_counter()
            outcome = guard.step(tokens)
            dist.barrier()
            end = time.perf_counter()
            alarms += outcome.verdict is not None
            kind = "audit" if "audit" in guard.last_due else "finite"
            if step >= CYCLE:  # the first cycle warms up and holds the calibration
                pairs.append((kind, middle - begin, end - middle))
        guard.close()
    both = zip(plain.parameters(), model.parameters(), strict=True)
    return {"pairs": pairs, "alarms": alarms, "same_bits": all(torch.equal(local(a), local(b)) for a, b in both)}


def recover(
    rank: int, size: int, way: str, preset: str, batch: int, length: int, rounds: int, directory: str
) -> dict[str, Any]:
    """Guarded steps, each after an unguarded one, and all audited: clean ones, some with one wrong value, and last those of a
    device that always errs."""
    import contextlib
    import io
    import time

    import torch
    import torch.distributed as dist

    import unsilent
    from unsilent.events import read
    from unsilent.lab.faults import Fault
    from unsilent.lab.inject import Injector
    from unsilent.training.model import make_loss_fn

    loss_fn = make_loss_fn()
    plain, model = _build(way, size, preset), _build(way, size, preset)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = unsilent.GuardConfig(node=f"node-{rank}", audit_every=1, replicas_every=1, directory=directory)
    target = "model.layers.0.mlp.up_proj"
    seconds: dict[str, list[float]] = {"clean": [], "transient": [], "persistent": []}
    unguarded: list[float] = []
    actions: list[str] = []
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(model, optimizer, loss_fn, config=config)
        options: dict[str, Any] = {"world_size": size, "node": f"node-{rank}", "rank": rank,
                                   "replaying": lambda: guard.replayer.running}  # fmt: skip
        once = {"site": "forward", "target": target, "pattern": "relative", "relative": 0.5, "count": 1}
        # Each on another rank: a device that errs a third time in one run is taken to be broken.
        hit = {4 + 2 * i: i % size for i in range(min(rounds, 2 * size))}
        stuck = 5 + 2 * len(hit)
        faults = [Fault(**once, rank=who, step=step) for step, who in hit.items()]
        faults.append(Fault(site="forward", target=target, pattern="stuck_lane", rank=1, from_step=stuck))
        injectors = [Injector(model, optimizer, fault, **options) for fault in faults]
        for step in range(stuck + rounds):
            for injector in injectors:
                injector.begin_step(step)
            tokens = _tokens(rank, step, batch, length)
            dist.barrier()
            begin = time.perf_counter()
            _plain_step(plain, plain_optimizer, loss_fn, tokens)
            dist.barrier()
            unguarded.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            outcome = guard.step(tokens)
            dist.barrier()
            kind = "transient" if step in hit else "persistent" if step >= stuck else "clean"
            if step > 2:
                seconds[kind].append(time.perf_counter() - begin)
            actions.append("" if outcome.verdict is None else outcome.action.value)
            for injector in injectors:
                injector.after_update(step)
        for injector in injectors:
            injector.close()
        guard.close()
    events = read(directory).events if rank == 0 else []
    acted = [(e.step, e.fields["seconds"] / unguarded[e.step]) for e in events if e.kind == "action"]
    acting = {"transient": [s for at, s in acted if at in hit], "persistent": [s for at, s in acted if at >= stuck]}
    return {"seconds": seconds, "acting": acting, "actions": actions, "unguarded": unguarded[3:]}


def peak(rank: int, size: int, way: str, preset: str, batch: int, length: int, guarded: bool) -> float:
    """The most MiB of live tensors on this rank at any time of a few steps, an audit among them."""
    import contextlib
    import io

    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.weak import WeakIdKeyDictionary

    import unsilent
    from unsilent.training.model import make_loss_fn

    class Live(TorchDispatchMode):
        """Keeps an eye on every storage that an operation has given, as long as it lives."""

        def __init__(self) -> None:
            super().__init__()
            self.storages: Any = WeakIdKeyDictionary()
            self.peak = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # its local parts come by again
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self.storages[leaf.untyped_storage()] = None
            # Asked anew each time: weights that were gathered are let go of by resizing their storage.
            self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages))
            return out

    loss_fn = make_loss_fn()
    with contextlib.redirect_stderr(io.StringIO()), Live() as live:
        model = _build(way, size, preset)
        live.peak = 0  # the whole model, before it is sharded
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        guard = None
        if guarded:
            config = unsilent.GuardConfig(node=f"node-{rank}", audit_every=2, replicas_every=2)
            guard = unsilent.Guard(model, optimizer, loss_fn, config=config)
        for step in range(4):
            tokens = _tokens(rank, step, batch, length)
            if guard is not None:
                guard.step(tokens)
                continue
            _plain_step(model, optimizer, loss_fn, tokens)
        if guard is not None:
            guard.close()
    return live.peak / 2**20


def measure(way: str, options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """All three readings of one way."""
    shape = (way, options.preset, options.batch, options.length)
    with RankPool(RANKS[way]) as pool:
        paired = pool.results(alternate, *shape, CYCLE * options.cycles, timeout=7200)
        recovered = pool.results(recover, *shape, options.rounds, directory, timeout=7200)[0]
        memory = {
            name: max(pool.results(peak, *shape, guarded, timeout=3600))
            for name, guarded in (("unguarded", False), ("guarded", True))
        }
    by_kind = summary(paired[0]["pairs"])
    step = statistics.median(recovered["unguarded"])
    clean = statistics.median(recovered["seconds"]["clean"])
    recovery = {
        kind: {
            "count": len(recovered["seconds"][kind]),
            "acting_steps": statistics.median(recovered["acting"][kind]),
            "acting_steps_each": recovered["acting"][kind],
            "with_finding_out_steps": (statistics.median(recovered["seconds"][kind]) - clean) / step,
            "goal_steps": goal,
        }
        for kind, goal in GOAL_STEPS.items()
    }
    extra = memory["guarded"] - memory["unguarded"]
    return {
        "ranks": RANKS[way],
        "by_kind": by_kind,
        "recovery": recovery,
        "clean_audited_step_s": clean,
        "actions": recovered["actions"],
        "live_tensors_mib": {**memory, "extra": extra},
        "memory_goal_met": extra <= max(GOAL_MEMORY_MIB, GOAL_MEMORY_SHARE * memory["unguarded"]),
        "alarms": sum(r["alarms"] for r in paired),
        "same_bits": all(r["same_bits"] for r in paired),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="25m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of one sample")
    parser.add_argument("--cycles", type=int, default=20, help="audit steps, and three times as many plain ones")
    parser.add_argument("--rounds", type=int, default=8, help="recoveries of each kind")
    parser.add_argument("--out", type=Path, help="write sharded.json into this folder")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.preset, options.cycles, options.rounds, options.length = "tiny", 1, 1, 16
    import torch

    with tempfile.TemporaryDirectory() as folder:
        ways = {way: measure(way, options, f"{folder}/{way}") for way in (["hsdp"] if options.quick else RANKS)}
    result = {
        "command": " ".join(["python", "-m", "benchmarks.sharded_bench", *(sys.argv[1:] if arguments is None else [])]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, gloo ranks of one thread on one machine",
        "preset": options.preset,
        "tokens_per_rank": options.batch * options.length,
        **ways,
    }
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "sharded.json").write_text(json.dumps(result) + "\n")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
