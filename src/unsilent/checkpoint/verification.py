"""Compare a checkpoint with its certificate, offline and without a model; and give certificates to other writers."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unsilent.checkpoint import dcp
from unsilent.checkpoint.certificate import CERTIFICATE, Certificate, CheckRun, Problem, Status
from unsilent.checkpoint.composed import Part, compose, parts_of
from unsilent.checkpoint.files import (
    damaged_files,
    digests,
    files_in,
    read_certificate,
    sync_directory,
    write_certificate,
)
from unsilent.checkpoint.state import fingerprints, tensors_in
from unsilent.checkpoint.together import Together
from unsilent.errors import CheckpointError, UsageError
from unsilent.fingerprints import Fingerprint
from unsilent.sharding import block_of

_PIECE = 1 << 30  # bytes of tensors that are in memory at a time


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def certify(
    state: Mapping[str, Any],
    *,
    steps: int,
    checks: Sequence[CheckRun] = (),
    world_size: int = 1,
    ranks: Together | None = None,
) -> Certificate:
    """The certificate of a state that somebody else is about to write. Nested dictionaries are named as DCP names them.

    Give the copy that is written, so that what changes afterwards does not matter.

    Args:
        ranks: those that hold the state together, each a part of it; all of them call it. None where this rank holds all.

    Raises:
        UsageError: a tensor is sparse, quantized or on the meta device; or it is distributed, and there are no ``ranks``.
        CheckpointError: what the ranks hold of a tensor is not the whole of it.
    """
    tensors = tensors_in(state)
    if ranks is None:
        prints = fingerprints(tensors)
    else:
        parts: list[dict[str, Part]] = []
        ranks.each(
            "take fingerprints", lambda: parts.append(parts_of({n: block_of(t) for n, t in tensors.items()}, ranks))
        )
        prints = compose(parts[0], ranks)
    return Certificate(
        steps=steps,
        created=now(),
        torch=torch.__version__,
        world_size=world_size,
        checks=tuple(checks),
        tensors={name: f.to_json() for name, f in prints.items()},
    )


def attach(certificate: Certificate, path: Path | str) -> Certificate:
    """Hash the files that another writer has written into the directory ``path`` and put the certificate beside them.

    Returns:
        the certificate with the files' digests.

    Raises:
        UsageError: ``path`` is no directory, or it is empty.
        OSError: a file cannot be read, or the certificate cannot be written.
    """
    path = Path(path)
    if not path.is_dir():
        raise UsageError(f"{path} is no directory: give the directory that holds the checkpoint's files")
    names = files_in(path)
    if not names:
        raise UsageError(f"{path} holds no files: attach the certificate once the checkpoint has been written")
    complete = replace(certificate, files=digests(path, names, sync=True))
    sync_directory(path)
    write_certificate(path, complete)
    return complete


def verify(path: Path | str) -> list[Problem]:
    """Everything in which a checkpoint differs from its certificate: hashes first, then the tensors themselves.

    Single process, no model. No file is unpickled unless its hash has been verified. Files that are not written by
    torch.distributed.checkpoint are compared by their hashes only.
    """
    path = Path(path)
    if not path.is_dir():
        return [Problem(path=str(path), reason="there is no such directory")]
    try:
        certificate = read_certificate(path)
    except CheckpointError as error:
        return [Problem(path=str(path), file=CERTIFICATE, reason=str(error))]
    if certificate is None:
        return [Problem(path=str(path), file=CERTIFICATE, reason="there is no certificate: nothing can be verified")]
    problems: list[Problem] = []
    if certificate.status is Status.DISTRUSTED:
        problems.append(Problem(path=str(path), reason=f"it is distrusted: {certificate.reason}"))
    damaged = verify_files(path, certificate)
    if damaged or not dcp.is_written(path):
        return problems + damaged
    try:
        return problems + _verify_tensors(path, certificate)
    except Exception as error:  # noqa: BLE001 - unreadable, whatever the reason, is a problem to report
        return [*problems, Problem(path=str(path), reason=f"it cannot be read: {reason_of(error)}")]


def verify_files(path: Path, certificate: Certificate) -> list[Problem]:
    """Compare every file with its hash; a damaged one is named with the tensors in it, where ``.metadata`` is sound."""
    damaged = damaged_files(path, certificate)
    if not dcp.is_written(path):
        return damaged
    if dcp.METADATA not in certificate.files:
        return [*damaged, Problem(path=str(path), file=dcp.METADATA, reason="the certificate does not cover this file")]
    if any(problem.file == dcp.METADATA for problem in damaged):
        return damaged
    try:
        contents = dcp.read_contents(path)
    except Exception as error:  # noqa: BLE001 - unreadable, whatever the reason, is a problem to report
        return [*damaged, Problem(path=str(path), file=dcp.METADATA, reason=f"it cannot be read: {reason_of(error)}")]
    uncovered = sorted(contents.files - set(certificate.files))
    return [_located(problem, path, contents) for problem in damaged] + [
        Problem(
            path=str(path), file=file, tensors=contents.tensors_of(file), reason="the certificate does not cover it"
        )
        for file in uncovered
    ]


def _located(problem: Problem, path: Path, contents: dcp.Contents) -> Problem:
    """The damage of a file, with the tensors that lie in it, and in words those that it hits."""
    hit = contents.broken_in(path, problem.file)
    said = (
        f"; by its own checksum it hits {hit[0]!r}" + (f" and {len(hit) - 1} more" if len(hit) > 1 else "")
        if hit
        else ""
    )
    return replace(problem, reason=problem.reason + said, tensors=contents.tensors_of(problem.file))


def differences(path: Path, certificate: Certificate, contents: dcp.Contents, flat: Mapping[str, Any]) -> list[Problem]:
    """Where what was read, all or a part of it, is not what was certified before it was written."""
    return (
        _missing(path, certificate, contents)
        + _differing_tensors(path, certificate, contents, flat)
        + _differing_values(path, certificate, contents, flat)
    )


def _missing(path: Path, certificate: Certificate, contents: dcp.Contents) -> list[Problem]:
    return [
        Problem(path=str(path), tensors=(name,), reason="the certificate names a tensor that the checkpoint lacks")
        for name in certificate.tensors
        if contents.keys.get(name) is None
    ]


def _differing_tensors(
    path: Path, certificate: Certificate, contents: dcp.Contents, flat: Mapping[str, Any]
) -> list[Problem]:
    problems: list[Problem] = []
    for name, found in fingerprints({k: v for k, v in flat.items() if isinstance(v, Tensor)}).items():
        expected = certificate.tensors.get(name)
        try:
            if expected is None:
                reason = "the certificate does not cover this tensor"
            elif Fingerprint.from_json(expected) != found:
                reason = f"the tensor's fingerprint is {found.hex}, the certificate says {expected.get('hex')}"
            else:
                continue
        except UsageError as error:
            reason = f"the certificate cannot be read: {error}"
        problems.append(Problem(path=str(path), file=contents.file_of(name), tensors=(name,), reason=reason))
    return problems


def _differing_values(
    path: Path, certificate: Certificate, contents: dcp.Contents, flat: Mapping[str, Any]
) -> list[Problem]:
    wrong = {
        f"rng.{rank}": "the saved random state is not the certified one"
        for rank, expected in certificate.rng.items()
        if f"rng.{rank}" in flat and rng_digest(flat[f"rng.{rank}"]) != expected
    }
    if flat.get("steps", certificate.steps) != certificate.steps:
        wrong["steps"] = f"it was saved after {flat['steps']} steps, the certificate says {certificate.steps}"
    return [
        Problem(path=str(path), file=contents.file_of(key), tensors=(key,), reason=reason)
        for key, reason in wrong.items()
    ]


def rng_bytes(rng: Any) -> bytes:
    return pickle.dumps(rng, protocol=pickle.HIGHEST_PROTOCOL)


def rng_digest(data: Any) -> str:
    return sha256(data if isinstance(data, bytes) else repr(data).encode()).hexdigest()


def _verify_tensors(path: Path, certificate: Certificate) -> list[Problem]:
    contents = dcp.read_contents(path)
    problems = _missing(path, certificate, contents)
    for names in _pieces(contents):
        flat = dcp.read(path, contents, names.__contains__)
        problems += _differing_tensors(path, certificate, contents, flat)
        problems += _differing_values(path, certificate, contents, flat)
    return problems


def _pieces(contents: dcp.Contents) -> list[set[str]]:
    pieces: list[set[str]] = []
    room = 0
    for key, of in contents.keys.items():
        size = 0 if of is None else torch.Size(of[0]).numel() * of[1].itemsize
        if not pieces or size > room:
            pieces.append(set())
            room = _PIECE
        pieces[-1].add(key)
        room -= size
    return pieces


def reason_of(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
