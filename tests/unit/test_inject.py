"""The injector: exact corruption of real tensors, at the right moment, and not a bit of difference otherwise."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from unsilent.errors import UsageError
from unsilent.lab.faults import Fault
from unsilent.lab.inject import KEPT_ELEMENTS, Injector, corrupted_values, positions

MODULE_SITES = ("forward", "backward")
LIVE_SITES = ("forward", "backward", "gradient")
PERSISTENT: dict[str, Any] = {"from_step": 0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Net()


def fault(site: str = "forward", pattern: str = "scale", **options: Any) -> Fault:
    if site != "reduction":
        options.setdefault("target", "first" if site in MODULE_SITES else "first.weight")
        options.setdefault("rank", 0)
    if pattern == "scale":
        options.setdefault("factor", 1.5)
    return Fault(site=site, pattern=pattern, **options)


def inject(model: nn.Module, spec: Fault, optimizer: Any = None, **options: Any) -> Injector:
    return Injector(model, optimizer, spec, **{"rank": 0, "world_size": 4, **options})


def train(
    spec: Fault | None, steps: int = 4, after: Callable[[int, Net], None] | None = None, **options: Any
) -> tuple[list[torch.Tensor], Injector | None]:
    """Losses, then weights and moments of a short run."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    injector = None if spec is None else inject(model, spec, optimizer, **options)
    losses: list[torch.Tensor] = []
    for step in range(steps):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        if injector:
            injector.begin_step(step)
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if injector:
            injector.after_update(step)
        if after:
            after(step, model)
        losses.append(loss.detach())
    state = [optimizer.state[p][k] for p in model.parameters() for k in ("exp_avg", "exp_avg_sq")]
    return [*losses, *[p.detach() for p in model.parameters()], *state], injector


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(left, right, strict=True))


CLEAN = train(None)[0]


# -- nothing changes when nothing fires --------------------------------------------------------------------------------


@pytest.mark.parametrize("site", [*LIVE_SITES, "weight", "optimizer_state"])
@pytest.mark.parametrize(
    "options",
    [
        {"step": 99},
        {"from_step": 0, "rank": 1},
        {"from_step": 0, "probability": 0.0},
        {"from_step": 0, "pattern": "relative", "relative": 0.0},
    ],
    ids=["other step", "other rank", "never", "relative error 0"],
)
def test_off_or_null_leaves_every_bit(site: str, options: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    ended, injector = train(fault(site, **options))
    assert injector
    assert same(ended, CLEAN)
    assert torch.equal(torch.get_rng_state(), before)
    assert injector.fired == (4 if "relative" in options else 0)
    assert all(i.changed == 0 for i in injector.record)


def test_a_null_injection_leaves_every_bit_of_a_llama_in_bf16() -> None:
    pytest.importorskip("transformers", reason="the extra 'train' is not installed")
    from unsilent.training.model import build_model, make_loss_fn
    from unsilent.training.presets import preset

    batch = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))

    def gradients(site: str | None, target: str = "") -> tuple[list[torch.Tensor], int]:
        model = build_model(preset("tiny"), seed=0)
        spec = fault(site, "relative", relative=0.0, target=target, **PERSISTENT) if site else None
        injector = inject(model, spec) if spec else None
        if injector:
            injector.begin_step(0)
        loss = make_loss_fn(bf16=True)(model, batch)
        loss.backward()
        found = [loss.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]
        return found, injector.fired if injector else 0

    clean, _ = gradients(None)
    for site in MODULE_SITES:
        for target in ("model.layers.1", "model.layers.1.self_attn", "model.layers.0.mlp.up_proj", "model.norm"):
            found, fired = gradients(site, target)
            assert fired == 1
            assert same(found, clean), (site, target)


# -- the fault is what was asked for -----------------------------------------------------------------------------------


