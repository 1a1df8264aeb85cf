"""Who this process is among the ranks: what torchrun says, the device, the threads, the node that it plays."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from unsilent.environment import node_name
from unsilent.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all; alone it is rank 0 of 1."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str


def ranks_from_environment() -> Ranks:
    """Read what torchrun has set; nothing is started and nobody is waited for.

    Raises:
        UsageError: the variables contradict each other.
    """
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    local_rank, local_size = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", size)
    if not 0 <= rank < size:
        raise UsageError(f"RANK is {rank} and WORLD_SIZE is {size}: start the ranks with torchrun")
    if not torch.cuda.is_available():
        device, backend = torch.device("cpu"), "gloo"
    else:
        devices = torch.cuda.device_count()
        device = torch.device("cuda", local_rank % devices)
        # NCCL refuses two ranks on one device; gloo takes tensors of a GPU too, more slowly.
        backend = "nccl" if local_size <= devices else "gloo"
    return Ranks(rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=device, backend=backend)


def join(ranks: Ranks) -> None:
    """Share the cores out, start the device, and meet the other ranks if there are any."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks.local_size))
    if ranks.device.type == "cuda":
        # Read when CUDA starts; without it matmuls may not repeat.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(ranks.device)
    if ranks.size > 1 and not dist.is_initialized():
        dist.init_process_group(ranks.backend)


def node_of(rank: int, *, name: str | None, imitated: int | None) -> str:
    """The node that this rank says it runs on.

    Args:
        name: a name in place of the environment's; ``{rank}`` in it, or in UNSILENT_NODE, is replaced by the rank.
        imitated: play so many nodes on one machine, the ranks taking turns.

    Raises:
        UsageError: both are given, or there are fewer than one node to imitate.
    """
    if imitated is not None:
        if name is not None:
            raise UsageError("--node and --nodes-imitated exclude one another")
        if imitated < 1:
            raise UsageError(f"--nodes-imitated is {imitated}: it must be at least 1")
        return f"node-{rank % imitated}"
    return node_name(name).replace("{rank}", str(rank))


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}: torchrun sets it to a number") from None
