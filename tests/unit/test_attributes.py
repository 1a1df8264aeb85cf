"""A snapshot of what modules keep in plain attributes: what it sees, what it puts back, what it leaves alone."""

import random
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from unsilent.attributes import Attributes


@dataclass
class Memory:
    calls: int = 0
    means: list[float] = field(default_factory=list)


class Foreign:
    """Holds what cannot be looked into."""

    def __init__(self) -> None:
        self.lock, self.count = threading.Lock(), 0


def module(**attributes: object) -> nn.Module:
    made = nn.Module()
    vars(made).update(attributes)
    return nn.Sequential(made)


CHANGES = {
    "number": (3, lambda m: setattr(m, "x", 4)),
    "not a number": (1.0, lambda m: setattr(m, "x", float("nan"))),
    "text": ("a", lambda m: setattr(m, "x", "b")),
    "list": ([1], lambda m: m.x.append(2)),
    "list in a list": ([[1]], lambda m: m.x[0].append(2)),
    "deque": (deque([1], maxlen=2), lambda m: m.x.extend([2, 3])),
    "dictionary": ({"a": 1}, lambda m: m.x.update(b=2)),
    "set": ({1}, lambda m: m.x.add(2)),
    "tuple": ((1, [2]), lambda m: m.x[1].append(3)),
    "tensor": (torch.ones(2), lambda m: m.x.add_(1)),
    "sign of zero": (torch.zeros(2), lambda m: m.x.neg_()),
    "rebound tensor": (torch.ones(2), lambda m: setattr(m, "x", torch.zeros(2))),
    "array": (np.ones(2), lambda m: np.add(m.x, 1, out=m.x)),
    "own object": (Memory(), lambda m: m.x.means.append(1.0)),
    "attribute of an own object": (Memory(), lambda m: setattr(m.x, "calls", 1)),
    "Python generator": (random.Random(1), lambda m: m.x.random()),
    "NumPy generator": (np.random.default_rng(1), lambda m: m.x.random()),
    "old NumPy generator": (np.random.RandomState(1), lambda m: m.x.rand()),
    "torch generator": (torch.Generator().manual_seed(1), lambda m: torch.rand(1, generator=m.x)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_seen_and_put_back_in_the_same_object(kind):
    value, change = CHANGES[kind]
    root = module(x=value)
    snapshot = Attributes(root)
    assert snapshot.changed() == ""
    change(root[0])
    assert snapshot.changed() == "0.x"
    snapshot.restore()
    assert snapshot.changed() == "" and root[0].x is value
    change(root[0])
    snapshot.restore()
    assert snapshot.changed() == "", "a snapshot can be put back once only"


def test_what_was_made_anew_with_the_same_value_has_not_changed():
    root = module(x=[1, torch.ones(2)], y={"a": (1, 2)})
    snapshot = Attributes(root)
    root[0].x, root[0].y = [1, torch.ones(2)], {"a": (1, 2)}
    assert snapshot.changed() == ""


def test_attributes_that_are_new_go():
    root = module(x=1)
    snapshot = Attributes(root)
    root[0].cache = 2
    snapshot.restore()
    assert not hasattr(root[0], "cache") and root[0].x == 1


def test_two_names_of_one_list_stay_one_list():
    shared = [1]
    root = module(x=shared, y=shared)
    snapshot = Attributes(root)
    root[0].x = [1, 2]
    root[0].y.append(3)
    snapshot.restore()
    assert root[0].x is root[0].y is shared and shared == [1]


def test_a_list_that_holds_itself_ends():
    loop: list[object] = [1]
    loop.append(loop)
    root = module(x=loop)
    snapshot = Attributes(root)
    assert snapshot.changed() == ""
    loop.append(2)
    assert snapshot.changed() == "0.x"


def test_objects_that_hold_more_than_values_are_left_alone():
    foreign = Foreign()
    root = module(x=foreign)
    snapshot = Attributes(root)
    foreign.count = 1
    snapshot.restore()
    assert foreign.count == 1 and snapshot.changed() == ""


def test_weights_and_buffers_are_not_its_business():
    root = nn.Sequential(nn.BatchNorm1d(2))
    snapshot = Attributes(root)
    with torch.no_grad():
        root[0].weight.add_(1)
        root[0].running_mean.add_(1)
    snapshot.restore()
    assert snapshot.changed() == "" and root[0].running_mean.tolist() == [1.0, 1.0]
