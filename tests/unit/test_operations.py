"""Operations below autograd: each is shown with its phase and its module, once, and looking changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unsilent.lab.operations import Operation, Operations
from unsilent.lab.studies.llama import Llama, Shape, loss_of

SHAPE = Shape(name="test", hidden=16, layers=2, heads=2, kv_heads=1, ffn=24, vocabulary=32, samples=2, length=8)
LINEARS = [
    "head",
    *[f"blocks.{i}.{n}" for i in range(2) for n in ("attention.q", "attention.k", "attention.v", "attention.o")],
    *[f"blocks.{i}.ffn.{n}" for i in range(2) for n in ("gate", "up", "down")],
]


def batch() -> torch.Tensor:
    return torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))


def seen(model: nn.Module, *, optimizer: Any = None) -> list[Operation]:
    operations = Operations(model, optimizer)
    found: list[Operation] = []
    with operations.seen(lambda operation, result: found.append(operation)):
        loss_of(model, batch()).backward()
        if optimizer is not None:
            optimizer.step()
    operations.close()
    return found


def products(found: list[Operation], phase: str) -> Counter[str]:
    return Counter(o.module for o in found if o.name == "mm" and o.phase == phase)


def test_each_product_is_shown_in_its_module_forward_once_and_backward_twice() -> None:
    found = seen(Llama(SHAPE, seed=0))
    assert products(found, "forward") == Counter(LINEARS)
    assert products(found, "backward") == Counter(LINEARS * 2)  # the input's gradient and the weight's


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_repeats_is_shown_as_recomputation(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Llama(SHAPE, seed=0)
    block: Any = model.blocks[1]
    inner = block.forward
    monkeypatch.setattr(block, "forward", lambda x: checkpoint(inner, x, use_reentrant=reentrant))
    found = seen(model)
    again = set(products(found, "recompute"))
    assert again
    assert all(name.startswith("blocks.1.") for name in again)
    assert products(found, "backward") == Counter(LINEARS * 2)
    assert products(found, "forward") == Counter(LINEARS)


def test_the_optimizer_has_a_phase_of_its_own_and_other_work_is_not_shown() -> None:
    model = Llama(SHAPE, seed=0)
    found = seen(model, optimizer=torch.optim.AdamW(model.parameters()))
    updates = [o.name for o in found if o.phase == "optimizer"]
    assert "addcdiv_" in updates or "_fused_adamw_" in updates
    assert not any("cross_entropy" in o.name or "nll_loss" in o.name for o in found)


def test_looking_changes_no_bit() -> None:
    plain, looked_at = Llama(SHAPE, seed=0), Llama(SHAPE, seed=0)
    loss_of(plain, batch()).backward()
    seen(looked_at)
    for one, two in zip(plain.parameters(), looked_at.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)


def test_views_are_not_shown_so_that_nobody_writes_into_an_input() -> None:
    names = {o.name for o in seen(Llama(SHAPE, seed=0))}
    assert not names & {"view", "_unsafe_view", "t", "transpose", "detach", "expand", "split", "slice"}


def test_a_model_that_raises_leaves_the_modules_in_order() -> None:
    model = Llama(SHAPE, seed=0)
    operations = Operations(model)
    with pytest.raises(IndexError):
        model(torch.full((1, 4), 99))
    found: list[Operation] = []
    with operations.seen(lambda operation, result: found.append(operation)):
        loss_of(model, batch())
    assert products(found, "forward") == Counter(LINEARS)


def test_closed_it_leaves_no_hook() -> None:
    model = Llama(SHAPE, seed=0)
    Operations(model).close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
