"""``study bits``: its written-out step is torch's, a flip is one bit, and every flip is counted once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from unsilent.lab.studies.bits.study import QUICK, Bench, Flip, flip_bit, study
from unsilent.lab.studies.bits.tables import (
    BITS,
    CLASSES,
    EFFECTS,
    KERNELS,
    STAGES,
    UPDATE,
    classes,
    harmful_from,
    tables,
)
from unsilent.lab.studies.llama import Llama, loss_of
from unsilent.training.rate import rate

PLAN = replace(QUICK, trained=4, shape=replace(QUICK.shape, layers=1, length=8))
TEXT = bytes(range(32, 127)) * 50


@pytest.fixture
def bench() -> Bench:
    bench = Bench(PLAN, TEXT)
    bench.train(lambda: None)
    return bench


def test_its_step_is_that_of_torch(bench: Bench) -> None:
    model = Llama(PLAN.shape, seed=PLAN.seed, scores=True)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    for step in range(PLAN.trained):
        optimizer.param_groups[0]["lr"] = 1e-3 * rate(step, warmup=50, steps=10 * PLAN.trained)
        optimizer.zero_grad()
        loss_of(model, bench.data.batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(bench.weights, weights, rtol=1e-4, atol=1e-6)


def test_a_step_repeats_and_leaves_the_state_as_it_was(bench: Bench) -> None:
    before, moment = bench.weights.clone(), bench.moments["exp_avg"].clone()
    one = bench.step(4, None)
    flip = Flip(stage="backward", kernel="v", target="blocks.0.attention.v", bit=30, draw=3)
    wrong = bench.step(4, flip)
    two = bench.step(4, None)
    assert torch.equal(one.weights, two.weights) and one.norm == two.norm and one.next_loss == two.next_loss
    assert not torch.equal(wrong.weights, one.weights) and wrong.loss == one.loss
    assert torch.equal(bench.weights, before) and torch.equal(bench.moments["exp_avg"], moment)


def test_a_flip_of_the_update_changes_one_weight(bench: Bench) -> None:
    right = bench.step(4, None)
    clean = (bench.gradient.clone(), right)
    wrong = bench.step(4, Flip(stage=UPDATE, kernel="head", target="head", bit=26, draw=11), clean)
    assert int((wrong.weights != right.weights).sum()) == 1
    assert (wrong.loss, wrong.norm) == (right.loss, right.norm) and wrong.next_loss != right.next_loss


def test_a_flip_of_the_scores_is_seen_in_the_largest_logit(bench: Bench) -> None:
    right = bench.step(4, None)
    wrong = [
        bench.step(4, Flip(stage="forward", kernel="scores", target="blocks.0.attention.logits", bit=30, draw=draw))
        for draw in range(8)
    ]
    changed = [step.logit != right.logit for step in wrong]
    assert any(changed) and not all(changed)  # those of the future are thrown away


@pytest.mark.parametrize("bit", [0, 22, 30, 31])
def test_one_bit_is_flipped(bit: int) -> None:
    values = torch.tensor([1.5, -2.0, 3.0])
    flip_bit(values, 1, bit)
    bits = [int(x) & 0xFFFFFFFF for x in values.view(torch.int32)]
    right = [int(x) & 0xFFFFFFFF for x in torch.tensor([1.5, -2.0, 3.0]).view(torch.int32)]
    assert [a ^ b for a, b in zip(bits, right, strict=True)] == [0, 1 << bit, 0]


def test_only_scores_have_no_weights(bench: Bench) -> None:
    for stage in STAGES:
        without = {kernel for kernel in KERNELS if not bench.targets(stage, kernel)}
        assert without == (set() if stage in ("forward", "backward") else {"scores"})


def trials_of(**columns: list[Any]) -> dict[str, np.ndarray]:
    size = len(columns["d1"])
    nothing = {name: np.zeros(size) for name in EFFECTS}
    return {**nothing, "clean_norm": np.ones(1), "clean_loss": np.ones(1),
            **{name: np.array(values) for name, values in columns.items()}}  # fmt: skip


def test_every_flip_is_in_one_class() -> None:
    trials = trials_of(
        d1=[0.0, 1e-9, 0.1, 0.2, np.inf, 0.0], changed=[0, 1e-4, 1, 1, 1, 0], norm=[0, 0, 0, 0, 0, np.inf]
    )
    found = classes(trials)
    assert [[name for name in CLASSES if found[name][i]] for i in range(6)] == [
        ["masked"], ["small"], ["small"], ["harmful"], ["not finite"], ["not finite"],
    ]  # fmt: skip


def test_harmful_bits_are_given_as_ranges() -> None:
    bad = (31, 29, 28, 27, 0)
    trials = trials_of(
        d1=[1.0 if bit in bad else 0.01 for bit in range(BITS)], changed=[1] * BITS, bit=list(range(BITS)),
        stage=["forward"] * BITS, kernel=["q"] * BITS,
    )  # fmt: skip
    found = tables(trials)
    assert harmful_from(found["cells"], "forward", "q") == "31, 29–27, 0"
    assert harmful_from(found["cells"], "clipping", "scores") == "–"
    assert found["all"]["harmful"]["count"] == len(bad) and found["by_group"]["sign"]["harmful"]["count"] == 1


def test_the_trained_state_is_kept_and_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unsilent.lab.studies.bits.study.STAGES", (UPDATE,))
    first = study(PLAN, tmp_path)
    monkeypatch.setattr(Bench, "train", lambda self, advance: pytest.fail("trained again"))
    (tmp_path / "parts" / "trials.npz").unlink()
    again = study(PLAN, tmp_path)
    assert len(first["d1"]) == BITS * (len(KERNELS) - 1)
    assert all(np.array_equal(first[name], again[name]) for name in first)
