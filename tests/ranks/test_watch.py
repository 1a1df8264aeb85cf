"""Loops that own their step: ``guard.watch`` changes no bit of them, names faults and puts them right, and refuses disorder."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import unsilent
from tests.promises.job import Job, batch_of, build, loss_of, sha
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import Failed, RankPool
from unsilent.offline.replay import replay
from unsilent.sharding import local

STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop of the user's own.

    ``odd`` names what it does out of the ordinary, from step ``at`` on where that is a step's affair.
    """

    job: Job = field(default_factory=Job)
    sharded: bool = False
    scale: float | None = None
    odd: str = ""
    at: int = 0
    watched: bool = True

    def plain(self) -> Loop:
        """The same loop without a guard and without a fault of a device."""
        return replace(self, watched=False, job=self.job.unguarded())


@dataclass(frozen=True, kw_only=True)
class Seen:
    """``found``: (step, kind, site, action, ranks of suspects); ``before``: the weights before each step."""

    bits: str
    before: tuple[str, ...]
    losses: tuple[float, ...]
    found: tuple[Any, ...]
    reasons: tuple[str, ...]
    fired: int
    error: str
    said: str
    strength: str
    steps: int
    counts: dict[str, int]


def run(rank: int, size: int, loop: Loop) -> Seen:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        return _run(rank, size, loop, said)


def _run(rank: int, size: int, loop: Loop, said: io.StringIO) -> Seen:
    job = loop.job
    model, inner, optimizer = build(replace(job, ddp=None) if loop.sharded else job, rank)
    if loop.sharded:
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)  # type: ignore[arg-type]
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=loop.scale, growth_interval=3) if loop.scale else None
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9) if job.scheduler else None
    loss_fn = loss_of(job.autocast, rank)
    node = job.nodes[rank] if job.nodes else f"n{rank}"
    options = {"audit_every": 2, "replicas_every": 2, "timeout_s": 20.0, "node": node} | job.config
    guard = injector = None
    if loop.watched:
        config = unsilent.GuardConfig(**options)
        guard = unsilent.Guard(model, optimizer, loss_fn, scaler=scaler, scheduler=scheduler, config=config)
    if job.fault is not None:
        injector = Injector(inner, optimizer, Fault(**job.fault), rank=rank, world_size=size,
                            replaying=lambda: guard is not None and guard.replayer.running)  # fmt: skip
    found: list[Any] = []
    reasons: list[str] = []
    losses: list[float] = []
    before: list[str] = []
    error = ""

    def weights() -> str:
        return sha(*[local(p) for p in inner.parameters()])

    def block(part: dict[str, Any], last: bool) -> unsilent.Verdict | None:
        """Forward and backward, the loop's own, and what is bracketed around them."""
        watching = contextlib.nullcontext()
        if guard is not None:
            watching = guard.watch(part, accumulating=not last, divide_by=job.micro_batches)
        with _no_sync(loop, model, last):
            with watching as watched:
                loss = loss_fn(model, part) / (job.micro_batches if job.micro_batches > 1 else 1)
                if loop.odd == "another loss" and step >= loop.at:
                    loss = 1.5 * loss
                if loop.odd == "raises" and step == loop.at and rank == 1:
                    raise KeyError("sample 7")
                losses.append(loss.item())
                (loss if scaler is None else scaler.scale(loss)).backward()
        if guard is None or watched.verdict is None:
            return None
        verdict = watched.verdict
        note(verdict, watched.action.value)
        return verdict

    def note(verdict: Any, action: str) -> None:
        found.append((step, verdict.kind.value, verdict.site.value, action, tuple(s.rank for s in verdict.suspects)))
        reasons.append(verdict.reason)

    try:
        for step in range(job.steps):
            before.append(weights())
            if injector is not None:
                injector.begin_step(step)
            optimizer.zero_grad(set_to_none=True)
            parts = [batch_of(rank, step, part) for part in range(job.micro_batches)]
            if loop.odd == "poison" and step == loop.at and rank == 1:
                parts[0]["x"][0, 0] = float("nan")
            for i, part in enumerate(parts):
                block(part, last=i == len(parts) - 1)
            if scaler is not None:
                scaler.unscale_(optimizer)
            if job.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if injector is not None:
                injector.after_update(step)
    except unsilent.CorruptionError as raised:
        error = str(raised)
        note(raised.verdict, type(raised).__name__)
    finally:
        if injector is not None:
            injector.close()
    before.append(weights())
    moments = [local(v) for p in model.parameters() for v in optimizer.state.get(p, {}).values()]
    counters = [one.state_dict() for one in (scaler, scheduler) if one is not None]
    seen = Seen(
        bits=sha(before[-1], *moments, *inner.buffers(), torch.get_rng_state(), repr(counters)), before=tuple(before),
        losses=tuple(losses), found=tuple(found), reasons=tuple(reasons),
        fired=0 if injector is None else injector.fired, error=error, said="",
        strength="" if guard is None else guard.audit.strength.value,
        steps=0 if guard is None else guard.state_dict()["steps"], counts={} if guard is None else guard.counts,
    )  # fmt: skip
    if guard is not None:
        guard.close()
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    return replace(seen, said=said.getvalue())


