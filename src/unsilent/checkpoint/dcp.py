"""torch.distributed.checkpoint behind two verbs, with its warnings and its exceptions made ordinary."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from unsilent.checkpoint.files import DCP_METADATA
from unsilent.checkpoint.together import FailedOn
from unsilent.errors import CheckpointError

METADATA = DCP_METADATA


def write(tree: dict[str, Any], path: Path, group: dist.ProcessGroup | None) -> None:
    """Write what all ranks of the group offer into ``path``; without a group, this process writes all.

    Raises:
        FailedOn: a rank failed; every rank gets it.
    """
    try:
        with warnings.catch_warnings():
            # Said whenever there is no group, which is what was asked for here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            save(
                tree,
                storage_writer=FileSystemWriter(path, sync_files=True),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        raise FailedOn(rank, cause) from error


def is_written(path: Path) -> bool:
    return (path / METADATA).is_file()


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds: its keys with shape and dtype (None for no tensor), paths, and the file of each key."""

    keys: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]
    paths: Mapping[str, tuple[str | int, ...]]
    files: Mapping[str, str]

    def tensors_of(self, file: str) -> tuple[str, ...]:
        return tuple(sorted(k for k, f in self.files.items() if f == file and self.keys.get(k) is not None))


def read_contents(path: Path) -> Contents:
    """Read ``.metadata``. It is a pickle: verify its hash first.

    Raises:
        Exception: whatever a pickle can raise.
    """
    metadata = FileSystemReader(path).read_metadata()
    keys = {
        key: (tuple(of.size), of.properties.dtype) if isinstance(of, TensorStorageMetadata) else None
        for key, of in metadata.state_dict_metadata.items()
    }
    files = {index.fqn: str(info.relative_path) for index, info in (metadata.storage_data or {}).items()}
    return Contents(keys=keys, paths=dict(metadata.planner_data or {}), files=files)


def read(path: Path, contents: Contents, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Load the wanted keys into fresh tensors on the CPU, in this process alone: no other rank is waited for.

    Raises:
        CheckpointError: it cannot be read.
    """
    flat: dict[str, Any] = {
        key: b"" if of is None else torch.empty(of[0], dtype=of[1]) for key, of in contents.keys.items() if wanted(key)
    }
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(flat, storage_reader=FileSystemReader(path), no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{type(cause).__name__}: {cause}") from error
    return flat
