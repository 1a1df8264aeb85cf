"""Models as transformers has them, under DDP and FSDP2: guarded without a change to their code, quiet, and the same bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from unsilent import Guard, GuardConfig
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import RankPool
from unsilent.sharding import local

STEPS = 4
HIT = 3
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "use_cache": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mixtral": ("MixtralConfig", {**EXPERTS, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 24}),
}


def model_of(kind: str) -> nn.Module:
    import transformers  # here, since it takes seconds

    name, options = KINDS[kind]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SMALL, **options))


def loss_fn(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(100 * step + rank))


def train(
    rank: int, size: int, kind: str, sharded: bool, directory: str | None, *, fault: bool = False
) -> dict[str, Any]:
    inner: Any = model_of(kind)
    if sharded:
        mesh = init_device_mesh("cpu", (size,))
        for layer in inner.model.layers:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(inner, mesh=mesh)
    else:
        model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said: list[Any] = []
    if directory is None:
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            loss_fn(model, batch(rank, step)).backward()
            optimizer.step()
    else:
        config = GuardConfig(directory=directory, node=f"node-{rank}", audit_every=2, replicas_every=2)
        guard = Guard(model, optimizer, loss_fn, config=config)
        wrong = Fault(site="forward", target="model.layers.1.self_attn.v_proj", pattern="relative", relative=0.5,
                      rank=2, step=HIT)  # fmt: skip
        injector = Injector(inner, optimizer, wrong, rank=rank, world_size=size, node=f"node-{rank}",
                            replaying=lambda: guard.replayer.running)  # fmt: skip
        for step in range(STEPS):
            if fault:
                injector.begin_step(step)
            outcome = guard.step(batch(rank, step))
            if outcome.verdict is not None:
                suspects = [s.rank for s in outcome.verdict.suspects]
                said.append((step, outcome.verdict.kind.value, outcome.action.value, suspects))
        injector.close()
        guard.close()
    return {"weights": [local(p).clone() for p in inner.parameters()], "said": said}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one["weights"], other["weights"], strict=True))


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_true_model_is_guarded_as_it_is(pool3: RankPool, tmp_path: Path, kind: str, sharded: bool) -> None:
    plain = pool3.results(train, kind, sharded, None)
    clean = pool3.results(train, kind, sharded, str(tmp_path / "clean"))
    hit = pool3.results(partial(train, fault=True), kind, sharded, str(tmp_path / "hit"))
    for one, two, three in zip(plain, clean, hit, strict=True):
        assert two["said"] == []
        assert same(one, two)
        assert three["said"] == [(HIT, "TRANSIENT", "REPAIR", [2])]
        assert same(one, three)
