"""The parts of the study of the update check: its simulated job, its random faults, its figures."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.rates import rate_of
from unsilent.lab.studies.alpha.study import threshold_for
from unsilent.lab.studies.alpha.tables import difference
from unsilent.lab.studies.draws import draw, is_finite, is_gross, targets
from unsilent.lab.studies.job import Job, Shape
from unsilent.training.model import build_model, make_loss_fn
from unsilent.training.presets import Preset

SMALL = Preset(name="small", hidden_size=16, layers=1, heads=2, ffn_size=24, vocabulary=256)
SHAPE = Shape(preset=SMALL, ranks=3, samples=2, length=8, steps=20, warm_up=4)


@pytest.fixture(scope="module")
def text() -> bytes:
    return bytes(range(32, 127)) * 50


def test_a_step_is_that_of_a_job_whose_ranks_average_clip_and_update(text: bytes) -> None:
    """Against plain PyTorch with one tensor per parameter."""
    job = Job(SHAPE, seed=3, text=text)
    model = build_model(SMALL, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    loss_fn = make_loss_fn()
    for step in range(3):
        job.compute(step)
        job.apply(step)
        optimizer.param_groups[0]["lr"] = job.rate(step)
        optimizer.zero_grad()
        for rank in range(3):
            (loss_fn(model, job._data.batch(step, rank)) / 3).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for ours, theirs in zip(job.parameters, model.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-4, atol=1e-6)


def test_a_step_can_be_taken_back_bit_for_bit(text: bytes) -> None:
    job = Job(SHAPE, seed=0, text=text)
    for step in range(2):
        job.compute(step)
        job.apply(step)
    before = job.state()
    job.compute(2)
    job.apply(2)
    right = job.weights.detach().clone()
    job.restore(before)
    job.apply(2, job.local * 2)
    job.restore(before)
    job.compute(2)
    job.apply(2)
    assert torch.equal(job.weights, right)


def test_what_a_rank_sees_is_of_its_own_gradient(text: bytes) -> None:
    job = Job(SHAPE, seed=0, text=text)
    for step in range(3):
        job.compute(step)
        seen = job.see(step, job.local[1])
        job.apply(step)
    sizes = job.local[1].split(job.sizes)
    assert seen.gradient == pytest.approx([float(part.double().square().mean().sqrt()) for part in sizes])
    assert seen.norm == pytest.approx(float(job.local[1].norm()))
    assert (seen.update > 0).all() and seen.update.shape == seen.update_unclipped.shape == (len(job.names),)


def test_random_faults_are_the_mix_that_was_reported_and_all_of_them_fire(text: bytes) -> None:
    job = Job(SHAPE, seed=0, text=text)
    among = targets(job.model, 16)
    random = np.random.default_rng(0)
    patterns: Counter[str] = Counter()
    out = torch.empty(job.weights.numel())
    for i in range(150):
        fault = draw(random, among, step=0, rank=1)
        patterns[fault.pattern] += 1
        if i < 60:
            with Injector(job.model, None, fault, rank=1, world_size=3) as injector:
                injector.begin_step(0)
                job.compute_rank(0, 1, out)
            assert injector.fired == 1 and injector.record[0].site == fault.site
    assert 0.35 < patterns["zero"] / 150 < 0.65 and patterns["nan"] + patterns["inf"] < 15
    assert set(patterns) >= {"zero", "bit_flip", "scale", "stuck_lane", "random_bits"}


@pytest.mark.parametrize(
    ("options", "gross", "finite"),
    [
        ({"pattern": "scale", "factor": 2.0}, False, True),
        ({"pattern": "scale", "factor": -2e3}, True, True),
        ({"pattern": "zero"}, False, True),
        ({"pattern": "bit_flip", "bit": 30}, True, True),
        ({"pattern": "bit_flip", "bit": 22}, False, True),
        ({"pattern": "nan"}, False, False),
    ],
)
def test_gross_and_finite_are_read_from_what_was_put_in(
    text: bytes, options: dict[str, Any], gross: bool, finite: bool
) -> None:
    job = Job(SHAPE, seed=0, text=text)
    target = targets(job.model, 16)[0].parameter
    fault = Fault(site="gradient", target=target, rank=0, step=0, **options)
    with Injector(job.model, None, fault, rank=0, world_size=3) as injector:
        injector.begin_step(0)
        job.compute_rank(0, 0, torch.empty(job.weights.numel()))
    assert is_gross(fault, injector.record) == gross
    assert is_finite(injector.record) == finite


def test_a_rate_has_its_count_and_an_interval() -> None:
    half = rate_of(50, 100)
    assert half["share"] == 0.5 and half["interval"] == pytest.approx([0.404, 0.596], abs=1e-3)
    assert rate_of(0, 10)["interval"][0] == 0.0 and rate_of(0, 0)["of"] == 0


def test_a_mean_of_pairs_has_students_interval() -> None:
    found = difference([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0 and found["interval"] == pytest.approx([2 - 4.3 / math.sqrt(3), 2 + 4.3 / math.sqrt(3)])


def test_a_threshold_keeps_the_false_alarms_of_its_own_seed_within_the_target() -> None:
    random = np.random.default_rng(0)
    gradient = np.exp(random.normal(0, 0.1, (400, 2, 6)))
    clean = {
        "gradient": gradient,
        "update": gradient,
        "norm": gradient.sum(axis=2),
        "sizes": np.full(6, 4),
        "about": {},
    }
    from unsilent.lab.studies.alpha.study import needed

    threshold = threshold_for("robust", clean, 0.037, skip=60)
    share = float((needed("robust", clean)[0][60:].min(axis=1) <= threshold).mean())
    assert 0.02 < share <= 0.037
