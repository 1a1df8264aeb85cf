"""What the design takes for granted about torch, at 3 and 4 ranks: 2 and powers of two hide differences."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel

from unsilent.lab.pool import RankPool
from unsilent.training.stretch import warm_up


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def bits(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step * 100 + rank))


def train(rank: int, size: int, how: str) -> str:
    """Six steps of DDP under one way of reducing; the digest of the final weights."""
    torch.manual_seed(0)
    model = Layers()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.03)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        buffer = bucket.buffer()
        if how == "divide":
            buffer.div_(size)
        else:
            buffer.mul_(1 / size)
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        future: Any = torch.futures.Future()

        def complete(done: Any) -> None:
            # From another thread than the one that reduces: what the watcher does when a rank has failed.
            value = done.value()[0]
            threading.Thread(target=lambda: future.set_result(value)).start()

        work.get_future().add_done_callback(complete)
        return future

    if how in ("multiply", "divide"):
        ddp.register_comm_hook(None, hook)
    for step in range(6):
        optimizer.zero_grad(set_to_none=True)
        if how == "second pass" and step == 0:
            ddp(batch(rank, step)).backward()
            optimizer.zero_grad(set_to_none=True)
        if how == "inner module" and step == 0:
            torch.autograd.grad(model(batch(rank, step)), list(model.parameters()))
        ddp(batch(rank, step)).backward()
        optimizer.step()
    return bits(model)


def test_multiplying_keeps_ddp_s_bits_with_a_future_completed_by_another_thread(pool: RankPool) -> None:
    assert pool.results(train, "multiply") == pool.results(train, "default")


def test_dividing_does_not_at_three_ranks_and_hides_at_four(pool3: RankPool, pool4: RankPool) -> None:
    assert pool3.results(train, "divide") != pool3.results(train, "default")
    assert pool4.results(train, "divide") == pool4.results(train, "default")


def test_a_second_pass_through_the_wrapper_at_step_0_changes_bits_and_the_inner_module_does_not(
    pool3: RankPool,
) -> None:
    default = pool3.results(train, "default")
    assert pool3.results(train, "second pass") != default
    assert pool3.results(train, "inner module") == default


def resumed(rank: int, size: int, warm: bool) -> tuple[str, bool]:
    """Six steps, after three of them with a fresh DDP object; (digest of the weights, warming up left no trace)."""
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    clean = True
    for step in range(6):
        if step in (0, 3):
            ddp = DistributedDataParallel(model, bucket_cap_mb=0.03)
        if step == 3 and warm:
            before = bits(model), torch.get_rng_state()
            warm_up(ddp, lambda module, x: module(x) * torch.rand(1), batch(rank, 99))
            clean = bits(model) == before[0] and bool((torch.get_rng_state() == before[1]).all())
            clean &= all(p.grad is None for p in model.parameters())
        optimizer.zero_grad(set_to_none=True)
        ddp(batch(rank, step)).backward()
        optimizer.step()
    return bits(model), clean


def test_a_fresh_ddp_object_changes_bits_at_three_ranks_unless_it_has_been_warmed_up(
    pool3: RankPool, pool4: RankPool
) -> None:
    """What ``unsilent recheck`` rests on: its first step reduces in the layout in which the run reduced."""
    for pool in (pool3, pool4):
        uninterrupted = pool.results(train, "default")
        assert pool.results(resumed, True) == [(digest, True) for digest in uninterrupted]
    assert [digest for digest, _ in pool3.results(resumed, False)] != pool3.results(train, "default")


def wrong_pairs(rank: int, size: int) -> list[float]:
    """Two collectives of one size, in swapped order on rank 1."""
    group = dist.new_group(backend="gloo")
    a, b = torch.tensor([1.0]), torch.tensor([100.0])
    for tensor in (b, a) if rank == 1 else (a, b):
        dist.all_reduce(tensor, group=group)
    return [float(a), float(b)]


def test_swapped_collectives_add_wrong_pairs_without_an_error(pool3: RankPool) -> None:
    """Why the guard has a group of its own and a header in every message."""
    assert pool3.results(wrong_pairs)[0] == [102.0, 201.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_aminmax_carries_what_is_not_finite(value: float) -> None:
    tensor = torch.ones(1000)
    tensor[500] = value
    assert not all(torch.isfinite(extreme) for extreme in tensor.aminmax())
    assert torch.isfinite(torch.full((1000,), 3e38).aminmax().max)


# ---- fully_shard -----------------------------------------------------------------------------------------------------


class _Kept(DefaultReduceScatter):
    """torch's own reduce-scatter, which keeps what went in and what came out."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gone_in = input_tensor.clone()
        result = super().__call__(output_tensor, input_tensor, *args, **kwargs)
        self.calls.append((gone_in, output_tensor.clone()))
        return result


