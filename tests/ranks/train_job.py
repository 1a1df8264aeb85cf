"""``unsilent train`` on the ranks of a pool, which have met already: what a rank of torchrun does, without the start."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from unsilent.cli import app
from unsilent.training import loop


def train(rank: int, size: int, out: Path, words: list[str]) -> dict[str, Any] | None:
    """Rank 0's JSON; every rank must have ended with 0."""
    here = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in here.items()})
    leave, codes = loop.leave, list[int]()
    loop.leave = codes.append  # type: ignore[assignment]  # ranks of a pool stay
    try:
        result = CliRunner().invoke(app, ["train", "--out", str(out), "--json", *words])
    finally:
        loop.leave = leave
        for name in here:
            del os.environ[name]
    if result.exception is not None:
        raise result.exception
    assert codes == [0], result.output
    return json.loads(result.stdout.splitlines()[-1]) if rank == 0 else None
