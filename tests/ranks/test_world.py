"""The world: names, own group, exchange, and the few ways in which ranks talk."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unsilent.environment import node_name, read_environment
from unsilent.lab.pool import Failed, RankPool
from unsilent.world import World


def talk(rank: int, size: int) -> dict[str, Any]:
    """Every way to talk, once."""
    world = World(torch.device("cpu"), node=f"node-{rank % 2}")
    try:
        gathered = world.gather({"rank": rank, "text": "x" * (10 * rank)}, step=1, tag=7)
        after, before = (rank + 1) % size, (rank - 1) % size
        got = world.exchange([(after, ["hello", rank])], [before], step=1, tag=8)
        vector = torch.full((128,), rank, dtype=torch.int64)
        world.reduce_max(vector)
        tensor = torch.full((3, 5), float(rank), dtype=torch.bfloat16)
        if rank == 0:
            world.send(tensor, 1)
        elif rank == 1:
            world.receive(tensor, 0)
        buffer = torch.ones(4)
        world.reduce_in_job(buffer)
        return {
            "gathered": gathered,
            "got": got[before],
            "max": int(vector[5]),
            "tensor": tensor.float().unique().tolist(),
            "sum": buffer.tolist(),
            "nodes": world.nodes,
            "place": world.place,
            "own": world.group is not dist.group.WORLD,
        }
    finally:
        world.close()


def test_gather_exchange_agree_send_and_reduce(pool: RankPool) -> None:
    answers = pool.results(talk)
    size = len(answers)
    for rank, answer in enumerate(answers):
        assert [g["rank"] for g in answer["gathered"]] == list(range(size))
        assert answer["got"] == ["hello", (rank - 1) % size]
        assert answer["max"] == size - 1
        assert answer["sum"] == [size] * 4
        assert answer["nodes"] == ("node-0", "node-1")
        assert answer["place"].rank == rank and answer["place"].environment
        assert answer["own"]
    assert answers[1]["tensor"] == [0.0]


def lost(rank: int, size: int) -> None:
    """Rank 1 believes to be in another step."""
    world = World(torch.device("cpu"))
    try:
        world.gather(rank, step=2 if rank == 1 else 1, tag=7)
    finally:
        world.close(together=False)


def test_a_rank_in_another_step_is_a_clear_error_and_no_wrong_data(pool3: RankPool) -> None:
    answers = pool3.run(lost)
    assert all(isinstance(a, Failed) and "step 2" in a.text and "step 1" in a.text for a in answers)


def test_without_a_process_group_it_is_a_world_of_one() -> None:
    world = World(torch.device("cpu"), node="alone")
    assert (world.rank, world.size, world.nodes) == (0, 1, ("alone",))
    assert world.gather("x", step=0, tag=1) == ["x"]
    world.close()


def test_the_node_s_name_comes_from_the_argument_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNSILENT_NODE", "NODE_NAME", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    assert node_name() == os.uname().nodename
    monkeypatch.setenv("SLURMD_NODENAME", "slurm-7")
    assert node_name() == "slurm-7"
    monkeypatch.setenv("NODE_NAME", "k8s-3")
    assert node_name() == "k8s-3"
    monkeypatch.setenv("UNSILENT_NODE", "mine")
    assert node_name() == "mine"
    assert node_name("argument") == "argument"


def test_the_environment_tells_threads_apart() -> None:
    threads = torch.get_num_threads()
    one = read_environment(torch.device("cpu")).digest
    torch.set_num_threads(threads + 1)
    try:
        assert read_environment(torch.device("cpu")).digest != one
    finally:
        torch.set_num_threads(threads)
    assert read_environment(torch.device("cpu")).digest == one
