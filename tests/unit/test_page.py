"""Result pages: one file that needs nothing else, with everything escaped that came from a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unsilent.errors import UsageError
from unsilent.lab.page import Page, Part, beside, conditions, pyplot, svg


def plot() -> str:
    figure, axes = pyplot().subplots()
    axes.plot([0, 1], [1, 0])
    return svg(figure)


def test_a_page_holds_its_tables_plots_and_conditions_and_loads_nothing() -> None:
    parts = [
        Part(title="A table", columns=("what", "n"), rows=[("a < b", 3)], paragraphs=["One sentence."]),
        Part(title="A plot", plot=plot(), caption="simulated: something over time"),
        beside("Beside the paper", [("mismatch", "1.55e-5", "1.6e-5")]),
    ]
    page = Page(title="A study", lead="What came out.", parts=parts, conditions=conditions("unsilent study x")).html()
    assert "a &lt; b" in page
    assert "<svg" in page
    assert "simulated: something over time" in page
    assert "<th>paper</th><th>here</th>" in page
    assert "unsilent study x" in page
    addresses = set(re.findall(r'(?:src|href)="([^"#][^"]*)"', page))
    assert not addresses, "a page must stand alone"


def test_the_same_figures_give_the_same_bytes() -> None:
    assert plot() == plot()


def test_a_row_of_another_length_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="2 cells for 3 columns"):
        Part(title="x", columns=("a", "b", "c"), rows=[(1, 2)])


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        Page(title="x", lead="", parts=[]).write(tmp_path / "file" / "page.html")


def test_conditions_name_no_machine() -> None:
    import socket

    assert socket.gethostname() not in str(conditions("x"))
