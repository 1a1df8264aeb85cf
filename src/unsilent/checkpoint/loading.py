"""From a directory back into the run: hashes, then fresh tensors, then fingerprints, and only then the live objects."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unsilent.checkpoint import attempts, dcp, state, verification
from unsilent.checkpoint.certificate import CERTIFICATE, Certificate, Problem, Status
from unsilent.checkpoint.files import read_certificate
from unsilent.checkpoint.listing import Saved
from unsilent.checkpoint.together import Together
from unsilent.errors import CheckpointError, UsageError
from unsilent.inventory import Inventory

_SHOWN = 8  # checkpoints that an error says something about


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was loaded, and what was passed over on the way.

    Attributes:
        rng: the random state that this rank had saved; None when there is none for this rank.
        guard: what the guard had saved of itself.
        certificate: None when it was loaded unverified.
        notices: why newer checkpoints were not taken, and what is missing from this one.
    """

    path: Path
    steps: int
    status: Status | None
    rng: Any = None
    guard: Mapping[str, Any] = field(default_factory=dict[str, Any])
    certificate: Certificate | None = None
    notices: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Live:
    """What a checkpoint is loaded into."""

    inventory: Inventory
    scaler: state.Stateful | None
    scheduler: state.Stateful | None


@dataclass(frozen=True)
class _Fresh:
    """A checkpoint read into fresh tensors, or the problems that were found with it."""

    problems: list[Problem]
    tree: Mapping[str, Any] = field(default_factory=dict[str, Any])


def load_first_good(order: list[Saved], live: Live, ranks: Together, where: Path) -> Loaded:
    """Take the first checkpoint that verifies on every rank; the same one on all of them.

    Raises:
        CheckpointError: none does; the message says what was wrong with each.
        UsageError: a sound one is of another model or optimizer.
        OSError: rank 0 could not even look.
    """
    notices: list[Problem] = []
    for saved in order:
        problems, certificate = ranks.first(f"verify {saved.path.name}", lambda path=saved.path: examine(path))
        if not problems:
            fresh, problems = _read_together(saved.path, certificate, live, ranks)
            if not problems:
                return _put_back(saved, certificate, fresh, live, ranks, notices)
        notices += problems
    found = "; ".join(str(n) for n in notices[:_SHOWN]) or f"there is none in {where}"
    if len(notices) > _SHOWN:
        found += f"; and {len(notices) - _SHOWN} more"
    raise CheckpointError(f"no checkpoint can be loaded: {found}")


def examine(path: Path) -> tuple[list[Problem], Certificate | None]:
    """Why this checkpoint must be passed over, from its certificate and its files' hashes; nothing is unpickled before.

    No problem and no certificate means that it is unguarded.
    """
    try:
        certificate = read_certificate(path)
    except CheckpointError as error:
        return [Problem(path=str(path), file=CERTIFICATE, reason=str(error))], None
    poisoned = attempts.distrusted(path)
    if poisoned:
        return [Problem(path=str(path), reason=f"it is distrusted: {poisoned}")], certificate
    if certificate is None:
        return [], None
    if certificate.status is Status.DISTRUSTED:
        return [Problem(path=str(path), reason=f"it is distrusted: {certificate.reason}")], certificate
    if not dcp.is_written(path) and dcp.METADATA not in certificate.files:
        return [Problem(path=str(path), reason="it was not written by torch.distributed.checkpoint")], certificate
    return verification.verify_files(path, certificate), certificate


def _read_together(
    path: Path, certificate: Certificate | None, live: Live, ranks: Together
) -> tuple[_Fresh, list[Problem]]:
    mine: list[_Fresh] = []

    def work() -> list[Problem]:
        mine.append(_read(path, certificate, live.inventory, ranks.rank))
        return mine[0].problems

    problems = _merge(ranks.each(f"read {path.name}", work))
    return mine[0], problems


