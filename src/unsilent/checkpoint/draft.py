"""What a rank has ready before a checkpoint is written, and whether the ranks agree on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unsilent.checkpoint import state
from unsilent.checkpoint.together import Together
from unsilent.checkpoint.verification import rng_bytes, rng_digest
from unsilent.errors import CheckpointError, UsageError
from unsilent.fingerprints import Fingerprint
from unsilent.inventory import Inventory


@dataclass(frozen=True)
class Facts:
    """What the other ranks are told of a draft: digests only."""

    steps: int
    replicated: str
    local: Mapping[str, Fingerprint]
    rng: str | None


@dataclass(frozen=True)
class Draft:
    """The state with its fingerprints, taken from memory before the write; ``local`` names what ranks may differ in."""

    steps: int
    tree: dict[str, Any]
    prints: dict[str, Fingerprint]
    local: frozenset[str]
    rng: bytes | None

    def replicated(self) -> dict[str, Fingerprint]:
        """The fingerprints of what DCP may take from any rank."""
        return {name: self.prints[name] for name in state.tensors_in(state.share_of(self.tree, 1, self.local))}

    def facts(self) -> Facts:
        text = "\n".join(f"{name} {f.hex} {f.dtype} {f.shape}" for name, f in sorted(self.replicated().items()))
        return Facts(
            steps=self.steps,
            replicated=hashlib.sha256(text.encode()).hexdigest(),
            local={name: self.prints[name] for name in sorted(self.local) if name in self.prints},
            rng=None if self.rng is None else rng_digest(self.rng),
        )


def draft(
    inventory: Inventory,
    *,
    steps: int,
    scaler: state.Stateful | None,
    scheduler: state.Stateful | None,
    rng: Any,
    guard: Mapping[str, Any] | None,
) -> Draft:
    """Collect this rank's state and take its fingerprints.

    Raises:
        UsageError: a state that cannot be saved.
        Exception: ``rng`` does not pickle.
    """
    tree = state.collect(inventory, steps=steps, scaler=scaler, scheduler=scheduler, guard=guard)
    return Draft(
        steps=steps,
        tree=tree,
        prints=state.fingerprints(state.tensors_in(tree)),
        local=frozenset(state.local_buffers(inventory)),
        rng=None if rng is None else rng_bytes(rng),
    )


def must_agree(mine: Draft, facts: list[Facts], ranks: Together, *, may_differ: bool = False) -> bool:
    """All ranks have the same number of steps and the same bits of what is replicated.

    Returns:
        Whether the bits are the same; False only where they ``may_differ``.

    Raises:
        UsageError: they are at different steps.
        CheckpointError: their replicas differ; the message names the first tensor and the ranks.
    """
    steps = [f.steps for f in facts]
    if len(set(steps)) > 1:
        raise UsageError(f"the ranks save at different steps: {steps}")
    alike = len({f.replicated for f in facts}) == 1
    if alike or may_differ:
        return alike
    # Only now the details: on a clean save one digest per rank travels, whatever the model's size.
    everyone = ranks.gather(mine.replicated())
    for name in sorted({name for one in everyone for name in one}):
        held = [one.get(name) for one in everyone]
        if len(set(held)) > 1:
            holders = [[rank for rank, other in enumerate(held) if other == value] for value in dict.fromkeys(held)]
            groups = " and ".join(str(group) for group in sorted(holders, key=len))
            raise CheckpointError(f"nothing was saved: ranks {groups} do not hold the same {name!r}")
    raise CheckpointError("nothing was saved: the ranks do not hold the same replicas")


def own_fingerprints(facts: list[Facts]) -> dict[str, Any]:
    """The certificate's part on buffers that a rank holds otherwise than rank 0."""
    return {
        f"buffers.{rank}.{name.removeprefix('model.')}": found.to_json()
        for rank, of_rank in enumerate(facts)
        for name, found in of_rank.local.items()
        if found != facts[0].local.get(name)
    }


def share(mine: Draft, facts: list[Facts], rank: int, *, alike: bool = True) -> dict[str, Any]:
    """What this rank gives to DCP: its share of the common state, its random state, its own buffers.

    Where replicas are not ``alike``, the common state is rank 0's alone: DCP would take each tensor from any rank.
    """
    tree = dict(state.share_of(mine.tree, rank, mine.local)) if alike or rank == 0 else {}
    if mine.rng is not None:
        tree["rng"] = {str(rank): mine.rng}
    model: Mapping[str, Any] = mine.tree["model"]
    own: dict[str, Tensor] = {
        name.removeprefix("model."): model[name.removeprefix("model.")]
        for name, found in facts[rank].local.items()
        if found != facts[0].local.get(name)
    }
    if own:
        tree["buffers"] = {str(rank): own}
    return tree
