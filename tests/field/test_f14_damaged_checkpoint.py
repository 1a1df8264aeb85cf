"""F14: the newest checkpoint was cut by a kill or a full disk, or one bit of it flipped and it loads without an error."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as plain_load

from unsilent.checkpoint import CheckpointStore, verify
from unsilent.checkpoint.certificate import CERTIFICATE
from unsilent.errors import CheckpointError
from unsilent.inventory import Inventory


def make(seed: int) -> Inventory:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return Inventory(model, torch.optim.AdamW(model.parameters()))


def train(inventory: Inventory, steps: int) -> None:
    assert inventory.optimizer is not None
    for _ in range(steps):
        inventory.optimizer.zero_grad()
        inventory.model(torch.randn(4, 64)).square().sum().backward()
        inventory.optimizer.step()


def bits(inventory: Inventory) -> dict[str, torch.Tensor]:
    return {e.name: e.tensor.clone() for e in inventory.entries()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def run(tmp_path):
    """A run with three checkpoints, and the state at each of them."""
    inventory, store, states = make(0), CheckpointStore(tmp_path), {}
    for steps in (10, 20, 30):
        train(inventory, 2)
        store.save(inventory, steps=steps, rng={"torch": torch.get_rng_state()})
        states[steps] = bits(inventory)
    return store, tmp_path / "step-00000030", states


def flip(file: Path, at: int | None = None) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1 << 3
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


# A checkpoint without its certificate is another case: an unguarded one, in tests/ranks/test_checkpoint.py.
@pytest.mark.parametrize(
    ("name", "damage"),
    [(n, d) for n in ("__0_0.distcp", ".metadata", CERTIFICATE) for d in (cut, flip, Path.unlink)][:-1],
)
def test_the_newest_is_not_loaded_and_the_next_older_one_is(run, damage, name):
    store, newest, states = run
    damage(newest / name)
    inventory = make(1)
    loaded = store.load(inventory)
    assert loaded.steps == 20 and same(bits(inventory), states[20])
    (notice,) = loaded.notices
    assert notice.path == str(newest) and notice.file == name
    if name.endswith(".distcp"):  # the tensors that lie in it are named
        assert "model.0.weight" in notice.tensors and "model.0.weight" in str(verify(newest)[0])
    assert [p.file for p in verify(newest)] == [name]


def test_one_flipped_bit_in_a_weight_loads_silently_without_a_certificate_and_not_with_it(run):
    store, newest, states = run
    weight = states[30]["model.1.weight"].numpy().tobytes()
    file = newest / "__0_0.distcp"
    flip(file, file.read_bytes().index(weight) + 1000)
    plain = {"model": {"1.weight": torch.zeros(64, 64)}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        plain_load(plain, checkpoint_id=newest)
    assert int((plain["model"]["1.weight"] != states[30]["model.1.weight"]).sum()) == 1  # nobody said a word
    inventory = make(1)
    assert store.load(inventory).steps == 20 and same(bits(inventory), states[20])


def test_a_bit_that_flipped_between_memory_and_the_file_is_found_though_every_hash_is_right(run):
    """The hash is of what was written; only the fingerprint, taken before, knows what should have been."""
    from unsilent.checkpoint.files import digests, read_certificate, write_certificate

    store, newest, states = run
    file = newest / "__0_0.distcp"
    flip(file, file.read_bytes().index(states[30]["model.1.weight"].numpy().tobytes()) + 1000)
    certificate = read_certificate(newest)
    assert certificate is not None
    object.__setattr__(certificate, "files", digests(newest, certificate.files))
    write_certificate(newest, certificate)
    (problem,) = verify(newest)
    assert problem.file == "__0_0.distcp" and problem.tensors == ("model.1.weight",)
    inventory = make(1)
    loaded = store.load(inventory)
    assert loaded.steps == 20 and loaded.notices == (problem,) and same(bits(inventory), states[20])


def test_when_all_are_damaged_nothing_is_touched_and_each_is_named(run):
    store, newest, _ = run
    for path in newest.parent.iterdir():
        cut(path / "__0_0.distcp")
    inventory = make(1)
    before = bits(inventory)
    with pytest.raises(CheckpointError, match=r"no checkpoint can be loaded: .*00000030.*00000020.*00000010") as caught:
        store.load(inventory)
    assert caught.value.exit_code == 13 and same(bits(inventory), before)


def test_a_save_that_was_killed_leaves_nothing_that_could_be_loaded(run):
    store, newest, states = run
    (newest / CERTIFICATE).unlink()
    newest.rename(newest.with_name(".partial-step-00000030"))
    inventory = make(1)
    loaded = store.load(inventory)
    assert loaded.steps == 20 and loaded.notices == () and same(bits(inventory), states[20])
    store.save(inventory, steps=21)
    assert sorted(p.name for p in newest.parent.iterdir()) == [f"step-000000{n}" for n in (10, 20, 21)]