def _read(path: Path, certificate: Certificate | None, inventory: Inventory, rank: int) -> _Fresh:
    """Read into fresh tensors and compare them with the certificate.

    Raises:
        UsageError: it is of another model or optimizer.
    """

    def wanted(key: str) -> bool:
        top, _, rest = key.partition(".")
        return top not in ("rng", "buffers") or rest.split(".", 1)[0] == str(rank)

    try:
        contents = dcp.read_contents(path)
        _must_fit(path, contents, inventory)
        flat = dcp.read(path, contents, wanted)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - a pickle of others can raise anything; the next older one is tried
        return _Fresh([Problem(path=str(path), reason=f"it cannot be read: {verification.reason_of(error)}")])
    if certificate is not None:
        problems = verification.differences(path, certificate, contents, flat)
        if problems:
            return _Fresh(problems)
    tree: dict[str, Any] = state.decode(state.nested(flat, contents.paths))
    state.check_optimizer(inventory, tree.get("optimizer") or {})
    return _Fresh([], tree)


def _must_fit(path: Path, contents: dcp.Contents, inventory: Inventory) -> None:
    live = inventory.model.state_dict()
    keys = {k.removeprefix("model."): of for k, of in contents.keys.items() if k.startswith("model.")}
    if live and not keys:
        raise UsageError(f"{path} holds no 'model': it was not written as {{'model': ..., 'optimizer': ...}}")
    # DCP has spread a module's extra state over several keys: fold them back under its one name.
    extra = [name for name in live if name.endswith("_extra_state")]
    folded: dict[str, Any] = {}
    for key, of in keys.items():
        whole = next((name for name in extra if key.startswith(f"{name}.")), None)
        folded[whole or key] = None if whole else of
    state.check_model(inventory, folded)


def _put_back(
    saved: Saved,
    certificate: Certificate | None,
    fresh: _Fresh,
    live: Live,
    ranks: Together,
    notices: list[Problem],
) -> Loaded:
    tree, rank, path = fresh.tree, str(ranks.rank), str(saved.path)
    remarks: list[str] = []
    if certificate is None:
        remarks.append("it has no certificate: it was loaded without having been verified")
    same_size = certificate is None or certificate.world_size == ranks.world_size
    if certificate is not None and not same_size:
        remarks.append(
            f"it was saved by {certificate.world_size} ranks and is loaded by {ranks.world_size}: what each rank kept "
            "for itself (random state, own buffers) is not restored"
        )
    parts = (("optimizer", live.inventory.optimizer), ("scaler", live.scaler), ("scheduler", live.scheduler))
    remarks += [
        f"it holds no {part}: the {part} stays as it is"
        for part, of_run in parts
        if of_run is not None and tree.get(part) is None
    ]
    own = tree.get("buffers") or {} if same_size else {}
    kept = tree.get("rng") or {} if same_size else {}
    rng: list[Any] = []

    def work() -> None:
        data = kept.get(rank)
        # Its hash was compared with the certificate's, where there is one.
        rng.append(pickle.loads(data) if isinstance(data, bytes) else None)  # noqa: S301
        state.put_back(live.inventory, tree, scaler=live.scaler, scheduler=live.scheduler, buffers=own.get(rank) or {})

    ranks.each(f"restore {saved.path.name}", work)
    return Loaded(
        path=saved.path,
        steps=int(tree.get("steps", saved.steps)),
        status=saved.status,
        rng=rng[0],
        guard=tree.get("guard") or {},
        certificate=certificate,
        notices=(*notices, *(Problem(path=path, reason=remark) for remark in remarks)),
    )


def _merge(by_rank: list[list[Problem]]) -> list[Problem]:
    """What all ranks saw once, what only some saw with their rank."""
    merged: list[Problem] = []
    for rank, problems in enumerate(by_rank):
        for problem in problems:
            if not all(problem in others for others in by_rank):
                merged.append(replace(problem, rank=rank))
            elif rank == 0:
                merged.append(problem)
    return merged
