"""What torch knows of how a model is sharded: module groups of FSDP2, local parts of tensors, and who holds the same bits.

This and ``sharded_reduction.py`` read torch's private parts of ``fully_shard`` (torch 2.13); tests/ranks/test_torch_assumptions.py
fails where they have changed. What a placement says is used to know who *must* hold the same bits, never that they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unsilent.errors import UsageError

ROOT = "<root>"


@dataclass(frozen=True)
class ModuleGroup:
    """The parameters that one ``fully_shard`` (or ``replicate``) call reduces together; ``torch_group`` is torch's own object."""

    name: str
    torch_group: Any

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The sharded parameters, as the optimizer holds them."""
        return tuple(p.sharded_param for p in self.torch_group.fsdp_params)

    @property
    def device(self) -> torch.device:
        """Where its forward and backward run, wherever its shards lie."""
        return self.torch_group.device

    @property
    def mesh(self) -> Any:
        """The mesh whose ranks reduce these gradients with one another."""
        return self.torch_group.mesh_info.mesh

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of that mesh."""
        return tuple(sorted(self.mesh.mesh.flatten().tolist()))

    @property
    def scatters(self) -> bool:
        """Whether its gradients pass a reduce-scatter; with whole parameters on every rank they pass an all-reduce only."""
        return len(self.replica) > 1

    @property
    def replica(self) -> tuple[int, ...]:
        """The global ranks that hold all shards together, this rank among them, in order."""
        group = getattr(self.torch_group.mesh_info, "shard_process_group", None)
        return (dist.get_rank(),) if group is None else tuple(dist.get_process_group_ranks(group))

    @property
    def copies(self) -> tuple[int, ...]:
        """The global ranks that hold the same shard as this rank, itself among them, in order."""
        group = getattr(self.torch_group.mesh_info, "replicate_process_group", None)
        return (dist.get_rank(),) if group is None else tuple(sorted(dist.get_process_group_ranks(group)))


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard``, or ``replicate`` of the same family, was called on this module."""
    return hasattr(model, "_get_fsdp_state")


def module_groups(model: nn.Module) -> tuple[ModuleGroup, ...]:
    """All module groups under ``model``, in the order of its modules; none where nothing is sharded.

    Raises:
        UsageError: the model is sharded in a way that is not guarded yet; the message says what to change.
    """
    found: list[ModuleGroup] = []
    seen = set[int]()
    for name, module in model.named_modules():
        if not is_sharded(module):
            continue
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        if id(state) in seen:
            continue
        seen.add(id(state))
        if len(state._fsdp_param_groups) > 1:
            raise UsageError(
                f"module {name or ROOT} holds parameters on several meshes (shard_placement_fn), which is not guarded "
                "yet: give its parts a fully_shard of their own"
            )
        for group in state._fsdp_param_groups:
            found.append(ModuleGroup(name or ROOT, group))
            if len(found[-1].replica) * len(found[-1].copies) < 2:
                raise UsageError(
                    f"module {name or ROOT} is sharded over one rank only, so its gradients are not reduced: use "
                    "DistributedDataParallel"
                )
    if found and not is_sharded(model):
        raise UsageError(
            f"module {found[0].name} is sharded and the model that holds it is not: call fully_shard on the model too, and "
            "give the guard that very module"
        )
    return tuple(found)


def fsdp_modules(model: nn.Module) -> Iterator[Any]:
    """The modules on which ``fully_shard`` was called."""
    return (module for module in model.modules() if is_sharded(module))


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def is_torchs_own(collective: Any) -> bool:
    """Whether this is what a module group calls by default."""
    # Here, since it takes long to import and only sharded models need it.
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    return type(collective) in (DefaultAllGather, DefaultReduceScatter)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, as a plain tensor over the same memory; a plain tensor is itself."""
    part: Any = getattr(tensor, "_local_tensor", None)
    return tensor.detach() if part is None else part.detach()


@dataclass(frozen=True)
class Block:
    """What this rank holds of a tensor.

    Attributes:
        part: a plain tensor over the same memory.
        shape: of the whole tensor.
        start: position of the block's first element in it, by dimension.
        holders: the global ranks that must hold the same block, this one among them, in order; None for all.
        spread: how the tensor is spread over ranks, in words; "" for a plain one.
    """

    part: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    holders: tuple[int, ...] | None = None
    spread: str = ""


def block_of(tensor: torch.Tensor) -> Block:
    """This rank's block of a distributed tensor; a plain tensor is a block by itself.

    Raises:
        UsageError: its values are sums that are not made yet, or it lies on other ranks only.
    """
    part = local(tensor)
    if not is_distributed(tensor):
        return Block(part, tuple(part.shape), (0,) * part.ndim)
    distributed: Any = tensor
    mesh, placements = distributed.device_mesh, distributed.placements
    at = mesh.get_coordinate()
    if at is None or any(placement.is_partial() for placement in placements):
        raise UsageError(
            f"a distributed tensor of shape {list(tensor.shape)} has the placements {list(placements)} on {mesh}: this rank "
            "holds no block of it that could be saved"
        )
    (chunk,) = distributed.__create_chunk_list__()  # what torch.distributed.checkpoint writes of it
    same = tuple(slice(None) if p.is_replicate() else i for p, i in zip(placements, at, strict=True))
    holders = tuple(sorted(mesh.mesh[same].flatten().tolist()))
    spread = f"{placements} on ranks {mesh.mesh.tolist()}"
    return Block(part, tuple(tensor.shape), tuple(chunk.offsets), holders, spread)
