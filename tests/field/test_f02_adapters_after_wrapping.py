"""F2 (plain DDP, FSDP2): adapters attached after the wrap are never broadcast nor reduced."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import unsilent
from tests.field.harness import Case, Session, assert_stopped_before_update, run, train
from unsilent.lab.pool import Failed
from unsilent.records import Kind


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 4)
        self.adapter: nn.Module | None = None

    def forward(self, x):
        return self.base(x) if self.adapter is None else self.base(x) + self.adapter(x)


def attach(session: Session) -> None:
    """Each rank makes its own adapter, with its own random numbers, and trains it."""
    session.inner.adapter = nn.Linear(16, 4)
    session.optimizer.add_param_group({"params": list(session.inner.adapter.parameters())})


def attach_and_freeze(session: Session) -> None:
    attach(session)
    session.inner.base.requires_grad_(False)


def attach_unused(session: Session) -> None:
    attach(session)
    session.inner.adapter.requires_grad_(False)


def attach_to_the_wrapper(session: Session) -> None:
    session.ddp.late = nn.Linear(4, 4)
    session.optimizer.add_param_group({"params": list(session.ddp.late.parameters())})


def attach_alike(session: Session) -> None:
    """The adapter begins with the same bits everywhere, so only its missing reduction gives it away."""
    torch.manual_seed(5)
    attach(session)


def through_the_wrapper(model, batch):
    output = model(batch)
    late = getattr(model, "late", None)
    return (output if late is None else late(output)).square().mean()


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("before", [attach, attach_and_freeze, attach_unused, attach_alike])
def test_exactly_those_parameters_are_named_in_the_first_step(pool3, before, sharded):
    case = Case(model=Adapted, before=before, steps=1, sharded=sharded)
    found = assert_stopped_before_update(run(pool3, case), step=0)
    assert found.verdict.kind is Kind.SOFTWARE and found.verdict.suspects == ()
    names = {name.removeprefix("model.") for name in found.verdict.tensors}
    assert names == {"adapter.weight", "adapter.bias"}
    assert "adapter.weight" in found.verdict.reason and "base" not in found.verdict.reason


def test_a_layer_hung_on_the_wrapper_itself_is_named_too(pool3):
    case = Case(model=Adapted, before=attach_to_the_wrapper, loss=through_the_wrapper, steps=1)
    found = assert_stopped_before_update(run(pool3, case), step=0)
    assert found.verdict.kind is Kind.SOFTWARE and found.verdict.suspects == ()
    assert set(found.verdict.tensors) == {"late.weight", "late.bias"}


class Labelled(nn.Module):
    """Its weight says that all ranks hold the same, while each holds its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        own = nn.Linear(16, 4).weight.detach()
        mesh = init_device_mesh("cpu", (size,))
        self.weight = nn.Parameter(DTensor.from_local(own, mesh, [Replicate()], run_check=False))

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to_local())


def attach_labelled(session: Session) -> None:
    session.inner.adapter = Labelled(session.size)
    session.optimizer.add_param_group({"params": list(session.inner.adapter.parameters())})


def attach_labelled_late(session: Session, step: int) -> None:
    if step == 1:
        attach_labelled(session)


def test_a_label_is_not_trusted(pool3):
    """Where ranks hold other data than the label says, the run does not begin, or ends before its first update."""
    for answer in pool3.run(train, Case(model=Adapted, before=attach_labelled, steps=1, sharded=True)):
        if isinstance(answer, Failed):
            assert answer.kind == "UsageError" and "adapter.weight is a DTensor" in answer.text
        else:
            assert isinstance(answer.error, unsilent.IntegrityLost) and answer.weights[-1] == answer.weights[0]
            assert "adapter.weight" in answer.error.verdict.reason and answer.error.verdict.suspects == ()


def test_nor_is_one_that_comes_when_the_guard_is_there_already(pool3):
    case = Case(model=Adapted, before_step=attach_labelled_late, steps=3, sharded=True)
    found = assert_stopped_before_update(run(pool3, case), step=1)
    assert found.verdict.kind is Kind.SOFTWARE and found.verdict.suspects == ()
    assert "adapter.weight" in found.verdict.reason and "base" not in found.verdict.reason
