"""FSDP2 and HSDP: a guarded run is the unguarded one bit for bit, and a fault names its true producer and is repaired.

What ``test_matrix.py`` does with them at 4 ranks is done here at 3, and what is particular to them at both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from unsilent import Guard, GuardConfig
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import RankPool
from unsilent.sharding import local

STEPS = 6
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 sums": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}


class Block(nn.Module):
    """Odd sizes, so that shards are uneven and some are empty; dropout, so that a rerun needs the generators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)
        self.odd = nn.Linear(width, 2)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.drop(self.down(F.gelu(self.up(y)))) + self.odd(y).mean(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 13)
        self.blocks = nn.ModuleList(Block(13) for _ in range(3))
        self.head = nn.Linear(13, 37, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def batch(rank: int, step: int, part: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    return torch.randint(0, 37, (3, 9), generator=generator)


def build(mesh: Any, policy: str, reshard: bool, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": POLICIES[policy], "reshard_after_forward": reshard}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@functools.cache  # a mesh brings process groups, and a pool of ranks lives for many tests
def mesh_of(size: int, replicas: int) -> Any:
    if replicas == 1:
        return init_device_mesh("cpu", (size,))
    return init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))


def bits(model: nn.Module) -> list[torch.Tensor]:
    return [local(p).clone().view(torch.int32) for p in model.parameters()]


def train(
    rank: int,
    size: int,
    directory: str | None,
    fault: dict[str, Any] | None = None,
    *,
    replicas: int = 1,
    policy: str = "fp32",
    reshard: bool = True,
    parts: int = 1,
    seeds: bool = False,
    nodes: int | None = None,
    errs_again: int | None = None,
    **config: Any,
) -> dict[str, Any]:
    """A run, guarded if it has a directory; its weights, what the guard said, and what became of its reruns' gradients.

    ``errs_again``: this rank errs once more, in the rerun whose gradients are made ready.
    """
    model = build(mesh_of(size, replicas), policy, reshard, seed=100 + rank if seeds else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7 + rank)
    if directory is None:
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            for part in range(parts):
                model.set_requires_gradient_sync(part == parts - 1)
                (loss_fn(model, batch(rank, step, part)) / parts).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return {"bits": bits(model), "said": []}
    node = f"node-{rank * (nodes or size) // size}"
    options = {"audit_every": 2, "replicas_every": 2, "quarantine": "ask", "timeout_s": 10.0, **config}
    guard = Guard(
        model, optimizer, loss_fn, clip_norm=1.0,
        config=GuardConfig(directory=directory, node=node, **options),
    )  # fmt: skip
    coverage, injector = guard.coverage(), None
    if fault is not None:
        injector = Injector(model, optimizer, Fault(**fault), rank=rank, world_size=size, node=node,
                            replaying=lambda: guard.replayer.running)  # fmt: skip
    reruns = note_reruns(guard, model if errs_again == rank else None)
    said: list[tuple[int, str, str, str, list[int | None]]] = []
    try:
        for step in range(STEPS):
            if injector is not None:
                injector.begin_step(step)
            batches = [batch(rank, step, part) for part in range(parts)]
            outcome = guard.step(micro_batches=batches) if parts > 1 else guard.step(batches[0])
            if injector is not None:
                injector.after_update(step)
            if outcome.verdict is not None:
                verdict = outcome.verdict
                suspects = sorted(s.rank for s in verdict.suspects)
                said.append((step, verdict.kind.value, verdict.site.value, outcome.action.value, suspects))
    finally:
        if injector is not None:
            injector.close()
        guard.close()
    return {"bits": bits(model), "said": said, "coverage": coverage, "reruns": reruns,
            "fired": [r for r in injector.record if r.changed] if injector else []}  # fmt: skip


def note_reruns(guard: Any, errs: Any) -> list[str | None]:
    """What becomes of the gradients of each rerun; a model that ``errs`` does so where they are put aside."""
    reruns: list[str | None] = []
    again = guard.reduction.again

    def noted(**options: Any) -> Any:
        reruns.append(options["reduces"])
        return again(**options)

    def err(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 1.5 if guard.replayer.running and reruns[-1] == "aside" else output

    guard.reduction.again = noted
    if errs is not None:
        errs.blocks[1].up.register_forward_hook(err)
    return reruns


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


FORWARD = {"site": "forward", "target": "blocks.1.up", "pattern": "relative", "relative": 0.5, "count": 1}
BACKWARD = {"site": "backward", "target": "blocks.1.up", "pattern": "relative", "relative": 0.5, "count": 1}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_clean_run_is_quiet_and_changes_no_bit(
    pool3: RankPool, tmp_path: Path, policy: str, reshard: bool, parts: int
) -> None:  # at 4 ranks: test_matrix.py
    options = {"policy": policy, "reshard": reshard, "parts": parts}
    plain = pool3.results(partial(train, **options), None)
    guarded = pool3.results(partial(train, **options), str(tmp_path))
    for one, other in zip(plain, guarded, strict=True):
        assert other["said"] == []
        assert same(one["bits"], other["bits"])


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_one_wrong_value_names_its_producer_and_ends_bit_identical(
    pool3: RankPool, tmp_path: Path, policy: str, fault: dict[str, Any]
) -> None:
    plain = pool3.results(partial(train, policy=policy), None)
    guarded = pool3.results(partial(train, policy=policy), str(tmp_path), {**fault, "rank": 2, "step": 3})
    assert guarded[2]["fired"]
    for one, other in zip(plain, guarded, strict=True):
        assert other["said"] == [(3, "TRANSIENT", "gradient", "REPAIR", [2])]
        assert same(one["bits"], other["bits"])


@pytest.mark.parametrize(("errs_again", "whole"), [(None, ["aside"]), (0, ["aside", "in place"])])
def test_a_repair_takes_what_the_inquiry_has_made_unless_that_is_wrong(
    pool: RankPool, tmp_path: Path, errs_again: int | None, whole: list[str]
) -> None:
    plain = pool.results(train, None)
    hit = partial(train, errs_again=errs_again)
    guarded = pool.results(hit, str(tmp_path), {**FORWARD, "rank": 2, "step": 3})
    for one, other in zip(plain, guarded, strict=True):
        assert other["said"] == [(3, "TRANSIENT", "gradient", "REPAIR", [2])]
        assert [reduces for reduces in other["reruns"] if reduces is not None] == whole
        assert same(one["bits"], other["bits"])


def test_where_nothing_is_repaired_nothing_is_reduced_in_reruns(pool3: RankPool, tmp_path: Path) -> None:
    observed = partial(train, mode="observe")
    for one in pool3.results(observed, str(tmp_path), {**FORWARD, "rank": 2, "step": 3}):
        assert [kind for _, kind, *_ in one["said"]] == ["TRANSIENT"]
        assert set(one["reruns"]) == {None}


STUCK = {"site": "forward", "target": "blocks.1.up", "pattern": "stuck_lane"}
WEIGHT = {"site": "weight", "target": "blocks.1.up.weight", "pattern": "bit_flip", "bit": 20}


def test_a_device_that_always_errs_is_named_and_every_step_of_it_is_put_right(pool3: RankPool, tmp_path: Path) -> None:
    plain = pool3.results(train, None)
    guarded = pool3.results(train, str(tmp_path), {**STUCK, "rank": 1, "from_step": 3})
    for one, other in zip(plain, guarded, strict=True):
        # Step 2 was not audited, so the way back to the last vote is taken once; from then on every step is audited.
        assert other["said"] == [
            (3, "PERSISTENT", "gradient", "ROLLBACK", [1]),
            (4, "PERSISTENT", "gradient", "REPAIR", [1]),
            (5, "PERSISTENT", "gradient", "REPAIR", [1]),
        ]
        assert same(one["bits"], other["bits"])


def test_a_device_that_errs_in_every_execution_is_repaired_with_what_the_arbiter_has_made(
    pool: RankPool, tmp_path: Path
) -> None:
    plain = pool.results(train, None)
    audited = partial(train, audit_every=1, replicas_every=1)
    guarded = pool.results(audited, str(tmp_path), {**STUCK, "rank": 1, "from_step": 3})
    for one, other in zip(plain, guarded, strict=True):
        assert [(step, action, who) for step, _, _, action, who in other["said"]] == [
            (step, "REPAIR", [1]) for step in (3, 4, 5)
        ]
        assert same(one["bits"], other["bits"])
        # In each of these steps: the audit, three reruns of the two open audits, one of their arbiters, and the repair.
        assert other["reruns"][-18:] == [None, None, None, "aside", None, "in place"] * 3


def test_a_nan_in_a_step_that_no_audit_was_planned_for_is_traced_to_its_rank(pool: RankPool, tmp_path: Path) -> None:
    plain = pool.results(train, None)
    fault = {"site": "forward", "target": "blocks.1.up", "pattern": "nan", "rank": 1, "step": 2}
    guarded = pool.results(train, str(tmp_path), fault)
    for one, other in zip(plain, guarded, strict=True):
        assert [(step, kind, action, who) for step, kind, _, action, who in other["said"]] == [
            (2, "TRANSIENT", "REPAIR", [1])
        ]
        assert same(one["bits"], other["bits"])


def test_with_two_nodes_of_two_devices_the_device_is_still_named(pool4: RankPool, tmp_path: Path) -> None:
    guarded = pool4.results(partial(train, nodes=2), str(tmp_path), {**STUCK, "rank": 1, "from_step": 3})
    for one in guarded:  # the other device of its node and one on the other node agree against it
        assert [(step, kind, who) for step, kind, _, _, who in one["said"]] == [
            (step, "PERSISTENT", [1]) for step in (3, 4, 5)
        ]


@pytest.fixture(scope="module")
def pool2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def test_with_two_devices_on_two_nodes_both_sides_are_named(pool2: RankPool, tmp_path: Path) -> None:
    guarded = pool2.results(train, str(tmp_path), {**STUCK, "rank": 1, "from_step": 3})
    for one in guarded:
        assert one["said"][0] == (3, "INCONCLUSIVE", "gradient", "CONTINUE", [0, 1])


def test_with_accumulation_a_wrong_value_of_an_earlier_part_is_repaired(pool: RankPool, tmp_path: Path) -> None:
    plain = pool.results(partial(train, parts=2), None)
    guarded = pool.results(partial(train, parts=2), str(tmp_path), {**FORWARD, "rank": 0, "step": 3})
    for one, other in zip(plain, guarded, strict=True):
        assert other["said"] == [(3, "TRANSIENT", "gradient", "REPAIR", [0])]
        assert same(one["bits"], other["bits"])


# ---- HSDP ------------------------------------------------------------------------------------------------------------

hsdp = partial(train, replicas=2)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_hsdp_a_clean_run_is_quiet_and_changes_no_bit(pool4: RankPool, tmp_path: Path, policy: str) -> None:
    plain = pool4.results(partial(hsdp, policy=policy, parts=2), None)
    guarded = pool4.results(partial(hsdp, policy=policy, parts=2), str(tmp_path))
    for one, other in zip(plain, guarded, strict=True):
        assert other["said"] == []
        assert same(one["bits"], other["bits"])


def test_hsdp_a_nan_that_a_wrong_weight_makes_blames_no_healthy_rank(pool4: RankPool, tmp_path: Path) -> None:
    """Both ranks of its replica compute with it, in a step without audit and vote: the pairs of the audit that the NaN asks
    for hold unlike weights, so a vote comes first."""
    plain = pool4.results(hsdp, None)
    fault = {"site": "weight", "target": "blocks.1.up.weight", "pattern": "nan", "rank": 2, "step": 3}
    guarded = pool4.results(partial(hsdp, audit_every=4, replicas_every=4), str(tmp_path), fault)
    assert guarded[2]["fired"]
    for one, other in zip(plain, guarded, strict=True):
        assert other["said"] == [(4, "INCONCLUSIVE", "weights", "ROLLBACK", [])]
        assert same(one["bits"], other["bits"])


def test_hsdp_replicas_that_were_made_with_seeds_of_their_own_are_found_before_the_first_update(
    pool4: RankPool, tmp_path: Path
) -> None:  # F13
    answers = pool4.run(partial(hsdp, seeds=True), str(tmp_path))
    for answer in answers:
        assert answer.kind == "IntegrityLost"
        assert "not synchronised" in answer.text


# ---- what collectives give -------------------------------------------------------------------------------------------


def unguarded(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any]:
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss_fn(model, batch(rank, step)).backward()
        optimizer.step()
    return {"bits": bits(model), "said": []}


class WrongOnce(DefaultAllGather):
    """Delivers one wrong weight to this rank, the next time it is armed."""

    armed = False

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(output_tensor, *args, **kwargs)
        if self.armed:
            self.armed = False
            output_tensor.view(-1)[5] += 1.0
        return result


def gather_wrongly(rank: int, size: int, directory: str | None) -> dict[str, Any]:
    model = build(mesh_of(size, 1), "fp32", True)
    gathers = WrongOnce()
    for module in (*model.blocks, model):
        module.set_custom_all_gather(gathers)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7 + rank)
    said: list[tuple[int, str, str, list[int | None]]] = []
    if directory is None:
        return unguarded(model, optimizer, rank)
    config = GuardConfig(directory=directory, node=f"node-{rank}", audit_every=2, replicas_every=2, timeout_s=10.0)
    with Guard(model, optimizer, loss_fn, config=config) as guard:
        for step in range(STEPS):
            gathers.armed = rank == 1 and step == 3
            outcome = guard.step(batch(rank, step))
            assert not gathers.armed
            if (verdict := outcome.verdict) is not None:
                said.append((step, verdict.kind.value, outcome.action.value, sorted(s.rank for s in verdict.suspects)))
        told = [row.blind for row in guard.coverage() if row.site == "weights"]
    return {"bits": bits(model), "said": said, "told": told}


def test_a_wrong_weight_that_an_all_gather_delivers_to_one_rank_is_found_by_its_audit(
    pool: RankPool, tmp_path: Path
) -> None:
    plain = pool.results(gather_wrongly, None)
    for one, other in zip(plain, pool.results(gather_wrongly, str(tmp_path)), strict=True):
        assert other["said"] == [(3, "TRANSIENT", "REPAIR", [1])]
        assert same(one["bits"], other["bits"])
        assert any("all-gather" in text and "alike" in text for text in other["told"])


def reduce_wrongly(rank: int, size: int, directory: str | None) -> dict[str, Any]:
    """HSDP, whose all-reduce over replicas delivers one wrong value to rank 2."""
    model = build(mesh_of(size, 2), "fp32", True)
    armed: list[bool] = [False]

    def after_the_all_reduce(reduced: torch.Tensor) -> None:
        if armed[0]:
            armed[0] = False
            reduced[3] += 1.0

    for module in (*model.blocks, model):
        module.set_all_reduce_hook(after_the_all_reduce)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7 + rank)
    said: list[tuple[int, str, str, str, list[int | None]]] = []
    if directory is None:
        return unguarded(model, optimizer, rank)
    config = GuardConfig(directory=directory, node=f"node-{rank}", audit_every=2, replicas_every=1, timeout_s=10.0)
    with Guard(model, optimizer, loss_fn, config=config) as guard:
        for step in range(STEPS):
            armed[0] = rank == 2 and step == 4  # an audit would not see it: it compares what goes into the reduction
            outcome = guard.step(batch(rank, step))
            assert not armed[0]
            if (verdict := outcome.verdict) is not None:
                suspects = sorted(s.rank for s in verdict.suspects)
                said.append((step, verdict.kind.value, verdict.site.value, outcome.action.value, suspects))
    return {"bits": bits(model), "said": said}


def test_hsdp_a_wrong_sum_that_one_of_two_replicas_gets_is_found_by_the_vote(pool4: RankPool, tmp_path: Path) -> None:
    plain = pool4.results(reduce_wrongly, None)
    for one, other in zip(plain, pool4.results(reduce_wrongly, str(tmp_path)), strict=True):
        assert other["said"] == [(4, "INCONCLUSIVE", "reduction", "RECOMPUTE", [])]
        assert same(one["bits"], other["bits"])
