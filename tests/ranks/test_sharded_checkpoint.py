"""Certified checkpoints of sharded state: written by some ranks, read by others, and the same certificate for all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock
from zipfile import ZipFile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as plain_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

from tests.ranks.test_fsdp2 import Model, batch, build, loss_fn, mesh_of
from unsilent import Guard, GuardConfig
from unsilent.checkpoint import CheckpointStore, Status, checkpoints_in, dcp, state, verify
from unsilent.checkpoint.certificate import CERTIFICATE
from unsilent.checkpoint.files import read_certificate
from unsilent.cli import app
from unsilent.errors import CheckpointError, UsageError
from unsilent.fingerprints import fingerprint
from unsilent.inventory import Inventory
from unsilent.lab.pool import RankPool
from unsilent.sharding import is_distributed, local

STEPS = 4
WEIGHT = "model.blocks.1.up.weight"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def prints(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The whole state, gathered as no certificate may do, under the names of certificates."""
    tensors = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    found = {f"model.{n}": fingerprint(whole(t.detach())).hex for n, t in tensors.items()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            found[f"optimizer.state.{name}.{key}"] = fingerprint(whole(value)).hex
    return found


def started(size: int, directory: str, *, replicas: int = 1, seed: int = 0, **config: Any) -> Guard:
    model = build(mesh_of(size, replicas), "fp32", True, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"audit_every": 2, "replicas_every": 2, "timeout_s": 10.0, **config}
    node = f"node-{dist.get_rank()}"
    return Guard(model, optimizer, loss_fn, config=GuardConfig(directory=directory, node=node, **options))


def bits(guard: Guard) -> dict[str, str]:
    return prints(guard.model, guard.optimizer)


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("a tensor is put together from its shards")


def saves(rank: int, size: int, directory: str, *, replicas: int = 1) -> dict[str, Any]:
    """Two checkpoints, after two steps and after all; then two steps more."""
    guard = started(size, directory, replicas=replicas)
    torch.manual_seed(7 + rank)
    found: dict[str, Any] = {"coverage": guard.coverage()}
    for step in range(STEPS + 2):
        if step in (2, STEPS):
            with mock.patch.object(DTensor, "full_tensor", never), mock.patch.object(DTensor, "redistribute", never):
                found["path"] = guard.save(f"{directory}/checkpoints")
            found[f"state {step}"] = bits(guard)
        guard.step(batch(rank, step))
    guard.close()
    return {**found, "end": bits(guard)}


def loads(
    rank: int, size: int, directory: str, root: str, *, replicas: int = 1, trained: bool = False
) -> dict[str, Any]:
    guard = started(size, directory, replicas=replicas, seed=5)
    torch.manual_seed(100 + rank)
    if trained:  # what has state already is overwritten
        guard.step(batch(rank, 77))
    steps = guard.load(root)
    state = bits(guard)
    for step in range(steps, STEPS + 2):
        guard.step(batch(rank, step))
    guard.close()
    return {"steps": steps, "state": state, "end": bits(guard)}


def said(directory: Path) -> str:
    lines = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return "\n".join(str(line["text"]) for line in lines if line["kind"] == "notice")


@pytest.fixture(scope="module")
def pool2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def written(pool4: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What four ranks of FSDP2 have saved."""
    return pool4.results(saves, str(tmp_path_factory.mktemp("saved")))[0]


@pytest.fixture(scope="module")
def written_hsdp(pool4: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two replicas of two ranks have saved."""
    return pool4.results(partial(saves, replicas=2), str(tmp_path_factory.mktemp("saved")))[0]


@pytest.fixture
def copied(written: dict[str, Any], tmp_path: Path) -> Path:
    """The newest checkpoint of a copy that a test may damage."""
    root = tmp_path / "copy"
    for path in written["path"].parent.iterdir():
        (root / path.name).mkdir(parents=True)
        for file in path.iterdir():
            (root / path.name / file.name).write_bytes(file.read_bytes())
    return root / written["path"].name


# ---- other numbers of ranks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", ["written", "written_hsdp"])
def test_what_four_ranks_save_four_three_two_and_one_load(
    pool4: RankPool, pool3: RankPool, pool2: RankPool, tmp_path: Path, request: pytest.FixtureRequest, made: str
) -> None:
    saved = request.getfixturevalue(made)
    path, state = saved["path"], saved[f"state {STEPS}"]
    certificate = read_certificate(path)
    assert certificate is not None and certificate.status is Status.CERTIFIED
    # Composed from sums, and yet those of the whole tensors.
    assert {name: one["hex"] for name, one in certificate.tensors.items()} == state
    for pool in (pool4, pool3, pool2):
        loaded = pool.results(partial(loads, trained=pool is pool3), str(tmp_path / f"{pool.size}"), str(path.parent))
        for one in loaded:
            assert one["steps"] == STEPS and one["state"] == state
            assert one["end"] == loaded[0]["end"] != state
        if pool is pool4 and made == "written":  # the run goes on as the one that never stopped
            assert loaded[0]["end"] == saved["end"]
    model = Model()
    inventory = Inventory(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    CheckpointStore(path.parent).load(inventory)
    assert prints(model, inventory.optimizer) == state  # type: ignore[arg-type]
    if made == "written":  # and the other way, from one that holds all
        alone = CheckpointStore(tmp_path / "alone").save(inventory, steps=STEPS)
        again = read_certificate(alone)
        assert again is not None and again.tensors == certificate.tensors
        for one in pool3.results(loads, str(tmp_path / "again"), str(alone.parent)):
            assert one["state"] == state


def test_two_replicas_write_each_shard_once(written: dict[str, Any], written_hsdp: dict[str, Any]) -> None:
    for saved, shards in ((written, 4), (written_hsdp, 2)):
        contents = dcp.read_contents(saved["path"])
        assert len(contents.places[WEIGHT]) == len(contents.places[f"optimizer.state.{WEIGHT[6:]}.exp_avg"]) == shards
        assert len(contents.places["optimizer.state.head.weight.step"]) == 1
        assert {f"__{rank}_0.distcp" for rank in range(4)} < contents.files | {CERTIFICATE}  # the writing is spread


def test_one_process_verifies_it(written: dict[str, Any], copied: Path) -> None:
    run = CliRunner().invoke(app, ["verify", str(written["path"])])
    assert run.exit_code == 0, run.output
    damage(copied, WEIGHT)
    run = CliRunner().invoke(app, ["verify", str(copied)])
    assert run.exit_code == 13 and f"it hits '{WEIGHT}'" in " ".join(run.output.split())


# ---- damage ----------------------------------------------------------------------------------------------------------


def damage(path: Path, name: str) -> str:
    """Flip one bit of one value of a tensor; returns the file."""
    place = dcp.read_contents(path).places[name][-1]
    data = bytearray((path / place.file).read_bytes())
    saved = bytes(data[place.offset : place.offset + place.length])
    values = ZipFile(BytesIO(saved)).read("archive/data/0")
    data[place.offset + saved.index(values) + 5] ^= 1 << 3
    (path / place.file).write_bytes(data)
    return place.file


def test_a_flipped_bit_is_traced_to_its_tensor_and_an_older_one_is_loaded(
    pool3: RankPool, written: dict[str, Any], copied: Path, tmp_path: Path
) -> None:
    file = damage(copied, WEIGHT)
    (problem,) = verify(copied)
    assert problem.file == file and WEIGHT in problem.tensors and problem.reason.endswith(f"it hits {WEIGHT!r}")
    for one in pool3.results(loads, str(tmp_path / "run"), str(copied.parent)):
        assert one["steps"] == 2 and one["state"] == written["state 2"]
    assert f"it hits {WEIGHT!r}" in said(tmp_path / "run")


def misreads(
    rank: int, size: int, directory: str, root: str, how: str, replicas: int = 1
) -> tuple[int, dict[str, str]]:
    """One rank gets something else than the file holds, or nothing at all, from the newest checkpoint."""
    guard = started(size, directory, replicas=replicas, seed=5)
    read, plan = dcp.read_blocks, dcp.create_read_items_for_chunk_list

    def flips(path: Path, contents: Any, blocks: Any) -> Any:
        found = read(path, contents, blocks)
        if path.name.endswith(str(STEPS)):
            found[WEIGHT].part.view(torch.int32)[0, 0] ^= 1
        return found

    def forgets(key: str, saved: Any, chunks: Any) -> Any:
        items = plan(key, saved, chunks)
        return items[:-1] if key == WEIGHT else items

    patch: Any = nullcontext()
    if rank == size - 1:
        if how == "flips":
            patch = mock.patch.object(dcp, "read_blocks", flips)
        else:
            patch = mock.patch.object(dcp, "create_read_items_for_chunk_list", forgets)
    with patch:
        try:
            return guard.load(root), bits(guard)
        finally:
            guard.close()


@pytest.mark.parametrize("replicas", [1, 2], ids=["FSDP2", "HSDP"])
def test_what_one_rank_reads_wrong_is_taken_by_none(
    pool4: RankPool, written: dict[str, Any], tmp_path: Path, replicas: int
) -> None:
    job = partial(misreads, replicas=replicas)
    for steps, read in pool4.results(job, str(tmp_path), str(written["path"].parent), "flips"):
        assert steps == 2 and read == written["state 2"]
    assert WEIGHT in said(tmp_path) and ("ranks [1] and [3]" in said(tmp_path)) == (replicas == 2)


def test_a_shard_that_nothing_is_read_into_is_an_error(
    pool3: RankPool, written: dict[str, Any], tmp_path: Path
) -> None:
    for answer in pool3.run(misreads, str(tmp_path), str(written["path"].parent), "forgets"):
        assert answer.kind == "CheckpointError"
        assert f"elements of {WEIGHT!r} are in its files (seen by rank 2)" in answer.text and "only " in answer.text


def leaves_alone(rank: int, size: int, directory: str, root: str) -> str:
    guard = started(size, directory, seed=5)
    guard.step(batch(rank, 0))
    with mock.patch.object(state, "_put_optimizer") if rank == 1 else nullcontext():
        with pytest.raises(CheckpointError) as error:
            guard.load(root)
    guard.close()
    return str(error.value)


def test_a_tensor_that_is_left_as_it_was_is_an_error(pool3: RankPool, written: dict[str, Any], tmp_path: Path) -> None:
    for text in pool3.results(leaves_alone, str(tmp_path), str(written["path"].parent)):
        assert (
            "rank 1 could not restore" in text and "'optimizer.state.blocks.0.down.bias.exp_avg' does not hold" in text
        )


def loads_another(rank: int, size: int, root: str) -> list[str]:
    """Models and optimizers that are not those of the checkpoint."""
    found: list[str] = []
    group = dist.new_group(backend="gloo")
    store = CheckpointStore(root, group=group, rank=rank, world_size=size)
    for change in ("more", "less", "wider", "group"):
        model = Model()
        if change == "more":
            model.more = nn.Linear(3, 3)
        elif change == "less":
            model.blocks[2].odd = nn.Identity()  # type: ignore[assignment]
        elif change == "wider":
            model.head = nn.Linear(13, 38, bias=False)
        fully_shard(model, mesh=mesh_of(size, 1))
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters[1:] if change == "group" else parameters)
        with pytest.raises(UsageError) as error:
            store.load(Inventory(model, optimizer))
        found.append(str(error.value))
    return found


def test_missing_and_extra_tensors_are_one_sentence_that_names_the_first(
    pool3: RankPool, written: dict[str, Any]
) -> None:
    more, less, wider, group = pool3.results(loads_another, str(written["path"].parent))[1]
    assert more == "this checkpoint is of another model: it has no 'more.bias'" or "'more.weight'" in more
    assert less == "this checkpoint is of another model: it has 'blocks.2.odd.weight', which is not here"
    assert wider == "this checkpoint is of another model: 'head.weight' has shape [38, 13] here and [37, 13] there"
    assert group.startswith("this checkpoint is of another optimizer: group 0 has")


def keeps_rows(rank: int, size: int, root: str) -> tuple[str, bool]:
    """An optimizer whose state is not sharded as its parameter is."""
    store = CheckpointStore(root, group=dist.new_group(backend="gloo"), rank=rank, world_size=size)

    def made(fill: float | None) -> Inventory:
        model = fully_shard(nn.Linear(3, 7), mesh=mesh_of(size, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if fill is not None:
            weight: Any = model.weight
            part = torch.full((weight.to_local().shape[0], 1), fill + rank)
            row = DTensor.from_local(
                part, weight.device_mesh, weight.placements, shape=torch.Size([7, 1]), stride=(1, 1)
            )
            optimizer.state[weight]["row"] = row
        return Inventory(model, optimizer)

    saved = made(1.0)
    store.save(saved, steps=1)
    with pytest.raises(UsageError) as error:
        store.load(made(None))
    other = made(5.0)
    store.load(other)
    assert saved.optimizer is not None and other.optimizer is not None
    one, two = (prints(i.model, i.optimizer) for i in (saved, other))  # type: ignore[arg-type]
    return str(error.value), one == two


def test_state_that_is_sharded_otherwise_is_loaded_where_it_is_known_how(pool3: RankPool, tmp_path: Path) -> None:
    for text, same in pool3.results(keeps_rows, str(tmp_path)):
        assert text.startswith("nothing says how 'optimizer.state.weight.row' of shape [7, 1] is sharded") and same


# ---- trust -----------------------------------------------------------------------------------------------------------


def earns_trust(rank: int, size: int, directory: str) -> list[Any]:
    guard = started(size, directory, audit_every=4, replicas_every=1)
    root = Path(directory) / "checkpoints"
    found: list[Any] = []
    for step in range(4):
        guard.step(batch(rank, step))
        if step in (1, 2):  # step 1 is audited, since the guard has just been calibrated
            path = guard.save(root)
            found.append(guard.standing.store(root).status_of(path))  # type: ignore[arg-type]
    store = guard.standing.store(root)  # the audit of step 3 was clean
    found += [(saved.steps, saved.status) for saved in store.candidates()]
    store.distrust(3, "because")
    found.append(guard.load(root))
    guard.close()
    return found


def test_candidates_are_certified_by_a_later_audit_and_a_distrusted_one_is_not_loaded(
    pool3: RankPool, tmp_path: Path
) -> None:
    for found in pool3.results(earns_trust, str(tmp_path)):
        assert found == [Status.CERTIFIED, Status.CANDIDATE, (2, Status.CERTIFIED), (3, Status.CERTIFIED), 2]
    assert "it is distrusted: because" in said(tmp_path)


def test_without_a_second_copy_a_certificate_claims_no_vote(
    written: dict[str, Any], written_hsdp: dict[str, Any]
) -> None:
    for saved, name in ((written, "counters"), (written_hsdp, "replicas")):
        certificate = read_certificate(saved["path"])
        assert certificate is not None and {run.check for run in certificate.checks} == {"audit", "finite", name}
        rows = [row.blind for row in saved["coverage"] if row.site == "checkpoint"]
        assert ["shards at rest" in row for row in rows] == ([True] if name == "counters" else [])


def flips_a_weight(rank: int, size: int, directory: str, mode: str) -> dict[str, Any]:
    """A replica's shard flips after the last update, before the state is saved."""
    guard = started(size, directory, replicas=2, mode=mode)
    for step in range(3):
        guard.step(batch(rank, step))
    clean = bits(guard)
    if rank in (2, 3):
        local(dict(guard.model.named_parameters())[WEIGHT[6:]]).view(torch.int32)[1, 1] ^= 1 << 20
    first = guard.save(f"{directory}/checkpoints")
    mended = bits(guard)
    second = guard.save(f"{directory}/checkpoints")
    guard.close()
    return {"clean": clean, "first": first, "mended": mended, "second": second}


def test_the_vote_before_a_save_finds_a_wrong_shard(pool4: RankPool, tmp_path: Path) -> None:
    found = pool4.results(flips_a_weight, str(tmp_path), "act")
    for one in found:
        assert one["first"] is None and one["mended"] == one["clean"]
    certificate = read_certificate(found[0]["second"])
    assert certificate is not None and certificate.tensors[WEIGHT]["hex"] == found[0]["clean"][WEIGHT]
    assert len(checkpoints_in(tmp_path / "checkpoints")) == 1


def test_observe_mode_writes_the_replica_of_the_lowest_ranks_and_never_certifies_it(
    pool4: RankPool, tmp_path: Path
) -> None:
    found = pool4.results(flips_a_weight, str(tmp_path), "observe")
    certificate = read_certificate(found[0]["first"])
    assert certificate is not None and certificate.status is Status.CANDIDATE and "differed" in certificate.reason
    assert certificate.tensors[WEIGHT]["hex"] == found[0]["clean"][WEIGHT]
    assert verify(found[0]["first"]) == []


def rolls_back(rank: int, size: int, directory: str, fault: bool) -> tuple[list[str], dict[str, str]]:
    """A weight of one replica flips and is used, and the snapshots are gone: a certified checkpoint is the way back."""
    guard = started(size, directory, replicas=2)
    torch.manual_seed(7 + rank)
    done: list[str] = []
    for step in range(6):
        if fault and step == 5:
            guard.rollback.snapshot = guard.rollback.taken_at = None
            if rank == 2:
                local(dict(guard.model.named_parameters())[WEIGHT[6:]]).view(torch.int32)[1, 1] ^= 1 << 20
        done.append(guard.step(batch(rank, step), saving=step == 3).action.value)
        if step == 3:
            guard.save(f"{directory}/checkpoints")
    guard.close()
    return done, bits(guard)


def test_a_certified_checkpoint_is_a_way_back_for_shards(pool4: RankPool, tmp_path: Path) -> None:
    plain = pool4.results(rolls_back, str(tmp_path / "plain"), False)
    mended = pool4.results(rolls_back, str(tmp_path / "mended"), True)
    for (_, want), (done, found) in zip(plain, mended, strict=True):
        assert done == ["CONTINUE"] * 5 + ["ROLLBACK"] and found == want


# ---- other writers ---------------------------------------------------------------------------------------------------


def writes_itself(rank: int, size: int, directory: str) -> dict[str, Any]:
    guard = started(size, directory)
    for step in range(2):
        guard.step(batch(rank, step))
    names = {p: name for name, p in guard.model.named_parameters()}
    copy = {
        "model": {name: value.clone() for name, value in guard.model.state_dict().items()},
        "optimizer": {
            "state": {names[p]: {k: v.clone() for k, v in of.items()} for p, of in guard.optimizer.state.items()},
            "param_groups": [{"lr": 1e-2, "params": list(names.values())}],
        },
        "steps": 2,
    }
    certificate, state = guard.certify(copy), bits(guard)
    guard.step(batch(rank, 2))
    path = Path(directory) / "own" / "step-00000002"
    plain_save(copy, checkpoint_id=path, process_group=guard.world.group)
    if rank == 0:
        guard.attach(certificate, path)
        (path / CERTIFICATE).rename(path / "aside")
    found: dict[str, Any] = {"path": path, "state": state, "may": guard.may_publish(certificate)}
    dist.barrier(group=guard.world.group)
    guard.load(path)  # with no certificate too
    found["unverified"] = bits(guard)
    dist.barrier(group=guard.world.group)
    if rank == 0:
        (path / "aside").rename(path / CERTIFICATE)
    guard.step(batch(rank, 2))
    guard.load(path)
    found["verified"] = bits(guard)
    guard.close()
    return found


def test_what_another_writer_wrote_is_certified_and_loaded(pool3: RankPool, tmp_path: Path) -> None:
    for one in pool3.results(writes_itself, str(tmp_path)):
        assert one["unverified"] == one["verified"] == one["state"] and one["may"] == "yes"
    path = tmp_path / "own" / "step-00000002"
    assert verify(path) == []
    certificate = read_certificate(path)
    assert certificate is not None and {n: f["hex"] for n, f in certificate.tensors.items()} == one["state"]
    assert "without having been verified" in said(tmp_path)


# ---- a state of which each rank holds only a part --------------------------------------------------------------------


class Stage(nn.Module):
    """One of two stages; both keep the names of the whole model."""

    def __init__(self, *stages: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = {str(i): nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for i in range(2)}
        self.layers = nn.ModuleDict({name: layer for name, layer in layers.items() if int(name) in stages})
        self.scale = nn.Parameter(torch.ones(1))  # on every stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x * self.scale

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seen": 3}


def pipeline(rank: int, size: int, root: str, shard: bool, load: bool) -> dict[str, str]:
    """Two stages, each on half of the ranks, sharded there or replicated."""
    half = size // 2
    stage = rank // half
    peers = tuple(range(stage * half, (stage + 1) * half))
    model = Stage(stage)
    if shard:
        from torch.distributed.device_mesh import DeviceMesh

        meshes = [DeviceMesh("cpu", list(range(i * half, (i + 1) * half))) for i in range(2)]
        fully_shard(model.layers[str(stage)], mesh=meshes[stage])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if not load else 5.0)
    if not load:
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(stage))).square().mean().backward()
        for p in model.parameters():
            if not is_distributed(p) and p.shape == (1,):
                p.grad = torch.ones_like(p)
        optimizer.step()
        model.layers[str(stage)][1].running_mean.add_(rank)  # type: ignore[index, operator]
    inventory = Inventory(model, optimizer, copies=lambda tensor, name="": None if name == "scale" else peers)
    store = CheckpointStore(root, group=dist.new_group(backend="gloo"), rank=rank, world_size=size)
    if load:
        assert store.load(inventory).status is Status.CANDIDATE
        assert optimizer.param_groups[0]["lr"] == 1e-2
    else:
        store.save(inventory, steps=1)
    return prints(model, optimizer)


@pytest.mark.parametrize("shard", [True, False], ids=["sharded stages", "whole stages"])
def test_stages_that_hold_parts_of_the_model_make_one_checkpoint(
    pool4: RankPool, pool2: RankPool, tmp_path: Path, shard: bool
) -> None:
    saved = pool4.results(pipeline, str(tmp_path), shard, False)
    state = {**saved[0], **saved[2]}
    (one,) = checkpoints_in(tmp_path)
    assert verify(one.path) == []
    certificate = read_certificate(one.path)
    assert certificate is not None
    own = {f"buffers.{rank}.layers.{rank // 2}.1.running_mean" for rank in (1, 3)}  # else than the first that has it
    assert {n: f["hex"] for n, f in certificate.tensors.items() if n not in own} == state
    assert own < certificate.tensors.keys()
    assert pool4.results(pipeline, str(tmp_path), shard, True) == saved
    assert pool2.results(pipeline, str(tmp_path), False, True) == [saved[0], saved[2]]
    model = Stage(0, 1)
    inventory = Inventory(model, torch.optim.AdamW(model.parameters()))
    CheckpointStore(tmp_path).load(inventory)
    assert prints(model, inventory.optimizer) == state  # type: ignore[arg-type]


def zero(rank: int, size: int, root: str, load: bool) -> dict[str, str]:
    """Every rank keeps the optimizer's state of its own part of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own deprecated parts

    torch.manual_seed(5 if load else 0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3.0 if load else 1e-2)
    store = CheckpointStore(root, group=dist.new_group(backend="gloo"), rank=rank, world_size=size)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    if load:
        store.load(Inventory(model, optimizer))
    else:
        step()
        assert verify(store.save(Inventory(model, optimizer), steps=1)) == []
    step()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, prints(model, optimizer.optim))
    return {name: value for mine in everyone for name, value in mine.items()}


def test_an_optimizer_in_parts_is_loaded_on_fewer_ranks(pool3: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    (want, *_) = pool3.results(zero, str(tmp_path), False)
    assert sum(".exp_avg_sq" in name for name in want) == 6
    for pool in (pool3, pool2):
        assert pool.results(zero, str(tmp_path), True) == [want] * pool.size
