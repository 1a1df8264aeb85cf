"""Sharpness of a surface that is known, and the answer that is drawn from rates and sharpness."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from unsilent.lab.studies.llama import Llama, Shape, loss_of
from unsilent.lab.studies.surface.sharpness import Surface, largest_eigenvalue
from unsilent.lab.studies.surface.tables import answer, rank_correlation, tables, variance

SHAPE = Shape(name="least", hidden=4, layers=1, heads=1, kv_heads=1, ffn=6, vocabulary=8, samples=2, length=6)


def test_the_largest_eigenvalue_of_a_matrix_that_is_known() -> None:
    values = torch.tensor([3.0, -7.0, 0.5, 1.0])
    assert largest_eigenvalue(lambda v: values * v, 4) == pytest.approx(-7.0, rel=0.02)
    assert largest_eigenvalue(lambda v: 0 * v, 4) == 0.0


def test_sharpness_is_that_of_the_whole_hessian() -> None:
    model = Llama(SHAPE, seed=3)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]) * 3
    batch = torch.randint(8, (2, 7), generator=torch.Generator().manual_seed(1))
    surface = Surface(SHAPE, batch)
    reference = Llama(SHAPE, seed=0, scores=True)
    names = [name for name, _ in reference.named_parameters()]
    sizes = [p.numel() for p in reference.parameters()]
    shapes = [p.shape for p in reference.parameters()]

    def loss(flat: torch.Tensor) -> torch.Tensor:
        parts = {n: part.view(s) for n, part, s in zip(names, flat.split(sizes), shapes, strict=True)}
        return loss_of(lambda ids: torch.func.functional_call(reference, parts, ids), batch)  # type: ignore[arg-type]

    hessian = torch.autograd.functional.hessian(loss, weights)
    assert isinstance(hessian, torch.Tensor)
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert surface.sharpness(weights) == pytest.approx(float(eigenvalues[-1]), rel=0.05)
    moment = torch.rand(len(weights), generator=torch.Generator().manual_seed(2)) + 0.1
    root = (moment.sqrt() + 1e-8).rsqrt()
    scaled = torch.linalg.eigvalsh(root[:, None] * hessian * root)
    assert surface.scaled_sharpness(weights, moment) == pytest.approx(float(scaled[-1]), rel=0.05)


def test_shares_of_variance() -> None:
    by_way = np.array([[1.0, 1.0], [3.0, 3.0]])
    assert variance(by_way) == (1.0, 0.0) and variance(by_way.T) == (0.0, 1.0)
    assert variance(np.ones((2, 2))) == (0.0, 0.0)
    way, fault = variance(np.array([[0.0, 1.0], [2.0, 3.0]]))
    assert (way, fault) == pytest.approx((0.8, 0.2))


def test_rank_correlation_with_its_chance() -> None:
    rising = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    correlation, chance = rank_correlation(rising, np.exp(rising))
    assert correlation == pytest.approx(1.0) and chance == pytest.approx(2 / 720, abs=0.002)
    assert rank_correlation(rising, rising[::-1])[0] == pytest.approx(-1.0)
    assert rank_correlation(rising, np.ones(6)) == (0.0, 1.0)


def measure(**changed: Any) -> dict[str, Any]:
    sharp = {"correlation": 0.9, "p": 0.01, "count": 9}
    return {"ways": 9, "faults": ["once", "unit-1"], "of_way": 0.9, "of_fault": 0.05, "sharpness": sharp, **changed}


def test_the_answer_names_surface_fault_or_neither() -> None:
    assert "the sharpness of its surface" in answer(measure())
    assert "no proof" in answer(measure())
    assert "cannot be decided" in answer(measure(sharpness={"correlation": 0.4, "p": 0.3, "count": 9}))
    assert "goes with the fault at least" in answer(measure(of_way=0.2, of_fault=0.7))
    # What pure noise gives over 9 ways and 2 faults: more for the way, which has eight times the freedom.
    assert "goes with the fault at least" in answer(measure(of_way=0.47, of_fault=0.06))
    assert answer(measure(ways=3)).startswith("It cannot be decided")
    assert answer(measure(faults=["once"])).startswith("It cannot be decided")


def test_tables_keep_the_faults_that_show_a_rate_under_every_way() -> None:
    steps = np.arange(100.0)
    ways = {}
    for i in range(6):
        growth = 1e-6 * np.exp((0.01 + 0.01 * i) * steps)
        late = np.where(steps < 90, 0.0, growth)
        ways[f"way {i}"] = {
            "loss": np.ones(100), "distance": np.full(100, 10.0), "sharpness": np.array([1.0, 10.0 * i, 99.0]),
            "scaled": np.array([1.0 + i]), "difference-once": growth, "difference-unit-1": 2 * growth,
            "difference-unit-8": growth if i else late,
        }  # fmt: skip
    record = tables(ways, dict.fromkeys(ways, 1e-3))
    assert record["measures"]["growth"]["faults"] == ["once", "unit-1"]
    assert record["measures"]["slope"] == {"ways": 6, "faults": []}
    assert "the sharpness of its surface" in record["answer"]
