"""The weights of the fingerprint: what every implementation must agree on.

For lanes b_i (at most 32 bits, zero-extended) at global positions i

    F = (sum b_i, sum w_i * b_i) mod 2^64,    w_i = A[i mod 1024] * B[i div 1024] mod 2^64,

    A[j] = output(j) | 1,    B[k] = output(1024 + k) | 1,

where output(n) is the n-th number of the SplitMix64 generator seeded with 0 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014; constants of Vigna's public-domain splitmix64.c; output(0) is
0xE220A8397B1DCDAF). A product of two odd numbers is odd, so no lane can change without changing both sums.

Why a product and not one mix per position: A fits in the first-level cache and B is needed once in 1024 lanes, which
leaves one multiplication per lane. It costs nothing in strength that matters: all A[j] differ modulo 2^33, so *every*
change of one or two lanes within a row of 1024 is found (if the plain sum is to stay, the two changes are d and -d,
|d| < 2^32, and d * (A[j] - A[k]) can only vanish modulo 2^64 if A[j] and A[k] agree modulo 2^33); other patterns
escape only if pseudo-random numbers of 33 bits or more cancel.

Why lanes of at most 32 bits in 64: an odd weight leaves bit 63 of a word where it is, and 2^63 + 2^63 = 0. Were two
fp32 values (or one fp64) packed in one 64-bit lane, any two flips of the top sign bit would cancel in both sums. With
32-bit lanes the top bit meets 33 bits of its weight.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

ROW = 1024
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def _signed(word: int) -> int:
    """The same 64 bits as a two's-complement number, which is what torch's int64 wants."""
    return word - (1 << 64) if word >> 63 else word


@functools.cache
def column_weights() -> np.ndarray:
    """A: uint64[1024], read-only."""
    z = np.arange(1, ROW + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    z = z ^ (z >> np.uint64(31)) | np.uint64(1)
    z.flags.writeable = False
    return z


@functools.cache
def column_weights_on(device: torch.device) -> Tensor:
    """A as int64[1024] on ``device``; the first call for a device copies it there, which may wait for the device."""
    # A plain tensor even if first asked for in inference mode, whose tensors could not be used outside it.
    with torch.inference_mode(False):
        return torch.from_numpy(column_weights().view(np.int64).copy()).to(device)


def mix(z: Tensor) -> Tensor:
    """SplitMix64's finalizer, element by element, int64 to int64 (shifts are made logical by masking)."""
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _signed(MIX_1)
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _signed(MIX_2)
    return z ^ (z >> 31 & (1 << 33) - 1)


def row_weights(rows: Tensor) -> Tensor:
    """B of the given row numbers, int64 to int64."""
    return mix((rows + (ROW + 1)) * _signed(GOLDEN)) | 1
