"""The Triton kernel of the CUDA path. Importing this imports Triton; ``cuda`` does so at the first fingerprint.

The constants 1024, 1025 and the mix are those of ``weights``; Triton cannot read them from there.
"""

import triton
import triton.language as tl


@triton.jit
def add_runs(runs, columns, out, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr):
    """Program (r, p) adds tiles p, p + P, ... of run r; tiles lie at multiples of 1024 of the global position.

    runs: int64[n, 4], see ``cuda._table``; columns: the weights A as int64[1024]; out: int64[m, 2]. WIDTH is the bytes
    of a lane; ALIGNED says that all runs start on 16 bytes and at a multiple of 1024; ROWS is the rows of a tile.
    """
    run = runs + tl.program_id(0).to(tl.int64) * 4
    address = tl.load(run)
    count = tl.load(run + 1)
    base = tl.load(run + 2)
    row = tl.load(run + 3)
    if WIDTH == 4:
        lanes = address.to(tl.pointer_type(tl.uint32))
    elif WIDTH == 2:
        lanes = address.to(tl.pointer_type(tl.uint16))
    else:
        lanes = address.to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        # Lets the compiler load 16 bytes at once.
        lanes = tl.multiple_of(lanes, 16)

    column = tl.arange(0, 1024)[None, :]
    in_tile = tl.arange(0, ROWS)[:, None]
    column_weight = tl.load(columns + column).to(tl.uint64)
    plain = tl.zeros([ROWS, 1024], dtype=tl.uint64)
    weighted = tl.zeros([ROWS, 1024], dtype=tl.uint64)
    first_row = base // 1024
    tiles = (base + count - first_row * 1024 + ROWS * 1024 - 1) // (ROWS * 1024)
    for tile in range(tl.program_id(1).to(tl.int64), tiles, tl.num_programs(1)):
        row_number = first_row + tile * ROWS + in_tile
        # Index into the run; negative before its first lane, when the run starts inside a row.
        start = (first_row + tile * ROWS) * 1024 - base
        if ALIGNED:
            start = tl.multiple_of(start, 1024)
        index = start + in_tile * 1024 + column
        if (start >= 0) & (start + ROWS * 1024 <= count):
            # A mask would forbid wide loads.
            lane = tl.load(lanes + index).to(tl.uint64)
        else:
            lane = tl.load(lanes + index, mask=(index >= 0) & (index < count), other=0).to(tl.uint64)
        z = (row_number + 1025).to(tl.uint64) * 0x9E3779B97F4A7C15
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        row_weight = (z ^ (z >> 31)) | 1
        plain += lane
        weighted += lane * column_weight * row_weight
    # Short runs of a long list leave most programs without a tile; they need not queue for the atomics.
    had_work = tl.program_id(1) < tiles
    tl.atomic_add(out + row * 2, tl.sum(plain).to(tl.int64, bitcast=True), mask=had_work)
    tl.atomic_add(out + row * 2 + 1, tl.sum(weighted).to(tl.int64, bitcast=True), mask=had_work)
