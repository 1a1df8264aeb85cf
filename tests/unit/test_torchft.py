"""The torchft hook: with a manager of our own always, with the real package's where it is installed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from unsilent.errors import IntegrityLost, Quarantine, RankFailure
from unsilent.integrations.torchft import Manager, reporting_to
from unsilent.records import Kind, Site, Suspect, Verdict

VERDICT = Verdict(
    kind=Kind.PERSISTENT, site=Site.FORWARD, step=3, check="audit", reason="it was wrong",
    suspects=(Suspect(rank=1, node="n1", device="cpu:0"),),
)  # fmt: skip


class Told:
    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def report_error(self, e: Exception) -> None:
        self.errors.append(e)


@pytest.mark.parametrize(
    "error", [Quarantine("out", verdict=VERDICT), IntegrityLost("lost", verdict=VERDICT), RankFailure(1, "it is gone")]
)
def test_what_the_guard_raises_is_reported_and_raised_on(error: Exception) -> None:
    manager = Told()
    with pytest.raises(type(error)), reporting_to(manager):
        raise error
    assert manager.errors == [error]
    with pytest.raises(type(error)), reporting_to(None):
        raise error


def test_other_errors_and_clean_steps_are_not_reported() -> None:
    manager = Told()
    with reporting_to(manager):
        pass
    with pytest.raises(KeyError), reporting_to(manager):
        raise KeyError("the user's own")
    assert manager.errors == []


def test_the_real_manager_takes_it_and_does_not_commit() -> None:
    real: Any = pytest.importorskip("torchft.manager", reason="torchft is not installed here", exc_type=ImportError)
    theirs, ours = (inspect.signature(owner.report_error).parameters for owner in (real.Manager, Manager))
    assert list(theirs) == list(ours)
    manager = object.__new__(real.Manager)  # a whole one needs a lighthouse
    error = Quarantine("out", verdict=VERDICT)
    with pytest.raises(Quarantine), reporting_to(manager):
        raise error
    assert manager.errored().original_exception is error
