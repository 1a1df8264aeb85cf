"""A fingerprint that is put together from blocks is that of the whole tensor, and nothing less passes for it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch

from unsilent.checkpoint import dcp
from unsilent.checkpoint.composed import alike, compose, first_unlike, groups_of, must_be_one, parts_of
from unsilent.checkpoint.together import Together
from unsilent.errors import CheckpointError
from unsilent.fingerprints import fingerprint
from unsilent.sharding import Block

T = TypeVar("T")


class Threads(Together):
    """Ranks that are threads."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, values: list[Any]) -> None:
        super().__init__(None, 0, 1)
        self.rank, self.world_size, self._barrier, self._values = rank, size, barrier, values

    def gather(self, value: T) -> list[T]:
        self._values[self.rank] = value
        self._barrier.wait(10)
        values = list(self._values)
        self._barrier.wait(10)
        return values

    def add(self, rows: torch.Tensor) -> None:
        rows.copy_(torch.stack(self.gather(rows.clone())).sum(0))

    def numbers(self, ranks: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return ranks


def on_ranks(work: Callable[[Together, Any], Any], given: list[Any]) -> list[Any]:
    """What each rank returned, or the error that it raised."""
    barrier, values, found = threading.Barrier(len(given)), [None] * len(given), cast("list[Any]", [None] * len(given))

    def run(rank: int) -> None:
        try:
            found[rank] = work(Threads(rank, len(given), barrier, values), given[rank])
        except CheckpointError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def composed(ranks: Together, blocks: Mapping[str, Block]) -> Any:
    return compose(parts_of(blocks, ranks), ranks)


def rows(tensor: torch.Tensor, first: int, last: int, holders: tuple[int, ...], spread: str = "rows") -> Block:
    start = (first, *[0] * (tensor.ndim - 1))
    return Block(tensor[first:last].clone(), tuple(tensor.shape), start, holders, spread)


@pytest.mark.parametrize("seed", range(8))
def test_however_a_tensor_is_cut_and_copied(seed: int) -> None:
    generator = random.Random(seed)
    size, copies = generator.choice([(3, 1), (4, 1), (4, 2), (6, 3)])
    shards = size // copies
    tensors = {
        name: torch.randn(generator.randint(0, 9), generator.randint(1, 70)).to(generator.choice([torch.float32, torch.bfloat16]))
        for name in "abc"
    }  # fmt: skip
    given: list[dict[str, Block]] = []
    for rank in range(size):
        shard, blocks = rank % shards, {}
        for name, tensor in tensors.items():
            step = -(-tensor.shape[0] // shards)
            first, last = min(shard * step, len(tensor)), min((shard + 1) * step, len(tensor))
            blocks[name] = rows(tensor, first, last, tuple(range(shard, size, shards)))
        blocks["plain"] = Block(torch.arange(5), (5,), (0,))
        given.append(blocks)
    want = {name: fingerprint(tensor) for name, tensor in {**tensors, "plain": torch.arange(5)}.items()}
    assert on_ranks(composed, given) == [want] * size


def test_meshes_that_hold_the_same_count_once() -> None:
    """Tensor parallelism alone: each of two meshes knows of its own two ranks only."""
    tensor = torch.randn(4, 3)
    given = [{"w": rows(tensor, 2 * (r % 2), 2 * (r % 2) + 2, (r,), f"mesh {r // 2}")} for r in range(4)]
    assert on_ranks(composed, given) == [{"w": fingerprint(tensor)}] * 4


@pytest.mark.parametrize("rest", [(2, 3), (1, 4)], ids=["a gap", "an overlap"])
def test_blocks_that_are_not_the_whole_are_an_error_on_all(rest: tuple[int, int]) -> None:
    tensor = torch.randn(4, 3)
    given = [{"w": rows(tensor, 0, 2, (0,))}, {"w": rows(tensor, *rest, (1,))}]
    for error in on_ranks(composed, given):
        assert "the blocks of 'w' have" in str(error) and "the tensor has 12" in str(error)


def test_stages_may_hold_different_names_but_not_different_tensors_of_one_name() -> None:
    one, other = torch.randn(3), torch.randn(3)

    def work(ranks: Together, blocks: dict[str, Block]) -> Any:
        parts = parts_of(blocks, ranks)
        found = compose(parts, ranks)
        must_be_one(parts, found, except_for=())
        return found

    def whole(tensor: torch.Tensor, *holders: int) -> Block:
        return Block(tensor, tuple(tensor.shape), (0,) * tensor.ndim, holders)

    fine = [{"a": whole(one, 0), "both": whole(one, 0)}, {"b": whole(other, 1), "both": whole(one, 1)}]
    want = {"a": fingerprint(one), "b": fingerprint(other), "both": fingerprint(one)}
    assert on_ranks(work, fine) == [want] * 2
    first, second = on_ranks(work, [{"a": whole(one, 0), "w": whole(one, 0)}, {"w": whole(other, 1)}])
    assert "w" in first and "another 'w'" in str(second)
    for error in on_ranks(work, [{"w": whole(one, 0)}, {"w": whole(torch.randn(4), 1)}]):
        assert "'w' has not the same shape and dtype on all ranks" in str(error)


def test_who_holds_the_same_must_hold_the_same_bits() -> None:
    tensor = torch.randn(4, 3)
    wrong = tensor.clone()
    wrong.view(torch.int32)[3, 1] ^= 1

    def work(ranks: Together, blocks: dict[str, Block]) -> Any:
        parts = parts_of(blocks, ranks)
        return alike(ranks.gather(groups_of(parts))), first_unlike(parts, ranks)

    def shards(tensors: list[torch.Tensor], holders: list[tuple[int, ...]]) -> list[dict[str, Block]]:
        return [{"w": rows(t, 2 * (r % 2), 2 * (r % 2) + 2, holders[r])} for r, t in enumerate(tensors)]

    pairs: list[tuple[int, ...]] = [(0, 2), (1, 3), (0, 2), (1, 3)]
    single: list[tuple[int, ...]] = [(0,), (1,), (2,), (3,)]
    for holders in (pairs, single):  # whether or not they know of each other
        assert on_ranks(work, shards([tensor] * 4, holders)) == [(True, None)] * 4
        found = on_ranks(work, shards([tensor, tensor, tensor, wrong], holders))
        assert found == [(False, ("w", [[1], [3]]))] * 4
    everywhere = [{"a": Block(tensor, (4, 3), (0, 0))}, {}, {"a": Block(tensor, (4, 3), (0, 0))}]
    assert on_ranks(work, everywhere) == [(False, ("a", [[1], [0, 2]]))] * 3


def test_a_block_is_read_whatever_was_written(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(7, 5), "b": torch.randn(3).bfloat16(), "c": torch.tensor(2.0)}
    dcp.write(dict(tensors), tmp_path, None)
    contents = dcp.read_contents(tmp_path)
    wanted = {
        "a": Block(torch.empty(3, 2), (7, 5), (2, 3)),
        "b": Block(torch.empty(0), (3,), (3,)),
        "c": Block(torch.empty(()), (), ()),
    }
    found = dcp.read_blocks(tmp_path, contents, wanted)
    assert torch.equal(found["a"].part, tensors["a"][2:5, 3:])
    assert found["b"].part.dtype == torch.bfloat16 and found["b"].part.numel() == 0
    assert torch.equal(found["c"].part, tensors["c"]) and found["a"].start == (2, 3)


def test_what_no_file_fills_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.write({"a": torch.randn(7, 5), "b": torch.ones(2)}, tmp_path, None)
    contents = dcp.read_contents(tmp_path)
    monkeypatch.setattr(dcp, "create_read_items_for_chunk_list", lambda *_: [])
    with pytest.raises(CheckpointError, match="only 0 of 6 elements of 'a' are in its files"):
        dcp.read_blocks(tmp_path, contents, {"a": Block(torch.empty(3, 2), (7, 5), (2, 3))})


def test_damage_is_traced_to_the_tensor_that_it_hits(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(20, 3) for i in range(4)}
    dcp.write({**tensors, "other": {1: "no tensor"}}, tmp_path, None)
    contents = dcp.read_contents(tmp_path)
    (file,) = contents.files
    assert contents.broken_in(tmp_path, file) == () and contents.file_of("t1") == file
    data = bytearray((tmp_path / file).read_bytes())
    data[bytes(data).index(tensors["t2"].numpy().tobytes()) + 17] ^= 4
    (tmp_path / file).write_bytes(data)
    assert contents.broken_in(tmp_path, file) == ("t2",)
    (tmp_path / file).write_bytes(data[: contents.places["t3"][0].offset + 10])
    assert {"t2", "t3"} <= set(contents.broken_in(tmp_path, file))
    (tmp_path / file).unlink()
    assert contents.broken_in(tmp_path, file) == ()