@contextlib.contextmanager
def _no_sync(loop: Loop, model: Any, last: bool) -> Iterator[None]:
    """What a loop does about the reduction of micro-batches that are not the last of their step."""
    if loop.sharded:
        model.set_requires_gradient_sync(last)
    whole = last or loop.job.ddp is None or loop.sharded
    with contextlib.nullcontext() if whole else model.no_sync():
        yield


def both(rank: int, size: int, loop: Loop) -> tuple[Seen, Seen]:
    return run(rank, size, loop), run(rank, size, loop.plain())


def in_pool(pool: RankPool, loop: Loop) -> list[tuple[Seen, Seen]]:
    return pool.results(both, loop)


ACCUMULATED = Job(micro_batches=3)

CLEAN: dict[str, Loop] = {
    "DDP": Loop(),
    "accumulation, check update": Loop(job=replace(ACCUMULATED, config={"update": unsilent.UpdateConfig()})),
    "scaler, clipping, scheduler": Loop(scale=1024.0, job=Job(clip=True, scheduler=True)),
    "clipping, bf16 autocast, unused parameters": Loop(
        job=Job(clip=True, autocast=True, model="unused", ddp={"find_unused_parameters": True})
    ),
    "gradients as views": Loop(job=Job(micro_batches=2, ddp={"gradient_as_bucket_view": True})),
    "FSDP2": Loop(sharded=True),
    "FSDP2, accumulation, clipping": Loop(sharded=True, job=replace(ACCUMULATED, clip=True)),
}


