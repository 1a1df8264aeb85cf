"""Checkpoints saved and loaded by four ranks together, and by one process alone.

This file is also the program of the ranks: one set of processes runs all cases, and the tests read what they report.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from unsilent.checkpoint import CheckpointStore, CheckRun, Status, attach, certify, checkpoints_in, dcp, files, verify
from unsilent.errors import CheckpointError, UsageError
from unsilent.fingerprints import fingerprint
from unsilent.inventory import Inventory

WORLD = 4


class Net(nn.Module):
    """Everything that is awkward to save: a tied weight, bf16, 0-dim, a channels-last kernel, buffers of two kinds."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(width)
        self.bf = nn.Linear(width, width).bfloat16()
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mask", torch.arange(12).reshape(3, 4).t())
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("none", torch.empty(0, 3))

    def forward(self, x):
        h = self.norm(self.embed(x).mean(1))
        h = h + self.bf(h.bfloat16()).float() * self.scale
        return self.head(h).square().mean() + self.conv(h[:, :4].reshape(-1, 1, 2, 2).repeat(1, 2, 2, 2)).sum() * 1e-3

    def get_extra_state(self):
        return {"seen": {1: "by number"}}

    def set_extra_state(self, state):
        assert state == {"seen": {1: "by number"}}


class Run:
    """A small run without DDP: all ranks take the same batches, so that their replicas stay equal."""

    def __init__(self, seed: int = 0, width: int = 6, lr: float | torch.Tensor = 1e-2):
        torch.manual_seed(seed)
        self.model = Net(width)
        some = [p for n, p in self.model.named_parameters() if p.requires_grad and "bf" not in n]
        self.optimizer = torch.optim.AdamW(
            [{"params": some}, {"params": [*self.model.bf.parameters()], "lr": 1e-3, "betas": (0.8, 0.9)}], lr=lr
        )
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[2, 5])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        self.inventory = Inventory(self.model, self.optimizer, replicated_buffers=frozenset({"mask"}))

    def train(self, first: int, last: int):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            loss = self.model(torch.randint(0, 10, (8, 3), generator=generator))
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()

    def save(self, store: CheckpointStore, steps: int, **more) -> Path:
        return store.save(self.inventory, steps=steps, scaler=self.scaler, scheduler=self.scheduler, **more)

    def load(self, store: CheckpointStore, **more):
        return store.load(self.inventory, scaler=self.scaler, scheduler=self.scheduler, **more)

    def bits(self):
        tensors = {e.name: fingerprint(e.tensor) for e in self.inventory.entries() if "scratch" not in e.name}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return tensors, groups, self.scaler.state_dict(), self.scheduler.state_dict()


# ------------------------------------------------------------------------------------------------ cases of four ranks


class Rank:
    def __init__(self, rank: int, root: Path, group):
        self.rank, self.root, self.group = rank, root, group

    def store(self, name: str, **more) -> CheckpointStore:
        return CheckpointStore(self.root / name, group=self.group, rank=self.rank, world_size=WORLD, **more)

    def wait(self):
        dist.barrier(group=self.group)


