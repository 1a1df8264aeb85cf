"""Multiple-choice questions from the sources of Python's standard library.

``next-line``   which of four lines follows these six lines of code?
``ending``      which of four endings completes this line of code, after two others?

Files are split into those for training and those that are held out, by a digest of their paths; a question is made of one
part's files only. The wrong options are right answers of questions from three other files of the same part, so an option
tells nothing by itself; indentation tells nothing either: all options have that of the right one. No answer is the right one twice, and
no right answer of a held-out question is one in training.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from unsilent.errors import UsageError
from unsilent.training.data import standard_library_files

OPTIONS = 4
LINES, LINES_BEFORE_ENDING = 6, 2
LONGEST_CONTEXT, LONGEST_OPTION = 160, 72  # bytes
FEWEST_LETTERS = 8
"""Letters and digits that an answer has at least: ``else:`` and ``pass`` are no answers."""
MOST_PER_FILE, FEWEST_FILES = 64, 20
HELD_OUT = 0.42


@dataclass(frozen=True, kw_only=True)
class Question:
    """``options[answer]`` is what follows ``context``."""

    context: str
    options: tuple[str, ...]
    answer: int


@dataclass(frozen=True, kw_only=True)
class Example:
    """What a question is made of: ``answer`` follows ``context``, with ``indent`` before it, in ``file``."""

    file: str
    context: str
    indent: str
    answer: str

    @property
    def line(self) -> str:
        """The line of the source that the answer is, or completes, without indentation."""
        begun = self.context[self.context.rfind("\n") + 1 :]
        return (begun + self.answer).strip()


@dataclass(frozen=True, kw_only=True)
class Library:
    """Sources by their relative paths, in two parts that share no file."""

    training: dict[str, str]
    held_out: dict[str, str]

    def training_text(self) -> bytes:
        """All files for training, one after another."""
        return "".join(self.training.values()).encode()

    def training_lines(self) -> frozenset[str]:
        """All lines of the files for training, without indentation: what a model has read in pre-training."""
        return frozenset(line.strip() for text in self.training.values() for line in text.splitlines())


def library() -> Library:
    """This Python's standard library; files that are no UTF-8 are left out."""
    parts: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for name, path in standard_library_files().items():
        text = _read(path)
        if text is not None:
            parts[is_held_out(name)][name] = text
    return Library(training=parts[0], held_out=parts[1])


def is_held_out(name: str) -> bool:
    """Whether the file of this relative path is held out."""
    return hashlib.sha256(name.encode()).digest()[0] < HELD_OUT * 256


def next_lines(file: str, text: str) -> Iterator[Example]:
    """Six lines of code and the seventh."""
    for window in _windows(text, LINES + 1):
        *before, after = window
        answer = after.lstrip()
        yield Example(file=file, context="\n".join(before) + "\n", indent=after[: -len(answer)], answer=answer)


def endings(file: str, text: str) -> Iterator[Example]:
    """Two lines of code and the beginning of a third, and how that ends; it is cut before the word nearest to its middle."""
    for window in _windows(text, LINES_BEFORE_ENDING + 1):
        *before, last = window
        words = [word.start() for word in re.finditer(r"\b\w", last.lstrip())][1:]
        if words:
            indent = len(last) - len(last.lstrip())
            cut = indent + min(words, key=lambda start: abs(start - (len(last) - indent) / 2))
            yield Example(file=file, context="\n".join([*before, last[:cut]]), indent="", answer=last[cut:])


TASKS: dict[str, Callable[[str, str], Iterator[Example]]] = {"next-line": next_lines, "ending": endings}


def make_questions(
    task: str, sources: dict[str, str], count: int, *, seed: int, read: frozenset[str] = frozenset()
) -> list[Question]:
    """``count`` questions, the same ones for the same seed.

    Args:
        read: lines that a model has read; no question's answer, or the line that it completes, is one of them.

    Raises:
        UsageError: the sources do not have as many.
    """
    draw = random.Random(f"{task} {seed}")
    examples = _examples(task, sources, count, draw, read)
    if len(examples) < count or len({example.file for example in examples}) < OPTIONS:
        raise UsageError(f"the {len(sources)} files make {len(examples)} questions for the task {task}, not {count}")
    return [_question(example, examples, draw) for example in examples]


def answers(questions: list[Question]) -> frozenset[str]:
    """Their right answers, without indentation."""
    return frozenset(question.options[question.answer].strip() for question in questions)


def guess(question: Question) -> int:
    """What someone answers who only compares letters: the option with the largest share of its trigrams in the context; the
    first of several."""
    known = _trigrams(question.context)
    shares = [len(own & known) / max(1, len(own)) for option in question.options for own in [_trigrams(option)]]
    return shares.index(max(shares))


def _windows(text: str, size: int) -> Iterator[list[str]]:
    """So many lines in a row; blank lines are left out, and the indentation that they share."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    for i in range(len(lines) - size + 1):
        window = lines[i : i + size]
        common = min(len(line) - len(line.lstrip()) for line in window)
        yield [line[common:] for line in window]


def _examples(
    task: str, sources: dict[str, str], count: int, draw: random.Random, read: frozenset[str]
) -> list[Example]:
    """Up to ``count``, from files in a drawn order, no answer twice."""
    most = max(1, min(MOST_PER_FILE, count // FEWEST_FILES))
    files = list(sources)
    draw.shuffle(files)
    found: dict[str, Example] = {}
    for file in files:
        its = [example for example in TASKS[task](file, sources[file]) if _is_fit(example)]
        draw.shuffle(its)
        new = [example for example in its if example.line not in read and example.answer not in found]
        found |= {example.answer: example for example in new[:most]}
        if len(found) >= count:
            break
    return list(found.values())[:count]


def _is_fit(example: Example) -> bool:
    letters = len(re.sub(r"[\W_]", "", example.answer))
    size = len((example.indent + example.answer).encode())
    return letters >= FEWEST_LETTERS and size <= LONGEST_OPTION and len(example.context.encode()) <= LONGEST_CONTEXT


def _question(example: Example, examples: list[Example], draw: random.Random) -> Question:
    options = {example.file: example.answer}  # by file: each option comes from another
    while len(options) < OPTIONS:
        other = draw.choice(examples)
        options.setdefault(other.file, other.answer)
    shown = list(options.values())
    draw.shuffle(shown)
    return Question(
        context=example.context,
        options=tuple(example.indent + answer + "\n" for answer in shown),
        answer=shown.index(example.answer),
    )


def _trigrams(text: str) -> set[str]:
    text = text.strip().lower()
    return {text[i : i + 3] for i in range(len(text) - 2)}


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
