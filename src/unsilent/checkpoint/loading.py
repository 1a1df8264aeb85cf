"""From a directory back into the run: hashes, then fresh tensors, then fingerprints, and only then the live objects."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unsilent.checkpoint import attempts, dcp, state, verification
from unsilent.checkpoint.certificate import CERTIFICATE, Certificate, Problem, Status
from unsilent.checkpoint.composed import Part, alike, compose, first_unlike, groups_of, parts_of
from unsilent.checkpoint.files import read_certificate
from unsilent.checkpoint.listing import Saved
from unsilent.checkpoint.together import Together
from unsilent.errors import CheckpointError, UsageError
from unsilent.inventory import Inventory
from unsilent.sharding import block_of

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
    """A checkpoint read into fresh tensors, or the problems that were found with it; ``parts`` are of what was read in blocks."""

    problems: list[Problem]
    tree: Mapping[str, Any] = field(default_factory=dict[str, Any])
    parts: Mapping[str, Part] = field(default_factory=dict[str, Part])


def load_first_good(order: list[Saved], live: Live, ranks: Together, where: Path) -> Loaded:
    """Take the first checkpoint that verifies on every rank; the same one on all of them.

    Raises:
        CheckpointError: none does; the message says what was wrong with each.
        UsageError: a sound one is of another model or optimizer.
        OSError: rank 0 could not even look.
    """
    notices: list[Problem] = []
    elsewhere = _elsewhere(live.inventory, ranks) if order else frozenset[str]()
    for saved in order:
        problems, certificate = ranks.first(f"verify {saved.path.name}", lambda path=saved.path: examine(path))
        if not problems:
            fresh, problems = _read_together(saved.path, certificate, live, ranks, elsewhere)
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
    path: Path, certificate: Certificate | None, live: Live, ranks: Together, elsewhere: frozenset[str]
) -> tuple[_Fresh, list[Problem]]:
    mine: list[_Fresh] = []

    def work() -> tuple[list[Problem], bool]:
        mine.append(_read(path, certificate, live.inventory, ranks, elsewhere))
        return mine[0].problems, bool(mine[0].parts)

    answers = ranks.each(f"read {path.name}", work)
    problems = _merge([found for found, _ in answers])
    if not problems and certificate is not None and any(in_blocks for _, in_blocks in answers):
        problems = _unlike_certified(path, certificate, mine[0].parts, ranks)
    return mine[0], problems


def _elsewhere(inventory: Inventory, ranks: Together) -> frozenset[str]:
    """The names in the model that only other ranks hold, as in a pipeline; none where all hold the same."""
    mine: list[list[str]] = []
    ranks.each("list what its model holds", lambda: mine.append(state.names_in(inventory)))
    everyone = ranks.unlike(mine[0])
    return frozenset(name for names in everyone or () for name in names) - set(mine[0])


def _unlike_certified(
    path: Path, certificate: Certificate, parts: Mapping[str, Part], ranks: Together
) -> list[Problem]:
    """Where what the ranks hold of tensors, each its blocks, is not what was certified; all ranks call it, and get the same."""
    problems: list[Problem] = []
    if not alike(ranks.gather(groups_of(parts))):
        name, groups = first_unlike(parts, ranks) or ("", [])
        reason = f"ranks {' and '.join(str(group) for group in groups)} have read unlike blocks of {name!r}"
        return [Problem(path=str(path), tensors=(name,), reason=reason)]
    try:
        composed = compose(parts, ranks)
    except CheckpointError as error:
        return [Problem(path=str(path), reason=str(error))]
    for name, print_ in composed.items():
        expected = certificate.tensors.get(name)
        if expected is None:
            reason = "the certificate does not cover this tensor"
        elif expected != print_.to_json():
            reason = f"the tensor's fingerprint is {print_.hex}, the certificate says {expected.get('hex')}"
        else:
            continue
        problems.append(Problem(path=str(path), tensors=(name,), reason=reason))
    return problems


def _read(
    path: Path, certificate: Certificate | None, inventory: Inventory, ranks: Together, elsewhere: frozenset[str]
) -> _Fresh:
    """Read into fresh tensors and compare them with the certificate.

    Raises:
        UsageError: it is of another model or optimizer.
    """

    try:
        contents = dcp.read_contents(path)
        _must_fit(path, contents, inventory, elsewhere)
        mine = _keys_for(ranks.rank, contents, elsewhere)
        patterns = state.patterns(inventory, {key: contents.keys[key] for key in mine}, contents.paths)
        blocks = {key: block_of(pattern) for key, pattern in patterns.items()}
        flat = dcp.read(path, contents, lambda key: key in mine and key not in blocks)
        read = dcp.read_blocks(path, contents, blocks) if blocks else {}
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - a pickle of others can raise anything; the next older one is tried
        return _Fresh([Problem(path=str(path), reason=f"it cannot be read: {verification.reason_of(error)}")])
    if certificate is not None:
        problems = verification.differences(path, certificate, contents, flat)
        if problems:
            return _Fresh(problems)
    flat |= {key: block.part for key, block in read.items()}
    tree: dict[str, Any] = state.without(state.decode(state.nested(flat, contents.paths)), elsewhere)
    state.check_optimizer(inventory, tree.get("optimizer") or {})
    return _Fresh([], tree, parts_of(read, ranks))


def _keys_for(rank: int, contents: dcp.Contents, elsewhere: frozenset[str]) -> set[str]:
    """What this rank reads: all but what other ranks have kept for themselves, and what only their models hold."""
    extra = tuple(f"{name}." for name in elsewhere if name.endswith("_extra_state"))

    def wanted(key: str) -> bool:
        top, _, rest = key.partition(".")
        path = contents.paths.get(key, ())
        if top in ("rng", "buffers"):
            return rest.split(".", 1)[0] == str(rank)
        if top == "model":
            return rest not in elsewhere and not rest.startswith(extra or ("\0",))
        return path[:2] != ("optimizer", "state") or str(path[2]) not in elsewhere

    return {key for key in contents.keys if wanted(key)}


def _must_fit(path: Path, contents: dcp.Contents, inventory: Inventory, elsewhere: frozenset[str]) -> None:
    live = inventory.model.state_dict()
    keys = {k.removeprefix("model."): of for k, of in contents.keys.items() if k.startswith("model.")}
    if live and not keys:
        raise UsageError(f"{path} holds no 'model': it was not written as {{'model': ..., 'optimizer': ...}}")
    # DCP has spread a module's extra state over several keys: fold them back under its one name.
    extra = [name for name in (*live, *elsewhere) if name.endswith("_extra_state")]
    folded: dict[str, Any] = {}
    for key, of in keys.items():
        whole = next((name for name in extra if key.startswith(f"{name}.")), None)
        folded[whole or key] = None if whole else of
    state.check_model(inventory, folded, elsewhere)


def _must_have_arrived(certificate: Certificate | None, fresh: _Fresh, inventory: Inventory, ranks: Together) -> None:
    """Every tensor of model and optimizer has the bits that were read for it, whoever wrote them there.

    Raises:
        CheckpointError: one has not; the message names the first.
    """
    tree = state.collect(inventory, steps=0, scaler=None, scheduler=None, guard=None)
    held = parts_of(state.blocks(inventory, tree), ranks)
    certified = {} if certificate is None else certificate.tensors
    for name in sorted(held.keys() - state.local_buffers(inventory)):
        read = fresh.parts.get(name)
        if read is not None and read.share != held[name].share:
            raise CheckpointError(f"{name!r} does not hold what was read for it")
        if read is None and certified and certified.get(name) != held[name].share.to_json():
            raise CheckpointError(f"{name!r} does not hold what the certificate says, though the files do")


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
        if fresh.parts:
            _must_have_arrived(certificate, fresh, live.inventory, ranks)

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
