"""One small model, trained in every way of spreading it over ranks that is guarded, each with a fault or without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from unsilent import Equal, Guard, GuardConfig, Layout
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.sharding import local

STEPS = 5
WIDTH, WORDS, LENGTH = 12, 29, 8


class Attention(nn.Module):
    """``cp``: the group over which the sequence is split; keys and values of all parts are gathered."""

    def __init__(self, cp: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cp = cp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mask, first = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), 0
        if self.cp is not None:
            k, v = (all_gather_tensor_autograd(t.contiguous(), 1, self.cp) for t in (k, v))
            first = dist.get_rank(self.cp) * x.shape[1]
        mask = mask[first : first + x.shape[1], : k.shape[1]]
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Block(nn.Module):
    def __init__(self, cp: dist.ProcessGroup | None = None, *, attends: bool = True) -> None:
        super().__init__()
        self.attention = Attention(cp) if attends else nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """The blocks ``first`` to ``last`` of three; the first stage begins with the embedding, the last ends with the head."""

    def __init__(
        self, cp: dist.ProcessGroup | None = None, first: int = 0, last: int = 3, *, attends: bool = True
    ) -> None:
        super().__init__()
        blocks = [Block(cp, attends=attends) for _ in range(3)]
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in range(first, last)})
        if first > 0:
            del self.embedding
        if last < 3:
            del self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) if hasattr(self, "embedding") else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if hasattr(self, "head") else x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return loss_of(model(batch[:, :-1]), batch[:, 1:])


def loss_in_bf16(model: Any, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_fn(model, batch)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one rank trains: ``data`` numbers its batches, alike on ranks that compute together."""

    model: nn.Module
    parameters: nn.Module
    loss_fn: Callable[[Any, Any], torch.Tensor]
    data: int
    layout: Layout | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Made once in a rank's life: every mesh brings process groups, and a pool of ranks lives for many tests."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@functools.cache
def _flat(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    return mesh[names]._flatten("_".join(names))


def _policy(dtype: str) -> MixedPrecisionPolicy:
    if dtype == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _spread(model: Any, mesh: DeviceMesh, dtype: str, *, shard: bool, whole_output: bool = False) -> Any:
    """``fully_shard`` or ``replicate`` over one block and the rest; ``whole_output``: what the model gives is in fp32."""
    policy = _policy(dtype)
    spread: Any = fully_shard if shard else replicate
    if "1" in model.blocks:
        spread(model.blocks["1"], mesh=mesh, mp_policy=policy)
    return spread(model, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32) if whole_output else policy)


def ddp(size: int, dtype: str) -> Job:
    wrapped = DistributedDataParallel(Model(), bucket_cap_mb=0.01)
    return Job(
        model=wrapped,
        parameters=wrapped.module,
        loss_fn=loss_fn if dtype == "fp32" else loss_in_bf16,
        data=dist.get_rank(),
    )


def zero1(size: int, dtype: str) -> Job:
    from torch.distributed.optim import (
        ZeroRedundancyOptimizer,
    )  # its import warns, which is an error in a test's own process

    return replace(ddp(size, dtype), optimizer=lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=1e-2))


def fsdp2(size: int, dtype: str) -> Job:
    model = _spread(Model(), mesh_of((size,), ("dp",)), dtype, shard=True)
    return Job(model=model, parameters=model, loss_fn=loss_fn, data=dist.get_rank())


def hsdp(size: int, dtype: str) -> Job:
    mesh = mesh_of((2, size // 2), ("replicate", "shard"))
    model = _spread(Model(), mesh, dtype, shard=True)
    return Job(model=model, parameters=model, loss_fn=loss_fn, data=dist.get_rank())


def tensor_parallel(size: int, dtype: str, *, shard: bool = False, sequence: bool = False) -> Job:
    """Two ranks hold the parts of each feed-forward; the rest is on both."""
    mesh = mesh_of((size // 2, 2), ("dp", "tp"))
    model = Model(attends=not sequence)
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)), "drop": SequenceParallel()}  # fmt: skip
        whole = {
            "blocks.0": PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=False
            ),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], whole)
    for block in model.blocks.values():
        parallelize_module(block, mesh["tp"], plan)
    _spread(model, mesh["dp"], dtype, shard=shard)
    return Job(model=model, parameters=model, loss_fn=loss_fn, data=mesh.get_local_rank("dp"))