@pytest.mark.parametrize(
    ("ranks", "loop"),
    [*((3, name) for name in CLEAN), *((4, name) for name in ("DDP", "FSDP2, accumulation, clipping"))],
)
def test_a_clean_run_is_quiet_and_has_the_bits_of_the_loop_without_a_guard(
    request: pytest.FixtureRequest, ranks: int, loop: str
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{ranks}")
    _is_quiet(pool, CLEAN[loop])


def _is_quiet(pool: RankPool, loop: Loop) -> None:
    loop = replace(loop, job=replace(loop.job, steps=STEPS))
    for watched, plain in in_pool(pool, loop):
        assert (watched.found, watched.error) == ((), "")
        assert watched.bits == plain.bits and watched.losses == plain.losses
        assert watched.strength == "bitwise" and watched.counts["audit"] == 3 and watched.counts["replicas"] >= 3
        assert watched.steps == STEPS


FORWARD = {"site": "forward", "target": "layers.2", "pattern": "scale", "factor": 3.0}
BACKWARD = {"site": "backward", "target": "layers.2", "pattern": "scale", "factor": 3.0}
WEIGHT = {"site": "weight", "target": "layers.1.weight", "pattern": "bit_flip", "bit": 20, "count": 1}
NAN = {"site": "forward", "target": "layers.2", "pattern": "nan", "count": 1}
REDUCED_NAN = {"site": "reduction", "pattern": "nan"}


@pytest.mark.parametrize("fault", [FORWARD, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("options", [{}, {"job": ACCUMULATED}, {"sharded": True}], ids=["DDP", "accumulation", "FSDP2"])
def test_a_wrong_value_is_named_and_put_right_before_the_update(
    pool3: RankPool, options: dict[str, Any], fault: dict[str, Any]
) -> None:
    loop = Loop(**options)
    loop = replace(loop, job=replace(loop.job, steps=STEPS, fault=fault | {"rank": 2, "step": 3}))
    results = in_pool(pool3, loop)
    assert [watched.fired for watched, _ in results] == [0, 0, 1]
    for watched, plain in results:
        assert watched.found == ((3, "TRANSIENT", "gradient", "REPAIR", (2,)),)
        assert watched.bits == plain.bits


def test_a_device_that_always_errs_is_repaired_every_step_and_nothing_of_the_past_is_undone(pool3: RankPool) -> None:
    """Step 2 was not audited. ``guard.step`` would go back over it; here the loop's updates cannot be made again."""
    fault = FORWARD | {"rank": 1, "from_step": 3}
    for watched, plain in in_pool(pool3, Loop(job=Job(steps=STEPS, fault=fault))):
        assert watched.found == tuple((step, "PERSISTENT", "gradient", "REPAIR", (1,)) for step in (3, 4, 5))
        assert watched.bits == plain.bits


def test_a_wrong_weight_that_nobody_has_used_is_healed(pool3: RankPool) -> None:
    job = Job(steps=STEPS, fault=WEIGHT | {"rank": 1, "step": 2}, config={"replicas_every": 1})
    for watched, plain in in_pool(pool3, Loop(job=job)):
        assert watched.found == ((3, "TRANSIENT", "weights", "HEAL", (1,)),)
        assert watched.bits == plain.bits


def test_one_that_was_used_stops_the_run_and_says_why_there_is_no_way_back(pool3: RankPool) -> None:
    job = Job(steps=STEPS, fault=WEIGHT | {"rank": 1, "step": 2}, config={"replicas_every": 2, "audit_every": 50})
    for watched, _ in in_pool(pool3, Loop(job=job)):
        assert watched.found == ((4, "TRANSIENT", "weights", "IntegrityLost", (1,)),)
        assert "makes its updates itself" in watched.error and "guard.watch" in watched.error


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (NAN | {"rank": 1}, (4, "TRANSIENT", "gradient", "REPAIR", (1,))),
        (REDUCED_NAN, (4, "TRANSIENT", "reduction", "RECOMPUTE", ())),
    ],
    ids=["made by a rank", "made by the reduction"],
)
def test_a_nan_never_reaches_the_optimizer(pool3: RankPool, fault: dict[str, Any], found: tuple[Any, ...]) -> None:
    for watched, plain in in_pool(pool3, Loop(job=Job(steps=STEPS, fault=fault | {"step": 4}))):
        assert [(s, site, action) for s, _, site, action, _ in watched.found] == [(found[0], found[2], found[3])]
        assert watched.bits == plain.bits


def test_a_nan_of_the_data_stops_the_run_before_the_update(pool3: RankPool) -> None:
    for watched, plain in in_pool(pool3, Loop(job=Job(steps=STEPS), odd="poison", at=4)):
        assert watched.found == ((4, "SOFTWARE", "gradient", "IntegrityLost", (1,)),)
        assert watched.before[-1] == plain.before[4]


UNLIKE = [
    Loop(odd="another loss"),
    Loop(odd="another loss", sharded=True),
    Loop(odd="another loss", job=Job(nodes=("n", "n", "n"))),
    Loop(odd="another loss", at=3),
]


@pytest.mark.parametrize("loop", UNLIKE, ids=["DDP", "FSDP2", "one node", "from step 3 on"])
def test_a_loss_fn_unlike_the_block_is_said_and_nobody_is_blamed(pool3: RankPool, loop: Loop) -> None:
    """What the loop computes is left as it is, and no rerun ever takes its place."""
    loop = replace(loop, job=replace(loop.job, steps=STEPS))
    first = 3 if loop.at else 1
    for watched, plain in in_pool(pool3, loop):
        assert watched.found == ((first, "INCONCLUSIVE", "gradient", "CONTINUE", ()),)
        assert "the block of guard.watch has left other gradients" in watched.reasons[0]
        assert watched.strength == "off" and watched.bits == plain.bits
    assert "audit compares from now on: off" in in_pool(pool3, loop)[0][0].said


@pytest.mark.parametrize("fault", [NAN | {"rank": 1}, REDUCED_NAN], ids=["made by a rank", "made by the reduction"])
def test_where_they_are_unlike_a_nan_stops_the_run_instead_of_being_rerun(
    pool3: RankPool, fault: dict[str, Any]
) -> None:
    loop = Loop(odd="another loss", job=Job(steps=STEPS, fault=fault | {"step": 4}))
    for watched, plain in in_pool(pool3, loop):
        assert watched.found[-1][0] == 4 and watched.found[-1][3] in ("Inconclusive", "IntegrityLost")
        assert watched.before[-1] == plain.before[4]


def test_a_scaler_that_leaves_updates_out_is_in_order(pool3: RankPool) -> None:
    loop = Loop(scale=1024.0, job=Job(steps=STEPS), odd="poison", at=3)
    for watched, plain in in_pool(pool3, loop):
        assert plain.before[3] == plain.before[4] != plain.before[5], "no update was left out: the test shows nothing"
        assert (watched.found, watched.error) == ((), "")
        assert watched.bits == plain.bits and watched.steps == STEPS


def test_observe_mode_changes_nothing(pool3: RankPool) -> None:
    fault = FORWARD | {"rank": 2, "step": 3}
    loop = Loop(job=Job(steps=STEPS, fault=fault, config={"mode": "observe"}))
    for watched, faulty in pool3.results(_with_the_fault, loop):
        assert watched.found == ((3, "TRANSIENT", "gradient", "CONTINUE", (2,)),)
        assert watched.bits == faulty.bits


def _with_the_fault(rank: int, size: int, loop: Loop) -> tuple[Seen, Seen]:
    return run(rank, size, loop), run(rank, size, replace(loop, watched=False))


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_an_error_in_the_block_of_one_rank_ends_all(pool3: RankPool, sharded: bool) -> None:
    answers = pool3.run(run, Loop(job=Job(steps=STEPS), sharded=sharded, odd="raises", at=2))
    pool3.restart()
    assert all(isinstance(answer, Failed) for answer in answers)
    assert [answer.kind for answer in answers] == ["RankFailure", "KeyError", "RankFailure"]
    assert "rank 1 failed: KeyError" in answers[0].text and "sample 7" in answers[2].text


def _checkpointed(rank: int, size: int, root: str, resume: bool) -> tuple[str, int, str]:
    """Six steps in one go, or the last three of them from a checkpoint; (weights there, steps in the end, its status)."""
    model, inner, optimizer = build(Job(model="lstm"), rank)
    loss_fn = loss_of(False, rank)
    config = unsilent.GuardConfig(audit_every=1, replicas_every=1, node=f"n{rank}", timeout_s=20.0)
    there = status = ""
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(model, optimizer, loss_fn, config=config)
        start = guard.load(root) if resume else 0
        if resume:
            there = sha(*inner.parameters())
        for step in range(start, STEPS):
            optimizer.zero_grad()
            batch = batch_of(rank, step)
            with guard.watch(batch, saving=step == 2) as watched:
                loss_fn(model, batch).backward()
            assert watched.step == step and watched.verdict is None
            optimizer.step()
            if step == 2:
                path = guard.save(root)
                there = sha(*inner.parameters())
                status = "" if path is None else str(guard.standing.store(root).status_of(path))
        steps = guard.steps
        guard.close()
    return there, steps, status


def test_a_checkpoint_after_an_update_is_certified_and_resumes(pool3: RankPool, tmp_path: Path) -> None:
    whole = pool3.results(_checkpointed, str(tmp_path), False)
    rest = pool3.results(_checkpointed, str(tmp_path), True)
    for (there, steps, status), (loaded, resumed, _) in zip(whole, rest, strict=True):
        assert "certified" in status.lower() and there == loaded != ""
        assert steps == resumed == STEPS


# ---- alone, and out of order -----------------------------------------------------------------------------------------


class Alone:
    """A world of one: a small model, and a step of a loop in its parts."""

    def __init__(self, **config: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(6, 4)
        options = {"audit_every": 1, **config}
        self.guard = unsilent.Guard(self.model, self.optimizer, self.loss, config=unsilent.GuardConfig(**options))

    @staticmethod
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    def block(self, *, factor: float = 1.0, **options: Any) -> unsilent.Verdict | None:
        with self.guard.watch(self.batch, **options) as watched:
            (factor * self.loss(self.model, self.batch)).backward()
        return watched.verdict

    def step(self, **options: Any) -> unsilent.Verdict | None:
        self.optimizer.zero_grad()
        verdict = self.block(**options)
        self.optimizer.step()
        return verdict


@pytest.fixture
def alone() -> Iterator[Alone]:
    one = Alone()
    yield one
    one.guard.close()


def test_a_world_of_one_is_watched_too(alone: Alone) -> None:
    fault = Fault(site="forward", target="0", pattern="scale", factor=3.0, rank=0, step=3)
    with Injector(
        alone.model, None, fault, rank=0, world_size=1, replaying=lambda: alone.guard.replayer.running
    ) as hit:
        verdicts: list[Any] = []
        for step in range(STEPS):
            hit.begin_step(step)
            verdicts.append(alone.step())
    assert hit.fired == 1 and [v.kind.value for v in verdicts if v] == ["TRANSIENT"] and verdicts[3] is not None
    twin = Alone()
    for _ in range(STEPS):
        twin.optimizer.zero_grad()
        twin.loss(twin.model, twin.batch).backward()
        twin.optimizer.step()
    twin.guard.close()
    assert sha(*alone.model.parameters()) == sha(*twin.model.parameters())


def test_alone_a_loss_fn_unlike_the_block_blames_nobody(alone: Alone) -> None:
    verdicts = [v for v in (alone.step(factor=1.5) for _ in range(STEPS)) if v is not None]
    assert [(v.kind.value, v.suspects) for v in verdicts] == [("INCONCLUSIVE", ())]
    assert alone.guard.audit.strength.value == "off"


def test_the_coverage_table_says_what_a_watched_loop_loses(alone: Alone) -> None:
    before = alone.guard.coverage()
    alone.step()
    new = [row for row in alone.guard.coverage() if row not in before]
    assert [row.site for row in new] == ["forward", "optimizer"] and all(not row.how for row in new)
    assert "no ROLLBACK" in new[1].blind


def entry() -> tuple[nn.Module, Callable[[Any, Any], torch.Tensor]]:
    """For ``unsilent replay``."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)), Alone.loss


def test_a_finding_of_a_watched_loop_can_be_rerun_from_its_evidence(tmp_path: Path) -> None:
    """What was recorded there holds no loss."""
    one = Alone(directory=tmp_path, evidence="full")
    fault = Fault(site="forward", target="0", pattern="scale", factor=3.0, rank=0, step=2)
    with Injector(one.model, None, fault, rank=0, world_size=1, replaying=lambda: one.guard.replayer.running) as hit:
        for step in range(3):
            hit.begin_step(step)
            one.step()
    one.guard.close()
    (path,) = (tmp_path / "evidence").glob("2-*")
    answer, facts = replay(path, entry="tests.ranks.test_watch:entry", trusted=False)
    recorded, *reruns = [execution["digest"] for execution in facts["executions"]]
    assert facts["reruns"] == [reruns[0]] * 2 and recorded not in facts["reruns"], answer
    assert not any("loss" in name for name in facts["differs_from_recorded"])


def _left_over(alone: Alone) -> None:
    alone.step()
    alone.block()


def _backward_outside(alone: Alone) -> None:
    with alone.guard.watch(alone.batch):
        loss = alone.loss(alone.model, alone.batch)
    loss.backward()


def _update_inside(alone: Alone) -> None:
    with alone.guard.watch(alone.batch):
        alone.loss(alone.model, alone.batch).backward()
        alone.optimizer.step()


def _two_updates(alone: Alone) -> None:
    alone.step()
    alone.optimizer.step()


def _update_of_a_part(alone: Alone) -> None:
    alone.step()
    alone.optimizer.zero_grad()
    alone.block(accumulating=True)
    alone.optimizer.step()


def _nested(alone: Alone) -> None:
    with alone.guard.watch(alone.batch):
        alone.block()


def _two_divisors(alone: Alone) -> None:
    alone.block(accumulating=True, divide_by=2)
    alone.block(divide_by=3)


def _save_inside(alone: Alone) -> None:
    with alone.guard.watch(alone.batch):
        alone.guard.save("nowhere")


def _mixed(alone: Alone) -> None:
    alone.step()
    alone.guard.step(alone.batch)


DISORDER: dict[str, tuple[Callable[[Alone], None], str]] = {
    "gradients left over": (_left_over, "call zero_grad"),
    "backward after the block": (_backward_outside, "backward belong inside"),
    "update inside the block": (_update_inside, "inside the block"),
    "a second update": (_two_updates, "no block of guard.watch has looked at"),
    "an update before the last micro-batch": (_update_of_a_part, "no block of guard.watch has looked at"),
    "a block inside a block": (_nested, "inside another"),
    "two divisors": (_two_divisors, "divide_by"),
    "no divisor": (lambda alone: alone.step(divide_by=0), "divide_by is 0"),  # type: ignore[dict-item]
    "save inside the block": (_save_inside, "after the update"),
    "watch and step": (_mixed, "one of the two"),
}


@pytest.mark.parametrize(("disorder", "sentence"), DISORDER.values(), ids=DISORDER.keys())
def test_a_loop_out_of_order_is_refused_in_words(
    alone: Alone, disorder: Callable[[Alone], None], sentence: str
) -> None:
    with pytest.raises(unsilent.UsageError, match=sentence):
        disorder(alone)


def test_no_unseen_gradient_was_used_where_that_was_refused(alone: Alone) -> None:
    alone.step()
    before = sha(*alone.model.parameters())
    alone.optimizer.zero_grad()
    with pytest.raises(unsilent.UsageError):
        _update_inside(alone)
    with pytest.raises(unsilent.UsageError):
        alone.optimizer.step()
    assert sha(*alone.model.parameters()) == before


def test_step_and_watch_do_not_mix_the_other_way_round_either(alone: Alone) -> None:
    alone.guard.step(alone.batch)
    with pytest.raises(unsilent.UsageError, match="one of the two"):
        alone.step()


def test_what_the_guard_would_have_to_do_itself_is_refused(alone: Alone) -> None:
    alone.guard.clip_norm = 1.0
    with pytest.raises(unsilent.UsageError, match="clip after the block"):
        alone.step()
    one = Alone(audit=unsilent.AuditConfig(micro_batch="rotating"))
    with pytest.raises(unsilent.UsageError, match="audits the sum"):
        one.step()
    one.guard.close()


def test_a_closure_may_hold_the_block(alone: Alone) -> None:
    """As Lightning calls it: ``optimizer.step(closure)`` runs forward and backward first."""
    for _ in range(3):
        alone.optimizer.zero_grad()
        alone.optimizer.step(lambda: alone.block())  # type: ignore[arg-type]
    assert alone.guard.steps == 3 and alone.guard.counts["audit"] == 3


def test_a_batch_that_fails_may_be_left_out_by_a_loop_that_catches_its_error(alone: Alone) -> None:
    alone.step()
    alone.optimizer.zero_grad()
    with contextlib.suppress(ZeroDivisionError), alone.guard.watch(alone.batch, accumulating=True):
        alone.loss(alone.model, alone.batch).backward()
        raise ZeroDivisionError
    assert alone.step() is None and alone.guard.steps == 2


def _reduced_too_early(rank: int, size: int, sharded: bool) -> str:
    model, _, optimizer = build(Job(ddp=None if sharded else {}), rank)
    if sharded:
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    loss_fn, batch = loss_of(False, rank), batch_of(rank, 0)
    config = unsilent.GuardConfig(node=f"n{rank}", timeout_s=20.0)
    with contextlib.redirect_stderr(io.StringIO()), unsilent.Guard(model, optimizer, loss_fn, config=config) as guard:
        try:
            with guard.watch(batch, accumulating=True, divide_by=2):
                (loss_fn(model, batch) / 2).backward()
        except (unsilent.UsageError, unsilent.RankFailure) as error:
            return str(error)
    return ""


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_micro_batches_that_are_reduced_one_by_one_are_refused(pool3: RankPool, sharded: bool) -> None:
    assert all("under no_sync()" in text for text in pool3.results(_reduced_too_early, sharded))
