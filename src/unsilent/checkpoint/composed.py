"""Fingerprints of whole tensors, from the sums of the blocks that ranks hold of them; no tensor leaves its rank.

The sums of a tensor's blocks add up to the sums of the tensor, however it was cut, so a certificate says the same of a state
whatever the number of ranks. A checkpoint has one place for each block: ranks that hold the same one must hold the same bits,
and it is counted once.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from unsilent.checkpoint.state import fingerprints
from unsilent.checkpoint.together import Together
from unsilent.errors import CheckpointError
from unsilent.fingerprints import Fingerprint, sums_of_shard
from unsilent.sharding import Block

_WORD = 1 << 64


@dataclass(frozen=True)
class Part:
    """The share of one block in the fingerprint of its tensor.

    Attributes:
        share: its sums, with shape and dtype of the whole tensor.
        start, elements: where the block begins in the tensor, and how many elements it has.
        holders: the ranks that must hold the same block; None for all.
        spread: how the tensor is spread over ranks, "" for one that is not.
    """

    share: Fingerprint
    start: tuple[int, ...]
    elements: int
    holders: tuple[int, ...] | None
    spread: str

    @property
    def group(self) -> str:
        """What it has in common with others on this rank: how they are spread, and who must hold the same."""
        return f"{self.spread} {self.holders}"


@dataclass(frozen=True)
class Group:
    """Digests over blocks that are spread alike: one of which they are, one of their bits; ``holders`` as of each of them."""

    blocks: str
    bits: str
    holders: tuple[int, ...] | None
    whole: bool


#: what a rank tells the others of its blocks, whatever their number
Groups = Mapping[str, Group]


def parts_of(blocks: Mapping[str, Block], ranks: Together) -> dict[str, Part]:
    """The share of each block; one wait per device.

    Raises:
        UsageError: a tensor is sparse, quantized or on the meta device.
    """
    whole = fingerprints({name: block.part for name, block in blocks.items() if not block.spread})
    by_device: dict[torch.device, list[str]] = {}
    for name in blocks.keys() - whole.keys():
        by_device.setdefault(blocks[name].part.device, []).append(name)
    shares = dict(whole)
    for names in by_device.values():
        held = [blocks[name] for name in names]
        sums = torch.stack([sums_of_shard(b.part, global_shape=b.shape, start=b.start) for b in held]).tolist()
        for name, block, (plain, weighted) in zip(names, held, sums, strict=True):
            dtype = str(block.part.dtype).removeprefix("torch.")
            shares[name] = Fingerprint(plain % _WORD, weighted % _WORD, block.shape, dtype)
    return {
        name: Part(shares[name], block.start, block.part.numel(), ranks.numbers(block.holders), block.spread)
        for name, block in blocks.items()
    }


def groups_of(parts: Mapping[str, Part]) -> Groups:
    found: dict[str, list[tuple[str, Part]]] = {}
    for name, part in sorted(parts.items(), key=lambda item: item[0]):
        found.setdefault(part.group, []).append((name, part))
    return {
        group: Group(
            blocks=_digest([f"{n} {p.share.dtype} {p.share.shape} {p.start} {p.elements}" for n, p in held]),
            bits=_digest([f"{n} {p.share.hex}" for n, p in held]),
            holders=held[0][1].holders,
            whole=not held[0][1].spread,
        )
        for group, held in found.items()
    }


def alike(everyone: Sequence[Groups]) -> bool:
    """Whether ranks that hold the same blocks hold the same bits, and those that must hold the same do."""
    held = [{(group.blocks, group.bits) for group in groups.values()} for groups in everyone]
    bits: dict[str, str] = {}
    for rank, groups in enumerate(everyone):
        for group in groups.values():
            # Where all must hold the same, each is compared with the next one.
            members = ((rank + 1) % len(everyone),) if group.holders is None else group.holders
            if any((group.blocks, group.bits) not in held[member] for member in members):
                return False
            if bits.setdefault(group.blocks, group.bits) != group.bits:
                return False
    return True


def first_unlike(parts: Mapping[str, Part], ranks: Together) -> tuple[str, list[list[int]]] | None:
    """The first tensor of which ranks do not hold the same, with these ranks, the fewest first; all ranks call it."""
    everyone = ranks.gather(dict(parts))
    for name in sorted({name for one in everyone for name in one}):
        held = {rank: one[name] for rank, one in enumerate(everyone) if name in one}
        for part in held.values():
            must = range(ranks.world_size) if part.holders is None else part.holders
            same = {
                rank for rank, other in held.items() if (other.start, other.elements) == (part.start, part.elements)
            }
            shares = {rank: held[rank].share if rank in held else None for rank in sorted({*must, *same})}
            if len(set(shares.values())) > 1:
                by_share = [[r for r, other in shares.items() if other == s] for s in dict.fromkeys(shares.values())]
                return name, sorted(by_share, key=len)
    return None


def firsts(everyone: Sequence[Groups], rank: int) -> frozenset[str]:
    """The groups of a rank that no lower one holds too."""
    before = {group.blocks for groups in everyone[:rank] for group in groups.values()}
    return frozenset(name for name, group in everyone[rank].items() if group.blocks not in before)


def compose(parts: Mapping[str, Part], ranks: Together) -> dict[str, Fingerprint]:
    """The fingerprints of all tensors of which any rank holds a block; all ranks call it, and get the same.

    Raises:
        CheckpointError: a tensor's blocks are not the whole of it, or ranks hold different tensors under one name.
    """
    mine = firsts(ranks.gather(groups_of(parts)), ranks.rank)

    kinds = [(name, part.share.shape, part.share.dtype) for name, part in parts.items()]
    unlike = ranks.unlike(sorted(kinds))
    if unlike is not None:
        kinds = sorted({kind for theirs in unlike for kind in theirs})
    names = sorted(name for name, _, _ in kinds)  # in the same order on all ranks
    for one, other in itertools.pairwise(names):
        if one == other:
            raise CheckpointError(
                f"{one!r} has not the same shape and dtype on all ranks: give each tensor its own name"
            )
    held = [{name for name, _, _ in theirs} for theirs in unlike or ()]

    rows = torch.zeros(len(names), 3, dtype=torch.int64)
    for i, name in enumerate(names):
        part = parts.get(name)
        if part is None:
            continue
        # What a rank has whole is told by its name alone: the ranks that share it may not share the rest.
        before = any(name in theirs for theirs in held[: ranks.rank]) if held else ranks.rank > 0
        if part.group in mine if part.spread else not before:
            rows[i] = torch.tensor([_signed(part.share.plain), _signed(part.share.weighted), part.elements])
    ranks.add(rows)
    sums = dict(zip(names, rows.tolist(), strict=True))
    for name, shape, _ in kinds:
        elements, size = sums[name][2], math.prod(shape)
        if elements != size:
            raise CheckpointError(
                f"the blocks of {name!r} have {elements} elements together, and the tensor has {size}"
            )
    return {
        name: Fingerprint(sums[name][0] % _WORD, sums[name][1] % _WORD, shape, dtype) for name, shape, dtype in kinds
    }


def must_be_one(parts: Mapping[str, Part], composed: Mapping[str, Fingerprint], *, except_for: Collection[str]) -> None:
    """What this rank holds whole is what the others know by that name; ``except_for`` names what ranks may differ in.

    Raises:
        CheckpointError: it is not; the message names the first tensor.
    """
    for name, part in sorted(parts.items()):
        if not part.spread and name not in except_for and part.share != composed[name]:
            raise CheckpointError(f"it holds another {name!r} than the ranks before it: give each tensor its own name")


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _signed(word: int) -> int:
    return word - _WORD if word >> 63 else word
