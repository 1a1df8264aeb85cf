"""Faults of operations, ids, the optimizer's arithmetic and the comparison, and when they come back or do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from unsilent import fingerprint
from unsilent.checks import replicas
from unsilent.errors import UsageError
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.studies.llama import Llama, Shape, loss_of

SHAPE = Shape(name="test", hidden=16, layers=2, heads=2, kv_heads=1, ffn=24, vocabulary=32, samples=2, length=8)


def operation(target: str = "mm", pattern: str = "scale", **options: Any) -> Fault:
    if pattern == "scale":
        options.setdefault("factor", 3.0)
    if not {"step", "from_step", "probability"} & set(options):
        options["from_step"] = 0
    return Fault(site="operation", target=target, pattern=pattern, rank=0, **options)


def train(
    spec: Fault | None, *, steps: int = 3, replaying: Callable[[], bool] = lambda: False
) -> tuple[list[torch.Tensor], Injector | None]:
    """Losses, gradients of every step, and the weights in the end."""
    model = Llama(SHAPE, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    injector = None
    if spec is not None:
        injector = Injector(model, optimizer, spec, rank=0, world_size=2, replaying=replaying)
    seen: list[torch.Tensor] = []
    for step in range(steps):
        if injector:
            injector.begin_step(step)
        optimizer.zero_grad(set_to_none=True)
        ids = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = loss_of(model, ids)
        loss.backward()
        seen += [loss.detach().clone(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
        optimizer.step()
        if injector:
            injector.after_update(step)
    if injector:
        injector.close()
    return [*seen, *[p.detach().clone() for p in model.parameters()]], injector


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(one, two, strict=True))


CLEAN = train(None)[0]


# -- operations --------------------------------------------------------------------------------------------------------


def test_an_error_of_zero_in_every_operation_of_every_phase_changes_no_bit() -> None:
    for name in ("mm", "mul", "add", "silu", "_softmax", "addcdiv_", "lerp_"):
        ended, injector = train(operation(name, pattern="relative", relative=0.0))
        assert same(ended, CLEAN), name
        assert injector is not None
        if name in ("mm", "mul", "add", "silu"):
            assert injector.fired


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_a_named_operation_is_hit_in_its_phase_only(phase: str) -> None:
    name = {"forward": "mm", "backward": "mm", "optimizer": "addcdiv_"}[phase]
    where = {} if phase == "optimizer" else {"module": "blocks.1.ffn"}
    ended, injector = train(operation(name, phase=phase, step=0, element=0, **where), steps=1)
    assert injector is not None
    assert injector.fired == 1
    parameters = len(CLEAN) // 4
    loss, gradients, weights = ended[0], ended[1:-parameters], ended[-parameters:]
    clean = train(None, steps=1)[0]
    assert torch.equal(loss, clean[0]) == (phase != "forward")
    assert same(gradients, clean[1:-parameters]) == (phase == "optimizer")
    assert not same(weights, clean[-parameters:])


def test_one_bit_of_one_operation_is_one_element_with_one_other_bit() -> None:
    spec = operation("mm", "bit_flip", bit=12, phase="forward", module="blocks.0.attention.q", step=1, seed=4)
    _, injector = train(spec)
    assert injector is not None
    (one,) = injector.record
    assert one.size == one.changed == 1
    assert one.step == 1
    flipped = one.pristine.view(torch.int32) ^ one.corrupted.view(torch.int32)
    assert flipped.tolist() == [1 << 12]


def test_a_module_that_only_begins_alike_is_not_meant() -> None:
    model = nn.Sequential()
    model.add_module("a", nn.Linear(4, 4, bias=False))
    model.add_module("ab", nn.Linear(4, 4, bias=False))
    with Injector(model, None, operation(module="a", from_step=0), rank=0, world_size=2) as injector:
        injector.begin_step(0)
        model(torch.ones(3, 4))
        assert injector.fired == 1


def test_the_mode_is_entered_only_for_steps_of_the_fault_and_only_on_its_rank() -> None:
    model = Llama(SHAPE, seed=0)
    for rank, step, expected in ((0, 1, False), (0, 2, True), (1, 2, False)):
        injector = Injector(model, None, operation(step=2), rank=rank, world_size=2)
        injector.begin_step(step)
        assert (len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()) > 0) == expected
        injector.after_update(step)
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        injector.begin_step(2)
        injector.close()
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_lane_of_a_matrix_unit_is_wrong_in_every_product() -> None:
    _, injector = train(operation(pattern="stuck_lane", every=8, relative=0.5), steps=1)
    assert injector is not None
    assert len(injector.record) == 3 * 15  # each of 15 products forward and two for each backward
    for one in injector.record:
        assert one.size > 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "matmull_"}, "no ATen operation 'matmull_'"),
        ({"module": "blocks.0.atention"}, "did you mean 'blocks.0.attention'"),
    ],
)
def test_what_does_not_exist_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        train(operation(**options))


# -- ids, arithmetic, comparison ---------------------------------------------------------------------------------------


def test_a_wrong_id_stays_inside_the_table_and_the_batch_itself_stays_right() -> None:
    model = Llama(SHAPE, seed=0)
    spec = Fault(site="ids", target="embedding", pattern="bit_flip", bit=40, rank=0, step=0, element=3)
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    kept = ids.clone()
    looked_up: list[torch.Tensor] = []
    with Injector(model, None, spec, rank=0, world_size=2) as injector:
        model.embedding.register_forward_hook(lambda m, args, out: looked_up.append(args[0]))
        injector.begin_step(0)
        model(ids)
    assert torch.equal(ids, kept)
    assert injector.fired == 1
    assert int(looked_up[0].min()) >= 0
    assert int(looked_up[0].max()) < 32


def test_a_wrong_id_changes_the_gradient_of_the_table() -> None:
    spec = Fault(site="ids", target="embedding", pattern="bit_flip", bit=0, rank=0, step=0)
    ended, _ = train(spec, steps=1)
    assert not same(ended, train(None, steps=1)[0])


def test_ids_need_an_embedding() -> None:
    with pytest.raises(UsageError, match=r"no nn\.Embedding"):
        train(Fault(site="ids", target="head", pattern="bit_flip", bit=0, rank=0, step=0))


def test_wrong_arithmetic_of_an_update_scales_what_was_added_and_nothing_else() -> None:
    name = "blocks.0.ffn.up.weight"
    spec = Fault(site="optimizer", target=name, pattern="scale", factor=-2.0, rank=0, step=0, element=5)
    ended, injector = train(spec, steps=1)
    clean = train(None, steps=1)[0]
    assert injector is not None
    assert injector.fired == 1
    parameters = dict(Llama(SHAPE, seed=0).named_parameters())
    before = parameters[name].detach().flatten()
    index = list(parameters).index(name) - len(parameters)  # weights are the last of what train() gives
    right, wrong = clean[index].flatten(), ended[index].flatten()
    differs = (right != wrong).nonzero().flatten().tolist()
    assert differs == [5]
    assert float(wrong[5] - before[5]) == pytest.approx(-2 * float(right[5] - before[5]), rel=1e-3)


def test_arithmetic_that_errs_by_nothing_changes_no_bit() -> None:
    spec = Fault(site="optimizer", target="head.weight", pattern="relative", relative=0.0, rank=0, from_step=0)
    ended, _ = train(spec)
    assert same(ended, CLEAN)


def test_a_fault_of_the_comparison_makes_equal_tensors_look_different_and_goes_away() -> None:
    tensor = torch.arange(8.0)
    right = replicas.sums_of_gradients([tensor])
    spec = Fault(site="comparison", pattern="bit_flip", bit=5, rank=0, from_step=0, element=0)
    with Injector(nn.Linear(2, 2), None, spec, rank=0, world_size=2) as injector:
        injector.begin_step(0)
        assert not torch.equal(replicas.sums_of_gradients([tensor]), right)
        assert injector.fired == 1
    assert torch.equal(replicas.sums_of_gradients([tensor]), right)
    assert fingerprint(tensor) == fingerprint(torch.arange(8.0))


# -- when --------------------------------------------------------------------------------------------------------------


def test_a_duty_cycle_vanishes_on_the_retry_and_comes_back() -> None:
    spec = operation(module="blocks.0.ffn.down", phase="forward", on=1, off=2)
    _, injector = train(spec, steps=6)
    assert injector is not None
    assert [one.step for one in injector.record] == [0, 3]


def test_only_a_replay_is_wrong_where_the_auditor_is_what_errs() -> None:
    replay = [False]
    model = Llama(SHAPE, seed=0)
    spec = operation(module="head", phase="forward", step=0, during_replay="only")
    with Injector(model, None, spec, rank=0, world_size=2, replaying=lambda: replay[0]) as injector:
        injector.begin_step(0)
        for replay[0] in (False, True, True):
            model(torch.zeros(1, 4, dtype=torch.int64))
        assert injector.fired == 1
        assert injector.record[0].replay


def test_a_rate_hits_other_elements_each_time() -> None:
    _, injector = train(operation(module="head", phase="forward", rate=0.02), steps=6)
    assert injector is not None
    places = {tuple(one.elements.tolist()) for one in injector.record}
    assert len(places) > 1
    assert sum(one.size for one in injector.record) == pytest.approx(6 * 0.02 * 2 * 8 * 32, rel=0.5)


def test_the_same_seed_gives_the_same_wrong_bits() -> None:
    spec = operation(pattern="gates", period=4, count=2, burst=0.6, seed=8)
    one, injector = train(spec, steps=4)
    two, _ = train(spec, steps=4)
    assert injector is not None
    assert injector.fired
    assert same(one, two)