@pytest.mark.parametrize("site", [*LIVE_SITES, "weight", "optimizer_state"])
@pytest.mark.parametrize("pattern", ["zero", "scale", "relative", "stuck_lane", "random_bits", "bit_flip"])
def test_it_changes_the_run_and_keeps_both_values(site: str, pattern: str) -> None:
    options: dict[str, Any] = {"bit": 20} if pattern == "bit_flip" else {}
    spec = fault(site, pattern, step=1, seed=3, **options)
    ended, injector = train(spec)
    again, twin = train(spec)
    assert injector
    assert twin
    assert not same(ended, CLEAN)
    assert same(ended, again)
    (injection,), (other,) = injector.record, twin.record
    assert (injection.step, injection.site, injection.replay) == (1, site, False)
    assert injection.execution_count == 2
    assert 0 < injection.changed <= injection.size == len(injection.elements)
    assert not torch.equal(injection.pristine, injection.corrupted)
    assert torch.equal(injection.corrupted, other.corrupted)
    assert torch.equal(injection.elements, other.elements)


def test_the_forward_output_that_follows_is_wrong_in_exactly_these_elements() -> None:
    model, x = net(), torch.randn(5, 6)
    right = model.first(x).detach()
    injector = inject(model, fault(pattern="scale", factor=2.0, step=0, count=3))
    injector.begin_step(0)
    wrong = model.first(x).detach()
    (injection,) = injector.record
    assert torch.equal((wrong != right).flatten().nonzero().flatten(), injection.elements.sort().values)
    assert torch.equal(wrong.flatten()[injection.elements], injection.corrupted)
    assert torch.equal(right.flatten()[injection.elements], injection.pristine)


def test_a_wrong_forward_reaches_the_gradients_as_a_wrong_value_would() -> None:
    """The gradient is that of the function with the wrong value in it, not of the injection."""
    model, x = net(), torch.randn(5, 6)
    injector = inject(model, fault(pattern="zero", step=0, element=7))
    injector.begin_step(0)
    model(x).sum().backward()
    hidden = model.first(x).detach()
    hidden.view(-1)[7] = 0
    hidden.requires_grad_()
    model.second(torch.tanh(hidden)).sum().backward()
    assert model.first.bias.grad is not None
    assert hidden.grad is not None
    torch.testing.assert_close(model.first.bias.grad, hidden.grad.sum(0))


def test_the_gradient_of_one_parameter_only() -> None:
    model = net()
    injector = inject(model, fault("gradient", "scale", factor=3.0, step=0, element=4))
    twin = net()
    injector.begin_step(0)
    x = torch.randn(5, 6)
    for m in (model, twin):
        m(x).sum().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        differ = (p.grad != q.grad).flatten().nonzero().flatten().tolist()
        assert differ == ([4] if name == "first.weight" else [])


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda y: (y, "other"), lambda o: o[0]),
        (lambda y: {"n": 3, "y": y}, lambda o: o["y"]),
        (lambda y: [torch.arange(3), y], lambda o: o[1]),
    ],
)
@pytest.mark.parametrize("site", MODULE_SITES)
def test_outputs_of_any_shape(wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any], site: str) -> None:
    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return wrap(self.inner(x))

    model = nn.Sequential(Wrapping())
    injector = inject(model, fault(site, target="0", step=0))
    injector.begin_step(0)
    unwrap(model(torch.randn(2, 6))).sum().backward()
    assert injector.fired == 1


def test_a_module_that_returns_its_input_does_not_spoil_it() -> None:
    model = nn.Sequential(nn.Identity())
    injector = inject(model, fault(target="0", pattern="nan", step=0))
    injector.begin_step(0)
    x = torch.ones(3)
    assert model(x).isnan().any()
    assert torch.equal(x, torch.ones(3))


def test_a_sparse_gradient_is_corrupted_in_its_values() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    injector = inject(model, fault("gradient", "nan", target="0.weight", step=0))
    injector.begin_step(0)
    model(torch.tensor([1, 2])).sum().backward()
    assert model[0].weight.grad.to_dense().isnan().sum() == 1  # pyright: ignore