def pipeline_parallel(size: int, dtype: str, *, shard: bool = False, schedule: str = "1F1B") -> Job:
    """Two stages, two micro-batches; the schedule runs forward and backward."""
    mesh = mesh_of((2, size // 2), ("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    model = Model(first=0, last=2) if stage == 0 else Model(first=2, last=3)
    _spread(model, mesh["dp"], dtype, shard=shard, whole_output=True)
    held = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    kind: Any = Schedule1F1B if schedule == "1F1B" else ScheduleGPipe
    plan = kind(held, 2, loss_fn=loss_of)

    def run(model: Any, batch: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if stage == 0:
            plan.step(batch[:, :-1])
            return torch.zeros(())
        plan.step(target=batch[:, 1:], losses=losses)
        return torch.stack(losses).mean().detach()

    layout = Layout(mesh=mesh, data=("dp",))
    return Job(model=model, parameters=model, loss_fn=run, data=mesh.get_local_rank("dp"), layout=layout)


def context_parallel(size: int, dtype: str, *, shard: bool = False) -> Job:
    """Two ranks share a sequence; gradients are reduced over all ranks."""
    mesh = mesh_of((size // 2, 2), ("dp", "cp"))
    part, length = mesh.get_local_rank("cp"), LENGTH // 2
    model = _spread(Model(cp=mesh.get_group("cp")), _flat(mesh, "dp", "cp"), dtype, shard=shard)

    def loss_of_part(model: Any, batch: torch.Tensor) -> torch.Tensor:
        at = slice(part * length, (part + 1) * length)
        return loss_of(model(batch[:, :-1][:, at]), batch[:, 1:][:, at])

    layout = Layout(mesh=mesh, data=("dp",))
    return Job(model=model, parameters=model, loss_fn=loss_of_part, data=mesh.get_local_rank("dp"), layout=layout)


class Experts(nn.Module):
    """One expert here and one on each other rank of the group: every rank sends each token to the expert of its turn."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        expert, ranks = dist.get_rank(group), dist.get_world_size(group)
        made = [nn.Linear(WIDTH, WIDTH) for _ in range(ranks)]
        self.expert = made[expert]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ranks = dist.get_world_size(self.group)
        tokens = x.reshape(-1, ranks, WIDTH).transpose(0, 1).reshape(-1, WIDTH)  # those of the first expert first
        split = [tokens.shape[0] // ranks] * ranks
        there = all_to_all_single_autograd(tokens, split, split, self.group)
        back = all_to_all_single_autograd(self.expert(there), split, split, self.group)
        return back.reshape(ranks, -1, WIDTH).transpose(0, 1).reshape(x.shape)


def expert_parallel(size: int, dtype: str, *, shard: bool = False) -> Job:
    """Pairs of ranks hold an expert each for every block, and exchange tokens; each rank has a batch of its own."""
    mesh = mesh_of((size // 2, 2), ("dp", "ep"))
    model: Any = Model()
    for block in model.blocks.values():
        block.down = nn.Sequential(block.down, Experts(mesh.get_group("ep")))
    torch.manual_seed(1)
    spread: Any = fully_shard if shard else replicate
    for block in model.blocks.values():
        spread(block.down[1].expert, mesh=mesh["dp"], mp_policy=_policy(dtype))
    _spread(model, _flat(mesh, "dp", "ep"), dtype, shard=shard)
    return Job(
        model=model, parameters=model, loss_fn=loss_fn, data=dist.get_rank(), layout=Layout(mesh=mesh, data=("dp",))
    )


def tied_stages(size: int, dtype: str) -> Job:
    """A pipeline whose head begins with the embedding's weights; nothing here keeps them alike, and nothing changes them."""
    job = pipeline_parallel(size, dtype)
    assert job.layout is not None
    for name, parameter in job.model.named_parameters():
        if name in ("embedding.weight", "head.weight"):
            shape: Any = parameter.shape
            local(parameter).copy_(torch.randn(shape, generator=torch.Generator().manual_seed(5)))
    tied = Equal(names=("embedding.weight", "head.weight"), along=("pp",))
    return replace(
        job,
        layout=replace(job.layout, equal=(tied,)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )


WAYS: dict[str, Callable[[int, str], Job]] = {
    "ddp": ddp,
    "zero1": zero1,
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "tp": tensor_parallel,
    "tp fsdp2": lambda size, dtype: tensor_parallel(size, dtype, shard=True),
    "sp": lambda size, dtype: tensor_parallel(size, dtype, sequence=True),
    "sp fsdp2": lambda size, dtype: tensor_parallel(size, dtype, shard=True, sequence=True),
    "pp": pipeline_parallel,
    "pp fsdp2": lambda size, dtype: pipeline_parallel(size, dtype, shard=True, schedule="GPipe"),
    "cp": context_parallel,
    "cp fsdp2": lambda size, dtype: context_parallel(size, dtype, shard=True),
    "ep": expert_parallel,
    "ep fsdp2": lambda size, dtype: expert_parallel(size, dtype, shard=True),
    "tied pp": tied_stages,
}


class SpoiledInput:
    """A module whose backward gives a wrong gradient of its input in one step, as often as it runs, but in no rerun."""

    def __init__(self, module: nn.Module, step: int, replaying: Callable[[], bool]) -> None:
        self.record: list[Any] = []
        self._at, self._now, self._replaying = step, -1, replaying
        self._hook = module.register_forward_pre_hook(self._enter, prepend=True)

    def begin_step(self, step: int) -> None:
        self._now = step

    def after_update(self, step: int) -> None:
        return

    def close(self) -> None:
        self._hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._now == self._at and args[0].requires_grad and not self._replaying():
            args[0].register_hook(self._spoil)

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._now != self._at or self._replaying():
            return gradient  # a pipeline receives into the same tensor again
        wrong = gradient.clone()
        local(wrong).view(-1)[3] += 0.5
        return wrong


def train(
    rank: int,
    size: int,
    way: str,
    dtype: str,
    directory: str | None,
    fault: dict[str, Any] | None = None,
    **config: Any,
) -> dict[str, Any]:
    """A run, guarded if it has a directory; its weights and what the guard said."""
    torch.manual_seed(0)
    job = WAYS[way](size, dtype)
    optimizer = job.optimizer(job.model.parameters())
    torch.manual_seed(7 + job.data)
    guard: Guard | None = None
    injector: Any = None
    if directory is not None:
        options = {"audit_every": 2, "replicas_every": 2, "quarantine": "ask", "timeout_s": 10.0, **config}
        guard = Guard(
            job.model, optimizer, job.loss_fn, layout=job.layout,
            config=GuardConfig(directory=directory, node=f"node-{rank}", **options),
        )  # fmt: skip
    if fault is not None and fault["rank"] == rank:  # other stages of a pipeline have no such module
        assert guard is not None
        replayer = guard.replayer
        if fault["site"] == "input gradient":
            module = job.model.get_submodule(fault["target"])
            injector = SpoiledInput(module, fault["step"], lambda: replayer.running)
        else:
            injector = Injector(
                job.parameters, optimizer, Fault(**fault), rank=rank, world_size=size, node=f"node-{rank}",
                replaying=lambda: replayer.running,
            )  # fmt: skip
    said: list[tuple[int, str, str, str, list[int | None]]] = []
    reasons: list[str] = []
    try:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(1000 * step + job.data)
            batch = torch.randint(0, WORDS, (4, LENGTH + 1), generator=generator)
            if injector is not None:
                injector.begin_step(step)
            if guard is None:
                optimizer.zero_grad(set_to_none=True)
                loss = job.loss_fn(job.model, batch)
                if loss.requires_grad:
                    loss.backward()
                optimizer.step()
                continue
            outcome = guard.step(batch)
            if injector is not None:
                injector.after_update(step)
            if outcome.verdict is not None:
                verdict = outcome.verdict
                suspects = sorted(s.rank for s in verdict.suspects)
                said.append((step, verdict.kind.value, verdict.site.value, outcome.action.value, suspects))
                reasons.append(verdict.reason)
    finally:
        if injector is not None:
            injector.close()
        if guard is not None:
            guard.close()
    return {
        "bits": [local(p).clone().view(torch.int32) for p in job.model.parameters()],
        "said": said,
        "reasons": reasons,
        "coverage": [] if guard is None else guard.coverage(),
        "fired": [r for r in injector.record if r.changed] if injector else [],
        "audit": None if guard is None else guard.audit.strength.value,
    }
