"""SIGTERM is held while a guard is open, and given back only if nobody else has taken it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from unsilent.lifeline import HeldSignal


@pytest.fixture(autouse=True)
def _default() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def held() -> HeldSignal:
    world: Any = SimpleNamespace(size=2, watcher=None)
    return HeldSignal(world)


def test_it_is_given_back() -> None:
    one = held()
    assert signal.getsignal(signal.SIGTERM) == one._handle
    one.release()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_somebody_installed_since_stays() -> None:
    one = held()
    theirs: Any = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGTERM, theirs)
    one.release()
    assert signal.getsignal(signal.SIGTERM) is theirs


def test_a_handler_that_was_there_before_is_left_alone() -> None:
    theirs: Any = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGTERM, theirs)
    held().release()
    assert signal.getsignal(signal.SIGTERM) is theirs