def test_a_tied_parameter_answers_to_both_names_and_is_hit_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    for name in ("0.weight", "1.weight"):
        with inject(model, fault("gradient", target=name, **PERSISTENT)) as injector:
            injector.begin_step(0)
            model(torch.randn(2, 4)).sum().backward()
            assert injector.fired == 1


def test_weights_and_moments_are_wrong_between_the_update_and_the_next_step() -> None:
    seen: list[float] = []
    spec = fault("weight", "scale", factor=0.0, step=1, element=3)
    train(spec, after=lambda step, model: seen.append(model.first.weight.flatten()[3].item()))
    assert [value == 0 for value in seen] == [False, True, False, False]
    _, injector = train(fault("optimizer_state", "scale", key="exp_avg_sq", factor=0.0, step=1, steps=2))
    assert injector
    assert [i.step for i in injector.record] == [1, 2]
    assert all(i.pristine > 0 for i in injector.record)


def test_the_version_counter_tells_nothing() -> None:
    model = net()
    version = model.first.weight._version
    inject(model, fault("weight", step=0)).after_update(0)
    assert model.first.weight._version == version


def test_a_large_injection_is_counted_in_full_and_kept_in_part() -> None:
    model = nn.Sequential(nn.Linear(2, 64))
    injector = inject(model, fault(target="0", pattern="stuck_lane", add=1.0, every=2, step=0))
    injector.begin_step(0)
    model(torch.randn(100, 2))
    (injection,) = injector.record
    assert injection.size == injection.changed == 3200
    assert len(injection.elements) == len(injection.pristine) == len(injection.corrupted) == KEPT_ELEMENTS


# -- patterns ----------------------------------------------------------------------------------------------------------

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
VALUES = [4.0, -4.0, 0.0, -0.0, 1e-3, float("inf"), float("nan"), 3.0]


def spoil(values: torch.Tensor, pattern: str, seed: int = 0, **options: Any) -> torch.Tensor:
    spec = fault(pattern=pattern, step=0, **options)
    return corrupted_values(values, spec, torch.Generator().manual_seed(seed))


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize])


@pytest.mark.parametrize("dtype", DTYPES)
def test_patterns_in_every_dtype(dtype: torch.dtype) -> None:
    values = torch.tensor(VALUES, dtype=dtype)
    for bit in range(8 * dtype.itemsize):
        flipped = spoil(values, "bit_flip", bit=bit)
        changed = bits(flipped) ^ bits(values)
        assert {x % 2 ** (8 * dtype.itemsize) for x in changed.tolist()} == {1 << bit}
    assert (spoil(values, "zero") == 0).all()
    assert spoil(values, "nan").isnan().all()
    assert spoil(values, "inf").isinf().all()
    assert torch.equal(spoil(values, "scale", factor=2.0)[:6], (values * 2)[:6])
    assert torch.equal(spoil(values, "stuck_lane", add=1.0)[:6], (values + 1)[:6])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relative", [2.5e-5, -2.5e-5, 0.5])
def test_a_relative_error_is_never_rounded_away(dtype: torch.dtype, relative: float) -> None:
    values = torch.tensor(VALUES, dtype=dtype)
    wrong = spoil(values, "relative", relative=relative)
    nonzero = torch.tensor([v == v and abs(v) not in (0.0, float("inf")) for v in VALUES])
    assert torch.equal(bits(wrong) != bits(values), nonzero)
    assert torch.equal((wrong.abs() > values.abs())[nonzero], torch.full((4,), relative > 0))
    step = max(abs(relative), 2 * torch.finfo(dtype).eps)
    assert ((wrong - values).abs() <= 1.01 * step * values.abs())[nonzero].all()


