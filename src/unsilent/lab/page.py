"""One self-contained HTML page for a study or a campaign: tables and plots in the file itself, nothing loaded from elsewhere."""

from __future__ import annotations

import datetime
import io
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unsilent.errors import UsageError

PAPER, HERE = "paper", "here"
"""The columns that every page uses to set its figures beside published ones."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One section.

    Attributes:
        paragraphs: plain text, one string each.
        columns, rows: a table, where there is one; every row has as many cells as there are columns.
        plot: SVG text of :func:`svg`, where there is one; ``caption`` says what it shows, without the text around it.
    """

    title: str
    paragraphs: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    plot: str = ""
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: a row has {len(row)} cells for {len(self.columns)} columns")


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page: what was asked, what came out in one paragraph, the parts, and under which conditions."""

    title: str
    lead: str
    parts: Sequence[Part]
    conditions: dict[str, Any] = field(default_factory=dict[str, Any])

    def write(self, path: Path) -> None:
        """Write it as one HTML file.

        Raises:
            UsageError: the file cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.html())
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}") from error

    def html(self) -> str:
        from jinja2 import Environment

        return (
            Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_TEMPLATE).render(page=self)
        )


def beside(title: str, rows: Sequence[tuple[Any, Any, Any]], *, paragraphs: Sequence[str] = ()) -> Part:
    """The table that sets what a paper states beside what was measured here; a row is (what, paper, here)."""
    return Part(title=title, columns=("", PAPER, HERE), rows=rows, paragraphs=paragraphs)


def conditions(command: str) -> dict[str, Any]:
    """What the figures depend on, and nothing that names this machine."""
    import torch

    return {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, no GPU used",
        "threads": torch.get_num_threads(),
    }


def pyplot() -> Any:
    """matplotlib's pyplot, without a window.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError("plots need the package matplotlib: pip install 'unsilent[plots]'") from error
    matplotlib.use("Agg")
    # The same figures give the same bytes.
    matplotlib.rcParams.update({"svg.hashsalt": "unsilent", "font.size": 10, "axes.grid": True, "grid.alpha": 0.3})
    from matplotlib import pyplot as plots

    return plots


def svg(figure: Any) -> str:
    """A matplotlib figure as SVG text, to be put into a page; the figure is closed."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    pyplot().close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
.lead { font-size: 1.15rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { border-bottom: 1px solid #ddd; padding: 0.3rem 0.7rem; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #888; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
figcaption, footer { color: #555; font-size: 0.9rem; }
code { font-size: 0.9em; }
</style>
</head>
<body>
<h1>{{ page.title }}</h1>
<p class="lead">{{ page.lead }}</p>
{% for part in page.parts %}
<h2>{{ part.title }}</h2>
{% for paragraph in part.paragraphs %}
<p>{{ paragraph }}</p>
{% endfor %}
{% if part.plot %}
<figure>{{ part.plot | safe }}<figcaption>{{ part.caption }}</figcaption></figure>
{% endif %}
{% if part.columns %}
<div class="wide"><table>
<tr>{% for column in part.columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in part.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endif %}
{% endfor %}
{% if page.conditions %}
<footer><h2>Conditions</h2><table>
{% for name, value in page.conditions.items() %}
<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}
</table></footer>
{% endif %}
</body>
</html>
"""
