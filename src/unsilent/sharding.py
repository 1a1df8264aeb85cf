"""What torch knows of how a model is sharded: module groups of FSDP2, local parts of tensors, and who holds the same bits.

This is the one place that reads torch's private parts of ``fully_shard`` (torch 2.13); tests/ranks/test_torch_assumptions.py
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


@dataclass(frozen=True)
class ModuleGroup:
    """The parameters that one ``fully_shard`` call gathers and reduces together; ``torch_group`` is torch's own object."""

    name: str
    torch_group: Any

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The sharded parameters, as the optimizer holds them."""
        return tuple(p.sharded_param for p in self.torch_group.fsdp_params)

    @property
    def copies(self) -> tuple[int, ...]:
        """The global ranks that hold the same shard as this rank, itself among them, in order."""
        group = getattr(self.torch_group.mesh_info, "replicate_process_group", None)
        return (dist.get_rank(),) if group is None else tuple(sorted(dist.get_process_group_ranks(group)))


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on this module."""
    return hasattr(model, "_get_fsdp_state")


def module_groups(model: nn.Module) -> tuple[ModuleGroup, ...]:
    """All module groups under ``model``, in the order of its modules.

    Raises:
        UsageError: a module has several groups (parameters on several meshes), its parameters were distributed before, or a
            shard group has one rank only.
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
                f"module {name or 'model'} holds parameters on several meshes (shard_placement_fn), which is not guarded "
                "yet: give its parts a fully_shard of their own"
            )
        for group in state._fsdp_param_groups:
            if any(parameter.is_dtensor for parameter in group.fsdp_params):
                raise UsageError(
                    f"the parameters of {name or 'model'} were DTensors before fully_shard (tensor parallelism), which is not "
                    "guarded yet"
                )
            if getattr(group.mesh_info, "shard_mesh_size", 1) < 2:
                raise UsageError(
                    f"module {name or 'model'} is sharded over one rank only, so its gradients pass no reduce-scatter: use "
                    "DistributedDataParallel"
                )
            found.append(ModuleGroup(name or "model", group))
    return tuple(found)


def fsdp_modules(model: nn.Module) -> Iterator[Any]:
    """The modules on which ``fully_shard`` was called."""
    return (module for module in model.modules() if is_sharded(module))


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, as a plain tensor over the same memory; a plain tensor is itself."""
    part: Any = getattr(tensor, "_local_tensor", None)
    return tensor.detach() if part is None else part.detach()
