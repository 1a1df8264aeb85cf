"""``unsilent doctor``: what this machine, and a run of a given shape, can promise, before it starts."""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from unsilent.agreement import WORDS
from unsilent.checks.audit import Audit
from unsilent.checks.replicas import Replicas
from unsilent.config import GuardConfig
from unsilent.determinism import missing_settings
from unsilent.environment import device_name, read_environment
from unsilent.errors import UsageError
from unsilent.evidence import device_counters
from unsilent.generators import read_generators
from unsilent.guard import Guard
from unsilent.localize import team_ring
from unsilent.records import Place
from unsilent.replay import MicroBatch, Work, pack
from unsilent.teams import Teams
from unsilent.training.presets import preset
from unsilent.training.ranks import Ranks, join, node_of, ranks_from_environment
from unsilent.world import World

_NODE_VARIABLES = ("UNSILENT_NODE", "NODE_NAME", "SLURMD_NODENAME")
_FP32 = 4
_BYTES_OF_A_NAME = 56  # of a LLaMA's parameter, pickled
_TENSORS_OF_A_LAYER, _OTHER_TENSORS = 9, 3


def examine(
    *,
    ranks: int | None,
    nodes: int | None,
    preset_name: str,
    audit_every: int | None,
    replicas_every: int | None,
    mesh: str | None = None,
    data: str = "dp",
) -> dict[str, Any] | None:
    """All that doctor knows, as plain values; None on a rank that has nothing to say.

    Args:
        ranks, nodes: a layout to imagine; without them it is the one that torchrun has started, or four nodes.
        mesh, data: how a model is spread over its ranks, as in "dp=2,tp=4", and the dimensions along which ranks have batches
            of their own.

    Raises:
        UsageError: a layout that cannot be, an unknown preset, periods below 1.
    """
    config = GuardConfig(audit_every=audit_every, replicas_every=replicas_every)
    here = ranks_from_environment()
    sizes = _sizes(mesh, data) if mesh is not None else {}
    if sizes:
        ranks = _product(sizes, ranks, here.size)
    cost = _cost(preset_name, config, ranks or (here.size if here.size > 1 else 4))
    guard = _small_guard(config)  # before the ranks meet: afterwards it would wait for theirs
    join(here)
    places, layout = _layout(here, None if sizes and here.size > 1 else ranks, nodes)
    teams = Teams.of_mesh(sizes, data.split(",")) if sizes else Teams.of_one(len(places))
    if here.rank != 0:
        return None
    environment = read_environment(here.device)
    return {
        "environment": {**asdict(environment), "variables": dict(environment.variables), "digest": environment.digest},
        "node": node_of(here.rank, name=None, imitated=None),
        "node_from": next((name for name in _NODE_VARIABLES if os.environ.get(name)), "the host's name"),
        "device": device_name(here.device),
        "device_from": "its UUID" if device_name(here.device).startswith("GPU-") else "its index",
        "determinism": missing_settings(),
        "layout": layout,
        "places": [vars(place) for place in places],
        "mesh": sizes,
        "teams": [list(ranks) for ranks in teams.members],
        "auditors": list(team_ring(places, teams)),
        "alike": _alike(sizes, data.split(",")),
        "coverage": _coverage(guard, places, teams),
        "cost": cost,
        "counters": _counters(here.device),
    }


def render(facts: dict[str, Any]) -> RenderableType:
    """The same for people."""
    e = facts["environment"]
    environment = _pairs(
        "This machine",
        ("torch", e["torch"]),
        ("CPU", f"{e['cpu']}, kernels for {e['cpu_capability']}, {e['threads']} threads"),
        ("GPU", f"{e['gpu']}, CUDA and cuDNN {e['driver']}" if e["gpu"] else "none that torch can use"),
        ("fp32 matmuls", e["precision"]),
        ("switches", ", ".join(f"{k}={v}" for k, v in e["variables"].items()) or "none is set"),
        ("digest", f"{e['digest']} (only machines with equal digests are compared bit for bit)"),
        ("node", f"{facts['node']} (from {facts['node_from']})"),
        ("device", f"{facts['device']} (from {facts['device_from']})"),
        ("to be set", "; ".join(facts["determinism"]) or "nothing is missing for matmuls that repeat"),
        ("error counters", _counter_words(facts["counters"])),
    )
    return Group(environment, _ring(facts), _alike_table(facts), _coverage_table(facts), _cost_table(facts["cost"]))


# ---- the layout ------------------------------------------------------------------------------------------------------


