"""Files that survive a crash: hash them, force them to disk, replace them in one piece, take them away in one piece."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from unsilent.checkpoint.certificate import CERTIFICATE, Certificate, FileDigest, Problem
from unsilent.errors import CheckpointError

DCP_METADATA = ".metadata"
_PARTIAL = ".partial-"
_REPLACED = ".replaced-"
_STEP = re.compile(r"step-(\d{8,})")
_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")
_BLOCK = 1 << 20


def step_name(steps: int) -> str:
    return f"step-{steps:08d}"


def steps_of(path: Path) -> int | None:
    """The updates completed that a checkpoint's directory name states; None for another kind of name.

    One that was put aside to be replaced counts as long as nothing has taken its name.
    """
    name = path.name.removeprefix(_REPLACED)
    match = _STEP.fullmatch(name)
    if name != path.name and path.with_name(name).exists():
        return None
    return int(match[1]) if match else None


def partial_path(root: Path, steps: int) -> Path:
    return root / f"{_PARTIAL}{step_name(steps)}"


def clean_partials(root: Path) -> None:
    """Take away what interrupted saves have left behind."""
    for path in root.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def finish_replacing(root: Path) -> None:
    """Bring to its end a :func:`publish` that was killed: what it had put aside goes, or gets its name back.

    Raises:
        OSError: it cannot be renamed.
    """
    for aside in list(root.glob(f"{_REPLACED}*")):
        final = aside.with_name(aside.name.removeprefix(_REPLACED))
        if final.exists():
            remove(aside)
        else:
            aside.rename(final)
            sync_directory(root)


def files_in(path: Path) -> list[str]:
    """The files of a checkpoint, relative and with forward slashes, without its certificate."""
    names = (p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    return sorted(n for n in names if n != CERTIFICATE and not n.startswith(f".{CERTIFICATE}."))


def written_by(name: str) -> int | None:
    """The rank whose data a file of DCP holds (``__3_0.distcp``); None for a file of another name."""
    match = _OF_RANK.fullmatch(name)
    return int(match[1]) if match else None


def digest(path: Path, *, sync: bool = False) -> FileDigest:
    """Read a whole file and say what it holds; ``sync`` forces it to disk first.

    Raises:
        OSError: it cannot be read.
    """
    sha, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(_BLOCK):
            sha.update(block)
            size += len(block)
    return FileDigest(sha256=sha.hexdigest(), size=size)


def digests(path: Path, names: Iterable[str], *, sync: bool = False) -> dict[str, FileDigest]:
    return {name: digest(path / name, sync=sync) for name in names}


def sync_directory(path: Path) -> None:
    """Force a directory's entries to disk, so that a rename in it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_certificate(path: Path, certificate: Certificate) -> None:
    """Put the certificate beside the files it speaks of: the old one or the new one is there, never half of one.

    Raises:
        OSError: it cannot be written.
    """
    aside = path / f".{CERTIFICATE}.{uuid.uuid4().hex}"
    with aside.open("w", encoding="utf-8") as file:
        file.write(certificate.dumps())
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path / CERTIFICATE)
    sync_directory(path)


def read_certificate(path: Path) -> Certificate | None:
    """The certificate of a checkpoint; None when it has none.

    Raises:
        CheckpointError: it is damaged or cannot be read.
    """
    try:
        return Certificate.loads((path / CERTIFICATE).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"the certificate cannot be read: {error}") from error


def publish(partial: Path, final: Path) -> None:
    """Give a complete checkpoint its name; one that has the name already is replaced.

    The old one is put aside, and deleted only when the new one has the name, so that a kill never loses both.

    Raises:
        OSError: it cannot be renamed; the old one has its name still.
    """
    for directory in sorted({p.parent for p in partial.rglob("*")} | {partial}):
        sync_directory(directory)
    aside = final.with_name(f"{_REPLACED}{final.name}")
    replaces = final.exists()
    if replaces:
        final.rename(aside)
        sync_directory(final.parent)
    try:
        partial.rename(final)
    except OSError:
        if replaces:
            aside.rename(final)
        raise
    sync_directory(final.parent)
    if replaces:
        with contextlib.suppress(OSError):  # the next save tries again
            remove(aside)


def remove(path: Path) -> None:
    """Take a checkpoint away: the name goes first and in one piece, so that no half of one is ever found.

    Raises:
        OSError: it cannot be renamed.
    """
    aside = path.with_name(f"{_PARTIAL}removed-{path.name}-{uuid.uuid4().hex[:8]}")
    path.rename(aside)
    sync_directory(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def damaged_files(path: Path, certificate: Certificate) -> list[Problem]:
    """Every file that is not what the certificate says, found without opening any of them as anything but bytes."""
    problems: list[Problem] = []
    for name, expected in certificate.files.items():
        try:
            size = (path / name).stat().st_size
            if size != expected.size:
                reason = f"the file has {size} bytes, the certificate says {expected.size}"
            elif digest(path / name).sha256 != expected.sha256:
                reason = "the file's SHA-256 is not the one in the certificate"
            else:
                continue
        except FileNotFoundError:
            reason = "the file is missing"
        except OSError as error:
            reason = f"the file cannot be read: {error}"
        problems.append(Problem(path=str(path), file=name, reason=reason))
    return problems
