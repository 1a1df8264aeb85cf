"""Faults as data: what is accepted, what is refused and with which words, and when a fault is in force."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.errors import UsageError
from unsilent.lab.faults import (
    INTEGER_PATTERNS,
    INTEGER_SITES,
    PATTERNS,
    SITES,
    Fault,
    fault_from,
    read_faults,
    uniform,
)

FORWARD = {"site": "forward", "target": "layer", "rank": 1, "step": 3}
OPTIONS = {"bit_flip": {"bit": 3}, "scale": {"factor": 2.0}, "stuck_bit": {"bit": 3}, "gates": {"period": 4}}
WITHOUT_TARGET = {"reduction": {"rank": 1, "delivery": True}, "comparison": {"rank": 1}}


@pytest.mark.parametrize(
    ("site", "pattern"),
    [(s, p) for s in SITES for p in PATTERNS if s not in INTEGER_SITES or p in INTEGER_PATTERNS],
)
def test_every_site_takes_every_pattern_and_survives_the_way_through_plain_values(site: str, pattern: str) -> None:
    place = WITHOUT_TARGET.get(site, {"rank": 1, "target": "x"})
    fault = Fault(site=site, pattern=pattern, from_step=4, **place, **OPTIONS.get(pattern, {}))
    assert fault_from(fault.to_json()) == fault
    assert pattern in fault.describe()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"site": "foward"}, "unknown site 'foward': did you mean 'forward'"),
        ({"pattern": "bitflip", "bit": 3}, "unknown pattern 'bitflip': did you mean 'bit_flip'"),
        ({"probability": 1.5}, "between 0 and 1, not 1.5"),
        ({"probability": -0.1}, "between 0 and 1"),
        ({"probability": float("nan")}, "finite number"),
        ({"targt": "x"}, "no option 'targt': did you mean 'target'"),
        ({"target": ""}, "needs a target, the name of a module"),
        ({"site": "weight", "target": ""}, "the name of a parameter"),
        ({"rank": None}, "needs a rank"),
        ({"rank": -1}, "whole number from 0, not -1"),
        ({"node": "n2"}, "on a rank or on a node, not on both"),
        ({"site": "reduction", "target": "", "rank": None, "node": "n2"}, "a wrong sum reaches all ranks"),
        ({"step": "3"}, "step must be a whole number from 0, not '3'"),
        ({"step": True}, "step must be a whole number"),
        ({"steps": 0}, "steps must be a whole number from 1"),
        ({"site": "ids", "pattern": "nan"}, "holds integers"),
        ({"site": "operation", "target": ""}, "ATen operation, such as mm"),
        ({"phase": "forward"}, "belong to faults of an operation only"),
        ({"site": "operation", "target": "mm", "phase": "sideways"}, "unknown phase 'sideways'"),
        ({"site": "comparison", "pattern": "bit_flip", "bit": 3}, "has no target"),
        ({"pattern": "gates", "period": 3}, "one of 2, 4, 8, 16"),
        ({"pattern": "gates", "share": 1.5}, "up to 1"),
        ({"pattern": "gates", "share": 0.5, "period": 2}, "period and share exclude one another"),
        ({"rate": 2.0}, "rate must lie between 0 and 1"),
        ({"rate": 0.5, "count": 2}, "leave count and lane out"),
        ({"at_least": 2.0, "below": 1.0}, "must be above at_least"),
        ({"burst": 0.5}, "burst needs from_step"),
        ({"burst_steps": 2}, "burst_steps needs burst"),
        ({"off": 2}, "never comes back"),
        ({"from_step": 2}, "exclude one another"),
        ({"step": None}, "say when the fault fires"),
        ({"step": None, "from_step": 1, "steps": 2}, "steps needs step"),
        ({"pattern": "bit_flip"}, "needs a bit"),
        ({"pattern": "bit_flip", "bit": 64}, "no number has a bit 64"),
        ({"pattern": "scale"}, "needs a factor"),
        ({"pattern": "scale", "factor": float("inf")}, "factor must be a finite number"),
        ({"factor": 2.0}, "'zero' does not use factor"),
        ({"pattern": "stuck_lane", "add": 1.0, "relative": 0.1}, "add or relative, not both"),
        ({"pattern": "stuck_lane", "count": 2}, "does not use count"),
        ({"during_replay": "never"}, "unknown during_replay 'never'"),
        ({"delivery": True}, "faults of the reduction only"),
        ({"delivery": "yes", "site": "reduction"}, "true or false"),
        ({"key": "exp_avg_sq"}, "key belongs to"),
        ({"site": "reduction"}, "has no target"),
        ({"site": "reduction", "target": "", "rank": 1}, "a wrong sum reaches all ranks"),
        ({"site": "reduction", "target": "", "delivery": True, "rank": None}, "needs a rank"),
    ],
)
def test_what_is_refused_is_refused_in_words(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        fault_from({"pattern": "zero", **FORWARD, **options})
    assert words in str(caught.value)


@pytest.mark.parametrize("missing", ["site", "pattern"])
def test_site_and_pattern_are_asked_for(missing: str) -> None:
    options = {"pattern": "zero", **FORWARD}
    del options[missing]
    with pytest.raises(UsageError, match=f"needs a {missing}: one of"):
        fault_from(options)


@given(first=st.integers(0, 50), steps=st.integers(1, 9), step=st.integers(0, 70))
def test_in_force(first: int, steps: int, step: int) -> None:
    some = Fault(site="weight", target="w", pattern="zero", rank=0, step=first, steps=steps)
    forever = Fault(site="weight", target="w", pattern="zero", rank=0, from_step=first)
    assert some.in_force(step) == (step in range(first, first + steps))
    assert forever.in_force(step) == (step >= first)


def test_a_probability_alone_means_from_the_beginning() -> None:
    fault = Fault(site="weight", target="w", pattern="zero", rank=0, probability=0.5)
    assert fault.in_force(0)
    assert fault.in_force(1000)
    assert not fault.one_shot


def test_toml_one_fault_or_many(tmp_path: Path) -> None:
    one = tmp_path / "one.toml"
    one.write_text('site = "forward"\ntarget = "a"\npattern = "bit_flip"\nbit = 3\nrank = 2\nstep = 7\n')
    assert read_faults(one) == (Fault(site="forward", target="a", pattern="bit_flip", bit=3, rank=2, step=7),)
    many = tmp_path / "many.toml"
    many.write_text(
        '[[fault]]\nsite = "reduction"\npattern = "nan"\nstep = 1\n'
        '[[fault]]\nsite = "weight"\ntarget = "w"\npattern = "scale"\nfactor = 3\nrank = 0\nfrom_step = 2\n'
    )
    assert [fault.site for fault in read_faults(many)] == ["reduction", "weight"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no fault"),
        ("fault = []", "holds no fault"),
        ("fault = [3]", "holds no fault"),
        ("site = ", "is not valid TOML"),
        ('site = "forward"\n[[fault]]\nsite = "weight"', "keys beside"),
        ('site = "nowhere"\npattern = "zero"\nrank = 0\nstep = 1\ntarget = "x"', "unknown site 'nowhere'"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_faults(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the fault file"):
        read_faults(tmp_path / "none.toml")


def test_reading_a_fault_does_not_import_torch() -> None:
    code = "import sys, unsilent.lab.faults; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bursts_last_as_long_as_they_say_and_come_as_often() -> None:
    fault = Fault(site="forward", target="x", pattern="zero", rank=0, from_step=100, burst=0.02, burst_steps=3, seed=5)
    on = [fault.in_force(step) for step in range(20_000)]
    assert not any(on[:100])
    lengths: list[int] = []
    for before, now in itertools.pairwise(on):
        if now:
            lengths = [*lengths, 1] if not before else [*lengths[:-1], lengths[-1] + 1]
    assert min(lengths) == 3
    assert sum(on) / 19_900 == pytest.approx(1 - 0.98**3, rel=0.15)


def test_numbers_drawn_from_keys_are_even_and_fine_enough_for_rates_of_2e_9() -> None:
    drawn = [uniform(7, n) for n in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.01)
    assert all(0 <= x < 1 for x in drawn)
    assert any(x != round(x * 2**24) / 2**24 for x in drawn)  # single precision would make 6e-8 of 2e-9