def _layout(here: Ranks, ranks: int | None, nodes: int | None) -> tuple[tuple[Place, ...], str]:
    if ranks is None and nodes is None and here.size > 1:
        world = World(here.device, node=node_of(here.rank, name=None, imitated=None))
        world.close()
        return world.places, "the ranks that torchrun has started"
    size = ranks if ranks is not None else (nodes or 4)
    count = nodes if nodes is not None else size
    if size < 1 or not 1 <= count <= size:
        raise UsageError(
            f"{size} ranks cannot run on {count} nodes: give --ranks and --nodes of at least 1 rank a node"
        )
    digest = read_environment(here.device).digest
    per_node = -(-size // count)
    places = tuple(
        Place(rank=r, node=f"node-{r * count // size}", device=f"{here.device.type}:{r % per_node}", environment=digest)
        for r in range(size)
    )
    return places, "imagined, with machines like this one"


def _sizes(mesh: str, data: str) -> dict[str, int]:
    """The dimensions that a text such as "dp=2,tp=4" names."""
    try:
        sizes = {name.strip(): int(size) for name, size in (part.split("=") for part in mesh.split(","))}
    except ValueError:
        raise UsageError(f"--mesh {mesh!r} is not a list like dp=2,tp=4") from None
    if wrong := [name for name, size in sizes.items() if size < 1]:
        raise UsageError(f"--mesh {mesh!r} gives {wrong[0]} less than 1 rank")
    if unknown := [name for name in data.split(",") if name not in sizes]:
        raise UsageError(f"--data names {unknown[0]!r}, and the mesh has {', '.join(sizes)}")
    return sizes


def _product(sizes: dict[str, int], ranks: int | None, started: int) -> int:
    size = math.prod(sizes.values())
    if (ranks or size) != size or (started > 1 and started != size):
        raise UsageError(f"a mesh of {size} ranks does not fit {started if started > 1 else ranks} ranks")
    return size


def _alike(sizes: dict[str, int], data: Sequence[str]) -> list[dict[str, str]]:
    """What a guard takes for granted about who must hold the same bits, unless a Layout says otherwise."""
    own = ", ".join(data) if sizes else "all ranks"
    rows = {
        "weights, optimizer state under DistributedDataParallel or replicate": f"along {own}" if sizes else own,
        "the same under fully_shard": "along the dimension that replicates (HSDP); a shard without a copy is not compared",
        "the part of the optimizer state that a ZeroRedundancyOptimizer keeps": "nowhere: it has a single owner",
        "parameters that tensor parallelism leaves whole": "along its dimension as well, whatever their placements say",
        "stages (pp), experts (ep)": "nowhere, unless Layout(equal=...) declares it",
        "buffers": "nowhere, unless replicated_buffers names them",
        "step, learning rate, loss scale": "all ranks",
    }
    return [{"what": what, "where": where} for what, where in rows.items()]


def _alike_table(facts: dict[str, Any]) -> RenderableType:
    table = _table("What must be equal, bit for bit, and where", "what", "where")
    for row in facts["alike"]:
        table.add_row(row["what"], row["where"])
    return table


def _ring(facts: dict[str, Any]) -> RenderableType:
    places, auditors = facts["places"], facts["auditors"]
    together = [ranks for ranks in facts["teams"] if len(ranks) > 1]
    table = _table(f"Who audits whom ({facts['layout']})", "rank", "node", "device", "audited by", "on")
    for place, auditor in zip(places, auditors, strict=True):
        other = "" if auditor is None else str(places[auditor]["node"])
        who = "nobody: replayed on its own device" if auditor is None else f"rank {auditor}"
        table.add_row(str(place["rank"]), place["node"], place["device"], who, other)
    team_of = {rank: ranks for ranks in facts["teams"] for rank in ranks}
    nodes = len({tuple(places[rank]["node"] for rank in ranks) for ranks in team_of.values()})
    if together:
        listed = "; ".join(", ".join(map(str, ranks)) for ranks in together[:4])
        more = "; ..." if len(together) > 4 else ""
        word = (
            "the rank that errs first is named" if nodes > 2 else "a persistent fault names both sides: three such groups are needed"
        )  # fmt: skip
        return Group(
            table, Text(f"These ranks compute one batch together and are audited as a whole: {listed}{more}; {word}.")
        )
    word = "a persistent fault can be pinned on one node" if nodes > 2 else (
        f"with {nodes} node{'s' if nodes > 1 else ''} a persistent fault cannot be pinned on one: three are needed"
    )  # fmt: skip
    return Group(table, Text(word + "."))


# ---- coverage and cost -----------------------------------------------------------------------------------------------


def _small_guard(config: GuardConfig) -> Guard:
    model = nn.Linear(1, 1)
    with contextlib.redirect_stderr(io.StringIO()):
        return Guard(model, torch.optim.AdamW(model.parameters()), _no_loss, config=config)


def _coverage(guard: Guard, places: tuple[Place, ...], teams: Teams) -> list[dict[str, Any]]:
    """What the guard of such a run would print: a guard of one small layer, told of other places."""
    config, reduces = guard.config, len(places) > 1
    guard.checks["audit"] = Audit(
        guard.inner,
        guard.recorder,
        config.audit,
        rank=0,
        auditors=team_ring(places, teams),
        places=places,
        team_places=teams.places(places),
        period=config.audit_every or 0,
        reduces=reduces,
        labels=guard.reduction.labels,
    )
    guard.checks["replicas"] = Replicas(guard.inventory, dict, period=config.replicas_every or 0, reduces=reduces)
    rows = [{**vars(row), "covered": bool(row.how)} for row in guard.coverage()]
    guard.close()
    return rows


def _no_loss(model: Any, batch: Any) -> torch.Tensor:
    raise AssertionError("this guard runs no step")


def _coverage_table(facts: dict[str, Any]) -> RenderableType:
    table = _table("What a guard would cover", "site", "check", "how", "when", "not seen")
    for row in facts["coverage"]:
        how = row["how"] if row["covered"] else "NOT COVERED"
        table.add_row(row["site"], row["check"], how, row["when"], row["blind"])
    return table


def _cost(preset_name: str, config: GuardConfig, ranks: int) -> dict[str, Any]:
    shape = preset(preset_name)
    size = shape.parameters * _FP32
    batch = torch.zeros(shape.samples_per_rank, shape.sequence_length + 1, dtype=torch.int64)
    work = len(pack(Work(step=0, micro_batches=(MicroBatch(batch, read_generators()),))))
    rows = shape.layers * _TENSORS_OF_A_LAYER + _OTHER_TENSORS
    return {
        "preset": shape.name,
        "parameters": shape.parameters,
        "bytes_weights": size,
        "bytes_gradients": size,
        "bytes_optimizer": 2 * size,
        "bytes_kept_on_audit_steps": size,
        "bytes_replayed_on_audit_steps": size,
        "bytes_snapshot_on_host": 3 * size if config.snapshot_every is not None and config.replicas_every else 0,
        "bytes_kept_batches": config.keep_batches * work if config.snapshot_every is not None else 0,
        "keep_batches": config.keep_batches,
        "bytes_agreed_vector": 8 * WORDS,
        "bytes_work_message": work + rows * (16 + _BYTES_OF_A_NAME),
        "bytes_repair_message": size,
        "bytes_read_per_vote": 4 * size,
        "audit_every": config.audit_every,
        "replicas_every": config.replicas_every,
        "audit_percent": None if config.audit_every is None else round(100 / config.audit_every, 2),
        "ranks": ranks,
    }


def _cost_table(cost: dict[str, Any]) -> RenderableType:
    audits = "no audits on schedule"
    if cost["audit_every"] is not None:
        audits = (
            f"an audit step takes about 2 x a normal one: every {cost['audit_every']} steps that is "
            f"{cost['audit_percent']:g} % of the run"
        )
    votes = "no votes on schedule"
    if cost["replicas_every"] is not None:
        votes = f"{_size(cost['bytes_read_per_vote'])} read per rank, every {cost['replicas_every']} steps"
    unguarded = (
        f"weights {_size(cost['bytes_weights'])}, gradients {_size(cost['bytes_gradients'])}, "
        f"AdamW {_size(cost['bytes_optimizer'])}, and activations"
    )
    audit_step = (
        f"+ {_size(cost['bytes_kept_on_audit_steps'])} local gradients kept for a repair (act mode), "
        f"+ {_size(cost['bytes_replayed_on_audit_steps'])} gradients of the replay (twice that in the calibration)"
    )
    rollback = "no snapshots: what a wrong weight has already spread stops the run"
    if cost["bytes_snapshot_on_host"]:
        rollback = (
            f"{_size(cost['bytes_snapshot_on_host'])} of host memory for weights and AdamW as the last clean vote found "
            f"them, and {_size(cost['bytes_kept_batches'])} for the batches of the last {cost['keep_batches']} steps, where "
            "the batches lie"
        )
    message = f"about {_size(cost['bytes_work_message'])} from each rank to its auditor: batch, random states, digests"
    repair = f"{_size(cost['bytes_repair_message'])} from the auditor to the faulty rank, and one more reduction"
    return _pairs(
        f"What preset {cost['preset']} needs on each rank",
        ("parameters", f"{cost['parameters']:,}"),
        ("without a guard", unguarded),
        ("on audit steps", audit_step),
        ("every step", f"one agreed vector of {cost['bytes_agreed_vector']:,} bytes; local gradients are read once"),
        ("audit", audits),
        ("audit message", message),
        ("vote", votes),
        ("repair", repair),
        ("rollback", rollback),
    )


# ---- small things ----------------------------------------------------------------------------------------------------


def _counters(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    return device_counters(device_name(device)) or device_counters(device.index or 0)


def _counter_words(counters: dict[str, Any]) -> str:
    if not counters:
        return "none can be read: there is no NVIDIA GPU with NVML and pynvml here, so ECC says nothing"
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in counters.items())


def _pairs(title: str, *pairs: tuple[str, str]) -> Table:
    table = _table(title, "", "")
    table.show_header = False
    for pair in pairs:
        table.add_row(*pair)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"
