"""What a ``full`` bundle holds besides its record, so that a fresh process can rerun the work that was found wrong.

    evidence.json   "record": {…, "rerun": facts}   whose work it is, the digests to compare with, kernels, scales
    work.pt         the batch, the generators' states and the buffers that each micro-batch began from
    weights.pt      all parameters as that step used them, by name

Everything that is saved is made of plain containers and tensors, apart from what a user's batch is made of. What the
model keeps in plain attributes is not in a bundle: work that depends on it is INCONCLUSIVE already when it runs.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from unsilent.checks.audit import Audit
from unsilent.environment import Environment
from unsilent.errors import UsageError
from unsilent.events import plain
from unsilent.evidence import read_bundle
from unsilent.generators import GeneratorStates
from unsilent.localize import agreed_value, steady_value
from unsilent.records import AuditEvidence, Place
from unsilent.replay import MicroBatch, Work
from unsilent.ring import Ring

SCHEMA_VERSION = 1
FACTS, WORK, WEIGHTS = "rerun", "work", "weights"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One finding, as read back.

    Attributes:
        auditee: whose work was audited.
        executions: of that work, the live one first; each with ``rank``, ``node``, ``device``, ``recorded``, ``digest``.
        agreed: the digest that was taken for the right one, None when nobody could tell.
        strength: what the digests are over, as calibration allowed: ``"bitwise"`` or ``"loss only"``.
        kernels: the mode in which the work was recorded and replayed.
        scale: what local gradients were multiplied by before they were recorded.
        loss_scale: of the loss scaler; None without one.
        evaluating: the modules that were not in training mode.
        environment: the facts that decide the bits, as :class:`Environment` has them.
        run: how ``unsilent train`` was started; None for other programs.
        reading: the recorded sums by name, where the bundle was written by the rank that recorded them.
        work: None when it is not in the bundle; so ``weights``, which are by name.
        left_out: bytes of each part that the cap left out.
        losses: whether the digests are over the losses as well.
    """

    path: Path
    step: int
    check: str
    auditee: int
    executions: tuple[Mapping[str, Any], ...]
    agreed: str | None
    strength: str
    kernels: str
    scale: float
    loss_scale: float | None
    evaluating: tuple[str, ...]
    environment: Mapping[str, Any]
    run: Mapping[str, Any] | None
    work: Work | None = None
    weights: Mapping[str, torch.Tensor] | None = None
    reading: Mapping[str, Any] | None = None
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    losses: bool = True


