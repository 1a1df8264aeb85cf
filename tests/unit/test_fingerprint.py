"""The fingerprint: its definition, what it finds, and that it disturbs nothing."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unsilent.errors import UsageError
from unsilent.fingerprints import Fingerprint, combine, cpu, fingerprint, reference, sums, sums_many, sums_of_shard
from unsilent.fingerprints.lanes import jobs
from unsilent.fingerprints.weights import column_weights

MOD = 1 << 64
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
IMPLEMENTATIONS = [reference.add, *([cpu.add] if cpu.available() else [])]


@functools.lru_cache(1 << 16)
def splitmix64(n: int) -> int:
    z = (n + 1) * 0x9E3779B97F4A7C15 % MOD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % MOD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % MOD
    return z ^ z >> 31


def by_definition(tensor: Tensor, offset: int = 0) -> tuple[int, int]:
    """The two sums in Python's integers, one lane at a time."""
    flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if not flat.numel():
        return 0, 0
    lanes = flat.view(torch.uint8).numpy().view(f"<u{min(flat.element_size(), 4)}").tolist()
    first = offset * (len(lanes) // tensor.numel())
    weights = [
        (splitmix64(i % 1024) | 1) * (splitmix64(1024 + i // 1024) | 1) for i in range(first, first + len(lanes))
    ]
    return sum(lanes) % MOD, sum(w * b for w, b in zip(weights, lanes, strict=True)) % MOD


def with_(add: Callable[..., None], tensor: Tensor, offset: int = 0) -> tuple[int, int]:
    out = torch.zeros(1, 2, dtype=torch.int64)
    for job in jobs(tensor, tensor.shape, [0] * tensor.ndim, offset, 0):
        add(out, [job])
    return unsigned(out[0])


def unsigned(row: Tensor) -> tuple[int, int]:
    plain, weighted = row.tolist()
    return plain % MOD, weighted % MOD


def bits(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor of random bit patterns, NaNs included."""
    raw = torch.tensor(bytearray(np.random.default_rng(seed).bytes(numel * dtype.itemsize)), dtype=torch.uint8)
    return (raw & 1).view(torch.bool) if dtype is torch.bool else raw.view(dtype)


# --- the definition -------------------------------------------------------------------------------------------------

# From by_definition, written down so that a change of the definition cannot go unnoticed: old files hold old values.
GOLDEN: dict[str, str] = {
    "empty": "00000000000000000000000000000000",
    "one": "000000003f800000a32ad62b1b800000",
    "minus zero": "0000000080000000c3dd672480000000",
    "float32": "00000322c504400036c84d4ce3324000",
    "bfloat16": "000000000322c502b4e49dbdd0db8532",
    "float64": "000002f460a08800ca15d4e83096cc00",
    "int64": "00000bb7fffff4487a021cce90d402ea",
    "uint8": "000000000005bc441502f6ecbe8003c4",
    "bool": "00000000000003e870034a87d40d3992",
    "complex64": "00000c218a088000ed3665d8834e4000",
    "transposed": "00000322c504400036ff18025e2cc000",
}


def golden_tensors() -> dict[str, Tensor]:
    count = torch.arange(3000)
    return {
        "empty": torch.zeros(0),
        "one": torch.tensor(1.0),
        "minus zero": torch.tensor([-0.0]),
        "float32": count.float(),
        "bfloat16": count.bfloat16(),
        "float64": count.double(),
        "int64": count - 1500,
        "uint8": count.to(torch.uint8),
        "bool": count % 3 == 0,
        "complex64": torch.complex(count.float(), -count.float()),
        "transposed": count.float().view(50, 60).t(),
    }


@pytest.mark.parametrize("name", golden_tensors())
def test_golden_values(name: str) -> None:
    assert fingerprint(golden_tensors()[name]).hex == GOLDEN[name]


def test_weights_are_splitmix64_and_found_changes_of_two_lanes_in_a_row_are_certain() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # first output of the published generator for seed 0
    weights = [int(w) for w in column_weights()]
    assert weights == [splitmix64(j) | 1 for j in range(1024)]
    assert len({w % (1 << 33) for w in weights}) == 1024


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("add", IMPLEMENTATIONS, ids=lambda add: add.__module__.rsplit(".", 1)[-1])
def test_every_implementation_follows_the_definition(add: Callable[..., None], dtype: torch.dtype) -> None:
    for seed, numel in enumerate([0, 1, 3, 1023, 1024, 1025, 5000, 9001]):
        for offset in [0, 1, 1000, 3072, 10**12 + 7]:
            tensor = bits(seed, numel, dtype)
            assert with_(add, tensor, offset) == by_definition(tensor, offset), (numel, offset)


def layouts(dtype: torch.dtype) -> dict[str, Tensor]:
    base = bits(5, 6 * 40 * 50, dtype).view(6, 40, 50)
    views = {
        "0-dim": base[0, 0, 0],
        "empty": base[:, :0],
        "one, strided": base[0, 0, ::50],
        "strided": base[::2, 1::3, ::7],
        "transposed": base.transpose(0, 2),
        "expanded": base[:, :1].expand(6, 9, 50),
        "scalar expanded": base[0, 0, 0].expand(70, 80),
        "requires grad": base.clone().requires_grad_() if dtype.is_floating_point else base,
    }
    if dtype.is_complex:
        views |= {"conj": base.conj(), "conj transposed": base[0].mH, "neg": base.conj().imag}
    return views


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_does_not_matter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in [1 << 20, 700, 1]:
        # Small limits cut even these tensors in pieces, as large ones would be.
        monkeypatch.setattr("unsilent.fingerprints.lanes.COPIED_ON_CPU", limit)
        for name, view in layouts(dtype).items():
            if limit == 1 and view.numel() > 1000:
                continue
            for add in IMPLEMENTATIONS:
                assert with_(add, view, 11) == by_definition(view, 11), (name, limit)


def test_large_tensors_agree_on_any_number_of_threads() -> None:
    tensor = bits(1, 5_000_001, torch.float32)  # more than one block of the reference
    threads = torch.get_num_threads()
    found = set()
    try:
        for count in [1, 2, 3]:
            torch.set_num_threads(count)
            found |= {with_(add, tensor[1:], 77) for add in IMPLEMENTATIONS}
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


def test_concurrent_calls_from_many_threads_agree() -> None:
    tensor = bits(2, 600_000, torch.float32)
    expected, found = unsigned(sums(tensor)), []
    workers = [threading.Thread(target=lambda: found.append(unsigned(sums(tensor)))) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [expected] * 8


FORK = """
import os, torch
from unsilent.fingerprints import fingerprint
torch.set_num_threads(2)
tensor = torch.arange(2_000_000, dtype=torch.int32)
before = fingerprint(tensor)
child = os.fork()
if not child:
    os._exit(0 if fingerprint(tensor) == before else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_a_forked_child_can_fingerprint() -> None:
    # In a process of its own, because this one has threads of other tests.
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=60)


def test_without_numba_the_reference_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from unsilent.fingerprints import compute

    tensor = bits(3, 5000, torch.float32)
    expected = sums(tensor)
    monkeypatch.setattr(cpu, "available", lambda: False)
    compute._adder.cache_clear()
    try:
        assert compute._adder(tensor.device) is reference.add
        assert torch.equal(sums(tensor), expected)
    finally:
        compute._adder.cache_clear()


# --- composition ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 6000), st.lists(st.integers(0, 6000), max_size=5), st.sampled_from(DTYPES), st.integers(0, 3000))
def test_flat_shards_add_up(numel: int, cuts: list[int], dtype: torch.dtype, offset: int) -> None:
    full = bits(numel, numel, dtype)
    edges = [0, *sorted(min(cut, numel) for cut in cuts), numel]
    parts = [sums(full[a:b], offset=offset + a) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.stack(parts).sum(0), sums(full, offset=offset))


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_blocks_of_any_grid_add_up(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 17), max_size=4))
    dtype = data.draw(st.sampled_from(DTYPES))
    full = bits(7, math.prod(shape), dtype).view(shape)
    # Cuts may repeat, so there are empty shards; one dimension cut is Shard(dim), several are a mesh.
    edges = [[0, *sorted(data.draw(st.lists(st.integers(0, size), max_size=2))), size] for size in shape]
    for add in [None, reference.add]:
        total = torch.zeros(1, 2, dtype=torch.int64)
        for block, start in blocks(full, edges, 0, []):
            if add is None:
                total[0] += sums_of_shard(block, global_shape=shape, start=start)
            else:
                for job in jobs(block.contiguous(), shape, start, 0, 0):
                    add(total, [job])
        assert torch.equal(total[0], sums(full))


def blocks(part: Tensor, edges: list[list[int]], dim: int, start: list[int]) -> Iterator[tuple[Tensor, list[int]]]:
    if dim == len(edges):
        yield part, start
        return
    for low, high in itertools.pairwise(edges[dim]):
        yield from blocks(part.narrow(dim, low, high - low), edges, dim + 1, [*start, low])


@pytest.mark.parametrize("add", IMPLEMENTATIONS, ids=lambda add: add.__module__.rsplit(".", 1)[-1])
def test_long_runs_of_a_shard_add_up(add: Callable[..., None]) -> None:
    full = bits(8, 9 * 14_001, torch.float32).view(9, 14_001)
    out = torch.zeros(1, 2, dtype=torch.int64)
    for low, high in [(0, 5000), (5000, 5001), (5001, 14_001)]:
        for job in jobs(full[:, low:high].contiguous(), full.shape, [0, low], 0, 0):
            add(out, [job])
    assert unsigned(out[0]) == with_(add, full)


def test_a_flat_uneven_split_over_more_ranks_than_rows() -> None:
    full = bits(9, 3 * 8, torch.bfloat16).view(3, 8)
    rows = [sums_of_shard(full[min(r, 3) : r + 1], global_shape=(3, 8), start=(r, 0)) for r in range(5)]
    assert torch.equal(torch.stack(rows).sum(0), sums(full))


def test_sums_many_is_sums_of_each() -> None:
    tensors = [bits(n, n, dtype) for n, dtype in enumerate(DTYPES * 20)]
    tensors += [torch.zeros(()), torch.arange(12.0).view(3, 4).t(), torch.ones(5, dtype=torch.complex64).conj()]
    assert torch.equal(sums_many(tensors), torch.stack([sums(tensor) for tensor in tensors]))
    assert sums_many([]).shape == (0, 2)


def test_combine_depends_on_order_number_and_every_bit() -> None:
    rows = sums_many([bits(n, 100, torch.float32) for n in range(50)])
    seen = {int(combine(rows))}
    for i in range(50):
        seen.add(int(combine(torch.cat([rows[:i], rows[i + 1 :]]))))
        swapped = rows.clone()
        swapped[[i, (i + 1) % 50]] = rows[[(i + 1) % 50, i]]
        seen.add(int(combine(swapped)))
        for bit in range(64):
            flipped = rows.clone()
            flipped[i, bit % 2] ^= (1 << bit) if bit < 63 else -(1 << 63)
            seen.add(int(combine(flipped)))
    for n in range(10):
        seen.add(int(combine(torch.zeros(n, 2, dtype=torch.int64))))
    assert len(seen) == 1 + 50 * 66 + 10
    assert min(seen) >= 0
    assert combine(rows).shape == ()


# --- what it finds --------------------------------------------------------------------------------------------------

# A case changes a tensor's bits (flat unsigned integers) in place.
Case = Callable[[np.ndarray], None]
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
WIDE = [torch.bfloat16, torch.float32, torch.int64, torch.float64]


def sweep(dtype: torch.dtype, data: str, cases: Iterator[Case]) -> tuple[int, int]:
    """(trials, missed) over all cases that change the tensor at all; each starts from the same values."""
    numel = 6 * 1024
    values = {
        "random bits": bits(3, numel, dtype),
        "zeros": torch.zeros(numel, dtype=dtype),
        "weights": (torch.linspace(-2, 2, numel, dtype=torch.float64) ** 3).to(dtype),
    }[data]
    tensor = values.clone()
    memory = tensor.view(UNSIGNED[min(dtype.itemsize, 8)]).numpy()
    pristine = memory.copy()
    clean = sums(tensor).tolist()
    trials = missed = 0
    for case in cases:
        case(memory)
        if not np.array_equal(memory, pristine):
            trials += 1
            missed += sums(tensor).tolist() == clean
        memory[:] = pristine
    assert sums(tensor).tolist() == clean
    return trials, missed


def flip(positions: Sequence[int] | slice | np.ndarray, mask: int) -> Case:
    def case(memory: np.ndarray) -> None:
        memory[positions] ^= memory.dtype.type(mask)

    return case


def bit_range(dtype: torch.dtype) -> range:
    return range(8 * min(dtype.itemsize, 8))


def every_element(dtype: torch.dtype) -> Iterator[Case]:
    pick = random.Random(1)
    for i in range(6 * 1024):
        yield flip([i], pick.randrange(1, 1 << len(bit_range(dtype))))


def every_bit(dtype: torch.dtype) -> Iterator[Case]:
    pick = random.Random(2)
    for bit in bit_range(dtype):
        for _ in range(24):
            yield flip([pick.randrange(6 * 1024)], 1 << bit)


def same_bit(dtype: torch.dtype, strides: Sequence[int]) -> Iterator[Case]:
    pick = random.Random(3)
    for bit in bit_range(dtype):
        for count in [2, 4, 8, 16, 32]:
            for stride in strides:
                span = (count - 1) * stride + 1
                if span <= 6 * 1024:
                    for _ in range(3):
                        start = pick.randrange(6 * 1024 - span + 1)
                        yield flip(slice(start, start + span, stride), 1 << bit)


def neighbours(dtype: torch.dtype) -> Iterator[Case]:
    return same_bit(dtype, [1])


def with_stride(dtype: torch.dtype) -> Iterator[Case]:
    return same_bit(dtype, [2, 3, 16, 64, 127, 1024])


def grids(dtype: torch.dtype) -> Iterator[Case]:
    """The same bit at the corners of rectangles: what weights of the form A[j] + B[k] would miss."""
    pick = random.Random(4)
    for bit in bit_range(dtype):
        for _ in range(30):
            rows, columns = pick.sample(range(6), 2), pick.sample(range(1024), 2)
            yield flip([r * 1024 + c for r in rows for c in columns], 1 << bit)


def stuck_lanes(dtype: torch.dtype) -> Iterator[Case]:
    def stuck(lane: int, lanes: int, bit: int, high: bool) -> Case:
        def case(memory: np.ndarray) -> None:
            mask = memory.dtype.type(1 << bit)
            memory[lane::lanes] = memory[lane::lanes] | mask if high else memory[lane::lanes] & ~mask

        return case

    for lanes in [4, 8, 16, 32, 64]:
        for lane in range(0, lanes, 3):
            for bit in bit_range(dtype):
                yield stuck(lane, lanes, bit, True)
                yield stuck(lane, lanes, bit, False)


def zeroed_tiles(dtype: torch.dtype) -> Iterator[Case]:
    def zero(top: int, left: int, size: int) -> Case:
        def case(memory: np.ndarray) -> None:
            memory.reshape(64, 96)[top : top + size, left : left + size] = 0

        return case

    for size in [2, 4, 8, 16, 32]:
        for top in range(0, 64, size):
            for left in range(0, 96, size):
                yield zero(top, left, size)


def swaps(dtype: torch.dtype) -> Iterator[Case]:
    def swap(i: int, j: int, length: int) -> Case:
        def case(memory: np.ndarray) -> None:
            first = memory[i : i + length].copy()
            memory[i : i + length] = memory[j : j + length]
            memory[j : j + length] = first

        return case

    pick = random.Random(5)
    for i in range(0, 6 * 1024 - 1, 2):
        yield swap(i, i + 1, 1)
    for _ in range(1000):
        yield swap(pick.randrange(6 * 1024), pick.randrange(6 * 1024), 1)
    for _ in range(500):  # whole tiles, rows of weights among them
        length = pick.choice([2, 16, 512, 1024])
        i, j = pick.sample(range(6 * 1024 // length), 2)
        yield swap(i * length, j * length, length)


def permutations(dtype: torch.dtype) -> Iterator[Case]:
    def rearrange(order: np.ndarray) -> Case:
        def case(memory: np.ndarray) -> None:
            memory[:] = memory[order]

        return case

    place = np.arange(6 * 1024)
    pick = np.random.default_rng(6)
    yield rearrange(place[::-1])
    for shift in [1, 2, 3, 4, 8, 16, 32, 512, 1023, 1024, 2048, 3072]:
        yield rearrange(np.roll(place, shift))
    for columns in [2, 3, 4, 8, 16, 32, 64, 96, 1024]:
        yield rearrange(place.reshape(-1, columns).T.reshape(-1))
        yield rearrange(place.reshape(-1, columns)[:, ::-1].reshape(-1))
        yield rearrange(place.reshape(-1, columns)[::-1].reshape(-1))
    for _ in range(300):
        yield rearrange(pick.permutation(place))


SWEEPS: list[tuple[Callable[[torch.dtype], Iterator[Case]], list[torch.dtype], list[str], int]] = [
    (every_element, [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ["random bits"], 24_576),
    (every_bit, DTYPES, ["random bits", "zeros"], 20_000),
    (neighbours, WIDE, ["random bits", "zeros", "weights"], 7_500),
    (with_stride, WIDE, ["random bits", "zeros", "weights"], 40_000),
    (grids, WIDE, ["random bits", "zeros"], 10_000),
    (stuck_lanes, WIDE, ["random bits", "weights"], 25_000),
    (zeroed_tiles, WIDE, ["random bits"], 8_000),
    (swaps, WIDE, ["random bits"], 17_000),
    (permutations, WIDE, ["random bits", "weights"], 2_500),
]


@pytest.mark.parametrize(("cases", "dtypes", "data", "at_least"), SWEEPS, ids=[row[0].__name__ for row in SWEEPS])
def test_sweep_misses_nothing(
    cases: Callable[[torch.dtype], Iterator[Case]], dtypes: list[torch.dtype], data: list[str], at_least: int
) -> None:
    results = [sweep(dtype, values, cases(dtype)) for dtype in dtypes for values in data]
    trials, missed = (sum(column) for column in zip(*results, strict=True))
    print(f"{cases.__name__}: {trials} trials, {missed} missed")
    assert missed == 0
    assert trials >= at_least


def test_the_parts_of_complex_numbers_are_told_apart() -> None:
    value = torch.complex(torch.arange(2000.0), torch.arange(2000.0) + 0.5)
    assert fingerprint(value) != fingerprint(value.conj())
    assert fingerprint(value) != fingerprint(torch.complex(value.imag, value.real))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32], ids=str)
def test_hash_tensor_would_not_do(dtype: torch.dtype) -> None:
    """Torch's own hash XORs the elements, so an even number of equal flips cancels. Do not swap it in."""
    tensor = torch.ones(4096, dtype=dtype)
    clean, ours = torch.hash_tensor(tensor), sums(tensor)
    memory = tensor.view(torch.int32).numpy().view(np.uint32)
    missed = 0
    for bit in range(32):
        memory[64:96] ^= np.uint32(1 << bit)
        missed += int(torch.hash_tensor(tensor) == clean)
        assert not torch.equal(sums(tensor), ours)
        memory[64:96] ^= np.uint32(1 << bit)
    assert missed == 32


# --- the value ------------------------------------------------------------------------------------------------------


def test_fingerprints_are_equal_only_for_equal_bits_shape_and_dtype() -> None:
    zeros = fingerprint(torch.zeros(4))
    assert zeros == fingerprint(torch.zeros(4))
    assert hash(zeros) == hash(fingerprint(torch.zeros(4)))
    assert zeros != fingerprint(-torch.zeros(4))
    assert zeros != fingerprint(torch.zeros(2, 2))
    assert zeros != fingerprint(torch.zeros(4, dtype=torch.int32))
    nan = torch.full((3,), math.nan)
    assert fingerprint(nan) == fingerprint(nan.clone())


def test_fingerprint_survives_json() -> None:
    value = fingerprint(bits(1, 3000, torch.float64).view(30, 100))
    assert len(value.hex) == 32
    assert (value.shape, value.dtype) == ((30, 100), "float64")
    assert Fingerprint.from_json(json.loads(json.dumps(value.to_json()))) == value
    for wrong in [{}, {**value.to_json(), "hex": "12"}, {**value.to_json(), "hex": "g" * 32}, {"hex": 1}]:
        with pytest.raises(UsageError, match="not a fingerprint"):
            Fingerprint.from_json(wrong)


# --- manners --------------------------------------------------------------------------------------------------------


def test_nothing_is_disturbed() -> None:
    tensor = torch.randn(300, 200, requires_grad=True)
    before, version, state = tensor.detach().clone(), tensor._version, torch.get_rng_state()
    rows = [sums(tensor), sums(tensor.t()), combine(sums_many([tensor]))]
    sums_of_shard(tensor, global_shape=(300, 400), start=(0, 200))
    assert not any(row.requires_grad for row in rows)
    assert torch.equal(tensor, before)
    assert tensor._version == version
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_modes_of_torch_do_not_matter() -> None:
    tensor = bits(6, 40_000, torch.float32)
    for add in IMPLEMENTATIONS:
        expected = with_(add, tensor)
        torch.use_deterministic_algorithms(True)
        try:
            assert with_(add, tensor) == expected
        finally:
            torch.use_deterministic_algorithms(False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert with_(add, tensor) == expected
        with torch.inference_mode():
            assert with_(add, tensor) == expected


class Distributed(torch.Tensor):
    def to_local(self) -> Tensor:
        raise AssertionError("a fingerprint must not guess a placement")


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.eye(3).to_sparse(), "layout"),
        (lambda: torch.eye(3).to_sparse_csr(), "layout"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.ones(2).as_subclass(Distributed), "to_local"),
        (lambda: [1.0], "not list"),
    ],
    ids=["coo", "csr", "quantized", "meta", "nested", "distributed", "list"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_dense_bits_are_refused(make: Callable[[], Tensor], word: str) -> None:
    tensor = make()
    for call in [
        fingerprint,
        sums,
        lambda t: sums_many([t]),
        lambda t: sums_of_shard(t, global_shape=(3,), start=(0,)),
    ]:
        with pytest.raises(UsageError, match=word):
            call(tensor)


def test_wrong_arguments_are_refused() -> None:
    tensor = torch.ones(2, 3)
    wrong: list[Callable[[], object]] = [
        lambda: sums(tensor, offset=-1),
        lambda: sums(tensor, offset=0.5),  # type: ignore[arg-type]
        lambda: sums_of_shard(tensor, global_shape=(2, 3), start=(0, 1)),
        lambda: sums_of_shard(tensor, global_shape=(2, 3), start=(0,)),
        lambda: sums_of_shard(tensor, global_shape=(2, 3), start=(0, -1)),
        lambda: combine(torch.zeros(3, 2)),
        lambda: combine(torch.zeros(3, dtype=torch.int64)),
    ]
    for call in wrong:
        with pytest.raises(UsageError):
            call()


@pytest.mark.parametrize("lengths", [[1], [1023, 1], [4096], [5000, 77, 100_003]])
@pytest.mark.parametrize("special", [None, float("nan"), float("inf"), -float("inf"), 3e38, 1e-40])
def test_one_pass_gives_the_bits_of_three(lengths: list[int], special: float | None) -> None:
    """Scaling, fingerprint and finiteness together give what mul_, sums_many and isfinite give one after the other."""
    pytest.importorskip("numba", reason="the fused loop needs numba")
    from unsilent.fingerprints.fused import scale_and_sum

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        buffer = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0))
        if special is not None:
            buffer[buffer.numel() // 2] = special
        expected = buffer.clone().mul_(1 / 3)
        answer = scale_and_sum(buffer, 1 / 3, lengths)
    finally:
        torch.set_num_threads(threads)
    assert answer is not None
    assert torch.equal(buffer.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(answer[0], sums_many(list(expected.split(lengths))))
    assert answer[1] == bool(torch.isfinite(expected).all())
