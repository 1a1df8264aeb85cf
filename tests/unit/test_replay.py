"""Capture and rerun: the inventory of what a replay needs, and of what it must leave as it was."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unsilent.determinism import Kernels, running_with
from unsilent.errors import UsageError
from unsilent.generators import read_generators, write_generators
from unsilent.replay import Reading, Recorder, Replayer, Work, pack, read_execution, unpack


class Counting(nn.Module):
    """Keeps state that is neither a parameter nor a buffer, and says so through ``get_extra_state``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * (1.0 + 0.001 * self.seen)

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


class Noisy(nn.Module):
    """Draws from every global generator in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(()) + random.random() + np.random.rand())


def make(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), *extra, nn.Linear(8, 1))


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def identity(loss: torch.Tensor) -> torch.Tensor:
    return loss


def live(model: nn.Module, recorder: Recorder, batches: list[torch.Tensor]) -> Reading:
    """One recorded live step; R of it."""
    recorder.begin_step(watch_attributes=True)
    losses: list[torch.Tensor] = []
    for batch in batches:
        recorder.begin_micro_batch(batch)
        loss = loss_fn(model, batch)
        losses.append(loss.detach())
        (loss / len(batches) if len(batches) > 1 else loss).backward()
    recorder.end_step()
    gradients = {id(p): p.grad for p in model.parameters() if p.grad is not None}
    return read_execution(model, losses, gradients, {n: b.detach() for n, b in model.named_buffers()})


def replayer(model: nn.Module, recorder: Recorder) -> Replayer:
    return Replayer(model, loss_fn, scale_loss=identity, scale=1.0, written=recorder.written)


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a replay must not disturb, as comparable values."""
    return {
        "generators": read_generators().digest,
        "buffers": [b.clone() for b in model.buffers()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "parameters": [id(p) for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "extra": [m.seen for m in model.modules() if isinstance(m, Counting)],
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for key, value in before.items():
        if key in ("buffers", "gradients"):
            pairs = zip(value, after[key], strict=True)
            assert all((a is None and b is None) or torch.equal(a, b) for a, b in pairs), key
        else:
            assert value == after[key], key


@pytest.mark.parametrize("extra", [(), (Noisy(),), (Counting(),)], ids=["plain", "all generators", "extra state"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_replay_gives_the_recorded_bits_and_leaves_no_trace(extra: tuple[nn.Module, ...], micro_batches: int) -> None:
    """Torch, Python and NumPy generators, buffers, .grad, training flags, extra state, deterministic switches."""
    model = make(*extra)
    recorder = Recorder(model)
    batches = [torch.randn(5, 6) for _ in range(micro_batches)]
    recorded = live(model, recorder, batches)
    before = everything(model)
    run = replayer(model, recorder).run(recorder.work(0), kernels=Kernels.DETERMINISTIC, start=recorder.attributes)
    assert run.reading.digest == recorded.digest, recorded.differing(run.reading)
    assert_same(before, everything(model))
    recorder.close()


def test_user_code_that_raises_in_a_replay_leaves_no_trace_either() -> None:
    model = make()
    recorder = Recorder(model)
    live(model, recorder, [torch.randn(5, 6)])
    before = everything(model)

    def failing(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss_fn(module, batch).backward()
        random.random()
        raise ValueError("out of memory, say")

    broken = Replayer(model, failing, scale_loss=identity, scale=1.0, written=recorder.written)
    with pytest.raises(ValueError, match="out of memory"):
        broken.run(recorder.work(0), kernels=Kernels.DETERMINISTIC)
    assert_same(before, everything(model))
    assert not broken.running


def test_another_rank_s_work_is_computed_with_its_buffers_and_generators() -> None:
    """What travels is enough: batch (any pytree), generators, buffers."""
    theirs, mine = make(), make()
    recorder = Recorder(theirs)
    torch.manual_seed(99)
    with torch.no_grad():
        theirs[1].running_mean.add_(3.0)  # type: ignore[union-attr]
    recorded = live(theirs, recorder, [torch.randn(5, 6)])
    sent = unpack(pack(recorder.work(4)), torch.device("cpu"))
    assert isinstance(sent, Work) and sent.step == 4
    torch.manual_seed(1)
    run = replayer(mine, Recorder(mine)).run(sent, kernels=Kernels.DEFAULT)
    assert run.reading.digest == recorded.digest


def test_one_wrong_element_shows_in_the_names_that_differ() -> None:
    model = make()
    recorder = Recorder(model)
    recorded = live(model, recorder, [torch.randn(5, 6)])
    with torch.no_grad():
        model[4 - 1].weight.view(-1)[0].add_(0.01)  # type: ignore[union-attr]
    run = replayer(model, recorder).run(recorder.work(0), kernels=Kernels.DEFAULT)
    differing = recorded.differing(run.reading)
    assert "loss[0]" in differing and "gradient.0.weight" in differing


def test_tied_parameters_stay_tied_and_hooks_on_parameters_take_part() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6, bias=False)
            self.b = nn.Linear(6, 6, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    model = Tied()
    model.a.weight.register_hook(lambda g: g * 0.5)
    recorder = Recorder(model)
    recorded = live(model, recorder, [torch.randn(5, 6)])
    run = replayer(model, recorder).run(recorder.work(0), kernels=Kernels.DEFAULT)
    assert run.reading.digest == recorded.digest
    assert model.a.weight is model.b.weight


def test_a_batch_that_cannot_be_sent_is_said_in_one_sentence() -> None:
    model = make()
    recorder = Recorder(model)
    recorder.begin_step(watch_attributes=False)
    recorder.begin_micro_batch({"x": torch.zeros(1), "lock": (i for i in range(3))})
    with pytest.raises(UsageError, match="cannot be sent to the rank that audits it"):
        pack(recorder.work(0))


def test_generators_come_back_exactly() -> None:
    states = read_generators()
    first = (torch.rand(3), random.random(), np.random.rand())
    write_generators(states)
    again = (torch.rand(3), random.random(), np.random.rand())
    assert torch.equal(first[0], again[0]) and first[1:] == again[1:]
    write_generators(states)
    assert read_generators().digest == states.digest


def test_every_switch_of_an_audit_is_put_back_even_after_an_error() -> None:
    before = (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)

    def fails() -> None:
        assert torch.are_deterministic_algorithms_enabled()
        raise RuntimeError

    with pytest.raises(RuntimeError), running_with(Kernels.MATH_ATTENTION):
        fails()
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == before