def test_four_point_zero_zero_zero_one() -> None:
    assert spoil(torch.tensor([4.0]), "relative").item() == pytest.approx(4.0001, abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("high", ["mantissa", "top"])
def test_random_bits(dtype: torch.dtype, high: str) -> None:
    width = 8 * dtype.itemsize
    bit = {"mantissa": {16: 6 if dtype is torch.bfloat16 else 9, 32: 22, 64: 51}[width], "top": width - 1}[high]
    values = torch.linspace(-3, 3, 400, dtype=dtype)
    options: dict[str, Any] = {} if high == "mantissa" else {"bit": bit}
    wrong = [spoil(values, "random_bits", seed=seed, **options) for seed in (0, 0, 1)]
    masks = [(bits(w) ^ bits(values)).to(torch.int64) & (2**width - 1 if width < 64 else -1) for w in wrong]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    for mask in masks:
        assert (mask != 0).all()
        union = 0
        for m in mask.tolist():
            union |= m % 2**64
        assert union == 2 ** (bit + 1) - 1
    assert high == "top" or wrong[0].isfinite().all()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (40, 96), (3, 5, 64), (1 << 20,)])
@pytest.mark.parametrize("seed", range(5))
def test_positions_are_distinct_inside_and_in_lanes(shape: tuple[int, ...], seed: int) -> None:
    size = torch.Size(shape).numel()
    for lane in (1, 4, 32):
        count = min(5, size // lane)
        if count:
            found = positions(torch.Size(shape), fault(pattern="zero", step=0, count=count, lane=lane, seed=seed))
            assert len(set(found.tolist())) == count * lane
            assert 0 <= found.min() <= found.max() < size
            lanes = found.view(count, lane)
            assert torch.equal(lanes - lanes[:, :1], torch.arange(lane).expand(count, lane))


def test_positions_with_an_element_and_in_columns() -> None:
    shape = torch.Size((3, 10))
    assert positions(shape, fault(pattern="zero", step=0, element=5, count=2, lane=2)).tolist() == [5, 6, 7, 8]
    stuck = positions(shape, fault(pattern="stuck_lane", step=0, element=6, every=4))
    assert stuck.tolist() == [2, 6, 12, 16, 22, 26]
    assert len(positions(torch.Size((4, 8)), fault(pattern="stuck_lane", step=0))) == 4


def test_every_element_may_be_asked_for() -> None:
    assert sorted(positions(torch.Size((9,)), fault(pattern="zero", step=0, count=9)).tolist()) == list(range(9))


def test_other_seeds_other_places() -> None:
    shape = torch.Size((1000,))
    assert len({positions(shape, fault(pattern="zero", step=0, seed=s)).item() for s in range(50)}) > 40


# -- when --------------------------------------------------------------------------------------------------------------


class Clock:
    """Runs the target by hand and notes which executions were wrong."""

    def __init__(self, spec: Fault, rank: int = 0) -> None:
        self.model = net()
        self.x = torch.ones(1, 6)
        self.right = self.model.first(self.x).detach()
        self.replay = False
        self.injector = inject(self.model, spec, rank=rank, replaying=lambda: self.replay)

    def run(self, replay: bool = False) -> bool:
        self.replay = replay
        return not torch.equal(self.model.first(self.x).detach(), self.right)

    def step(self, step: int) -> tuple[bool, ...]:
        """A replay before the live run, two live runs, two replays."""
        self.injector.begin_step(step)
        return (self.run(True), self.run(), self.run(), self.run(True), self.run(True))


def test_nothing_fires_before_the_first_step() -> None:
    assert not Clock(fault(**PERSISTENT)).run()


def test_once_is_the_first_live_execution_and_never_again() -> None:
    clock = Clock(fault(step=2))
    assert [clock.step(s) for s in (1, 2, 3)] == [(False,) * 5, (False, True, False, False, False), (False,) * 5]
    assert clock.step(2) == (False,) * 5  # rolled back: the transient does not come back


def test_steps_is_the_first_live_execution_of_each() -> None:
    clock = Clock(fault(step=1, steps=2))
    assert [any(clock.step(s)) for s in range(4)] == [False, True, True, False]
    assert [i.step for i in clock.injector.record] == [1, 2]


def test_for_ever_means_replays_too() -> None:
    clock = Clock(fault(from_step=1))
    assert [clock.step(s) for s in range(3)] == [(False,) * 5, (True,) * 5, (True,) * 5]
    assert [i.replay for i in clock.injector.record[:5]] == [True, False, False, True, True]
    assert [i.execution_count for i in clock.injector.record[:5]] == [6, 7, 8, 9, 10]


def test_replays_can_be_left_out() -> None:
    clock = Clock(fault(from_step=1, during_replay="off"))
    assert [clock.step(s) for s in range(2)] == [(False,) * 5, (False, True, True, False, False)]


def test_another_rank_computes_right() -> None:
    assert Clock(fault(**PERSISTENT), rank=1).step(0) == (False,) * 5


def test_a_stuck_lane_repeats_and_random_bits_do_not() -> None:
    stuck, loose = Clock(fault(pattern="stuck_lane", **PERSISTENT)), Clock(fault(pattern="random_bits", **PERSISTENT))
    for clock in (stuck, loose):
        for step in range(3):
            clock.step(step)
    assert len({tuple(i.corrupted.tolist()) for i in stuck.injector.record}) == 1
    assert len({tuple(i.corrupted.tolist()) for i in loose.injector.record}) == 15
    assert len({tuple(i.elements.tolist()) for i in loose.injector.record}) == 1


def test_probability_is_per_execution_and_seeded() -> None:
    clocks = [Clock(fault(probability=0.3, seed=s)) for s in (0, 0, 1)]
    runs = [[clock.step(s) for s in range(120)] for clock in clocks]
    assert runs[0] == runs[1] != runs[2]
    for position in range(5):
        assert 20 <= sum(run[position] for run in runs[0]) <= 52


def test_live_faults_do_not_depend_on_how_many_replays_there_were() -> None:
    guarded, bare = (Clock(fault(pattern="random_bits", probability=0.5)) for _ in range(2))
    for step in range(20):
        guarded.step(step)
        bare.injector.begin_step(step)
        bare.run()
        bare.run()
    live = [[i.corrupted.item() for i in c.injector.record if not i.replay] for c in (guarded, bare)]
    assert live[0] == live[1]
    assert len(live[0]) > 8


def test_a_step_with_a_chance_has_one_chance_in_all() -> None:
    fires = [sum(Clock(fault(step=0, probability=0.5, seed=s)).step(0)) for s in range(60)]
    assert set(fires) == {0, 1}
    assert 18 <= sum(fires) <= 42


def test_a_step_that_is_run_again_draws_anew() -> None:
    clock = Clock(fault(pattern="random_bits", **PERSISTENT))
    clock.step(0)
    clock.step(0)
    values = [i.corrupted.item() for i in clock.injector.record]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("when", [{"step": 0}, PERSISTENT])
def test_activation_checkpointing_recomputes_clean_after_a_transient_only(
    reentrant: bool, when: dict[str, Any]
) -> None:
    model = net()
    injector = inject(model, fault(**when))
    injector.begin_step(0)
    x = torch.randn(3, 6, requires_grad=True)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert injector.fired == (1 if "step" in when else 2)


def test_hooks_fire_in_replays_on_leaf_copies() -> None:
    """As a guard replays: the same module with other leaves that carry the parameters' hooks."""
    model = net()
    for site in LIVE_SITES:
        with inject(model, fault(site, **PERSISTENT)) as injector:
            injector.begin_step(0)
            leaves = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
            for n, p in model.named_parameters():
                leaves[n]._backward_hooks = p._backward_hooks
            torch.func.functional_call(model, leaves, (torch.randn(2, 6),)).sum().backward()
            assert injector.fired == 1, site
            assert all(p.grad is None for p in model.parameters())


def test_close_takes_everything_out() -> None:
    all_reduce = dist.all_reduce
    for site in (*LIVE_SITES, "reduction"):
        model = net()
        injector = inject(model, fault(site, **PERSISTENT))
        injector.begin_step(0)
        injector.close()
        injector.close()
        model(torch.randn(2, 6)).sum().backward()
        assert injector.fired == 0
        assert not model.first._forward_hooks
        assert dist.all_reduce is all_reduce


def test_closing_below_another_wrapper_passes_through() -> None:
    original = dist.all_reduce
    lower = inject(net(), fault("reduction", **PERSISTENT))
    upper = inject(net(), fault("reduction", **PERSISTENT))
    lower.close()
    assert dist.all_reduce is not original
    upper.close()
    dist.all_reduce = original


# -- usage errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (fault(target="frist", step=0), "no module 'frist': did you mean 'first'"),
        (fault(target="module.first", step=0), "did you mean 'first'"),
        (fault("weight", target="first.wieght", step=0), "no parameter 'first.wieght': did you mean 'first.weight'"),
        (fault("weight", target="qqq", step=0), "no parameter 'qqq': it has, for example, 'first.weight'"),
        (fault(rank=4, step=0), "rank 4, but the job has ranks 0 to 3 only"),
        (fault("optimizer_state", step=0), "needs an optimizer"),
        (fault("weight", "bit_flip", bit=40, step=0), "there is no bit 40 in 'first.weight'"),
        (fault("reduction", "bit_flip", bit=32, step=0), "there is no bit 32 in gradients of torch.float32"),
        (fault("weight", "zero", element=48, step=0), "1 elements from 48 on do not fit into 'first.weight'"),
        (fault("gradient", "stuck_lane", element=6, step=0), "no column 6"),
    ],
)
def test_what_the_model_cannot_do_is_said_at_once(spec: Fault, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        inject(net(), spec)
    assert words in str(caught.value)


def test_a_frozen_parameter_has_no_gradient() -> None:
    model = net()
    model.first.weight.requires_grad_(False)
    with pytest.raises(UsageError, match="frozen"):
        inject(model, fault("gradient", step=0))


def test_an_unknown_moment_is_named_when_it_can_be_known() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    spec = fault("optimizer_state", key="momentum", step=0)
    early = inject(model, spec, optimizer)
    with pytest.raises(UsageError, match="has not been updated yet"):
        early.after_update(0)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    for attempt in (lambda: inject(model, spec, optimizer), lambda: early.after_update(0)):
        with pytest.raises(UsageError, match="no state 'momentum': it keeps step, exp_avg, exp_avg_sq"):
            attempt()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_only_the_activation_can_tell_is_refused_on_every_rank(rank: int) -> None:
    model = net()
    injector = inject(model, fault(pattern="zero", element=10**6, step=0), rank=rank)
    injector.begin_step(0)
    with pytest.raises(UsageError, match="do not fit into 'first', which has 8"):
        model(torch.ones(1, 6))


# -- the reduction -----------------------------------------------------------------------------------------------------


def run_ranks(work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` on two gloo ranks; what each returned."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    processes = [context.Process(target=_rank, args=(work, rank, port, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0]
    return [answer for _, answer in sorted((answers.get() for _ in processes), key=lambda a: a[0])]


def _rank(work: Callable[[int], Any], rank: int, port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    answers.put((rank, work(rank)))
    dist.barrier()
    os._exit(0)


def _reductions(rank: int) -> dict[Any, Any]:
    """Which elements of reduced tensors came out wrong, by case."""
    own_group = dist.new_group([0, 1])
    found: dict[Any, Any] = {}

    def reduced(asynchronous: bool = False, group: Any = None, numel: int = 8, dtype: Any = torch.float32) -> Any:
        tensor = torch.arange(1, numel + 1).to(dtype) * (rank + 1)
        right = (torch.arange(1, numel + 1) * 3).to(dtype)
        if asynchronous:
            work = dist.all_reduce(tensor, group=group, async_op=True)
            assert work is not None
            value = work.get_future().then(lambda f: f.value()[0]).wait()
            work.wait()
            assert work.is_completed()
            assert value.data_ptr() == tensor.data_ptr()
        else:
            assert dist.all_reduce(tensor, group=group) is None
        return (tensor != right).nonzero().flatten().tolist()

    cases: dict[str, dict[str, Any]] = {
        "sum": {"step": 0},
        "delivery": {"step": 0, "delivery": True, "rank": 1},
        "for ever": {"from_step": 0},
    }
    for name, options in cases.items():
        with inject(net(), fault("reduction", element=2, **options), rank=rank, world_size=2) as injector:
            found[name, "before"] = reduced()
            injector.begin_step(0)
            found[name, "own group"] = reduced(group=own_group)
            found[name, "integers"] = reduced(dtype=torch.int64)
            found[name, "too small"] = reduced(numel=2)
            found[name, "first"] = reduced(asynchronous=True, group=dist.group.WORLD)
            found[name, "second"] = reduced()
            found[name, "record"] = [(i.elements.tolist(), i.pristine.tolist()) for i in injector.record]
        found[name, "closed"] = reduced()
    with inject(net(), fault("reduction", "random_bits", from_step=0), rank=rank, world_size=2) as injector:
        injector.begin_step(0)
        for asynchronous in (True, False):
            reduced(asynchronous)
        found["alike"] = [i.corrupted.tolist() for i in injector.record]
    found["ddp"] = _ddp_with_a_hook(rank)
    return found


def _ddp_with_a_hook(rank: int) -> tuple[bool, bool]:
    """Whether a NaN made by the reduction reaches the gradients, and nothing else does."""
    model = net()
    injector = inject(model, fault("reduction", "nan", step=1), rank=rank, world_size=2)
    ddp = nn.parallel.DistributedDataParallel(model)

    def hook(state: object, bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer().mul_(1 / 2), async_op=True)
        assert work is not None
        return work.get_future().then(lambda f: f.value()[0])

    hook.__annotations__.clear()  # DDP compares annotations with types, and ours are strings
    ddp.register_comm_hook(None, hook)
    finite: list[bool] = []
    for step in range(2):
        injector.begin_step(step)
        ddp.zero_grad()
        F.mse_loss(ddp(torch.ones(2, 6) * (rank + 1)), torch.zeros(2, 4)).backward()
        finite.append(all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None))
    injector.close()
    return finite[0], finite[1]


@pytest.fixture(scope="module")
def reductions() -> list[dict[Any, Any]]:
    return run_ranks(_reductions)


@pytest.mark.parametrize("name", ["sum", "delivery", "for ever"])
def test_reduction_faults_hit_whom_and_when_they_should(reductions: list[dict[Any, Any]], name: str) -> None:
    for rank, found in enumerate(reductions):
        here = [] if name == "delivery" and rank == 0 else [2]
        for clean in ("before", "own group", "integers", "too small", "closed"):
            assert found[name, clean] == [], clean
        assert found[name, "first"] == here
        assert found[name, "second"] == (here if name == "for ever" else [])
        fired = len(here) * (2 if name == "for ever" else 1)
        assert found[name, "record"] == [([2], [9.0])] * fired


def test_a_wrong_sum_is_the_same_on_all_ranks(reductions: list[dict[Any, Any]]) -> None:
    first, second = (found["alike"] for found in reductions)
    assert first == second
    assert len(first) == 2
    assert first[0] != first[1]


def test_a_reduction_fault_reaches_the_gradients_through_ddp(reductions: list[dict[Any, Any]]) -> None:
    assert [found["ddp"] for found in reductions] == [(True, False)] * 2
