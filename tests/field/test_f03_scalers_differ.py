"""F3 (plain DDP, FSDP2): the loss scaler's scale differs between ranks; weights drift while each rank looks healthy."""

import pytest
import torch

from tests.field.harness import Case, Session, assert_quiet, assert_stopped_before_update, run
from unsilent.records import Kind


def other_on_each_rank(rank: int) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + rank))


def same_on_each_rank(rank: int) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8)


def grown_on_rank_1(rank: int) -> torch.amp.GradScaler:
    """Equal scales today; on rank 1 the scale will be doubled a step before the others double theirs."""
    scaler = same_on_each_rank(rank)
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": 7 if rank == 1 else 0})
    return scaler


def set_on_rank_1(key: str, value: object):
    def change(session: Session) -> None:
        if session.rank == 1:
            session.optimizer.param_groups[0][key] = value

    return change


def other_learning_rate(session: Session) -> None:
    set_on_rank_1("lr", 2e-2)(session)


def other_weight_decay(session: Session) -> None:
    set_on_rank_1("weight_decay", 0.3)(session)


def other_betas(session: Session) -> None:
    set_on_rank_1("betas", (0.9, 0.95))(session)


SHARDED = pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])


@SHARDED
@pytest.mark.parametrize("scaler", [other_on_each_rank, grown_on_rank_1])
def test_the_message_names_the_scaler(pool3, scaler, sharded):
    found = assert_stopped_before_update(run(pool3, Case(scaler=scaler, steps=1, sharded=sharded)), step=0)
    assert found.verdict.kind is Kind.SOFTWARE and found.verdict.suspects == ()
    assert "loss scaler" in found.verdict.reason and "rank 1" in found.verdict.reason


@pytest.mark.parametrize(
    ("before", "word"),
    [(other_learning_rate, "learning rate"), (other_weight_decay, "weight_decay"), (other_betas, "betas")],
)
@SHARDED
def test_so_is_any_other_setting_of_the_optimizer_that_differs(pool3, before, word, sharded):
    """Left alone it would look like one rank's weights going wrong, and blame a healthy device."""
    found = assert_stopped_before_update(run(pool3, Case(before=before, steps=1, sharded=sharded)), step=0)
    assert found.verdict.kind is Kind.SOFTWARE and found.verdict.suspects == ()
    assert word in found.verdict.reason


@SHARDED
def test_equal_scalers_are_quiet(pool3, sharded):
    assert_quiet(pool3, Case(scaler=same_on_each_rank, config={"audit_every": 2, "replicas_every": 1}, sharded=sharded))
