"""The compiled loop of the CPU path. Importing this imports numba; ``cpu`` does so at the first fingerprint."""

import numba
import numpy as np

from unsilent.fingerprints.weights import GOLDEN, MIX_1, MIX_2, ROW

MAGNITUDE = 0x7FFFFFFF  # of fp32 bits, without the sign; from INFINITE on a value is NaN or infinite
INFINITE = 0x7F800000


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


@numba.njit
def _four_rows_scaled(values, scale, weights, row):
    # As _four_rows, on fp32 values that are multiplied and written back in the same pass.
    first, second = values[:ROW], values[ROW : 2 * ROW]
    third, fourth = values[2 * ROW : 3 * ROW], values[3 * ROW : 4 * ROW]
    weights = weights[:ROW]
    plain = np.uint64(0)
    s0 = s1 = s2 = s3 = np.uint64(0)
    largest = np.uint32(0)
    for i in range(ROW):
        weight = weights[i]
        v0, v1, v2, v3 = first[i] * scale, second[i] * scale, third[i] * scale, fourth[i] * scale
        first[i], second[i], third[i], fourth[i] = v0, v1, v2, v3
        u0, u1, u2, u3 = (
            np.float32(v0).view(np.uint32),
            np.float32(v1).view(np.uint32),
            np.float32(v2).view(np.uint32),
            np.float32(v3).view(np.uint32),
        )
        b0, b1, b2, b3 = np.uint64(u0), np.uint64(u1), np.uint64(u2), np.uint64(u3)
        plain += b0 + b1 + b2 + b3
        s0 += b0 * weight
        s1 += b1 * weight
        s2 += b2 * weight
        s3 += b3 * weight
        low = max(u0 & np.uint32(MAGNITUDE), u1 & np.uint32(MAGNITUDE))
        high = max(u2 & np.uint32(MAGNITUDE), u3 & np.uint32(MAGNITUDE))
        largest = max(largest, max(low, high))
    weighted = s0 * _row_weight(row) + s1 * _row_weight(row + 1)
    return plain, weighted + s2 * _row_weight(row + 2) + s3 * _row_weight(row + 3), largest


@numba.njit
def _one_row_scaled(values, scale, weights):
    plain = np.uint64(0)
    weighted = np.uint64(0)
    largest = np.uint32(0)
    for i in range(values.size):
        value = values[i] * scale
        values[i] = value
        bits = np.float32(value).view(np.uint32)
        plain += np.uint64(bits)
        weighted += np.uint64(bits) * weights[i]
        largest = max(largest, bits & np.uint32(MAGNITUDE))
    return plain, weighted, largest


@numba.njit(nogil=True)
def scale_and_add(values, scale, columns, totals, total):
    """Multiply fp32 values in place, add their sums to totals[total], and return the largest magnitude's bits."""
    plain = np.uint64(0)
    weighted = np.uint64(0)
    largest = np.uint32(0)
    at = 0
    while at < values.size:
        row = at // ROW
        if values.size - at >= 4 * ROW:
            count = 4 * ROW
            p, w, m = _four_rows_scaled(values[at : at + count], scale, columns, row)
        else:
            count = min(ROW, values.size - at)
            p, w, m = _one_row_scaled(values[at : at + count], scale, columns[:count])
            w *= _row_weight(row)
        plain += p
        weighted += w
        largest = max(largest, m)
        at += count
    totals[total, 0] += plain
    totals[total, 1] += weighted
    return largest
