"""P1: a guarded run without a fault ends with the bits of the unguarded run, and leaves no trace."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.nn.modules.module as module_internals
from torch import nn

from tests.promises.job import Job, both, build, guard_of, parts_of
from unsilent.lab.pool import RankPool

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "gradient_as_bucket_view": {"ddp": {"gradient_as_bucket_view": True}},
    "find_unused_parameters, one rank uses it": {"model": "unused", "ddp": {"find_unused_parameters": True}},
    "find_unused_parameters, nobody uses it": {"model": "never used", "ddp": {"find_unused_parameters": True}},
    "static_graph": {"ddp": {"static_graph": True}},
    "no_sync accumulation": {"micro_batches": 3},
}


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16 autocast"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_guarded_run_ends_with_the_bits_of_the_unguarded_one(
    pool: RankPool, options: dict[str, Any], autocast: bool
) -> None:
    for guarded, plain in pool.results(both, Job(autocast=autocast, **options)):
        assert guarded.found == () and guarded.error == ""
        assert guarded.parts == plain.parts
        assert guarded.losses == plain.losses
        # Calibration and the audits after it did run and compared bits: a check that went off would prove nothing.
        assert guarded.strength == "bitwise" and guarded.counts["audit"] >= 4 and guarded.counts["replicas"] >= 4


@pytest.mark.parametrize(
    "options",
    [
        {"scaler": True, "clip": True, "scheduler": True},
        {"clip": True, "micro_batches": 2, "config": {"mode": "observe"}},
        {"micro_batches": 3, "config": {"audit": "rotating"}},
    ],
    ids=["scaler, clipping, scheduler", "observe", "rotating micro-batch"],
)
def test_also_with_everything_else_around_the_step(pool: RankPool, options: dict[str, Any]) -> None:
    if "audit" in options.get("config", {}):
        from unsilent import AuditConfig

        options = options | {"config": {"audit": AuditConfig(micro_batch="rotating")}}
    for guarded, plain in pool.results(both, Job(**options)):
        assert guarded.parts == plain.parts and guarded.losses == plain.losses and guarded.found == ()


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_fault_in_the_first_steps_is_repaired_bit_for_bit(pool: RankPool, step: int) -> None:
    """Step 0 is where DDP has not rebuilt its buckets yet, step 1 is calibration, step 2 the first after it."""
    fault = {"site": "forward", "target": "layers.2", "pattern": "scale", "factor": 3.0, "rank": 2, "step": step}
    results = pool.results(both, Job(fault=fault, config={"audit_every": 1, "replicas_every": 1}))
    assert [r.fired for r, _ in results] == [int(rank == 2) for rank in range(pool.size)]
    for repaired, clean in results:
        assert repaired.found == ((step, "REPAIR", "TRANSIENT", (2,)),)
        assert repaired.parts == clean.parts
        assert repaired.losses == clean.losses


def _hook_counts(inner: nn.Module) -> dict[str, int]:
    counts = {
        "forward_pre": sum(len(m._forward_pre_hooks) for m in inner.modules()),
        "forward": sum(len(m._forward_hooks) for m in inner.modules()),
        "backward": sum(len(m._backward_hooks) for m in inner.modules()),
        "backward_pre": sum(len(m._backward_pre_hooks) for m in inner.modules()),
        "state": sum(len(m._state_dict_pre_hooks) + len(m._load_state_dict_pre_hooks) for m in inner.modules()),
        "tensor": sum(len(p._backward_hooks or {}) for p in inner.parameters()),
        "accumulated": sum(len(p._post_accumulate_grad_hooks or {}) for p in inner.parameters()),
    }
    counts |= {name: len(value) for name, value in vars(module_internals).items()
               if name.startswith("_global_") and "hooks" in name and hasattr(value, "__len__")}  # fmt: skip
    return counts


def _traces(rank: int, size: int) -> list[tuple[str, Any, Any]]:
    """What differs between before the guard, and after it was closed."""
    import signal
    import threading

    from unsilent import AuditConfig

    job = Job(micro_batches=2, config={"audit": AuditConfig(micro_batch="rotating")})
    model, inner, optimizer = build(job, rank)
    inner.layers[1].eval()  # a training flag of its own
    inner.norm.momentum = 0.2

    def look() -> dict[str, Any]:
        return _hook_counts(inner) | {
            "optimizer hooks": len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks),
            "training": [m.training for m in inner.modules()],
            "requires_grad": [p.requires_grad for p in inner.parameters()],
            "parameters": [id(p) for p in inner.parameters()],
            "storages": [p.data_ptr() for p in inner.parameters()],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "grad mode": torch.is_grad_enabled(),
            "sigterm": signal.getsignal(signal.SIGTERM),
            "attributes": sorted(k for m in inner.modules() for k in vars(m)),
        }

    before = look()
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(job, rank, model, optimizer)
        for step in range(5):
            guard.step(micro_batches=parts_of(job, rank, step))
        guard.close()
    after = look()
    threads = [t.name for t in threading.enumerate() if t.name == "unsilent-watcher"]
    return [(k, before[k], after[k]) for k in before if before[k] != after[k]] + [("threads", 0, t) for t in threads]


def test_the_guard_leaves_no_hook_and_no_flag_behind(pool3: RankPool) -> None:
    assert pool3.results(_traces) == [[], [], []]
