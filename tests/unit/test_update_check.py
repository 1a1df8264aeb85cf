"""The check over the rules: what it reads, when it learns, what it costs in copies, and what its options refuse."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unsilent
from unsilent.checks.protocol import Moment
from unsilent.checks.update import Update, UpdateConfig, number
from unsilent.reduction import Bucket
from unsilent.training.loop import Options


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def check_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Update:
    config = UpdateConfig(**({"rule": "robust", "sensitivity": 0.02} | options.pop("config", {})))
    return Update(model, optimizer, config, **{"reduces": False, "scale": 1.0, "loss_scale": lambda: 1.0,
                  "clip_norm": None, "ranks": 1} | options)  # fmt: skip


def one_step(
    check: Update, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, wrong: float = 1.0,
    skipped: bool = False, first: bool = False,
) -> bool:  # fmt: skip
    """A step whose middle weight gradient is multiplied by ``wrong``; whether it stands out."""
    optimizer.zero_grad(set_to_none=True)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
    (model(x) - x[:, :1]).square().mean().backward()
    model[2].weight.grad.mul_(wrong)
    moment = Moment(step=step, due=frozenset(), first=first)
    check.begin(moment)
    check.before_update(moment)
    spike = check.fill()[0]["spike"]
    if wrong == 1.0:
        optimizer.step()
    check.after_update(moment, skipped=skipped)
    return spike


def run(check: Update, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, **options: Any) -> list[bool]:
    return [one_step(check, model, optimizer, step, **options) for step in steps]


def test_it_stands_out_and_names_the_tensor() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    check = check_of(model, optimizer)
    run(check, model, optimizer, range(60))
    assert one_step(check, model, optimizer, 60, wrong=100.0)
    found = check.details()
    assert found is not None and found[0] == "2.weight"


def test_a_step_that_nobody_has_explained_is_not_learned_from() -> None:
    """Ten wrong steps in a row all stand out; once they are confirmed as real, they become what is usual."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    check = check_of(model, optimizer)
    run(check, model, optimizer, range(60))
    before = len(check._watches[0].rule._logs)
    assert all(run(check, model, optimizer, range(60, 70), wrong=100.0))
    check.confirmed()
    assert before == 50 and check.fill()[0] == {"spike": False}
    check.after_update(Moment(step=69, due=frozenset()), skipped=False)
    assert check._watches[0].rule._logs[-1] is not check._watches[0].rule._logs[-2]


@pytest.mark.parametrize("how", ["skipped", "repaired"])
def test_a_step_that_was_skipped_or_rebuilt_is_not_learned_from(how: str) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    check = check_of(model, optimizer)
    run(check, model, optimizer, range(10))
    before = len(check._watches[0].rule._logs)
    one_step(check, model, optimizer, 10, skipped=how == "skipped")
    assert len(check._watches[0].rule._logs) == before + (how != "skipped")
    check.settled()
    check.after_update(Moment(step=10, due=frozenset()), skipped=False)
    assert len(check._watches[0].rule._logs) == before + (how != "skipped")


def test_a_resume_begins_a_new_baseline() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    check = check_of(model, optimizer)
    run(check, model, optimizer, range(60))
    assert not one_step(check, model, optimizer, 60, wrong=100.0, first=True)


