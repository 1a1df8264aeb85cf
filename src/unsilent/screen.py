"""What people are told on the screen: a closed pipe or a full disk behind it costs the words, never the run."""

from __future__ import annotations

import contextlib
import sys


def show(text: str, *, out: bool = False) -> None:
    """Print ``text`` as a line on stderr, or on stdout where ``out`` is set; never raises because of where it goes."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stdout if out else sys.stderr, flush=True)