def shard(rank: int, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """What goes into and comes out of the reduce-scatter of a layer whose rows do not divide, in two accumulated parts; and
    the gradient of the same layer without sharding."""
    torch.manual_seed(0)
    whole, model = nn.Linear(3, 7), nn.Linear(3, 7)
    model.load_state_dict(whole.state_dict())
    kept = _Kept()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    model.set_custom_reduce_scatter(kept)
    for part in range(2):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * part + rank))
        model.set_requires_gradient_sync(part == 1)
        model(x).square().sum().backward()
        whole(x).square().sum().backward()
    assert whole.weight.grad is not None and whole.bias.grad is not None
    rows = -(-7 // size) * size  # of each parameter, padded with zeros
    padded = [torch.zeros(rows, 3), torch.zeros(rows)]
    padded[0][:7], padded[1][:7] = whole.weight.grad, whole.bias.grad
    local = torch.cat([torch.cat([part.chunk(size)[r].flatten() for part in padded]) for r in range(size)])
    return [gone_in for gone_in, _ in kept.calls], [out for _, out in kept.calls], local


def test_a_reduce_scatter_takes_the_accumulated_local_gradients_rank_by_rank(pool: RankPool) -> None:
    answers = pool.results(shard)
    for rank, (gone_in, out, local) in enumerate(answers):
        assert len(gone_in) == 1  # once, also where gradients are accumulated
        assert torch.equal(gone_in[0], local)
        mean = sum(other[0][0].view(pool.size, -1)[rank] for other in answers) / pool.size
        torch.testing.assert_close(out[0], mean)


class _Asked(DefaultReduceScatter):
    """Keeps the memory that a group asks for, and what the first piece holds when it asks for the second."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if len(self.made) % 2:
            self.seen.append(self.made[-1].clone())
        self.made.append(super().allocate(size, dtype=dtype, device=device))
        return self.made[-1]


def replicated(rank: int, size: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The same of ``replicate``: what the input holds, this rank's own gradient, and what is left in ``.grad``."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    torch.manual_seed(0)
    whole, model = nn.Linear(3, 7), nn.Linear(3, 7)
    model.load_state_dict(whole.state_dict())
    asked = _Asked()
    replicate(model, mesh=init_device_mesh("cpu", (size,)))
    model.set_custom_reduce_scatter(asked)  # type: ignore[operator]
    for part in range(2):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * part + rank))
        model.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
        model(x).square().sum().backward()
        whole(x).square().sum().backward()
    own = torch.cat([p.grad.flatten() for p in whole.parameters() if p.grad is not None])
    left: Any = [p.grad for p in model.parameters()]
    return asked.seen, own, torch.cat([grad._local_tensor.flatten() for grad in left])


def test_replicate_fills_the_input_before_it_asks_for_the_output(pool: RankPool) -> None:
    answers = pool.results(replicated)
    for seen, own, left in answers:
        assert len(seen) == 1 and torch.equal(seen[0], own)
        torch.testing.assert_close(left, sum(other[1] for other in answers) / pool.size)


def private_parts(rank: int, size: int) -> list[str]:
    """What sharding.py and sharded_reduction.py read of a module group, as far as it is missing."""
    model: Any = fully_shard(nn.Linear(3, 7), mesh=init_device_mesh("cpu", (size,)))
    (group,) = model._get_fsdp_state()._fsdp_param_groups
    (parameter, _) = group.fsdp_params
    names = {
        "group": (group, "_reduce_scatter_comm _all_gather_comm reduce_grads all_reduce_grads _partial_reduce_output "
                         "_all_reduce_hook mesh_info device"),
        "parameter": (parameter, "sharded_param unsharded_accumulated_grad"),
        "mesh_info": (group.mesh_info, "shard_process_group mesh"),
        "model": (model, "reshard reset_iter_state"),
    }  # fmt: skip
    return [f"{of}.{name}" for of, (thing, text) in names.items() for name in text.split() if not hasattr(thing, name)]


def test_the_private_parts_of_fully_shard_that_are_read_are_there(pool3: RankPool) -> None:
    assert pool3.results(private_parts) == [[], [], []]
