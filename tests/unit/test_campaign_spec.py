"""A campaign's specification: what is wrong with it is said with its line, before anything runs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unsilent.cli import app
from unsilent.errors import UsageError
from unsilent.lab.campaign.spec import Places, parallelism_from, read_spec, spec_from
from unsilent.lab.campaign.trial import model_of
from unsilent.lab.campaign.trials import CLEAN, DEVICE, Sick, Trial, trials_of
from unsilent.lab.faults import Fault
from unsilent.lab.studies.llama import Llama

CAMPAIGNS = Path(__file__).parents[2] / "campaigns"

TEXT = """\
name = "test"
units = [11]

[job]
steps = 6
seeds = 2
parallelism = ["ddp-3", "ddp-4-on-3"]

[checks.default]
audit_every = 2
replicas_every = 0
update = { rule = "robust" }

[sites.forward]
target = ["blocks.*.ffn.up", "head"]

[sites."wrong sum"]
site = "reduction"

[faults.now-and-then]
pattern = "zero"
probability = 0.5
from_step = [2, 3]

[faults.bit]
pattern = "bit_flip"
bit = 20
step = 2
sites = ["forward"]
"""


@cache
def model() -> Llama:
    return model_of(spec_from(TEXT, path="x").job)


def trials(text: str = TEXT) -> tuple[Trial, ...]:
    return trials_of(spec_from(text, path="x.toml"), model())


def test_every_combination_is_a_trial_once_and_every_job_has_a_clean_one() -> None:
    every = trials()
    # 2 seeds × 2 jobs × 1 set of checks × (2 sites × 1 fault + 1 site × 1 fault + 1 unit + 1 without)
    assert len(every) == len({t.name for t in every}) == 2 * 2 * (2 + 1 + 1 + 1)
    assert sum(t.site == CLEAN and t.fault is None for t in every) == 4
    assert [isinstance(t.fault, Sick) for t in every if t.site == DEVICE] == [True] * 4


def test_what_is_left_open_is_drawn_the_same_way_every_time() -> None:
    assert trials() == trials()
    faults = [t.fault for t in trials() if isinstance(t.fault, Fault)]
    forward = [f for f in faults if f.site == "forward"]
    assert {f.target for f in forward} <= {"head", *(f"blocks.{i}.ffn.up" for i in range(4))}
    assert len({f.target for f in forward}) > 1
    assert len({f.rank for f in forward}) > 1
    assert {f.from_step for f in forward} >= {2, 3}
    assert len({f.seed for f in faults}) == len(faults)
    assert all(f.rank is None for f in faults if f.site == "reduction")


def test_ranks_are_spread_over_nodes() -> None:
    four = parallelism_from("ddp-4-on-3")
    assert [four.node(rank) for rank in range(4)] == ["node-0", "node-0", "node-1", "node-2"]
    assert len({parallelism_from("ddp-3").node(rank) for rank in range(3)}) == 3


def test_zero_switches_a_period_off() -> None:
    checks = spec_from(TEXT, path="x").checks["default"]
    assert (checks.audit_every, checks.replicas_every) == (2, None)
    assert checks.update is not None and checks.update.rule == "robust"


@pytest.mark.parametrize("name", ["quick", "full"])
def test_the_campaigns_in_the_repository_are_right(name: str) -> None:
    spec = read_spec(CAMPAIGNS / f"{name}.toml")
    assert len(trials_of(spec, model_of(spec.job))) >= {"quick": 300, "full": 5000}[name]


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        ('name = "test"', "name = 3", 1, "name must be a string"),
        ('name = "test"', 'nome = "test"', 1, "did you mean 'name'"),
        ("units = [11]", "units = [16]", 2, "there is no unit 16"),
        ("units = [11]", "units = [13]", 2, "unit 13 errs from step 450 on"),
        ("units = [11]", "units = 11", 2, "units must be a list"),
        ("[job]", "[jobs]", 4, "did you mean 'job'"),
        ("steps = 6", "steps = 0", 5, "steps must be a whole number from 1"),
        ("steps = 6", "stepz = 6", 5, "did you mean 'steps'"),
        ("steps = 6", 'model = "huge"', 5, "no model shape 'huge'"),
        ('"ddp-3"', '"fsdp-4"', 7, "sharded jobs come in a later part"),
        ('"ddp-3"', '"dpp-4"', 7, "unknown parallelism 'dpp-4'"),
        ('"ddp-3"', '"ddp-3-on-4"', 7, "at most as many nodes"),
        ('"ddp-3"', '"ddp-4-on-3"', 7, "names a job twice"),
        ("[checks.default]", "[sites.default]", 1, "at least one table [checks.NAME]"),
        ("audit_every = 2", "audits_every = 2", 10, "did you mean 'audit_every'"),
        ("audit_every = 2", 'audit_every = "2"', 10, "audit_every must be a whole number, not '2'"),
        ("audit_every = 2", "audit_every = -1", 10, "audit_every is -1"),
        ("audit_every = 2", 'directory = "x"', 10, "there is no check option 'directory'"),
        ("rule =", "rules =", 12, "did you mean 'rule'"),
        ('"robust"', '"rabust"', 12, "the update rule is 'rabust'"),
        ("[sites.forward]", "[sites.foward]", 29, "there is no [sites.forward]: did you mean 'foward'"),
        (
            '[sites."wrong sum"]\nsite = "reduction"',
            "[sites.reductoin]",
            17,
            "unknown site 'reductoin': did you mean 'reduction'",
        ),
        ('site = "reduction"', 'site = "reductions"', 18, "unknown site 'reductions'"),
        ('"head"', '"haed"', 15, "target 'haed' fits nothing in the model"),
        ('site = "reduction"', "delivery = 1", 18, "delivery must be true or false"),
        ('pattern = "zero"', 'pattern = "zeros"', 21, "unknown pattern 'zeros'"),
        ('pattern = "zero"', "", 20, "a fault needs a pattern"),
        ("probability = 0.5", "probability = 1.5", 22, "probability must lie between 0 and 1"),
        ("probability = 0.5", "rate = 1.5", 22, "rate must lie between 0 and 1"),
        ("probability = 0.5", "probabilty = 0.5", 22, "did you mean 'probability'"),
        ("probability = 0.5", "node = 'node-0'\nrank = 1", 22, "a fault is on a rank or on a node"),
        ("from_step = [2, 3]", "from_step = []", 23, "an empty list"),
        ("from_step = [2, 3]", "from_step = 6", 23, "from_step 6 never comes"),
        ("bit = 20", "bit = 63", 27, "there is no bit 63"),
        ("step = 2\n", "step = 2\nrank = 3\n", 29, "rank 3 is outside ddp-3"),
        ("step = 2\n", 'step = 2\ntarget = "head"\n', 29, "target is given here and by [sites.forward] (line 15)"),
        ('sites = ["forward"]', 'sites = ["backward"]', 29, "there is no [sites.backward]"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(old: str, new: str, line: int, reason: str) -> None:
    assert TEXT.count(old) >= 1
    with pytest.raises(UsageError) as caught:
        trials(TEXT.replace(old, new, 1))
    assert str(caught.value).startswith(f"x.toml, line {line}: ")
    assert reason in str(caught.value)


def test_a_file_that_is_no_toml_or_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"x\.toml is not valid TOML: .*line 2"):
        spec_from("a = 1\nb = = 2\n", path="x.toml")
    with pytest.raises(UsageError, match="cannot read the campaign"):
        read_spec(tmp_path / "nothing.toml")


def test_lines_are_found_in_tables_with_quoted_names_and_of_tables_themselves() -> None:
    places = Places(path="x", text=TEXT)
    assert places.line("sites.wrong sum", "site") == 18
    assert places.line("", "faults") == 20
    assert places.line("faults", "bit") == 25
    assert places.line("faults.bit") == 25
    assert places.line("faults.bit", "nothing") == 25
    assert places.line("nothing") == 1


def test_the_command_refuses_a_wrong_campaign_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text(TEXT.replace("probability = 0.5", "probability = 2"))
    answer = CliRunner().invoke(app, ["campaign", str(tmp_path / "wrong.toml"), "--out", str(tmp_path / "out")])
    assert answer.exit_code == 2
    assert "line 22: probability must lie between 0 and 1, not 2" in answer.stderr
    assert not (tmp_path / "out").exists()
