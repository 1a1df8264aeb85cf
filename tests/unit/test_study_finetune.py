"""Questions and their split, scores, and what is read from answers and losses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from unsilent.errors import UsageError
from unsilent.lab.studies.finetune import study
from unsilent.lab.studies.finetune.questions import (
    TASKS,
    Library,
    Question,
    answers,
    endings,
    guess,
    is_held_out,
    library,
    make_questions,
    next_lines,
)
from unsilent.lab.studies.finetune.study import Plan, Task, batches, scores, tune_all
from unsilent.lab.studies.finetune.tables import chosen, spikes, tables
from unsilent.lab.studies.free_run import Setup
from unsilent.lab.studies.llama import Llama, Shape
from unsilent.lab.units import Rate, Unit

SHAPE = Shape(name="least", hidden=16, layers=1, heads=2, kv_heads=1, ffn=24, samples=2, length=32)


@pytest.fixture(scope="module")
def source() -> Library:
    whole = library()
    few = lambda files: dict(list(files.items())[:60])  # noqa: E731
    return Library(training=few(whole.training), held_out=few(whole.held_out))


def test_files_are_split_by_their_paths(source: Library) -> None:
    assert source.training and not set(source.training) & set(source.held_out)
    assert all(is_held_out(name) for name in source.held_out) and not any(map(is_held_out, source.training))


@pytest.mark.parametrize("task", list(TASKS))
def test_questions_repeat_and_give_nothing_away(task: str, source: Library) -> None:
    tuned_on = make_questions(task, source.training, 100, seed=0)
    assert tuned_on == make_questions(task, source.training, 100, seed=0)
    read = source.training_lines()
    test = make_questions(task, source.held_out, 100, seed=1, read=read)
    assert len(answers(test)) == len(test) == 100
    for question in test:
        begun = question.context[question.context.rfind("\n") + 1 :]
        assert (begun + question.options[question.answer]).strip() not in read
    for question in test:
        assert len(set(question.options)) == 4
        indents = {len(option) - len(option.lstrip()) for option in question.options}
        assert len(indents) == 1, "an option could be told by its indentation"
    positions = np.bincount([question.answer for question in test], minlength=4)
    assert positions.min() > 10
    whole = "".join(source.held_out.values())
    assert all(option.strip() in whole for option in test[0].options)


def test_too_few_files_are_refused(source: Library) -> None:
    with pytest.raises(UsageError, match="not 100"):
        make_questions("next-line", dict(list(source.training.items())[:2]), 100, seed=0)


def test_examples_are_what_they_say() -> None:
    text = "class A:\n" + "".join(f"    a{i} = {i}\n\n" for i in range(7))
    first, second = next_lines("f", text)
    assert first.context.startswith("class A:\n    a0 = 0\n") and (first.indent, first.answer) == ("    ", "a5 = 5")
    assert second.context.startswith("a0 = 0\n") and (second.indent, second.answer) == ("", "a6 = 6")
    (only,) = endings("f", "if a:\n\n    b = 1\n    result = function(argument)\n")
    assert (only.context, only.answer) == ("if a:\n    b = 1\n    result = ", "function(argument)")
    assert not list(endings("f", "a\nb\nword\n"))


def test_a_guess_compares_letters() -> None:
    assert guess(Question(context="read_file(path)", options=("nothing here", "the path of a file"), answer=1)) == 1


def test_scores_are_mean_log_likelihoods_whatever_stands_beside_them() -> None:
    model = Llama(SHAPE, seed=1)
    short = Question(context="ab", options=("c", "def"), answer=0)
    long = Question(context="a long context", options=("of many", "bytes"), answer=1)
    together = scores(model, [short, long])
    torch.testing.assert_close(together, torch.cat([scores(model, [short]), scores(model, [long])]))
    ids = torch.tensor([list(b"abdef")])
    each = F.log_softmax(model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None])[0, 1:, 0]
    assert together[0, 1].item() == pytest.approx(each.mean().item(), rel=1e-5)


def test_every_question_is_in_one_batch_and_the_seed_sets_the_order(source: Library) -> None:
    questions = make_questions("next-line", source.training, 50, seed=0)
    task = Task(name="next-line", questions=50, batch=4)
    order = batches(questions, task, seed=0)
    drawn = [question.context for batch in order for question in batch]
    assert sorted(drawn) == sorted(question.context for question in questions) and len(order) == 13
    assert order == batches(questions, task, seed=0) and order != batches(questions, task, seed=1)


def test_scores_that_are_not_finite_choose_nothing() -> None:
    values = np.array([[0.0, 2.0, 1.0, 0.0], [0.0, np.nan, 1.0, 0.0], [-np.inf, 0.0, 0.0, 1.0]])
    assert chosen(values).tolist() == [1, -1, -1]


def losses() -> Iterator[float]:
    random = np.random.default_rng(0)
    while True:
        yield 1.0 + 0.1 * random.standard_normal()


def test_spikes_and_what_became_of_them() -> None:
    loss = np.array([next(stream) for stream in [losses()] for _ in range(120)])
    assert spikes(loss) == []
    loss[50:53] = [5.0, 9.0, 4.0]
    assert spikes(loss) == [{"step": 50, "highest": 9.0, "recovered": True}]
    loss[80:] += 20.0
    assert spikes(loss)[-1]["recovered"] is False
    loss[80:] = np.nan
    assert spikes(loss)[-1] == {"step": 80, "highest": None, "recovered": False}


def test_tables_count_lost_scores_as_wrong_and_as_disagreement() -> None:
    right = np.eye(4)[np.arange(2000) % 4]
    half = right.copy()
    half[::2] = np.nan
    runs = {
        "test": {"answers": np.arange(2000) % 4, "guesses": np.zeros(2000, dtype=int)},
        "untuned": {"scores": right[::-1]},
        "healthy": {"scores": right, "loss": np.ones(60)},
        "unit-6": {"scores": np.full((2000, 4), np.nan), "loss": np.full(60, np.nan)},
        "unit-1": {"scores": half, "loss": np.ones(60)},
    }
    record = tables({"next-line": runs})
    rows = record["tasks"]["next-line"]["runs"]
    assert rows["unit-6"]["accuracy"]["share"] == 0.0 and rows["unit-6"]["disagreement"]["share"] == 1.0
    assert rows["unit-1"]["accuracy"]["share"] == 0.5 == rows["unit-1"]["disagreement"]["share"]
    assert rows["unit-1"]["not_finite"] == 1000 and rows["unit-6"]["last_loss"] is None
    assert record["tasks"]["next-line"]["letters"]["share"] == 0.25 and all(goal["met"] for goal in record["goals"])


def test_a_tuning_on_a_sick_device_differs_from_a_healthy_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Library
) -> None:
    monkeypatch.setattr(study, "library", lambda: source)
    sick = Unit(number=6, forward_ffn=Rate(chance=1.0, share=0.5), backward_ffn=Rate(chance=1.0, share=0.5))
    plan = Plan(
        pretraining=Setup(shape=SHAPE, steps=2),
        tasks=(Task(name="ending", questions=12, batch=4),),
        units=(Unit(number=2), sick),
        tested=12,
    )
    runs = tune_all(plan, tmp_path)["ending"]
    healthy, silent, other = (runs[name]["scores"] for name in ("healthy", "unit-2", "unit-6"))
    assert np.array_equal(healthy, silent) and not np.array_equal(healthy, other)
    assert not np.array_equal(healthy, runs["untuned"]["scores"]) and healthy.shape == (12, 4)
    again = tune_all(plan, tmp_path)["ending"]
    assert all(np.array_equal(runs[name]["scores"], again[name]["scores"]) for name in runs if name != "test")