def rerunnable(
    audits: Sequence[AuditEvidence],
    ring: Ring,
    audit: Audit,
    inner: nn.Module,
    *,
    rank: int,
    places: Sequence[Place],
    scale: float,
    loss_scale: float | None,
    environment: Environment,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(facts, parts) of the first audit that did not come out clean and whose work this rank holds, its own before all.

    The tensors are the live ones: write them before the next update. ({}, {}) where this rank holds no such work.
    """
    disputed = [a for a in audits if (a.alarm or _differ(a)) and a.auditee in ring.works]
    if not disputed:
        return {}, {}
    chosen = min(disputed, key=lambda a: a.auditee != rank)
    agreed = agreed_value(chosen, places) or steady_value(chosen, places)
    facts = {
        "schema": SCHEMA_VERSION,
        "auditee": chosen.auditee,
        "executions": [
            {
                "rank": e.rank,
                "node": places[e.rank].node,
                "device": places[e.rank].device,
                "recorded": e.recorded,
                "digest": e.digest,
            }
            for e in chosen.executions
        ],
        "agreed": agreed,
        "strength": audit.strength.value,
        "losses": audit.compares_losses,
        "kernels": ring.kernels.value,
        "scale": scale,
        "loss_scale": loss_scale,
        "evaluating": [name for name, module in inner.named_modules() if not module.training],
        "environment": plain(asdict(environment)),
    }
    reading = audit.recorded if chosen.auditee == rank else None
    work = _work_to_plain(ring.works[chosen.auditee])
    work["reading"] = None if reading is None else {"names": reading.names, "rows": reading.rows.cpu()}
    return facts, {WORK: work, WEIGHTS: {n: _own_memory(p.detach()) for n, p in inner.named_parameters()}}


def read(path: Path, *, trusted: bool = False) -> Bundle:
    """Read a bundle back.

    Args:
        trusted: also unpickle what a batch holds besides tensors and plain containers, which can run code.

    Raises:
        UsageError: it is no bundle, it holds no work that could be rerun, or a part of it cannot be read.
    """
    body = read_bundle(path)
    if body is None:
        raise UsageError(f"{path}: this is not an evidence bundle, or it was cut off")
    facts = body["record"].get(FACTS)
    if not facts:
        raise UsageError(f"{path}: there is nothing in it to rerun; {_why_not(path, body)}")
    if facts["schema"] > SCHEMA_VERSION:
        raise UsageError(f"{path}: a newer version of unsilent has written it (format {facts['schema']})")
    return Bundle(
        path=path,
        step=body["step"],
        check=body["check"],
        executions=tuple(facts["executions"]),
        evaluating=tuple(facts["evaluating"]),
        run=body.get("run"),
        left_out=body.get("left_out", {}),
        losses=facts.get("losses", True),
        **{key: facts[key] for key in _AS_WRITTEN},
        **_parts(path, body["step"], trusted=trusted),
    )


_AS_WRITTEN = ("auditee", "agreed", "strength", "kernels", "scale", "loss_scale", "environment")


def _parts(path: Path, step: int, *, trusted: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    work = _load(path / f"{WORK}.pt", trusted=trusted)
    if work is not None:
        found = {WORK: _work_from_plain(work, step), "reading": work.get("reading")}
    return {**found, WEIGHTS: _load(path / f"{WEIGHTS}.pt", trusted=False)}


def _load(file: Path, *, trusted: bool) -> Any:
    if not file.is_file():
        return None
    try:
        return torch.load(file, map_location=_home, weights_only=not trusted)
    except pickle.UnpicklingError as error:
        if trusted:
            raise UsageError(f"{file}: cannot be read: {error}") from error
        raise UsageError(
            f"{file}: the batch holds more than tensors and plain containers, and to read that can run code; if the "
            "bundle comes from a run of your own, add --trusted"
        ) from error
    except Exception as error:
        raise UsageError(f"{file}: cannot be read: {type(error).__name__}: {error}") from error


def _home(storage: Any, location: str) -> Any:
    """What lay on an accelerator comes to the one here, if there is one; all else stays on the host."""
    return storage.cuda() if location.startswith("cuda") and torch.cuda.is_available() else storage


def _why_not(path: Path, body: Mapping[str, Any]) -> str:
    if body.get("asked_level") != "full":
        return f'the run kept evidence="{body.get("asked_level")}", and only "full" keeps batch and weights'
    others = [p.name for p in sorted(path.parent.glob(f"{body['step']}-*")) if p != path]
    with_work = [name for name in others if (read_bundle(path.parent / name) or {}).get("record", {}).get(FACTS)]
    if with_work:
        return f"rank {body['rank']}, which wrote it, did not hold the work; look at {', '.join(with_work)} beside it"
    return "a finding that no audit has looked at has no work to rerun"


def _work_to_plain(work: Work) -> dict[str, Any]:
    def plain_leaf(leaf: Any) -> Any:
        return _own_memory(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf

    return {
        "divide_by": work.divide_by,
        "micro_batches": [
            {
                "batch": tree_map(plain_leaf, m.batch),
                "generators": _generators_to_plain(m.generators),
                "buffers": {name: plain_leaf(buffer) for name, buffer in m.buffers.items()},
                "weight": m.weight,
            }
            for m in work.micro_batches
        ],
    }


def _work_from_plain(work: Mapping[str, Any], step: int) -> Work:
    parts = [
        MicroBatch(
            batch=m["batch"], generators=_generators_from_plain(m["generators"]), buffers=m["buffers"],
            weight=m["weight"],
        )
        for m in work["micro_batches"]
    ]  # fmt: skip
    return Work(step=step, micro_batches=tuple(parts), divide_by=work["divide_by"])


def _generators_to_plain(states: GeneratorStates) -> dict[str, Any]:
    numpy = states.numpy
    if isinstance(numpy, tuple):
        numpy = tuple(torch.from_numpy(part.copy()) if hasattr(part, "tobytes") else part for part in numpy)
    return {"torch": states.torch, "cuda": states.cuda, "python": states.python, "numpy": numpy}


def _generators_from_plain(states: Mapping[str, Any]) -> GeneratorStates:
    numpy = states["numpy"]
    if isinstance(numpy, tuple):
        numpy = tuple(part.numpy() if isinstance(part, torch.Tensor) else part for part in numpy)
    return GeneratorStates(torch=states["torch"], cuda=states["cuda"], python=states["python"], numpy=numpy)


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A view of something larger would be saved with all of it."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _differ(audit: AuditEvidence) -> bool:
    return len({execution.digest for execution in audit.executions}) > 1
