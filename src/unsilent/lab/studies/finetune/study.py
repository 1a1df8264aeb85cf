"""``unsilent study finetune``: what is a model worth that was tuned for a task on a sick device?

A model is pre-trained on text on a healthy device. From there it is tuned for two tasks of four options each
(``questions.py``): on a healthy device, on a healthy one with the questions in another order (the control), and on
simulated sick units. What is asked of the model is the option that it finds likeliest, by the mean log-likelihood of the
option's bytes after the context; it is tuned by the cross-entropy over these four means. Every tuned model is asked the
same held-out questions on a healthy device, so that its weights answer, and not the device.

The pre-trained weights and every tuned model's answers are kept in a file each, and an interrupted study goes on with the
runs that are missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from unsilent.lab.progress import progress
from unsilent.lab.studies.drift.study import name_of
from unsilent.lab.studies.finetune.questions import Library, Question, guess, library, make_questions
from unsilent.lab.studies.free_run import BETAS, CLIP, EPS, WEIGHT_DECAY, Device, FreeRun, HealthyDevice, Setup, flatten
from unsilent.lab.studies.llama import Llama, shape_of
from unsilent.lab.studies.parts import Parts, Piece
from unsilent.lab.units import Unit, law, unit
from unsilent.lab.units.device import SickDevice
from unsilent.training.rate import rate

SEED_OF_FAULTS = 6
SEED, RESEEDED = 0, 1
"""Of the order of questions; the control has the second."""
SEED_OF_TRAINING, SEED_OF_TEST = 0, 1
"""Of what questions there are."""
LONGER = 32
"""Sequences of a batch differ in length by less than so many bytes: the rest of a batch is padding."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of ``questions.TASKS``: it is tuned once on each of ``questions`` of them, ``batch`` a step."""

    name: str
    questions: int
    batch: int
    learning_rate: float = 5e-4
    warm_up: int = 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run. ``tested`` questions of each task are asked of every model."""

    pretraining: Setup
    tasks: tuple[Task, ...]
    units: tuple[Unit, ...]
    tested: int


def plan(*, quick: bool) -> Plan:
    """The study; ``quick`` takes a minute, and its figures mean nothing."""
    if quick:
        small = replace(shape_of("small"), samples=4, length=208)
        return Plan(
            pretraining=Setup(shape=small, steps=20, schedule=20),
            tasks=(Task(name="next-line", questions=16, batch=4), Task(name="ending", questions=16, batch=4)),
            units=(unit(1), unit(6)),
            tested=40,
        )
    return Plan(
        pretraining=Setup(
            shape=replace(shape_of("million"), samples=4, length=208), steps=2000, schedule=2000, learning_rate=1.5e-3,
            warm_up=100,
        ),
        tasks=(Task(name="next-line", questions=1200, batch=4), Task(name="ending", questions=2400, batch=8)),
        units=(unit(1), unit(6), unit(11)),
        tested=2000,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One tuning: the order of its questions, and the unit that it is done on, if that is sick. ``tuned`` is False for the
    model as it is before."""

    seed: int = SEED
    unit: Unit | None = None
    tuned: bool = True

    def device(self, model: Llama) -> Device:
        """The device for the model that is tuned on it."""
        return HealthyDevice(model) if self.unit is None else SickDevice(self.unit, model, seed=SEED_OF_FAULTS)


def tune_all(plan: Plan, out: Path) -> dict[str, dict[str, Piece]]:
    """By task: ``untuned``, ``healthy``, ``reseeded`` and the units' runs; each has ``scores``, fp64[tested, 4], and the tuned
    ones ``loss``, fp64[steps]. ``test`` has the right ``answers`` and the ``guesses`` of a comparison of letters,
    int64[tested]."""
    source, folder = library(), out / "parts"
    parts = Parts(folder, plan.pretraining)
    pretrained = parts.get("pretrained") or parts.keep("pretrained", _pretrain(plan.pretraining, source))
    start = torch.from_numpy(pretrained["weights"])
    return {task.name: _tune_for(task, plan, start, source, folder) for task in plan.tasks}


def _pretrain(setup: Setup, source: Library) -> Piece:
    run = FreeRun(setup, source.training_text())
    with progress("pre-training", setup.steps) as advance:
        loss = []
        for step in run:
            loss.append(step.loss)
            advance()
    return {"weights": run.weights.detach().numpy(), "loss": np.array(loss), "evaluation": np.array(run.evaluate())}


