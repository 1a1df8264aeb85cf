"""How the ranks of a run share its work: which compute one batch together, and which must hold the same bits of what.

Most of it can be read off the model: ``fully_shard`` and ``replicate`` name the ranks that reduce gradients with one another,
tensor parallelism leaves its mesh on the parameters. Pipelines, context and expert parallelism leave nothing; they are declared.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from unsilent.errors import UsageError
from unsilent.sharding import block_of, is_distributed, module_groups
from unsilent.teams import Teams

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PIPELINE = "pp"


@dataclass(frozen=True, kw_only=True)
class Equal:
    """Parameters that ranks must hold alike, bit for bit, though nothing else says so: tied weights of two stages, say.

    Attributes:
        names: patterns of names as ``named_parameters()`` gives them (``*`` stands for any text); several patterns are names of
            one and the same parameter on different ranks, and then each matches one name at most on a rank.
        along: the dimensions of the mesh along which the ranks that hold it are alike.
    """

    names: tuple[str, ...]
    along: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which ranks compute one batch together, and what must be equal where.

    Attributes:
        mesh: of all ranks, with names; a dimension called ``pp`` is that of a pipeline's stages, in their order.
        data: the dimensions along which ranks do the same work on batches of their own. Ranks that differ in any of the others
            (``tp``, ``pp``, ``cp``, ``ep``) compute one batch together.
        equal: what is alike besides what the model's own placements say.
    """

    mesh: DeviceMesh
    data: tuple[str, ...]
    equal: tuple[Equal, ...] = ()

    def __post_init__(self) -> None:
        names = self.mesh.mesh_dim_names
        if names is None:
            raise UsageError("the mesh of a Layout needs names: init_device_mesh(..., mesh_dim_names=(...))")
        asked = (*self.data, *itertools.chain.from_iterable(e.along for e in self.equal))
        if unknown := [name for name in asked if name not in names]:
            raise UsageError(f"a Layout names the dimension {unknown[0]!r}, and its mesh has {', '.join(names)}")
        if self.mesh.size() != dist.get_world_size():
            raise UsageError(
                f"the mesh of a Layout holds {self.mesh.size()} of {dist.get_world_size()} ranks: give the one of all ranks, "
                "of which the others are parts"
            )

    @property
    def names(self) -> tuple[str, ...]:
        assert self.mesh.mesh_dim_names is not None
        return self.mesh.mesh_dim_names

    @property
    def together(self) -> tuple[str, ...]:
        """The dimensions along which ranks compute one batch together."""
        return tuple(name for name in self.names if name not in self.data)

    @property
    def teams(self) -> Teams:
        """The ranks that differ in nothing but those dimensions, in the order of the mesh."""
        ranks = self.mesh.mesh
        order = [self.names.index(name) for name in (*self.data, *self.together)]
        size = 1
        for name in self.together:
            size *= ranks.size(self.names.index(name))
        return Teams(ranks.permute(order).reshape(-1, size).tolist())

    def along(self, ranks: Iterable[int], dimensions: Sequence[str]) -> tuple[int, ...]:
        """These ranks, and all that differ from one of them in nothing but ``dimensions``."""
        found = set[int]()
        grid = self.mesh.mesh
        for rank in ranks:
            at = [int(i) for i in (grid == rank).nonzero()[0]]
            index = tuple(slice(None) if name in dimensions else i for name, i in zip(self.names, at, strict=True))
            found |= set(grid[index].reshape(-1).tolist())
        return tuple(sorted(found))

    @property
    def stage(self) -> int | None:
        """This rank's place in the pipeline, None without one."""
        return self.mesh.get_local_rank(PIPELINE) if PIPELINE in self.together else None

    def __str__(self) -> str:
        shape = " × ".join(f"{name} {self.mesh.size(i)}" for i, name in enumerate(self.names))
        together = ", ".join("+".join(map(str, ranks)) for ranks in self.teams.members[:4])
        more = ", ..." if len(self.teams.members) > 4 else ""
        return f"{shape}; ranks {together}{more} compute one batch together"


