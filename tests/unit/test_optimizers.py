"""Several optimizers as one: groups, state, steps, scaling and schedulers are those of the parts."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import unsilent
from unsilent.optimizers import JointOptimizer, JointScheduler, joined, joined_schedulers


def parts(kind: Any = torch.optim.AdamW) -> tuple[nn.Linear, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, [torch.optim.SGD([model.weight], lr=0.1, momentum=0.9), kind([model.bias], lr=0.01)]


def joint_of(optimizers: list[torch.optim.Optimizer]) -> Any:
    joint: Any = joined(optimizers)
    assert isinstance(joint, JointOptimizer)
    return joint


def backward(model: nn.Module, step: int = 0, scaler: torch.amp.GradScaler | None = None) -> None:
    model.zero_grad()
    loss = model(torch.randn(5, 4, generator=torch.Generator().manual_seed(step))).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_single_one_is_passed_through() -> None:
    _, (sgd, _) = parts()
    scheduler = StepLR(sgd, 1)
    assert joined(sgd) is sgd and joined([sgd]) is sgd
    assert joined_schedulers(scheduler) is scheduler and joined_schedulers([scheduler]) is scheduler
    assert joined_schedulers(None) is None and joined_schedulers([]) is None


def test_groups_are_the_very_ones_also_one_that_comes_later() -> None:
    _, both = parts()
    joint = joint_of(both)
    assert [id(g) for g in joint.param_groups] == [id(g) for part in both for g in part.param_groups]
    both[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert [len(g["params"]) for g in joint.param_groups] == [1, 1, 1]
    assert joint.param_groups[1] is both[0].param_groups[1]


def test_state_is_looked_up_in_the_part_that_holds_the_parameter() -> None:
    model, both = parts()
    state = joint_of(both).state
    assert len(state) == 0 and list(state) == [] and model.weight not in state
    assert state.get(model.bias) is None and state.get(model.bias, {}) == {} and state.pop(model.bias, 3) == 3
    assert len(both[1].state) == 0  # looking whether it is there has made none
    state[model.bias]["count"] = 1  # this does, where it belongs
    state[model.weight] = {"held": 2}
    assert dict(both[1].state) == {model.bias: {"count": 1}} and dict(both[0].state) == {model.weight: {"held": 2}}
    assert [v for _, v in state.items()] == [{"held": 2}, {"count": 1}] and len(state) == 2
    assert next(iter(state)) is model.weight and state.get(model.bias) is both[1].state[model.bias]
    assert state.pop(model.weight) == {"held": 2}
    del state[model.bias]
    assert len(both[0].state) == len(both[1].state) == 0
    stranger = nn.Parameter(torch.zeros(1))
    with pytest.raises(KeyError):
        state[stranger]
    with pytest.raises(KeyError):
        state.pop(stranger)


def test_a_step_is_one_of_each_part_and_its_hooks_run_once() -> None:
    model, both = parts()
    other, apart = parts()
    joint = joint_of(both)
    order: list[str] = []
    handles = [
        joint.register_step_pre_hook(lambda *_: order.append("before")),
        joint.register_step_post_hook(lambda *_: order.append("after")),
    ]
    for name, part in zip("ab", both, strict=True):
        part.register_step_pre_hook(lambda *_, name=name: order.append(name))
    backward(model)
    joint.step()
    backward(other)
    for part in apart:
        part.step()
    assert order == ["before", "a", "b", "after"] and alike(weights(model), weights(other))
    for handle in handles:
        handle.remove()
    joint.zero_grad(set_to_none=True)
    joint.step()
    assert order[4:] == ["a", "b"] and all(p.grad is None for p in model.parameters())


def test_state_dict_numbers_parameters_over_all_groups_and_comes_back() -> None:
    model, both = parts()
    joint = joint_of(both)
    backward(model)
    joint.step()
    saved = copy.deepcopy(joint.state_dict())
    assert [g["params"] for g in saved["param_groups"]] == [[0], [1]]
    assert set(saved["state"][0]) == {"momentum_buffer"} and set(saved["state"][1]) == {"step", "exp_avg", "exp_avg_sq"}
    held = weights(model)
    backward(model, 1)
    joint.step()
    fresh_model, fresh = parts()
    with torch.no_grad():
        for p, value in zip(fresh_model.parameters(), held, strict=True):
            p.copy_(value)
    joint_of(fresh).load_state_dict(saved)
    backward(fresh_model, 1)
    for part in fresh:
        part.step()
    assert alike(weights(model), weights(fresh_model))
    with pytest.raises(ValueError, match=r"2 parameter groups, the state 1"):
        joint.load_state_dict({**saved, "param_groups": saved["param_groups"][:1]})


def test_one_that_was_one_optimizer_with_two_groups_reads_alike() -> None:
    """Numbers are those of torch for one optimizer."""
    model = nn.Linear(4, 3)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    one = torch.optim.SGD(copy.copy(groups), lr=0.1, momentum=0.9)
    two = joint_of([torch.optim.SGD([g], lr=0.1, momentum=0.9) for g in copy.copy(groups)])
    backward(model)
    one.step()
    two.step()
    assert one.state_dict()["param_groups"] == two.state_dict()["param_groups"]
    assert set(one.state_dict()["state"]) == set(two.state_dict()["state"]) == {0, 1}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)])
@pytest.mark.parametrize("bad", [(), ("weight",), ("bias",), ("weight", "bias")])
def test_with_a_scaler_each_part_is_left_out_by_itself(kind: Any, bad: tuple[str, ...]) -> None:
    runs: list[Any] = []
    for by_hand in (True, False):
        model, both = parts(kind)
        joint = joint_of(both)
        ran: list[str] = []
        joint.register_step_pre_hook(lambda *_, ran=ran: ran.append("before"))
        joint.register_step_post_hook(lambda *_, ran=ran: ran.append("after"))
        scaler = torch.amp.GradScaler("cpu", init_scale=96.0, growth_interval=2)
        for step in range(4):
            backward(model, step, scaler)
            for name in bad if step == 1 else ():
                model.get_parameter(name).grad[0] = float("inf")  # type: ignore[index]
            if by_hand:
                for part in both:
                    scaler.step(part)
            else:
                ran.clear()
                joint.step_scaled(scaler)
                # A fused one is called in any case, and leaves itself out.
                assert (
                    ran == []
                    if step == 1 and len(bad) == 2 and not joint.param_groups[1].get("fused")
                    else ran == ["before", "after"]
                )
            scaler.update()
        state = [v for s in joint.state.values() for v in s.values()]
        runs.append((weights(model) + state, scaler.state_dict()))
    assert alike(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]
    assert all(bool(torch.isfinite(t).all()) for t in runs[1][0])


def test_taken_as_one_an_overflow_anywhere_leaves_all_out() -> None:
    """What the guard does where it clips by norm: the norm of all gradients is not finite then."""
    model, both = parts()
    joint = joint_of(both)
    scaler = torch.amp.GradScaler("cpu", init_scale=96.0)
    backward(model, 0, scaler)
    model.weight.grad[0, 0] = float("nan")  # type: ignore[index]
    before = weights(model)
    scaler.unscale_(joint)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert bool(model.bias.grad.isnan().any())  # type: ignore[union-attr]
    scaler.step(joint)
    scaler.update()
    assert alike(weights(model), before) and scaler.get_scale() == 48.0


def test_schedulers() -> None:
    _, both = parts()
    joint: Any = joined_schedulers([StepLR(both[0], 2), ExponentialLR(both[1], 0.5)])
    assert isinstance(joint, JointScheduler) and joint.last_epoch == (0, 0)
    for part in both:
        part.step()
    joint.step()
    saved = copy.deepcopy(joint.state_dict())
    assert joint.last_epoch == (1, 1) and both[1].param_groups[0]["lr"] == 0.005
    joint.step()
    joint.load_state_dict(saved)
    assert joint.last_epoch == (1, 1) and joint.state_dict() == saved
    with pytest.raises(ValueError, match="2 schedulers, and the state is of one"):
        joint.load_state_dict(StepLR(both[0], 2).state_dict())
    with pytest.raises(ValueError, match="2 schedulers, and the state is of 3"):
        joint.load_state_dict({"schedulers": [{}, {}, {}]})


def test_a_guard_on_one_process_has_the_bits_of_a_loop() -> None:
    runs: list[list[torch.Tensor]] = []
    for guarded in (False, True):
        model, both = parts()
        schedulers = [StepLR(both[0], 1, 0.5), ExponentialLR(both[1], 0.9)]
        batches = [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        if guarded:
            with unsilent.Guard(model, both, lambda m, b: m(b).square().mean(), scheduler=schedulers) as guard:
                assert all(guard.step(batch).verdict is None for batch in batches)
        else:
            for batch in batches:
                model.zero_grad()
                model(batch).square().mean().backward()
                for part in (*both, *schedulers):
                    part.step()
        runs.append(weights(model))
    assert alike(*runs)


@pytest.mark.parametrize("bad", [None, "weight", "bias"])
def test_a_guard_that_clips_scaled_gradients_leaves_all_out_where_one_overflows(bad: str | None) -> None:
    """By hand the part without an overflow would step on the NaN that the norm has spread: P5."""
    runs: list[Any] = []
    for guarded in (False, True):
        model, both = parts()
        scaler = torch.amp.GradScaler("cpu", init_scale=96.0)
        batches = [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        backwards: list[int] = []

        def spoil(gradient: torch.Tensor, backwards: list[int] = backwards) -> torch.Tensor:
            backwards.append(1)
            return gradient * float("inf") if bad and len(backwards) == 2 else gradient

        if bad:
            model.get_parameter(bad).register_hook(spoil)
        if guarded:
            config = unsilent.GuardConfig(audit_every=None, replicas_every=None)
            guard = unsilent.Guard(
                model, both, lambda m, b: m(b).square().mean(), scaler=scaler, clip_norm=0.1, config=config
            )
            with contextlib.redirect_stderr(io.StringIO()), guard:
                for batch in batches:
                    guard.step(batch)
        else:
            for i, batch in enumerate(batches):
                model.zero_grad()
                scaler.scale(model(batch).square().mean()).backward()
                for part in both:
                    scaler.unscale_(part)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                for part in both if bad is None or i != 1 else ():
                    scaler.step(part)
                scaler.update()
        runs.append((weights(model), scaler.get_scale()))
    assert alike(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]
    assert all(bool(torch.isfinite(t).all()) for t in runs[1][0])
