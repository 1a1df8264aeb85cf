"""The pieces of a long study, each kept in a file of its own as soon as it is done: an interrupted study goes on where it was."""

from __future__ import annotations

import json
import platform
import zipfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unsilent.errors import UsageError

Piece = dict[str, npt.NDArray[Any]]


class Parts:
    """Pieces by name, in files under ``folder``.

    Args:
        made_with: what the pieces depend on besides the code and the versions of torch and Python; a piece that was made with
            anything else counts as absent.
    """

    def __init__(self, folder: Path, made_with: object) -> None:
        # Bits depend on torch, and texts and questions are made of this Python's own library.
        versions = (version("torch"), platform.python_version())
        self._folder, self._made_with = folder, repr((versions, made_with))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {folder}: {error.strerror or error}") from error

    def get(self, name: str) -> Piece | None:
        """The piece, None if it is not there yet."""
        try:
            with self._path(name).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                piece = {key: file[key] for key in file.files}
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
            return None
        return piece if str(piece.pop("made_with", "")) == self._made_with else None

    def keep(self, name: str, piece: Mapping[str, Any]) -> Piece:
        """Write it, whole or not at all; gives it back as it will be read."""
        path = self._path(name)
        unfinished = path.with_suffix(".unfinished.npz")
        try:
            np.savez(unfinished, made_with=self._made_with, **piece)
            unfinished.replace(path)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
        return {key: np.asarray(value) for key, value in piece.items()}

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npz"


def write_figures(path: Path, record: Mapping[str, Any]) -> None:
    """Write a study's figures as JSON; what is no number must be None in them.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