def test_buckets_and_plain_gradients_give_the_same_reading() -> None:
    """Before the reduction the gradients are divided by the number of ranks and multiplied by the loss scale."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    plain = check_of(model, optimizer)
    bucketed = check_of(model, optimizer, reduces=True, scale=0.25, loss_scale=lambda: 1024.0)
    (model(torch.randn(16, 8))).square().mean().backward()
    moment = Moment(step=0, due=frozenset())
    plain.begin(moment)
    bucketed.begin(moment)
    parameters = tuple(model.parameters())
    flat = torch.cat([p.grad.flatten() for p in parameters]) * 256.0
    bucketed.before_reduction(Bucket(0, flat, parameters))
    for check in (plain, bucketed):
        check.before_update(moment)
        check.fill()
    assert plain._seen is not None and bucketed._seen is not None
    assert bucketed._seen.gradient == pytest.approx(plain._seen.gradient, rel=1e-5)
    assert bucketed._seen.norm == pytest.approx(plain._seen.norm, rel=1e-5)


def test_the_update_is_what_adam_would_make_of_the_local_gradient() -> None:
    """Against torch's own optimizer on a copy, whose bias correction is undone."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    check = check_of(model, optimizer, clip_norm=0.01, config={"rule": "harmful", "sensitivity": 0.05})
    run(check, model, optimizer, range(5))
    optimizer.zero_grad(set_to_none=True)
    x = torch.randn(16, 8)
    (model(x) - 1).square().mean().backward()
    moment = Moment(step=5, due=frozenset())
    check.begin(moment)
    check.before_update(moment)
    check.fill()
    assert check._seen is not None
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    first, second = 1 - 0.9**6, 1 - 0.999**6
    for value, old, new in zip(check._seen.update, before, model.parameters(), strict=True):
        made = ((new.detach() - old).double() * first / math.sqrt(second)).square().mean().sqrt()
        assert value == pytest.approx(float(made), rel=2e-3)


def test_large_models_take_turns_for_rules_that_need_the_moments() -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(9)])
    optimizer = torch.optim.AdamW(model.parameters())
    turns = check_of(model, optimizer, config={"rule": "ema"})._turns
    assert len(turns) == 5 and sorted(n for part in turns for n, _ in part) == sorted(
        n for n, _ in model.named_parameters()
    )
    assert len(check_of(model, optimizer)._turns) == 1


def test_rules_that_need_moments_refuse_other_optimizers() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(unsilent.UsageError, match="SGD"):
        check_of(model, optimizer, config={"rule": "harmful"})
    check_of(model, optimizer)


def test_short_types_do_not_overflow_in_their_norm() -> None:
    model = net().half()
    optimizer = torch.optim.AdamW(model.parameters())
    check = check_of(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 6e4)
    moment = Moment(step=0, due=frozenset())
    check.begin(moment)
    check.before_update(moment)
    check.fill()
    assert check._seen is not None and check._seen.finite and check._seen.gradient[0] == pytest.approx(6e4, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rule": "magic"}, "update rule"),
        ({"rule": "robust", "sensitivity": 0}, "above 0"),
        ({"rule": "robust", "sensitivity": math.nan}, "above 0"),
        ({"rule": "robust", "sensitivity": "loud"}, "scarce"),
        ({"rule": "robust", "critical_steps": ((5, 5),)}, "critical_steps"),
        ({"rule": "robust", "layers": (("a*", -1.0),)}, "above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(unsilent.UsageError, match=words):
        UpdateConfig(**options)


def test_a_preset_is_a_number() -> None:
    assert number("default") == 0.03 and number(0.2) == 0.2 and number(None) is None


def test_the_command_line_chooses_rule_and_sensitivity(tmp_path: Path) -> None:
    options = Options(out=tmp_path, update_rule="robust", sensitivity="critical").update_config()
    assert options == UpdateConfig(rule="robust", sensitivity="critical")
    assert Options(out=tmp_path, update_rule="ema", sensitivity="0.2").update_config() == UpdateConfig(
        rule="ema", sensitivity=0.2
    )
    assert Options(out=tmp_path).update_config() is None


@pytest.mark.parametrize(
    ("rule", "sensitivity"), [("magic", None), ("robust", "loud"), ("robust", "-1"), ("off", "0.1")]
)
def test_the_command_line_refuses_what_makes_no_sense(tmp_path: Path, rule: str, sensitivity: str | None) -> None:
    with pytest.raises(unsilent.UsageError):
        Options(out=tmp_path, update_rule=rule, sensitivity=sensitivity)