class Relations:
    """Who must hold what alike, for one rank's model.

    Args:
        model: its root module.
        layout: as declared, or None where the model tells all of it.
        exchange: gives every rank what all ranks gave; called once, by all.
    """

    def __init__(
        self, model: nn.Module, layout: Layout | None, exchange: Callable[[Any], list[Any]] = lambda mine: [mine]
    ) -> None:
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._peers = None if layout is None or layout.teams.alone else layout.teams.peers(self._rank)
        self._along = functools.cache(layout.along) if layout is not None else None
        self._tensor_parallel = frozenset(
            name for p in model.parameters() for name in _names_of(p) if layout is not None and name in layout.together
        )
        #: by name: what all ranks call it, along which dimensions it is alike, and the ranks that hold it
        self._declared: dict[str, tuple[str, tuple[str, ...], frozenset[int]]] = {}
        if layout is not None and layout.equal:
            self._declare(layout, [n for n, _ in model.named_parameters()], exchange)

    def copies(self, tensor: torch.Tensor, name: str = "") -> tuple[int, ...] | None:
        """The ranks that must hold the same bits as this rank's part of ``tensor``; None for all."""
        copies = self._peers
        if is_distributed(tensor):
            distributed: Any = tensor
            copies = block_of(tensor).holders
            if self._along is not None and copies is not None:
                # Along dimensions that its own mesh does not know; inside of that the placements decide.
                known = set(distributed.device_mesh.mesh.flatten().tolist())
                more = self._along(copies, tuple(sorted(self._tensor_parallel)))
                copies = tuple(rank for rank in more if rank in copies or rank not in known)
        if name not in self._declared or self._along is None:
            return copies
        _, dimensions, holders = self._declared[name]
        return tuple(rank for rank in self._along(copies or (self._rank,), dimensions) if rank in holders)

    def called(self, name: str) -> str:
        """The name under which a parameter is compared."""
        return self._declared[name][0] if name in self._declared else name

    def _declare(self, layout: Layout, names: list[str], exchange: Callable[[Any], list[Any]]) -> None:
        everyone: list[list[str]] = exchange(names)
        for equal in layout.equal:
            held = [{_called(name, equal) for name in theirs} for theirs in everyone]
            if not any(theirs - {""} for theirs in held):
                raise UsageError(f"Equal(names={equal.names}) matches no parameter on any rank")
            for name in names:
                if called := _called(name, equal):
                    holders = frozenset(rank for rank, theirs in enumerate(held) if called in theirs)
                    self._declared[name] = called, equal.along, holders


def layout_of(model: nn.Module) -> Layout | None:
    """The layout that the model itself tells: data parallelism (None), or tensor parallelism beneath it.

    Raises:
        UsageError: it cannot be told from the model; the message says what to declare.
    """
    for group in module_groups(model):
        for parameter in group.parameters:
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            data = tuple(group.mesh.mesh_dim_names or ())
            if mesh.ndim > group.mesh.ndim and mesh.size() == dist.get_world_size():
                return Layout(mesh=mesh, data=tuple(name for name in mesh.mesh_dim_names or () if name in data))
    return None


def check_layout(model: nn.Module, layout: Layout | None) -> None:
    """Every module group must be reduced over all ranks that do the same work.

    Raises:
        UsageError: one is not; the message says what to declare.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = set(range(size)) if layout is None else set(layout.teams.peers(rank))
    for group in module_groups(model):
        ranks = set(group.ranks)
        if not peers <= ranks:
            raise UsageError(
                f"module {group.name} is reduced over {len(ranks)} of {size} ranks, and nothing says what the others do: declare "
                "it with Guard(..., layout=unsilent.Layout(mesh=..., data=(...)))"
            )


def _names_of(tensor: Any) -> tuple[str, ...]:
    mesh = getattr(tensor, "device_mesh", None)
    return () if mesh is None else tuple(mesh.mesh_dim_names or ())


def _called(name: str, equal: Equal) -> str:
    """What all ranks call this parameter; "" where the declaration is not about it."""
    if not any(fnmatchcase(name, pattern) for pattern in equal.names):
        return ""
    return name if len(equal.names) == 1 else equal.names[0]
