"""The Triton kernel without a GPU: its values in Triton's interpreter, and that it compiles with wide loads.

Both run in processes of their own, since ``TRITON_INTERPRET`` counts only before Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the CUDA path needs Triton")

VALUES = """
import torch
from test_fingerprint import DTYPES, bits, by_definition, layouts, unsigned, with_
from unsilent.fingerprints import cuda, lanes, reference

compared = 0

def compare(tensor, global_shape, start, offset=0):
    global compared
    found, expected = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    for job in lanes.jobs(tensor, global_shape, start, offset, 0):
        cuda.add(found, [job])
        reference.add(expected, [job])
    assert torch.equal(found, expected), (tensor.dtype, tensor.shape, start, offset)
    compared += 1

for dtype in DTYPES:
    # One lane, parts of a row, whole tiles, a part of a tile; aligned and not.
    for numel in [0, 1, 1023, 1024, 4096, 4097, 9001]:
        for offset in [0, 1024, 1000]:
            tensor = bits(numel, numel + 1, dtype)[1:] if offset == 1000 else bits(numel, numel, dtype)
            compare(tensor, tensor.shape, [0], offset)
    assert with_(cuda.add, tensor, 77) == by_definition(tensor, 77)
    for view in layouts(dtype).values():
        compare(view, view.shape, [0] * view.ndim, 5)
    block = bits(9, 6 * 70, dtype).view(6, 70)
    compare(block, (10, 100), [2, 30])
    compare(block.view(2, 3, 70), (5, 4, 100), [1, 1, 30])
# A far position: the row's number needs more than 32 bits.
compare(bits(1, 3000, torch.float32), (3000,), [0], 10**15 + 1)
# More tiles than programs, so that programs take several.
cuda.PROGRAMS = 2
compare(bits(1, 50_001, torch.float32), (50_001,), [0], 3)
# One launch for many tensors of one width.
tensors = [bits(n, 37 * n + 1, dtype) for n, dtype in enumerate(DTYPES * 4)]
out = torch.zeros(len(tensors), 2, dtype=torch.int64)
cuda.add(out, [job for row, t in enumerate(tensors) for job in lanes.jobs(t, t.shape, [0], 0, row)])
assert [unsigned(row) for row in out] == [by_definition(t) for t in tensors]
print(compared)
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from unsilent.fingerprints import cuda

kinds = {"runs": "*i64", "columns": "*i64", "out": "*i64"}
for width in [1, 2, 4]:
    for aligned in [True, False]:
        constants = {"WIDTH": width, "ALIGNED": aligned, "ROWS": cuda.TILE_ROWS}
        source = ASTSource(
            fn=cuda._kernel(),
            signature=kinds | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            attrs={(i,): [["tt.divisibility", 16]] for i in range(len(kinds))},
        )
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=cuda.OPTIONS).asm["ptx"]
        # Lanes are read 16 bytes at a time where they can be.
        assert ("ld.global.v4.b32" in ptx) == aligned, (width, aligned)
        print(width, aligned)
"""


def run(script: str, **environment: str) -> list[str]:
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "PYTHONPATH": here, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_interpreted_kernel_equals_reference_and_definition() -> None:
    assert int(run(VALUES, TRITON_INTERPRET="1")[0]) > 450


def test_kernel_compiles_for_hopper_with_wide_loads(tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia", reason="needs Triton's NVIDIA compiler")
    assert len(run(COMPILED, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))) == 12
