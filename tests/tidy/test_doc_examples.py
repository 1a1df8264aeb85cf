"""What the documents show runs, and what they name exists."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unsilent

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/guarantees.md",
    "docs/dependencies.md",
    "docs/symptoms.md",
    "docs/evidence.md",
    "docs/ledger.md",
    "docs/restart.md",
    "docs/lab.md",
    "docs/loops.md",
    "docs/parallelism.md",
    "docs/results/coverage.md",
    "docs/results/lab.md",
]
#: Named as what is not there until something has run, or as what a run makes.
MAY_BE_ABSENT = {"docs/results/gpu-check.json", "evidence.json", "events.jsonl", "exit.json", "exclude.json", "launch.json", "run.json", "launch/",
                 "campaign.json", "trials.csv", "campaign.html", "coverage.png",
                 "train.py", "out/run", "out/demo"}  # fmt: skip
#: Where a name without its folders is looked for: a document may leave out what its readers know.
FOLDERS = [ROOT, ROOT / "src" / "unsilent", ROOT / "docs"]
SUFFIXES = (".py", ".md", ".toml", ".json", ".jsonl", ".txt", ".csv")


def _text(document: str) -> str:
    return (ROOT / document).read_text()


def _code(document: str) -> Iterator[str]:
    """Everything set as code: in backticks and in indented lines."""
    text = re.sub(r"```.*?```", "", _text(document), flags=re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", text)
    yield from (line.split("  #")[0].strip() for line in text.splitlines() if line.startswith("    "))


def _commands(document: str, name: str) -> set[str]:
    return {match for code in _code(document) for match in re.findall(rf"(?:^|\s){name} ([a-z][a-z-]+)", code)}


def test_the_example_of_the_readme_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", _text("README.md"), flags=re.DOTALL)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    before = [p.detach().clone() for p in model.parameters()]
    names = {
        "unsilent": unsilent,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loss_fn": lambda model, batch: model(batch).square().mean(),
        "loader": [torch.randn(6, 4) for _ in range(3)],
    }
    with contextlib.redirect_stderr(io.StringIO()):
        exec(compile(example, "README.md", "exec"), names)
        guard, outcome = names["guard"], names["outcome"]
        assert isinstance(guard, unsilent.Guard) and isinstance(outcome, unsilent.Outcome)
        guard.close()
    assert guard.steps == 3 and outcome.verdict is None and outcome.action is unsilent.Action.CONTINUE
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_the_examples_of_loops_that_own_their_step_run() -> None:
    one, accumulating = re.findall(r"```python\n(.*?)```", _text("docs/loops.md"), flags=re.DOTALL)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    model.no_sync = contextlib.nullcontext  # type: ignore[assignment]  # as the wrapper of DDP has it
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [torch.randn(6, 4) for _ in range(6)]
    names: dict[str, Any] = {
        "unsilent": unsilent, "torch": torch, "contextlib": contextlib, "model": model, "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "loader": batches, "steps": [batches[:3], batches[3:]],
        "loss_fn": lambda model, batch: model(batch).square().mean(),
    }  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()):
        exec(compile(one, "docs/loops.md", "exec"), names)
        guard, watched = names["guard"], names["watched"]
        assert guard.steps == 6 and watched.verdict is None and watched.action is unsilent.Action.CONTINUE
        names["guard"] = unsilent.Guard(model, optimizer, names["loss_fn"])
        exec(compile(accumulating, "docs/loops.md", "exec"), names)
        assert names["guard"].steps == 2 and names["guard"].counts["audit"] == 1
        names["guard"].close()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_it_names_exists(document: str) -> None:
    links = {target for target in re.findall(r"\]\(([^)#]+)\)", _text(document)) if "://" not in target}
    named = {word for code in _code(document) for word in code.split() if re.fullmatch(r"[\w./-]+", word)}
    paths = {word for word in named if word.endswith((*SUFFIXES, "/")) and not word.startswith(("-", "/"))}
    folders = [*FOLDERS, (ROOT / document).parent]
    missing = {
        path
        for path in links | paths
        if path not in MAY_BE_ABSENT and not any((folder / path).exists() for folder in folders)
    }
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_it_names_exists(document: str) -> None:
    import typer.main

    app = importlib.import_module("unsilent.cli").app
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert _commands(document, "unsilent") <= known
    targets = set(re.findall(r"^([a-z-]+):", _text("Makefile"), flags=re.MULTILINE))
    assert _commands(document, "make") <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_option_it_names_exists(document: str) -> None:
    """``name=...`` in code is an option of the configuration, or of a call that the document shows."""
    fields = set(unsilent.GuardConfig.__dataclass_fields__) | {"micro_batches", "UNSILENT_NODE"}
    named = {match for code in _code(document) for match in re.findall(r"^([a-z_]+)=", code)}
    assert named <= fields


def test_the_readme_names_something_of_each_kind() -> None:
    """The patterns above find what they look for."""
    assert _commands("README.md", "make") >= {"demo", "test", "gpu-check"}
    assert _commands("README.md", "unsilent") >= {"train", "report", "verify", "doctor", "exec", "approve"}
