"""torch.distributed.checkpoint behind two verbs, with its warnings and its exceptions made ordinary."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from unsilent.checkpoint.files import DCP_METADATA
from unsilent.checkpoint.together import FailedOn
from unsilent.errors import CheckpointError
from unsilent.sharding import Block

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
class Place:
    """Where a tensor, or a block of it, lies."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds: its keys with shape and dtype (None for no tensor), paths, and where each key lies."""

    keys: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]
    paths: Mapping[str, tuple[str | int, ...]]
    places: Mapping[str, tuple[Place, ...]]

    @property
    def files(self) -> set[str]:
        return {place.file for places in self.places.values() for place in places}

    def file_of(self, key: str) -> str:
        """The file that holds it, "" where its blocks lie in several."""
        files = {place.file for place in self.places.get(key, ())}
        return files.pop() if len(files) == 1 else ""

    def tensors_of(self, file: str) -> tuple[str, ...]:
        return tuple(sorted(k for k, places in self.places.items() if self.keys.get(k) and _in(file, places)))

    def broken_in(self, path: Path, file: str) -> tuple[str, ...]:
        """The tensors whose own checksum in a damaged file fails; nothing is unpickled.

        The damage may lie elsewhere in the file, between the tensors or in what is no tensor: then there is none.
        """
        found: list[str] = []
        try:
            with (path / file).open("rb") as opened:
                for key in self.tensors_of(file):
                    places = [place for place in self.places[key] if place.file == file]
                    if any(_is_broken(opened, place) for place in places):
                        found.append(key)
        except OSError:  # what is known by then
            pass
        return tuple(found)


def _in(file: str, places: tuple[Place, ...]) -> bool:
    return any(place.file == file for place in places)


def _is_broken(file: IO[bytes], place: Place) -> bool:
    """Whether what ``torch.save`` wrote there, a zip archive, fails the checksums in it; torch does not look at them."""
    file.seek(place.offset)
    saved = file.read(place.length)
    try:
        with zipfile.ZipFile(io.BytesIO(saved)) as archive:
            return archive.testzip() is not None
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, struct.error):
        return True


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
    places: dict[str, list[Place]] = {}
    for index, info in (metadata.storage_data or {}).items():
        places.setdefault(index.fqn, []).append(Place(str(info.relative_path), int(info.offset), int(info.length)))
    return Contents(
        keys=keys,
        paths=dict(metadata.planner_data or {}),
        places={key: tuple(of_key) for key, of_key in places.items()},
    )


def read(path: Path, contents: Contents, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Load the wanted keys into fresh tensors on the CPU, in this process alone: no other rank is waited for.

    Raises:
        CheckpointError: it cannot be read.
    """
    flat: dict[str, Any] = {
        key: b"" if of is None else torch.empty(of[0], dtype=of[1]) for key, of in contents.keys.items() if wanted(key)
    }
    return _fill(path, flat, {})


def read_blocks(path: Path, contents: Contents, blocks: Mapping[str, Block]) -> dict[str, Block]:
    """Load a block of each of these tensors, fresh and on the CPU, however the tensor was cut when it was saved.

    Args:
        blocks: which block of each; its bits do not matter.

    Raises:
        CheckpointError: they cannot be read.
    """
    flat: dict[str, Any] = {}
    for key, block in blocks.items():
        of = contents.keys[key]
        assert of is not None
        flat[key] = torch.empty(block.part.shape, dtype=of[1])
    _fill(path, flat, {key: block.start for key, block in blocks.items()})
    return {key: replace(block, part=flat[key]) for key, block in blocks.items()}


def _fill(path: Path, flat: dict[str, Any], starts: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    planner = _Planner(starts)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(flat, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{type(cause).__name__}: {cause}") from error
    for key, tensor in flat.items():
        if isinstance(tensor, torch.Tensor) and planner.written[key] != tensor.numel():
            raise CheckpointError(
                f"only {planner.written[key]} of {tensor.numel()} elements of {key!r} are in its files"
            )
    return flat


class _Planner(DefaultLoadPlanner):
    """Fills plain tensors, whole ones or blocks that begin somewhere in the saved one, and counts what it has filled."""

    def __init__(self, starts: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self._starts = starts
        self.written = Counter[str]()

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        whole = {key: value for key, value in self.state_dict.items() if key not in self._starts}
        items = list(create_default_local_load_plan(whole, self.metadata).items)
        for key, start in self._starts.items():
            chunk = ChunkStorageMetadata(offsets=torch.Size(start), sizes=self.state_dict[key].size())
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, saved, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn]  # torch's own takes a position for one in its list of shards

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.written[read_item.dest_index.fqn] += tensor.numel()
