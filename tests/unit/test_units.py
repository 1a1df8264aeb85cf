"""Simulated sick devices: what the data file says, that healthy ones do nothing, and that a seed repeats bit for bit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from unsilent.errors import UsageError
from unsilent.lab.corruption import seeded
from unsilent.lab.operations import Operation
from unsilent.lab.studies.llama import Llama, Shape, loss_of
from unsilent.lab.units import COUNT, HEALTHY, PLACES, Law, Rate, Unit, law, unit, units
from unsilent.lab.units.device import SickDevice, place_of, wrong_values

SHAPE = Shape(name="test", hidden=32, layers=2, heads=2, kv_heads=1, ffn=48, vocabulary=32, samples=2, length=16)
BUSY = Unit(
    number=99,
    forward_attention=Rate(chance=0.5, share=0.01, explosions=0.5),
    forward_ffn=Rate(chance=0.5, share=0.01),
    backward_attention=Rate(chance=0.5, share=0.01),
    backward_ffn=Rate(chance=0.5, share=0.01),
)


def gradients(ill: Unit, *, steps: int = 12, seed: int = 0, rank: int = 0) -> tuple[list[torch.Tensor], SickDevice]:
    model = Llama(SHAPE, seed=0)
    device = SickDevice(ill, model, seed=seed, rank=rank)
    out: list[torch.Tensor] = []
    for step in range(steps):
        model.zero_grad()
        with device.step(step):
            loss_of(model, torch.randint(32, (2, 17), generator=torch.Generator().manual_seed(step))).backward()
        out.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    device.close()
    return out, device


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(one, two, strict=True)]


CLEAN = gradients(Unit(number=0))[0]


def test_the_file_holds_what_is_known_of_the_real_devices() -> None:
    assert [u.number for u in units()] == list(range(1, COUNT + 1))
    assert [u.number for u in units() if u.fitted] == [1, 10, 11]
    assert [u.number for u in units() if u.healthy] == [2, 3]
    assert unit(13).from_step == 450
    assert all(u.healthy for u in HEALTHY)
    assert len(HEALTHY) == COUNT
    for one in units():
        assert one.fitted or "stored" in one.note or "interpolated" in one.note
        for place in PLACES:
            rate = one.rate(place)
            assert 0 <= rate.chance <= 1
            assert 0 <= rate.share <= 1
            assert not (place.startswith("backward") and rate.explosions), "explosions belong to the forward"


def test_there_is_no_sixteenth() -> None:
    with pytest.raises(UsageError, match="no unit 16"):
        unit(16)


def test_the_data_needs_no_torch() -> None:
    code = "import sys, unsilent.lab.units as u; u.units(), u.law(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("healthy", [HEALTHY[0], HEALTHY[14], unit(2), unit(3)], ids=lambda u: str(u.number))
def test_healthy_devices_agree_bit_for_bit(healthy: Unit) -> None:
    assert all(same(gradients(healthy)[0], CLEAN))


def test_steps_without_a_burst_are_right_and_those_with_one_are_wrong() -> None:
    found, device = gradients(BUSY)
    hit = {step for step, _ in device.bursts}
    assert [step not in hit for step in range(12)] == same(found, CLEAN)
    assert {place for _, place in device.bursts} == set(PLACES)


def test_a_seed_repeats_and_ranks_differ() -> None:
    one, two, other = gradients(BUSY)[0], gradients(BUSY)[0], gradients(BUSY, rank=1)[0]
    assert all(same(one, two))
    assert not all(same(one, other))


def test_a_step_that_is_run_again_meets_the_same_burst_with_other_errors() -> None:
    model = Llama(SHAPE, seed=0)
    device = SickDevice(BUSY, model, seed=0)
    step = next(s for s in range(100) if BUSY.in_burst("forward_ffn", s, seed=0))
    losses: list[float] = []
    for _ in range(2):
        with device.step(step):
            losses.append(float(loss_of(model, torch.zeros(2, 17, dtype=torch.int64)).detach()))
    assert losses[0] != losses[1]


def test_nothing_happens_before_the_first_step_of_a_unit() -> None:
    late = Unit(number=13, from_step=6, forward_attention=Rate(chance=1.0, share=0.05))
    assert same(gradients(late)[0], CLEAN) == [step < 6 for step in range(12)]


def test_bursts_last_as_many_steps_as_the_unit_says() -> None:
    long = Unit(number=6, burst_steps=60, forward_ffn=Rate(chance=0.004, share=0.1))
    on = [long.in_burst("forward_ffn", step, seed=1) for step in range(5000)]
    first = on.index(True)
    assert all(on[first : first + 60])
    assert sum(on) / 5000 == pytest.approx(1 - (1 - 0.004) ** 60, abs=0.12)


@pytest.mark.parametrize(
    ("module", "name", "phase", "where", "place"),
    [
        ("blocks.0.attention.o", "mm", "forward", "output", "forward_attention"),
        ("blocks.0.attention.o", "mm", "recompute", "output", "forward_attention"),
        ("blocks.0.attention.q", "mm", "forward", "output", None),
        ("blocks.0.attention.q", "mm", "backward", "output", "backward_attention"),
        ("blocks.0.attention.o", "mm", "backward", "output", None),
        ("model.layers.3.mlp.down_proj", "mm", "forward", "output", "forward_ffn"),
        ("model.layers.3.self_attn.k_proj", "mm", "backward", "output", "backward_attention"),
        ("blocks.0.ffn", "silu", "forward", "inside", "forward_ffn"),
        ("blocks.0.ffn.up", "mm", "forward", "inside", None),
        ("head", "mm", "forward", "output", None),
        ("blocks.0.ffn_norm", "mul", "forward", "inside", None),
        ("", "addcdiv_", "optimizer", "inside", None),
    ],
)
def test_only_attention_and_feed_forward_err(module: str, name: str, phase: str, where: str, place: str | None) -> None:
    assert place_of(Operation(name=name, phase=phase, module=module), where=where) == place


def test_magnitudes_follow_the_law() -> None:
    rule = law()
    right = torch.rand(50_000, generator=torch.Generator().manual_seed(0)) + 0.5
    forward = wrong_values(right, 5_000, rule, seeded("forward"), backward=False)
    error = ((forward - right) / right).double().abs()
    assert float(error[:-5_000].median()) == pytest.approx(rule.bulk, rel=0.05)
    grown = (forward / right).double().abs()[-5_000:].log10()
    assert 2 <= float(grown.min()) < 2.1
    assert 11.9 < float(grown.max()) <= 12.01
    assert float(grown.mean()) == pytest.approx(7, abs=0.2)


def test_a_backward_grows_by_sixteen_at_most() -> None:
    wild = Law(bulk=5.0, spread=3.0, largest_backward=16.0, explosion=(1e2, 1e12))
    right = torch.ones(10_000)
    wrong = wrong_values(right, 0, wild, seeded("backward"), backward=True)
    assert float(wrong.abs().max()) == 16.0


def test_wrong_values_stay_finite_in_a_short_format() -> None:
    right = torch.full((100,), 6e4, dtype=torch.float16)
    assert bool(torch.isfinite(wrong_values(right, 50, law(), seeded(1), backward=False)).all())
