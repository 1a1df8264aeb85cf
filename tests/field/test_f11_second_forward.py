"""F11: the audit is a second forward. It moves BatchNorm, spectral norm, histories and codebooks, and state that sits in
plain attributes or in generators. No trace may be left, or the audit refuses and says why."""

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from tests.field.harness import EVERY_STEP, Case, assert_quiet, run
from unsilent.records import Kind


class Around(nn.Module):
    """A linear layer, something in the middle, a linear layer."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 16), middle, nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.middle(torch.tanh(self.first(x))))


class RunningScale(nn.Module):
    """An fp8-like history of maxima in a buffer; what it scales by is what it saw before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.ones(4))

    def forward(self, x):
        scale = self.history.max()
        with torch.no_grad():
            self.history.copy_(torch.cat([x.detach().abs().max().reshape(1), self.history[:-1]]))
        return x / scale


class Codebook(nn.Module):
    """Moving averages in a parameter without gradient, written by the forward; alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x):
        self.codes.data.mul_(0.9).add_(0.01)
        return x * self.codes


class Counter(nn.Module):
    """The forward depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1.0 + self.calls % 7)


class Containers(nn.Module):
    """Histories in containers that the forward changes in place; ``alias`` is the same list under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.alias = self.seen
        self.table: dict[str, list[int]] = {"calls": [0]}
        self.recent: deque[float] = deque(maxlen=3)

    def forward(self, x):
        assert self.alias is self.seen, "the audit has put a copy in its place"
        self.seen.append(round(float(x.detach().mean()), 6))
        self.recent.append(self.seen[-1])
        self.table["calls"][0] += 1
        return x * (1.0 + self.table["calls"][0] % 3 + len(self.recent))


class Arrays(nn.Module):
    """State in a NumPy array that the forward changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros(3)

    def forward(self, x):
        self.array += 1.0
        return x * float(1.0 + self.array[0] % 5)


@dataclass
class Memory:
    calls: int = 0
    means: list[float] = field(default_factory=list)


class Holder(nn.Module):
    """State in an object of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def forward(self, x):
        self.memory.calls += 1
        self.memory.means.append(round(float(x.detach().mean()), 6))
        return x * (1.0 + self.memory.calls % 5)


class Kept(nn.Module):
    """Keeps a value of its last forward for the loss, with its graph, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary: torch.Tensor | None = None

    def forward(self, x):
        self.auxiliary = x.square().mean()
        return x


class WithPythonGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(3)

    def forward(self, x):
        return x * self.generator.random()


class WithNumpyGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.legacy = np.random.default_rng(3), np.random.RandomState(4)

    def forward(self, x):
        return x * float(self.generator.random() + self.legacy.rand())


class WithTorchGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x + torch.randn(x.shape, generator=self.generator)


class GlobalGenerators(nn.Module):
    """Other numbers on every rank, from the generators that everybody shares."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(x) * (random.random() + np.random.rand())


class ExtraState(nn.Module):
    """State that is reachable through get_extra_state only."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [0]
        self.read, self.write = (lambda: hidden[0]), (lambda value: hidden.__setitem__(0, value))

    def get_extra_state(self):
        return {"calls": self.read()}

    def set_extra_state(self, state):
        self.write(state["calls"])

    def forward(self, x):
        self.write(self.read() + 1)
        return x * (1.0 + self.read() % 7)


MODULES = {
    "BatchNorm": lambda: nn.BatchNorm1d(16),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(16, 16)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
    "dropout, random and NumPy": GlobalGenerators,
    "history in a buffer": RunningScale,
    "codebook in a parameter": Codebook,
    "counter": Counter,
    "containers": Containers,
    "NumPy array": Arrays,
    "own object": Holder,
    "kept value": Kept,
    "own Python generator": WithPythonGenerator,
    "own NumPy generators": WithNumpyGenerator,
    "own torch generator": WithTorchGenerator,
    "extra state": ExtraState,
}


@dataclass(frozen=True)
class Build:
    kind: str

    def __call__(self) -> nn.Module:
        return Around(MODULES[self.kind]())


def with_auxiliary(model, batch):
    loss = model(batch).square().mean()
    middle = getattr(model, "module", model).middle
    return loss if getattr(middle, "auxiliary", None) is None else loss + 0.1 * middle.auxiliary


@pytest.mark.parametrize("kind", MODULES)
def test_no_trace_is_left_and_the_audits_agree(pool3, kind):
    """Weights, buffers, moments, attributes and generators end with the bits of a run without a guard."""
    results = assert_quiet(pool3, Case(model=Build(kind), loss=with_auxiliary, config=EVERY_STEP))
    assert "calibration at step 1: audits compare bitwise" in results[0].said


class OwnOnEachRank(nn.Module):
    """A generator of the module's own with another seed on every rank: nobody else can draw its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(torch.distributed.get_rank())

    def forward(self, x):
        return x * self.generator.random()


def own_on_each_rank() -> nn.Module:
    return Around(OwnOnEachRank())


def test_what_another_rank_cannot_know_makes_the_audit_refuse_and_say_why(pool3):
    case = Case(model=own_on_each_rank, config=EVERY_STEP)
    for result, plain in zip(run(pool3, case), run(pool3, case, guarded=False), strict=True):
        assert result.error is None and result.bits == plain.bits and result.weights == plain.weights
        assert result.found, "the audit compared what it cannot know"
        for found in result.found:
            assert found.verdict.kind is Kind.INCONCLUSIVE and found.verdict.suspects == ()
            assert found.action == "CONTINUE" and "middle.generator" in found.verdict.reason
    assert "the audit compares from now on: off" in run(pool3, case)[0].said


def test_an_error_in_such_a_module_is_still_found(pool3):
    """Not every quiet audit is a good one: what is quiet above must also see a fault."""
    fault = {"site": "forward", "target": "last", "pattern": "scale", "factor": 2.0, "rank": 1, "step": 3}
    case = Case(model=Build("dropout, random and NumPy"), config=EVERY_STEP)
    reference = run(pool3, case, guarded=False)
    for result, clean in zip(run(pool3, case, fault=fault), reference, strict=True):
        assert result.error is None and result.bits == clean.bits
        assert result.only.verdict.kind is Kind.TRANSIENT and result.only.ranks == [1]
