"""HEAL: copy tensors of the state from a rank of the majority to the ranks that differ from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from unsilent.inventory import Inventory
from unsilent.records import VoteEvidence
from unsilent.world import World


def heal(world: World, inventory: Inventory, votes: Sequence[VoteEvidence]) -> tuple[int, ...]:
    """Give every minority rank the majority's bits, tensor by tensor; the same call on all ranks.

    Returns the ranks that were healed. Votes without a strict majority are left alone.
    """
    tensors = {entry.name: entry.tensor for entry in (*inventory.entries(), *inventory.gradients())}
    healed: set[int] = set()
    for vote in votes:
        value, count = Counter(vote.digests).most_common(1)[0]
        if value is None or 2 * count <= len(vote.digests):
            continue
        source = vote.digests.index(value)
        for rank, digest in enumerate(vote.digests):
            if digest == value:
                continue
            healed.add(rank)
            if world.rank == source:
                world.send(tensors[vote.tensor], rank)
            elif world.rank == rank:
                world.receive(tensors[vote.tensor], source)
    # Inside autocast a healed weight would be ignored: its low-precision copy is cached.
    torch.clear_autocast_cache()
    return tuple(sorted(healed))
