"""What cannot be guarded is refused before anything is touched, with one sentence that says why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unsilent


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Stands for torch's own, which cannot be made without a process group."""


class FullyShardedDataParallel(nn.Linear):
    """Stands for torch's own, which cannot be made without a process group."""


def refused(model: nn.Module, optimizer: type[torch.optim.SGD] = torch.optim.SGD) -> str:
    with pytest.raises(unsilent.UsageError) as error:
        unsilent.Guard(model, optimizer(model.parameters(), lr=0.1), lambda m, b: m(b).sum())
    return str(error.value)


def test_a_sharded_optimizer() -> None:
    assert "ZeroRedundancyOptimizer shards the optimizer's state" in refused(nn.Linear(2, 2), ZeroRedundancyOptimizer)


def test_batchnorm_that_communicates() -> None:
    said = refused(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    assert "module 1 is a SyncBatchNorm" in said and "wait for the others" in said


def test_a_sharded_model() -> None:
    assert "sharded by FSDP" in refused(nn.Sequential(FullyShardedDataParallel(2, 2)))


def test_sparse_gradients() -> None:
    assert "sparse=False" in refused(nn.Sequential(nn.Embedding(4, 2, sparse=True)))
