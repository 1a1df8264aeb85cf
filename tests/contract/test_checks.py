"""The contract of every check: what it declares it fills, it never touches the run, and its evidence is the same on
all ranks."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from unsilent.agreement import Agreement
from unsilent.checks.protocol import Check, Moment
from unsilent.checks.update import UpdateConfig
from unsilent.config import GuardConfig
from unsilent.generators import read_generators
from unsilent.guard import Guard
from unsilent.records import AuditEvidence, CounterEvidence, FiniteEvidence, SpikeEvidence, VoteEvidence

CHECKS = ("finite", "replicas", "audit", "update")
EVIDENCE = (AuditEvidence, CounterEvidence, FiniteEvidence, SpikeEvidence, VoteEvidence)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.fixture
def guard() -> Iterator[Guard]:
    """A guard of one process after one step, so that every check has seen a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with contextlib.redirect_stderr(io.StringIO()):
        made = Guard(
            model,
            optimizer,
            loss_fn,
            config=GuardConfig(audit_every=1, replicas_every=1, update=UpdateConfig(rule="robust")),
        )
        made.step(torch.randn(6, 4))
        yield made
        made.close()


@pytest.fixture(params=CHECKS)
def check(request: pytest.FixtureRequest, guard: Guard) -> Check:
    return guard.checks[request.param]


def fill(check: Check) -> tuple[dict[str, bool], dict[str, int]]:
    moment = Moment(step=1, due=frozenset(CHECKS))
    check.before_update(moment)
    return check.fill()


def test_it_has_a_name_sites_and_a_period(check: Check) -> None:
    assert check.name in CHECKS and check.sites and check.period >= 0


def test_its_coverage_says_how_when_and_what_it_cannot_see(check: Check) -> None:
    rows = check.coverage()
    assert rows
    for row in rows:
        assert row.check == check.name and row.site and row.how and row.when and row.blind


def test_it_fills_only_what_it_declares_with_values_that_fit(check: Check) -> None:
    declared = check.declares()
    flags, digests = fill(check)
    assert set(flags) <= set(declared.flags) and set(digests) <= set(declared.digests)
    assert all(type(up) is bool for up in flags.values())
    assert all(type(d) is int and 0 <= d < 2**63 for d in digests.values())


def test_the_same_state_gives_the_same_reading(check: Check) -> None:
    assert fill(check) == fill(check)


def test_reading_disturbs_neither_generators_nor_state(check: Check, guard: Guard) -> None:
    tensors = [e.tensor.clone() for e in (*guard.inventory.entries(), *guard.inventory.gradients())]
    generators = read_generators().digest
    fill(check)
    pickle.dumps(check.details())
    assert read_generators().digest == generators
    now = [e.tensor for e in (*guard.inventory.entries(), *guard.inventory.gradients())]
    assert all(torch.equal(a, b) for a, b in zip(tensors, now, strict=True))


def test_a_clean_state_raises_no_alarm(check: Check, guard: Guard) -> None:
    agreement = Agreement({name: c.declares() for name, c in guard.checks.items()})
    flags, digests = fill(check)
    vector = agreement.pack(
        step=1,
        phase=1,
        flags={(check.name, k): v for k, v in flags.items()},
        digests={(check.name, k): v for k, v in digests.items()},
    )
    assert not check.alarm(agreement.unpack(vector))


def test_every_flag_and_digest_it_declares_can_raise_an_alarm_or_adds_to_one(check: Check, guard: Guard) -> None:
    """A check that cannot fail is a defect: for each check at least one thing that it declares raises the alarm."""
    agreement = Agreement({name: c.declares() for name, c in guard.checks.items()})
    declared = check.declares()
    alarms = 0
    for flag in declared.flags:
        vector = agreement.pack(step=1, phase=1, flags={(check.name, flag): True}, digests={})
        alarms += check.alarm(agreement.unpack(vector))
    for digest in declared.digests:
        ranks = [agreement.pack(step=1, phase=1, flags={}, digests={(check.name, digest): d}) for d in (1, 2)]
        alarms += check.alarm(agreement.unpack(torch.stack(ranks).max(dim=0).values))
    assert alarms >= 1


def test_its_details_travel_and_its_evidence_is_a_record_that_any_rank_makes_alike(check: Check) -> None:
    fill(check)
    details = pickle.loads(pickle.dumps(check.details()))  # noqa: S301 - our own bytes
    one, other = check.evidence(1, [details] * 3), check.evidence(1, [details] * 3)
    assert list(one) == list(other)
    assert all(isinstance(record, EVIDENCE) for record in one)


def test_it_names_only_units_and_wants_nothing_it_does_not_use(check: Check) -> None:
    assert all(isinstance(unit, str) for m in range(3) for unit in check.wants(1, m))


def test_the_points_around_the_update_may_be_called_on_skipped_steps_too(check: Check) -> None:
    moment = Moment(step=1, due=frozenset(CHECKS))
    check.begin(moment)
    check.before_update(moment)
    check.after_update(moment, skipped=True)
    check.after_update(moment, skipped=False)
