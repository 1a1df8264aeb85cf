"""F7 (plain DDP, FSDP2): "Is it hardware?" — no: the loss scaler's normal search for a scale."""

from dataclasses import replace

import pytest
import torch

from tests.field.harness import Case, assert_quiet, assert_stopped_before_update, noise, run
from unsilent.checks.finite import FiniteConfig
from unsilent.records import Kind


def far_too_high(rank: int) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=3)


def high(rank: int) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**100, growth_interval=1000)


def loud(model, batch):
    return model(batch).square().mean() * 2.0**10


def large_on_rank_1(step: int, rank: int) -> torch.Tensor:
    """One rank's data are larger by far, in every step: it alone overflows until the scale suits it."""
    return noise(step, rank) * (2.0**33 if rank == 1 else 1.0)


def linear(model, batch):
    return model(batch).mean()


class Direct(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 4)


def grows_with_the_step(step: int, rank: int) -> torch.Tensor:
    """Data of rank 1 outgrow the scaler: it backs off, and overflows again in the next step, alone."""
    return noise(step, rank) * (2.0 ** (40 + 2 * step) if rank == 1 else 1.0)


SHARDED = pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])


@SHARDED
@pytest.mark.parametrize("audit_every", [100, 1])
def test_it_is_quiet_while_the_scaler_backs_off_on_all_ranks(pool3, audit_every, sharded):
    case = Case(
        scaler=far_too_high, loss=loud, steps=14, config={"audit_every": audit_every, "replicas_every": 1},
        sharded=sharded,
    )  # fmt: skip
    results = assert_quiet(pool3, case)
    assert len(set(results[0].weights)) > 2, "the scaler never came to rest"
    assert results[0].weights[0] == results[0].weights[2], "the scaler never backed off"


@SHARDED
def test_it_is_quiet_when_one_rank_overflows_a_few_times_before_the_scale_suits_it(pool3, sharded):
    case = Case(model=Direct, loss=linear, batch=large_on_rank_1, scaler=high, steps=8, config={"replicas_every": 1},
                sharded=sharded)  # fmt: skip
    results = assert_quiet(pool3, case)
    weights = results[0].weights
    assert weights[0] == weights[1], "rank 1 never overflowed"
    assert weights[0] != weights[-1], "the scale never suited it"


@SHARDED
def test_one_rank_that_alone_overflows_again_and_again_is_an_alarm_and_no_device_is_blamed(pool3, sharded):
    case = Case(
        model=Direct, loss=linear, batch=grows_with_the_step, scaler=high, steps=8,
        config={"finite": FiniteConfig(lone_limit=5)}, sharded=sharded,
    )  # fmt: skip
    results, plain = run(pool3, case), run(pool3, case, guarded=False)
    for result, reference in zip(results, plain, strict=True):
        assert result.error is None, result.error
        # The scaler leaves such a step out anyway, so the run may go on; but it is said, each time from the fifth on.
        assert [f.step for f in result.found] == [4, 5, 6, 7]
        assert {f.action for f in result.found} == {"CONTINUE"}
        assert all(f.verdict.kind is Kind.SOFTWARE and f.ranks == [1] and f.devices == [] for f in result.found)
        assert result.bits == reference.bits


@SHARDED
def test_a_streak_of_all_ranks_beyond_the_limit_stops_the_run_and_nobody_is_blamed(pool3, sharded):
    case = Case(
        scaler=far_too_high, loss=loud, steps=14, config={"finite": FiniteConfig(streak_limit=3)}, sharded=sharded
    )
    found = assert_stopped_before_update(run(pool3, case), step=2)
    assert found.verdict.kind is Kind.SOFTWARE and found.verdict.suspects == ()
    assert "loss scaler" in found.verdict.reason and "3 steps in a row" in found.verdict.reason


@SHARDED
def test_ranks_that_overflow_in_turn_are_not_one_rank_again_and_again(pool3, sharded):
    case = Case(model=Direct, loss=linear, batch=in_turn, scaler=high, steps=8, sharded=sharded,
                config={"finite": FiniteConfig(lone_limit=2)})  # fmt: skip
    assert_quiet(pool3, replace(case, config={**case.config, "replicas_every": 1}))


def in_turn(step: int, rank: int) -> torch.Tensor:
    return noise(step, rank) * (2.0 ** (40 + 2 * step) if rank == step % 3 else 1.0)
