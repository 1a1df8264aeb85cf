"""The text, its batches, and the model that is trained on them."""

from __future__ import annotations

import builtins
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from unsilent.errors import UsageError
from unsilent.training.data import TextData, file_text, standard_library_text
from unsilent.training.model import build_model, make_loss_fn
from unsilent.training.presets import PRESETS, preset

TEXT = bytes(torch.randint(256, (20_000,), generator=torch.Generator().manual_seed(0)).tolist())


def data(**options: Any) -> TextData:
    return TextData(TEXT, **{"sequence_length": 16, "global_batch": 12, **options})


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 12])
def test_any_number_of_ranks_sees_the_same_samples_in_the_same_order(world_size: int) -> None:
    whole, shared = data(), data(world_size=world_size)
    for step in (0, 1, 7, 400):
        parts = [shared.batch(step, rank) for rank in range(world_size)]
        assert torch.equal(torch.cat(parts), whole.batch(step))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_any_step_can_be_asked_again_in_any_order() -> None:
    first = data()
    batches = {step: first.batch(step) for step in range(300)}
    again = data()
    for step in (299, 0, 150, 149, 299):
        assert torch.equal(again.batch(step), batches[step])
        assert torch.equal(first.batch(step), batches[step])
    assert not torch.equal(batches[0], batches[1])
    assert not torch.equal(data(seed=1).batch(0), batches[0])


def test_an_epoch_reads_every_window_once() -> None:
    text = data(global_batch=1)
    seen = [bytes(text.batch(step)[0].tolist()) for step in range(2 * text.windows)]
    assert set(seen[: text.windows]) == set(seen[text.windows :])
    assert len(set(seen[: text.windows])) == text.windows
    assert seen[: text.windows] != seen[text.windows :]


def test_the_order_does_not_depend_on_the_batch_size() -> None:
    small, large = data(global_batch=4), data(global_batch=12)
    assert torch.equal(torch.cat([small.batch(step) for step in range(3)]), large.batch(0))


def test_evaluation_is_fixed_and_never_trained_on() -> None:
    text = data(world_size=3)
    evaluation = text.evaluation_batch(8)
    assert torch.equal(evaluation, data(seed=5, world_size=1).evaluation_batch(8))
    assert evaluation.shape == (8, 17)
    assert evaluation.dtype == torch.int64
    trained = b"".join(bytes(row.tolist()) for step in range(2 * text.windows // 12) for row in data().batch(step))
    assert all(bytes(row.tolist()) not in trained for row in evaluation)


def test_the_global_generators_are_not_moved() -> None:
    before = torch.get_rng_state()
    data().batch(3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch": 2, "world_size": 3}, "leaves some of the 3 ranks without any"),
        ({"sequence_length": 10_000}, "take a longer text"),
        ({"sequence_length": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        data(**options)


def test_a_batch_of_no_rank_is_refused() -> None:
    with pytest.raises(UsageError, match="no batch for step 0, rank 3 of 3"):
        data(world_size=3).batch(0, 3)


def test_the_smallest_text_that_fits_gives_a_batch() -> None:
    text = TextData(b"x" * 34, sequence_length=16, global_batch=2)
    assert text.batch(0).shape == (2, 17)
    assert text.evaluation_batch().shape == (1, 17)


def test_the_standard_library_is_text_without_tests() -> None:
    text = standard_library_text(300_000)
    assert len(text) == 300_000
    assert text == standard_library_text(300_000)
    assert b"import" in text
    assert b"unittest.main()" not in text


def test_a_file_is_read_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    assert file_text(path) == TEXT
    with pytest.raises(UsageError, match="cannot read the training text"):
        file_text(tmp_path)


# -- presets and model -------------------------------------------------------------------------------------------------


def test_an_unknown_preset_names_the_others() -> None:
    with pytest.raises(UsageError, match="no preset 'huge': one of tiny, 25m, 60m, 350m, 1b"):
        preset("huge")


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match=r"pip install 'unsilent\[train\]'"):
        build_model(preset("tiny"), seed=0)


class TestModel:
    @pytest.fixture(autouse=True)
    def _needs_transformers(self) -> None:
        pytest.importorskip("transformers", reason="the extra 'train' is not installed")

    @pytest.mark.parametrize(
        ("name", "count"), [("tiny", 857_216), ("25m", 25_567_744), ("60m", 58_073_600), ("350m", None), ("1b", None)]
    )
    def test_parameters(self, name: str, count: int | None) -> None:
        model = build_model(PRESETS[name], seed=0, device="meta")
        assert sum(p.numel() for p in model.parameters()) == PRESETS[name].parameters
        assert count in (None, PRESETS[name].parameters)

    def test_same_seed_same_bits_and_nothing_else_moves(self, capfd: pytest.CaptureFixture[str]) -> None:
        before, level = torch.get_rng_state(), logging.getLogger("transformers").level
        models = [build_model(preset("tiny"), seed=seed) for seed in (3, 3, 4)]
        assert torch.equal(torch.get_rng_state(), before)
        assert logging.getLogger("transformers").level == level
        weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in models]
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[0], weights[2])
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("bf16", [False, True])
    def test_it_learns(self, bf16: bool) -> None:
        model, loss_fn = build_model(preset("tiny"), seed=0), make_loss_fn(bf16=bf16)
        text = TextData(standard_library_text(200_000), sequence_length=32, global_batch=8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses: list[float] = []
        for step in range(12):
            loss = loss_fn(model, text.batch(step))
            assert loss.dtype == torch.float32
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert 5.3 < losses[0] < 5.8  # ln 256 is 5.545
        assert losses[-1] < losses[0] - 1
