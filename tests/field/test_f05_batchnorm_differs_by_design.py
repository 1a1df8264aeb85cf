"""F5 (plain DDP, FSDP2): BatchNorm statistics differ between ranks by design."""

import pytest
from torch import nn

from tests.field.harness import EVERY_STEP, Case, assert_quiet, assert_stopped_before_update, run
from unsilent.records import Kind


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


@pytest.mark.parametrize("broadcast", [True, False])
def test_it_is_quiet(pool3, broadcast):
    assert_quiet(pool3, Case(model=normed, ddp={"broadcast_buffers": broadcast}, config=EVERY_STEP))


def test_it_is_quiet_where_the_weights_are_sharded(pool3):
    assert_quiet(pool3, Case(model=normed, config=EVERY_STEP, sharded=True))


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_buffers_that_are_declared_replicated_are_compared(pool3, sharded):
    declared = ("1.running_mean", "1.running_var")
    case = Case(
        model=normed, ddp={"broadcast_buffers": False}, config={**EVERY_STEP, "replicated_buffers": declared}, steps=2,
        sharded=sharded,
    )  # fmt: skip
    found = assert_stopped_before_update(run(pool3, case), step=0)
    assert found.verdict.kind is Kind.SOFTWARE and found.verdict.suspects == ()
    assert {name.removeprefix("model.") for name in found.verdict.tensors} == set(declared)
    assert "weights" not in found.verdict.reason
