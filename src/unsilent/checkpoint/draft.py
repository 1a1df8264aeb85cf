"""What a rank has ready before a checkpoint is written, and whether the ranks agree on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from unsilent.checkpoint import state
from unsilent.checkpoint.composed import (
    Groups,
    Part,
    alike,
    compose,
    first_unlike,
    firsts,
    groups_of,
    must_be_one,
    parts_of,
)
from unsilent.checkpoint.together import Together
from unsilent.checkpoint.verification import rng_bytes, rng_digest
from unsilent.errors import CheckpointError, UsageError
from unsilent.fingerprints import Fingerprint
from unsilent.inventory import Inventory


@dataclass(frozen=True)
class Facts:
    """What the other ranks are told of a draft: digests only.

    ``groups`` are those of the blocks that ranks must hold alike; ``names`` stands for what this rank's model holds.
    """

    steps: int
    groups: Groups
    local: Mapping[str, Fingerprint]
    rng: str | None
    names: str


@dataclass(frozen=True)
class Draft:
    """The state with its fingerprints, taken from memory before the write; ``local`` names what ranks may differ in."""

    steps: int
    tree: dict[str, Any]
    parts: dict[str, Part]
    local: frozenset[str]
    rng: bytes | None
    names: list[str]

    def common(self) -> dict[str, Part]:
        """What DCP may take from any rank that holds it."""
        return {name: part for name, part in self.parts.items() if name not in self.local}

    def facts(self) -> Facts:
        return Facts(
            steps=self.steps,
            groups=groups_of(self.common()),
            local={name: self.parts[name].share for name in sorted(self.local) if name in self.parts},
            rng=None if self.rng is None else rng_digest(self.rng),
            names=hashlib.sha256(repr((self.names, state.groups_in(self.tree))).encode()).hexdigest(),
        )


def draft(
    inventory: Inventory,
    ranks: Together,
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
        parts=parts_of(state.blocks(inventory, tree), ranks),
        local=frozenset(state.local_buffers(inventory)),
        rng=None if rng is None else rng_bytes(rng),
        names=state.names_in(inventory),
    )


def must_agree(mine: Draft, facts: list[Facts], ranks: Together, *, may_differ: bool = False) -> bool:
    """All ranks have the same number of steps and the same bits of what several of them hold.

    Returns:
        Whether the bits are the same; False only where they ``may_differ``.

    Raises:
        UsageError: they are at different steps.
        CheckpointError: their replicas differ; the message names the first tensor and the ranks.
    """
    steps = [f.steps for f in facts]
    if len(set(steps)) > 1:
        raise UsageError(f"the ranks save at different steps: {steps}")
    same = alike([f.groups for f in facts])
    if same or may_differ:
        return same
    # Only now the details: on a clean save a few digests per rank travel, whatever the model's size.
    found = first_unlike(mine.common(), ranks)
    if found is None:
        raise CheckpointError("nothing was saved: the ranks do not hold the same replicas")
    name, groups = found
    raise CheckpointError(
        f"nothing was saved: ranks {' and '.join(str(group) for group in groups)} do not hold the same {name!r}"
    )


def fingerprints(mine: Draft, facts: list[Facts], ranks: Together, *, same: bool) -> dict[str, Fingerprint]:
    """The certificate's part on tensors, of whole ones however they are spread; what ranks may differ in as the first has it.

    Raises:
        CheckpointError: the blocks of a tensor are not the whole of it, or ranks hold different tensors under one name.
    """
    if all(group.whole and group.holders is None for f in facts for group in f.groups.values()):  # every rank holds all
        return {name: part.share for name, part in mine.parts.items()}
    composed = compose(mine.parts, ranks)
    if same:
        ranks.each("name its tensors", lambda: must_be_one(mine.parts, composed, except_for=mine.local))
    return composed


def first_holders(mine: Draft, facts: list[Facts], ranks: Together) -> tuple[Draft, frozenset[str] | None]:
    """Where ranks hold parts of the model: this rank's draft, rank 0's with the parameter groups of all, and the names that a
    lower rank holds too. None for names where every rank holds all.

    Raises:
        UsageError: the ranks have unequally many parameter groups.
    """
    if len({f.names for f in facts}) == 1:
        return mine, None
    everyone = ranks.gather((mine.names, state.groups_in(mine.tree)))
    tree = state.with_groups(mine.tree, [groups for _, groups in everyone])
    return replace(mine, tree=tree), frozenset(name for names, _ in everyone[: ranks.rank] for name in names)


def own_fingerprints(facts: list[Facts]) -> dict[str, Any]:
    """The certificate's part on buffers that a rank holds otherwise than the first that has them."""
    return {
        f"buffers.{rank}.{name.removeprefix('model.')}": of_rank.local[name].to_json()
        for rank, of_rank in enumerate(facts)
        for name in _own(facts, rank)
    }


def _own(facts: list[Facts], rank: int) -> list[str]:
    held = facts[rank].local
    return [name for name in held if held[name] != next(f.local[name] for f in facts if name in f.local)]


def share(
    mine: Draft, facts: list[Facts], rank: int, *, same: bool = True, before: frozenset[str] | None = None
) -> dict[str, Any]:
    """What this rank gives to DCP: its share of the common state, its random state, its own buffers.

    Where replicas are not the ``same``, each rank gives what it is the first to hold, of what all hold rank 0 alone: DCP would
    take each tensor from any rank.
    """
    tree = dict(state.share_of(mine.tree, rank, mine.local, before))
    if not same and rank > 0:
        tree = _first_blocks(tree, mine, facts, rank)
    if mine.rng is not None:
        tree["rng"] = {str(rank): mine.rng}
    model: Mapping[str, Any] = mine.tree["model"]
    own: dict[str, Tensor] = {
        name.removeprefix("model."): model[name.removeprefix("model.")] for name in _own(facts, rank)
    }
    if own:
        tree["buffers"] = {str(rank): own}
    return tree


def _first_blocks(tree: dict[str, Any], mine: Draft, facts: list[Facts], rank: int) -> dict[str, Any]:
    first = firsts([f.groups for f in facts], rank)

    def is_first(key: str) -> bool:
        part = mine.parts.get(key)
        if part is None or key in mine.local:  # nobody else offers it
            return True
        return part.holders is not None and part.group in first

    return state.keep(tree, is_first)