def _tune_for(task: Task, plan: Plan, start: torch.Tensor, source: Library, folder: Path) -> dict[str, Piece]:
    """All runs of one task."""
    questions = make_questions(task.name, source.training, task.questions, seed=SEED_OF_TRAINING)
    test = make_questions(task.name, source.held_out, plan.tested, seed=SEED_OF_TEST, read=source.training_lines())
    cases = {
        "untuned": Case(tuned=False),
        "healthy": Case(),
        "reseeded": Case(seed=RESEEDED),
        **{name_of(one): Case(unit=one) for one in plan.units},
    }
    done: dict[str, Piece] = {
        "test": {
            "answers": np.array([question.answer for question in test]),
            "guesses": np.array([guess(question) for question in test]),
        }
    }
    for name, case in cases.items():
        parts = Parts(folder, (plan.pretraining, task, plan.tested, case, law(), SEED_OF_FAULTS))
        piece = f"{task.name}-{name}"
        done[name] = parts.get(piece) or parts.keep(
            piece, _tune_and_ask(task, plan, start, case, questions, test, f"{task.name}, {name}")
        )
    return done


def _tune_and_ask(
    task: Task, plan: Plan, start: torch.Tensor, case: Case, questions: list[Question], test: list[Question], name: str
) -> Piece:
    tuning = Tuning(plan.pretraining, start)
    part: Piece = {}
    if case.tuned:
        order = batches(questions, task, seed=case.seed)
        with progress(name, len(order)) as advance:
            part["loss"] = tuning.tune(order, task, case.device(tuning.model), advance)
    with progress(f"{name}, test", len(test)) as advance:
        part["scores"] = tuning.ask(test, advance)
    return part


class Tuning:
    """A model that is tuned from ``start``, fp32[parameters]."""

    def __init__(self, pretraining: Setup, start: torch.Tensor) -> None:
        self.model = Llama(pretraining.shape, seed=pretraining.seed)
        self._weights, self._gradient = flatten(self.model)
        with torch.no_grad():
            self._weights.copy_(start)

    def tune(self, order: list[list[Question]], task: Task, device: Device, advance: Callable[[], None]) -> np.ndarray:
        """One step for each batch of ``order``; the losses before each update, fp64[steps]."""
        optimizer = torch.optim.AdamW(
            [self._weights], lr=task.learning_rate, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )
        losses: list[float] = []
        for step, batch in enumerate(order):
            self._gradient.zero_()
            with device.step(step):
                loss = F.cross_entropy(scores(self.model, batch), torch.tensor([one.answer for one in batch]))
                loss.backward()
            torch.nn.utils.clip_grad_norm_([self._weights], CLIP)
            for group in optimizer.param_groups:
                group["lr"] = task.learning_rate * rate(step, warmup=task.warm_up, steps=len(order))
            optimizer.step()
            losses.append(float(loss.detach()))
            advance()
        return np.array(losses)

    @torch.no_grad()
    def ask(self, questions: list[Question], advance: Callable[[], None]) -> np.ndarray:
        """The options' scores, fp64[questions, 4], in the order of the questions; not finite where the model has lost its
        numbers."""
        order = sorted(range(len(questions)), key=lambda i: _length(questions[i]))
        result = np.empty((len(questions), len(questions[0].options)))
        for first in range(0, len(order), 8):
            some = order[first : first + 8]
            result[some] = scores(self.model, [questions[i] for i in some]).double().numpy()
            for _ in some:
                advance()
        return result


def scores(model: Llama, questions: Sequence[Question]) -> torch.Tensor:
    """The mean log-likelihood of every option's bytes after its context, fp32[questions, 4]."""
    texts = [(question.context.encode(), option.encode()) for question in questions for option in question.options]
    longest = max(len(context) + len(option) for context, option in texts)
    # Padding stands behind what is read: under causal attention nothing before it sees it.
    ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    of_option = torch.zeros(len(texts), longest - 1)
    for row, (context, option) in enumerate(texts):
        end = len(context) + len(option)
        ids[row, :end] = torch.frombuffer(bytearray(context + option), dtype=torch.uint8)
        of_option[row, len(context) - 1 : end - 1] = 1 / len(option)
    logits = model(ids[:, :-1])
    likelihood = -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (likelihood.masked_fill(of_option == 0, 0.0) * of_option).sum(1).view(len(questions), -1)


def batches(questions: list[Question], task: Task, *, seed: int) -> list[list[Question]]:
    """The questions of every step, each once, in a drawn order; a batch has questions of about one length."""
    draw = random.Random(f"batches {seed}")
    drawn = draw.sample(questions, len(questions))
    drawn.sort(key=lambda question: _length(question) // LONGER)
    steps = [drawn[first : first + task.batch] for first in range(0, len(drawn), task.batch)]
    return draw.sample(steps, len(steps))


def _length(question: Question) -> int:
    """Of its longest sequence, in bytes."""
    return len(question.context.encode()) + max(len(option.encode()) for option in question.options)
