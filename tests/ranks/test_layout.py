"""Layouts: who must hold the same bits of what, and what cannot be declared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks.parallel import _flat, mesh_of
from unsilent import Equal, Guard, Layout, UsageError
from unsilent.lab.pool import RankPool
from unsilent.layout import Relations, layout_of


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 4), nn.Linear(4, 8)


def copies_of_experts(rank: int, size: int, spread: str) -> dict[str, Any]:
    """Experts split over pairs as a DTensor, the rest over all ranks."""
    mesh = mesh_of((2, 2), ("dp", "ep"))
    model: Any = Mixture()
    for name, parameter in list(model.experts.named_parameters()):
        setattr(model.experts, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)])))
    how: Any = fully_shard if spread == "fully_shard" else replicate
    how(model.experts, mesh=mesh["dp"])
    how(model, mesh=_flat(mesh, "dp", "ep"))
    relations = Relations(model, layout_of(model))
    return {name: relations.copies(parameter, name) for name, parameter in model.named_parameters()}


def test_shards_over_all_ranks_are_no_copies_of_one_another(pool4: RankPool) -> None:
    for rank, copies in enumerate(pool4.results(copies_of_experts, "fully_shard")):
        assert set(copies.values()) == {(rank,)}


def test_where_nothing_is_sharded_an_expert_has_its_copy_and_the_rest_is_on_all(pool4: RankPool) -> None:
    for rank, copies in enumerate(pool4.results(copies_of_experts, "replicate")):
        assert copies["experts.weight"] == ((0, 2) if rank % 2 == 0 else (1, 3))
        assert copies["router.weight"] == (0, 1, 2, 3)


def copies_of_two_families(rank: int, size: int) -> list[Any]:
    """One part replicated and the rest sharded, over one mesh."""
    mesh = mesh_of((size,), ("dp",))
    model: Any = Mixture()
    replicate(model.router, mesh=mesh)
    fully_shard(model.experts, mesh=mesh)
    relations = Relations(model, None)
    return [relations.copies(model.router.weight), relations.copies(model.experts.weight)]


def test_copies_are_read_off_each_parameter_and_not_off_its_mesh(pool3: RankPool) -> None:
    assert pool3.results(copies_of_two_families) == [[(0, 1, 2), (rank,)] for rank in range(3)]


def refused(rank: int, size: int) -> list[str]:
    mesh = mesh_of((2, 2), ("pp", "dp"))

    def guard(layout: Layout, **options: Any) -> Any:
        model: Any = replicate(nn.Linear(4, 4), mesh=mesh["dp"])
        return Guard(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, b: m(b).sum(), layout=layout, **options)

    sharded: Any = replicate(nn.Linear(4, 4), mesh=mesh["dp"])
    whole = Layout(mesh=mesh, data=("dp",))
    tries: list[Any] = [
        lambda: Layout(mesh=init_device_mesh("cpu", (4,)), data=("dp",)),
        lambda: Layout(mesh=mesh, data=("tp",)),
        lambda: Layout(mesh=mesh["dp"], data=("dp",)),
        lambda: Guard(sharded, torch.optim.SGD(sharded.parameters(), 0.1), lambda m, b: m(b).sum()),
        lambda: guard(whole, clip_norm=1.0),
        lambda: guard(Layout(mesh=mesh, data=("dp",), equal=(Equal(names=("none",), along=("pp",)),))),
    ]
    said: list[str] = []
    for attempt in tries:
        with pytest.raises(UsageError) as error:
            attempt()
        said.append(str(error.value))
    return said


def test_what_cannot_be_declared_is_refused_in_a_sentence(pool4: RankPool) -> None:
    for said in pool4.results(refused):
        expected = (
            "needs names", "names the dimension 'tp'", "holds 2 of 4 ranks", "declare it with Guard(..., layout=",
            "clip each stage of the pipeline", "matches no parameter on any rank",
        )  # fmt: skip
        assert all(part in text for part, text in zip(expected, said, strict=True)), said