def case_what_is_saved_comes_back_bit_for_bit(r: Rank):
    run = Run()
    run.train(0, 3)
    with torch.no_grad():
        run.model.frozen.copy_(torch.tensor([float("nan"), -0.0, float("inf")]))
    run.model.norm.running_mean.add_(r.rank // 2)  # ranks 0, 1 and ranks 2, 3 alike
    store = r.store("round")
    checks = [CheckRun(check="replicas", steps=(3,))]
    rng = {"python": random.Random(r.rank).getstate(), "torch": torch.get_rng_state(), 3: {"rank": r.rank}}
    path = run.save(store, 3, checks=checks, rng=rng, guard={"ring": 1, "seen": {7: torch.ones(2)}, "empty": {}})
    assert path == r.root / "round" / "step-00000003"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    want = run.bits()
    certificate = files.read_certificate(path)
    assert certificate is not None and certificate.checks == tuple(checks) and certificate.world_size == WORLD
    assert len(set(certificate.rng.values())) == WORLD
    assert {n.split(".")[1] for n in certificate.tensors if n.startswith("buffers.")} == {"2", "3"}
    written_by = {files.written_by(name) for name in certificate.files}
    assert written_by == {None, 0, 1, 2, 3}  # the writing is spread over the ranks

    fresh = Run(seed=9)
    assert not fresh.optimizer.state
    loaded = fresh.load(store)
    assert loaded.notices == () and loaded.steps == 3 and loaded.status is Status.CANDIDATE
    assert (
        loaded.guard["ring"] == 1
        and loaded.guard["empty"] == {}
        and torch.equal(loaded.guard["seen"][7], torch.ones(2))
    )
    assert loaded.rng[3] == {"rank": r.rank} and loaded.rng["python"] == rng["python"]
    assert fresh.bits() == want
    half = fresh.optimizer.state[fresh.model.bf.weight]
    assert half["exp_avg"].dtype == torch.bfloat16 and half["step"].dtype == torch.float32 and half["step"].ndim == 0
    assert fresh.optimizer.state[fresh.model.conv.weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    assert fresh.model.head.weight is fresh.model.embed.weight
    assert type(fresh.scheduler.milestones) is Counter and fresh.scheduler.milestones == {2: 1, 5: 1}

    # A run that goes on from it ends as the one that never stopped; what has state already is overwritten.
    run.train(3, 6)
    want = run.bits()
    moment = fresh.optimizer.state[fresh.model.scale]["exp_avg"]
    fresh.train(3, 5)
    fresh.load(store)
    assert fresh.optimizer.state[fresh.model.scale]["exp_avg"] is moment
    fresh.train(3, 6)
    assert fresh.bits() == want


def case_a_rank_that_cannot_prepare_is_named_on_all(r: Rank):
    run, store = Run(), r.store("prepare")
    bad = (lambda: 0) if r.rank == 2 else None
    with pytest.raises(CheckpointError, match=r"rank 2 could not prepare step-00000001: .*lambda"):
        run.save(store, 1, rng=bad)
    assert store.candidates() == [] and store.newest_certified() is None


def case_a_full_disk_on_one_rank_is_told_to_all(r: Rank):
    run, store = Run(), r.store("full")
    run.train(0, 1)
    full = mock.patch.object(
        dcp.FileSystemWriter, "write_data", side_effect=OSError(28, "No space left on device", "somewhere")
    )
    started = time.monotonic()
    with full if r.rank == 2 else nullcontext(), pytest.raises(OSError, match="rank 2 could not write step-00000001"):
        run.save(store, 1)
    assert time.monotonic() - started < 20
    r.wait()
    assert [p.name for p in (r.root / "full").iterdir()] == [".partial-step-00000001"]
    r.wait()
    run.save(store, 2)
    assert [p.name for p in (r.root / "full").iterdir()] == ["step-00000002"]


def case_a_failure_that_is_no_oserror_is_a_checkpoint_error(r: Rank):
    run, store = Run(), r.store("strange")
    odd = mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=RuntimeError("odd"))
    with odd if r.rank == 1 else nullcontext(), pytest.raises(CheckpointError, match=r"rank 1 .* RuntimeError: odd"):
        run.save(store, 1)


def case_rank_0_that_cannot_publish_is_told_to_all(r: Rank):
    run, store = Run(), r.store("publish")
    with mock.patch.object(files, "publish", side_effect=PermissionError(13, "Permission denied")):
        with pytest.raises(OSError, match="rank 0 could not publish step-00000001") as caught:
            run.save(store, 1)
    assert caught.value.errno == 13


def case_replicas_that_differ_are_not_saved(r: Rank):
    run, store = Run(), r.store("differ")
    run.train(0, 1)
    if r.rank == 1:
        run.optimizer.state[run.model.embed.weight]["exp_avg"].view(torch.int32)[2, 3] ^= 1
    with pytest.raises(CheckpointError, match=r"ranks \[1\] and \[0, 2, 3\] .*'optimizer.state.embed.weight.exp_avg'"):
        run.save(store, 1)
    assert store.candidates() == []
    with pytest.raises(UsageError, match="different steps"):
        run.save(store, r.rank)


def case_trust_and_retention(r: Rank):
    run, store = Run(), r.store("trust", keep=2)
    for steps in (10, 20):
        run.save(store, steps)
    store.promote(10)
    store.promote(10)
    for steps in (30, 40):
        run.save(store, steps)
    # The newest certified one stays besides what is kept.
    assert [(s.steps, s.status) for s in store.candidates()] == [(10, Status.CERTIFIED), (40, Status.CANDIDATE)]
    assert store.newest_certified().steps == store.newest_certified(at_most=10).steps == 10
    assert store.newest_certified(at_most=9) is None
    store.distrust(40, "rank 2 failed an audit")
    assert store.candidates()[-1].reason == "rank 2 failed an audit"
    store.distrust(40, "a second reason")
    assert store.candidates()[-1].reason == "rank 2 failed an audit"
    with pytest.raises(CheckpointError, match=r"distrusted .* cannot be promoted"):
        store.promote(40)
    with pytest.raises(CheckpointError, match="no certificate"):
        store.promote(50)
    loaded = run.load(store)
    assert loaded.steps == 10 and "distrusted: rank 2 failed an audit" in loaded.notices[0].reason
    run.save(store, 15)  # after going back: the distrusted one goes first, not the one just written
    assert [s.steps for s in store.candidates()] == [10, 15]
    run.save(store, 15, status=Status.CERTIFIED)  # the same step again replaces it
    assert [(s.steps, s.status) for s in store.candidates()][-1] == (15, Status.CERTIFIED)
    r.wait()
    assert not list((r.root / "trust").glob(".partial*"))


def case_replicas_that_may_differ_are_saved_as_rank_0_holds_them(r: Rank):
    run, store = Run(), r.store("may differ")
    run.train(0, 1)
    want = run.bits()
    if r.rank > 0:
        run.optimizer.state[run.model.embed.weight]["exp_avg"].view(torch.int32)[2, 3] ^= r.rank
    path = run.save(store, 1, may_differ=True, rng=r.rank)
    assert verify(path) == []
    assert run.load(store).rng == r.rank and run.bits() == want
    with pytest.raises(CheckpointError, match=r"candidate \(the replicas differed .* cannot be promoted"):
        store.promote(1)
    with pytest.raises(UsageError, match="different steps"):
        run.save(store, r.rank, may_differ=True)


def case_a_certified_one_is_not_replaced_by_one_that_is_less(r: Rank):
    run, store = Run(), r.store("kept")
    run.train(0, 1)
    path, want = run.save(store, 1, status=Status.CERTIFIED), run.bits()
    run.train(1, 2)
    assert run.save(store, 1) == path and store.status_of(path) is Status.CERTIFIED
    run.load(store)
    assert run.bits() == want
    r.wait()
    if r.rank == 0:
        os.truncate(path / "__1_0.distcp", 100)
    run.train(1, 2)
    assert run.save(store, 1) == path and store.status_of(path) is Status.CANDIDATE  # it was damaged
    assert verify(path) == []


def case_what_one_rank_reads_wrong_is_taken_by_none(r: Rank):
    run, store = Run(), r.store("misread")
    run.train(0, 1)
    run.save(store, 1)
    want = run.bits()
    run.train(1, 2)
    run.save(store, 2)
    real = dcp.read

    def misread(path, contents, wanted):
        flat = real(path, contents, wanted)
        if path.name == "step-00000002":
            flat["model.bf.weight"].view(torch.int16)[0, 0] ^= 1 << 14
        return flat

    fresh = Run(seed=5)
    with mock.patch.object(dcp, "read", misread) if r.rank == 3 else nullcontext():
        loaded = fresh.load(store)
    assert loaded.steps == 1 and fresh.bits() == want
    (notice,) = loaded.notices
    assert notice.rank == 3 and notice.tensors == ("model.bf.weight",) and notice.file.endswith(".distcp")


def case_damage_of_all_checkpoints_ends_with_an_error_on_all_ranks(r: Rank):
    run, store = Run(), r.store("damage")
    path = run.save(store, 1)
    if r.rank == 0:
        os.truncate(path / "__1_0.distcp", 100)
    r.wait()
    before = run.bits()
    with pytest.raises(CheckpointError, match=r"no checkpoint can be loaded.*__1_0.distcp: the file has 100 bytes"):
        run.load(store)
    assert run.bits() == before
    with pytest.raises(CheckpointError, match="there is none in"):
        run.load(r.store("nowhere"))


def case_another_model_is_one_clear_sentence_on_all_ranks(r: Rank):
    run, store = Run(), r.store("another")
    run.save(store, 1)
    before = (other := Run(width=7)).bits()
    with pytest.raises(UsageError, match=r"another model: 'embed.weight' has shape \[10, 7\] here and \[10, 6\] there"):
        other.load(store)
    assert other.bits() == before


CASES = {name: case for name, case in list(globals().items()) if name.startswith("case_")}


def be_a_rank(rank: int, root: Path) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    store = dist.FileStore(str(root / "rendezvous"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
    results: dict[str, str] = {}
    for name, case in CASES.items():
        try:
            case(Rank(rank, root, group))
            results[name] = ""
        except BaseException:  # noqa: BLE001 - pytest's own failures are none of Exception; all are reported
            results[name] = traceback.format_exc()
        # Ranks that left a case at different places start the next one together, or not at all.
        outcomes: list[str] = [""] * WORLD
        try:
            dist.all_gather_object(outcomes, name, group=group)
        except Exception:  # noqa: BLE001 - a rank has gone; what was reached is reported
            break
    (root / f"rank{rank}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # gloo aborts now and then when it is torn down


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict[str, str]]:
    root = tmp_path_factory.mktemp("ranks")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(root)], env=env) for rank in range(WORLD)]
    try:
        for rank in ranks:
            rank.wait(timeout=240)
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((root / f"rank{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES)
def test_four_ranks(case, reports):
    for rank, report in enumerate(reports):
        assert report.get(case, "was not reached") == "", f"rank {rank}: {report.get(case)}"


# --------------------------------------------------------------------------------------------------- one process alone


@pytest.fixture
def saved(tmp_path):
    run = Run()
    run.train(0, 3)
    store = CheckpointStore(tmp_path / "run")
    run.rng = {"torch": torch.get_rng_state()}
    path = run.save(store, 3, rng=run.rng)
    return run, store, path


def test_one_process_without_a_group_saves_loads_and_verifies(saved):
    run, store, path = saved
    assert verify(path) == []
    fresh = Run(seed=1)
    loaded = fresh.load(store)
    assert fresh.bits() == run.bits() and loaded.notices == ()
    assert torch.equal(loaded.rng["torch"], run.rng["torch"])
    assert fresh.load(CheckpointStore(path)).steps == 3  # the directory of one checkpoint will do
    assert fresh.load(CheckpointStore(path.parent.parent), path=path).steps == 3


def test_plain_dcp_loads_it_without_unsilent(saved, tmp_path):
    run, _, path = saved
    model = {name: value for name, value in run.model.state_dict().items() if isinstance(value, torch.Tensor)}
    torch.save(model, tmp_path / "want.pt")
    code = f"""
import pickle, sys
sys.modules["unsilent"] = None
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
want = torch.load({str(tmp_path / "want.pt")!r})
state = {{"model": {{name: torch.zeros_like(value) for name, value in want.items()}}, "steps": 0}}
dcp.load(state, checkpoint_id={str(path)!r})
assert state["steps"] == 3
assert all(torch.equal(state["model"][name], value) for name, value in want.items())
dcp_to_torch_save({str(path)!r}, {str(tmp_path / "all.pt")!r})
state = torch.load({str(tmp_path / "all.pt")!r}, weights_only=False)
assert set(state) == {{"model", "optimizer", "scaler", "scheduler", "rng", "guard", "steps"}}
assert "torch" in pickle.loads(state["rng"]["0"])
group = state["optimizer"]["param_groups"][1]
assert group["params"] == ["bf.weight", "bf.bias"] and group["betas"] == (0.8, 0.9)
assert state["optimizer"]["state"]["embed.weight"]["exp_avg"].shape == (10, 6)
assert state["scheduler"]["last_epoch"] == 3
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_saving_before_the_first_step_runs_no_step_and_comes_back_empty(tmp_path):
    run = Run()
    before = run.bits()
    store = CheckpointStore(tmp_path)
    run.save(store, 0)
    assert run.bits() == before
    other = Run(seed=3)
    other.train(0, 2)
    other.load(store)
    assert other.bits() == before and not other.optimizer.state


def test_a_learning_rate_in_a_tensor_is_certified_and_restored_in_place(tmp_path):
    run = Run(lr=torch.tensor(1e-2))
    run.train(0, 3)
    store = CheckpointStore(tmp_path)
    path = run.save(store, 3)
    assert "optimizer.param_groups.0.lr" in files.read_certificate(path).tensors
    fresh = Run(seed=2, lr=torch.tensor(5.0))
    lr = fresh.optimizer.param_groups[0]["lr"]
    fresh.load(store)
    assert fresh.optimizer.param_groups[0]["lr"] is lr and torch.equal(lr, run.optimizer.param_groups[0]["lr"])


def test_moments_keep_their_own_dtype(tmp_path):
    def make():
        model = nn.Linear(2, 2).bfloat16()
        return Inventory(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    one, other, store = make(), make(), CheckpointStore(tmp_path)
    for p in one.model.parameters():
        one.optimizer.state[p]["momentum_buffer"] = torch.randn(p.shape)  # fp32, as some keep them
    store.save(one, steps=1)
    store.load(other)
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        moment = other.optimizer.state[b]["momentum_buffer"]
        assert moment.dtype == torch.float32 and torch.equal(moment, one.optimizer.state[a]["momentum_buffer"])


def test_another_world_size_says_what_it_does_not_restore(saved):
    run, store, path = saved
    certificate = files.read_certificate(path)
    changed = copy.copy(certificate)
    object.__setattr__(changed, "world_size", 8)
    files.write_certificate(path, changed)
    loaded = run.load(store)
    assert loaded.rng is None and "saved by 8 ranks and is loaded by 1" in loaded.notices[0].reason


def test_a_checkpoint_without_a_certificate_loads_last_and_with_a_notice(tmp_path):
    run = Run()
    run.train(0, 2)
    state = {
        "model": {k: v for k, v in run.model.state_dict().items() if isinstance(v, torch.Tensor)},
        "optimizer": run.optimizer.state_dict(),
    }
    state["model"]["_extra_state"] = (run.model.get_extra_state(),)
    path = tmp_path / "step-00000002"
    dcp.write(state, path, None)
    assert "no certificate" in verify(path)[0].reason
    fresh = Run(seed=4)
    fresh.model.set_extra_state = lambda state: None
    loaded = fresh.load(CheckpointStore(tmp_path))
    assert fresh.bits()[:2] == run.bits()[:2] and loaded.steps == 2 and loaded.certificate is None
    reasons = [n.reason for n in loaded.notices]
    assert "without having been verified" in reasons[0]
    assert reasons[1:] == [f"it holds no {part}: the {part} stays as it is" for part in ("scaler", "scheduler")]

    # It is newer than one that is certified, and yet that one is taken; and it is nobody's to delete.
    guarded = CheckpointStore(tmp_path, keep=1)
    run.save(guarded, 1)
    run.save(guarded, 1)
    assert [(s.steps, s.unguarded) for s in guarded.candidates()] == [(1, False), (2, True)]
    loaded = run.load(guarded)
    assert loaded.steps == 1 and loaded.notices == ()


def test_what_another_writer_wrote_is_certified_verified_and_loaded(tmp_path):
    run = Run()
    run.train(0, 2)
    model = {k: v.clone() for k, v in run.model.state_dict().items() if isinstance(v, torch.Tensor)}
    copied = {"model": model, "optimizer": copy.deepcopy(run.optimizer.state_dict()), "steps": 2}
    want, certificate = run.bits(), certify(copied, steps=2)
    run.train(2, 3)  # an asynchronous writer is still writing its copy
    copied["model"]["_extra_state"] = ("not a tensor",)
    dcp.write(copied, tmp_path, None)
    attach(certificate, tmp_path)
    assert verify(tmp_path) == []
    run.model.set_extra_state = lambda state: None
    assert run.load(CheckpointStore(tmp_path)).steps == 2 and run.bits()[:2] == want[:2]


def test_what_differs_first_is_said(saved):
    _, store, _ = saved
    other = Run()
    other.model.extra = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"another model: it has no 'extra.weight'"):
        other.load(store)
    other = Run()
    del other.model.frozen
    with pytest.raises(UsageError, match="another model: it has 'frozen', which is not here"):
        other.load(store)
    other = Run()
    other.model.conv.double()
    with pytest.raises(UsageError, match=r"'conv.weight' is torch.float64 here and torch.float32 there"):
        other.load(store)
    other = Run()
    other.optimizer.param_groups.reverse()
    with pytest.raises(UsageError, match="another optimizer: group 0 has 2 parameters here and"):
        other.load(store)
    other.optimizer.param_groups.pop()
    with pytest.raises(UsageError, match="another optimizer: it has 1 parameter groups here and 2 there"):
        other.load(store)


def test_a_parameter_outside_the_model_is_refused(tmp_path):
    run = Run()
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(UsageError, match="a parameter that the model does not hold"):
        run.save(CheckpointStore(tmp_path), 1)


def test_no_pickle_is_opened_before_its_hash_is_verified(saved):
    run, store, path = saved

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(path / "owned"),))

    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="metadata"):
        run.load(store)
    assert verify(path)[0].file == ".metadata"
    assert not (path / "owned").exists()


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("at", ["step-00000003", ".partial-step-00000003", ".replaced-step-00000003"])
def test_a_kill_while_one_is_replaced_loses_neither(saved, at):
    """``at``: the process is killed when it is about to rename this one."""
    run, store, path = saved
    store.promote(3)
    old = run.bits()
    run.train(3, 4)
    new, rename = run.bits(), Path.rename

    def dies(self, target):
        if self.name == at:
            raise Killed
        return rename(self, target)

    with mock.patch.object(Path, "rename", dies), pytest.raises(Killed):
        run.save(store, 3, status=Status.CERTIFIED)
    assert [(s.steps, s.status) for s in checkpoints_in(path.parent)] == [(3, Status.CERTIFIED)]
    fresh = Run(seed=1)
    assert fresh.load(store).notices == ()
    assert fresh.bits() == (new if at.startswith(".replaced") else old)
    assert [(s.steps, s.status, s.path) for s in store.candidates()] == [(3, Status.CERTIFIED, path)]
    assert not list(path.parent.glob(".replaced*"))
    run.save(store, 3, status=Status.CERTIFIED)
    fresh.load(store)
    assert fresh.bits() == new and [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_new_one_that_cannot_get_its_name_leaves_it_to_the_old_one(saved):
    run, store, path = saved
    old, rename = run.bits(), Path.rename
    run.train(3, 4)

    def fails(self, target):
        if self.name == ".partial-step-00000003":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with mock.patch.object(Path, "rename", fails), pytest.raises(OSError, match="could not publish step-00000003"):
        run.save(store, 3)
    assert path.is_dir() and run.load(store).notices == () and run.bits() == old


def test_a_store_of_several_ranks_needs_their_group(tmp_path):
    with pytest.raises(UsageError, match="needs their process group"):
        CheckpointStore(tmp_path, world_size=2)
    with pytest.raises(UsageError, match="keep=0"):
        CheckpointStore(tmp_path, keep=0)
    assert checkpoints_in(tmp_path / "missing") == []


if __name__ == "__main__":
    be_a_rank(int(sys.argv[1]), Path(sys.argv[2]))
