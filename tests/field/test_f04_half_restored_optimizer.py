"""F4: only one rank restored the optimizer on resume."""

import pytest
import torch

from tests.field.harness import Case, Session, assert_quiet, assert_stopped_before_update, run
from unsilent.records import Kind, Site


def momentum(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-2, momentum=0.9)


def restore(session: Session, ranks: tuple[int, ...]) -> None:
    """What a resume does: the moments of an earlier run are loaded, but only on some ranks."""
    if session.rank not in ranks:
        return
    kept = torch.get_rng_state()
    torch.manual_seed(7)
    other = type(session.optimizer)(
        session.inner.parameters(),
        **{k: v for k, v in session.optimizer.defaults.items() if k in ("lr", "betas", "momentum")},
    )
    for parameter in session.inner.parameters():
        parameter.grad = torch.randn_like(parameter)
    weights = [p.detach().clone() for p in session.inner.parameters()]
    other.step()
    with torch.no_grad():
        for parameter, weight in zip(session.inner.parameters(), weights, strict=True):
            parameter.copy_(weight)
            parameter.grad = None
    session.optimizer.load_state_dict(
        other.state_dict() | {"param_groups": session.optimizer.state_dict()["param_groups"]}
    )
    torch.set_rng_state(kept)


def on_rank_0(session: Session) -> None:
    restore(session, (0,))


def on_all_but_rank_1(session: Session) -> None:
    restore(session, (0, 2))


def on_all(session: Session) -> None:
    restore(session, (0, 1, 2))


@pytest.mark.parametrize(
    ("optimizer", "key"), [(torch.optim.AdamW, "exp_avg"), (momentum, "momentum_buffer")], ids=["AdamW", "momentum"]
)
@pytest.mark.parametrize(
    ("before", "words"),
    [(on_rank_0, "only rank 0 has optimizer state"), (on_all_but_rank_1, "rank 1 lacks optimizer state")],
)
def test_it_is_found_before_the_first_step_after_the_resume(pool3, optimizer, key, before, words):
    found = assert_stopped_before_update(run(pool3, Case(optimizer=optimizer, before=before, steps=1)), step=0)
    assert found.verdict.kind is Kind.SOFTWARE and found.verdict.site is Site.OPTIMIZER_STATE
    assert words in found.verdict.reason and found.devices == []
    assert f"optimizer.0.weight.{key}" in found.verdict.tensors
    assert all(name.startswith("optimizer.") for name in found.verdict.tensors)


def test_restored_everywhere_it_is_quiet(pool3):
    assert_quiet(pool3, Case(before=on_all, config={"replicas_every": 1}))
