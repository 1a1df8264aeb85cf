"""The compiled loop of the CPU path. Importing this imports numba; ``cpu`` does so at the first fingerprint."""

import numba
import numpy as np

from unsilent.fingerprint.weights import GOLDEN, MIX_1, MIX_2, ROW


@numba.njit
def _row_weight(row):
    z = np.uint64(row + ROW + 1) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    return z ^ (z >> np.uint64(31)) | np.uint64(1)


@numba.njit
def _one_row(lanes, weights):
    plain = np.uint64(0)
    weighted = np.uint64(0)
    for i in range(lanes.size):
        lane = np.uint64(lanes[i])
        plain += lane
        weighted += lane * weights[i]
    return plain, weighted


@numba.njit
def _four_rows(lanes, weights, row):
    # Four streams keep more of the memory busy than one (14 against 6 GB/s on one thread), and share the weights.
    first, second = lanes[:ROW], lanes[ROW : 2 * ROW]
    third, fourth = lanes[2 * ROW : 3 * ROW], lanes[3 * ROW : 4 * ROW]
    weights = weights[:ROW]
    plain = np.uint64(0)
    s0 = s1 = s2 = s3 = np.uint64(0)
    for i in range(ROW):
        weight = weights[i]
        b0, b1, b2, b3 = np.uint64(first[i]), np.uint64(second[i]), np.uint64(third[i]), np.uint64(fourth[i])
        plain += b0 + b1 + b2 + b3
        s0 += b0 * weight
        s1 += b1 * weight
        s2 += b2 * weight
        s3 += b3 * weight
    weighted = s0 * _row_weight(row) + s1 * _row_weight(row + 1)
    return plain, weighted + s2 * _row_weight(row + 2) + s3 * _row_weight(row + 3)


@numba.njit(nogil=True)
def add_lanes(lanes, low, high, run, bases, columns, totals, total):
    """Add the sums of lanes[low:high] to totals[total]; lane i lies in run i // run, at its place there.

    lanes: uint8, uint16 or uint32; bases: int64, global position of each run's first lane; columns: the weights A,
    uint64[1024]; totals: uint64[n, 2].
    """
    plain = np.uint64(0)
    weighted = np.uint64(0)
    at = low
    while at < high:
        number = at // run
        left = min(high, (number + 1) * run) - at
        position = bases[number] + at - number * run
        row = position // ROW
        column = position % ROW
        if column == 0 and left >= 4 * ROW:
            left = 4 * ROW
            p, w = _four_rows(lanes[at : at + left], columns, row)
        else:
            left = min(left, ROW - column)
            p, w = _one_row(lanes[at : at + left], columns[column : column + left])
            w *= _row_weight(row)
        plain += p
        weighted += w
        at += left
    totals[total, 0] += plain
    totals[total, 1] += weighted
