"""Which elements a fault hits, and the wrong values that stand there: bits in, bits out, nothing of a job."""

from __future__ import annotations

import hashlib
import math

import torch

from unsilent.lab.faults import GROUP, Fault
from unsilent.lab.gates import NOT_FINITE, SINGLE_BIT, ZEROED

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def positions(shape: torch.Size, fault: Fault) -> torch.Tensor:
    """Flat indices, int64[hit], of the elements that are wrong in a tensor of this shape; the seed alone chooses."""
    size, generator = math.prod(shape), seeded(fault.seed, "positions")
    if fault.pattern == "stuck_lane":
        width = shape[-1] if len(shape) else 1
        offset = fault.element
        if offset is None:
            offset = int(torch.randint(min(fault.every, width), (), generator=generator))
        columns = torch.arange(offset % fault.every, width, fault.every)
        return (torch.arange(size // width)[:, None] * width + columns).flatten()
    if fault.share is not None:
        length = max(1, round(fault.share * size))
        first = int(torch.randint(size - length + 1, (), generator=generator))
        return torch.arange(first, first + length)
    if fault.period is not None:
        groups = _distinct(-(-size // GROUP), fault.count, generator) * GROUP
        offset = int(torch.randint(fault.period, (), generator=generator))
        found = (groups[:, None] + torch.arange(offset, GROUP, fault.period)).flatten()
        return found[found < size]
    if fault.element is not None:
        return torch.arange(fault.element, fault.element + fault.count * fault.lane)
    starts = _distinct(size // fault.lane, fault.count, generator) * fault.lane
    return (starts[:, None] + torch.arange(fault.lane)).flatten()


def positions_at_rate(size: int, rate: float, generator: torch.Generator) -> torch.Tensor:
    """Flat indices, int64[hit], where each of ``size`` elements is hit with probability ``rate``."""
    count = torch.binomial(
        torch.tensor(float(size), dtype=torch.float64), torch.tensor(rate, dtype=torch.float64), generator=generator
    )
    return _distinct(size, int(count), generator)


def corrupted_values(values: torch.Tensor, fault: Fault, generator: torch.Generator) -> torch.Tensor:
    """The wrong values that stand where ``values`` (one-dimensional, on the CPU) would be right."""
    match fault.pattern:
        case "zero":
            wrong = torch.zeros_like(values)
        case "nan":
            wrong = torch.full_like(values, math.nan)
        case "inf":
            wrong = torch.full_like(values, math.inf)
        case "scale":
            assert fault.factor is not None
            wrong = (values.double() * fault.factor).to(values.dtype)
        case "stuck_lane" if fault.add is not None:
            wrong = (values.double() + fault.add).to(values.dtype)
        case "relative" | "stuck_lane":
            wrong = _with_relative_error(values, fault.error)
        case "bit_flip":
            wrong = _viewed_as(bits(values) ^ _bit_mask(values, fault), values)
        case "stuck_bit":
            mask = _bit_mask(values, fault)
            wrong = _viewed_as(bits(values) | mask if fault.high else bits(values) & ~mask, values)
        case "random_bits":
            wrong = _viewed_as(bits(values) ^ _random_masks(values, fault.bit, generator), values)
        case "gates":
            wrong = _as_gates_fail(values, generator)
        case _:
            raise AssertionError(fault.pattern)
    return _within_range(values, wrong, fault)


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bit patterns, as signed integers of the same width."""
    return values.contiguous().view(_INTEGER[values.dtype.itemsize])


def seeded(*key: object) -> torch.Generator:
    """A generator of our own, on the CPU, for this purpose only: the job's generators are never touched."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _within_range(values: torch.Tensor, wrong: torch.Tensor, fault: Fault) -> torch.Tensor:
    """Right values outside the range to which a fault's dependence on values confines it stay right."""
    if fault.at_least == 0 and fault.below is None:
        return wrong
    size = values.double().abs()
    return torch.where(
        (size >= fault.at_least) & (size < (math.inf if fault.below is None else fault.below)), wrong, values
    )


def _as_gates_fail(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each value drawn for itself: zeroed, NaN or Inf, or one or several bits changed so that it stays finite."""
    kind = torch.rand(values.shape, dtype=torch.float64, generator=generator)
    single = torch.rand(values.shape, dtype=torch.float64, generator=generator) < SINGLE_BIT
    one_bit = _viewed_as(bits(values) ^ _single_masks(values, generator), values)
    wrong = torch.where(single, one_bit, _several_bits(values, generator))
    either = torch.rand(values.shape, dtype=torch.float64, generator=generator) < 0.5
    wrong = torch.where(kind < ZEROED + NOT_FINITE, torch.where(either, math.nan, math.inf).to(values.dtype), wrong)
    return torch.where(kind < ZEROED, torch.zeros_like(values), wrong)


def _several_bits(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Two or more bits of each value changed; drawn again where that is not finite."""
    width = 8 * values.dtype.itemsize
    wrong = values.clone()
    open_ = torch.ones(values.shape, dtype=torch.bool)
    while bool(open_.any()):
        masks = _random_masks(values, width - 1, generator)
        tried = _viewed_as(bits(values) ^ masks, values)
        fits = torch.isfinite(tried.double()) & (masks & (masks - 1) != 0)
        wrong = torch.where(open_ & fits, tried, wrong)
        open_ &= ~fits
    return wrong


def _single_masks(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One bit for each value, drawn again where the flip would not leave a finite number."""
    width = 8 * values.dtype.itemsize
    masks = torch.zeros_like(bits(values))
    open_ = torch.ones(values.shape, dtype=torch.bool)
    while bool(open_.any()):
        drawn = torch.randint(width, values.shape, generator=generator)
        tried = _powers(drawn, width).to(masks.dtype)
        fits = torch.isfinite(_viewed_as(bits(values) ^ tried, values).double())
        masks = torch.where(open_ & fits, tried, masks)
        # A value that was not finite before has no flip that must be finite.
        open_ &= ~fits & torch.isfinite(values.double())
    return masks


def _powers(exponents: torch.Tensor, width: int) -> torch.Tensor:
    return torch.tensor([_signed(1 << n, width) for n in range(width)])[exponents]


def _with_relative_error(values: torch.Tensor, error: float) -> torch.Tensor:
    if error == 0:
        return values.clone()
    wrong = (values.double() * (1 + error)).to(values.dtype)
    touched = torch.isfinite(values.double()) & (values != 0)
    # In a short format a small error rounds away: take the neighbouring number then, so that the fault is one.
    neighbour = _viewed_as(bits(values) + (1 if error > 0 else -1), values)
    wrong = torch.where(bits(wrong) == bits(values), neighbour, wrong)
    return torch.where(touched, wrong, values)


def _bit_mask(values: torch.Tensor, fault: Fault) -> torch.Tensor:
    assert fault.bit is not None
    mask = _signed(1 << fault.bit, 8 * values.dtype.itemsize)
    return torch.full(values.shape, mask, dtype=_INTEGER[values.dtype.itemsize])


def _random_masks(values: torch.Tensor, highest: int | None, generator: torch.Generator) -> torch.Tensor:
    """Bit masks, never empty, whose bits lie at or below ``highest`` (None: in the mantissa; of integers, the low half)."""
    width = 8 * values.dtype.itemsize
    if highest is None:
        eps = torch.finfo(values.dtype).eps if values.is_floating_point() else 2.0 ** (-width // 2)
        highest = max(0, round(-math.log2(eps)) - 1)
    masks = torch.randint(-(2**63), 2**63 - 1, values.shape, generator=generator)
    masks &= _signed((1 << (highest + 1)) - 1, 64)
    masks = torch.where(masks == 0, 1, masks)
    if width < 64:
        masks = torch.where(masks >= 1 << (width - 1), masks - (1 << width), masks)
    return masks.to(_INTEGER[values.dtype.itemsize])


def _viewed_as(pattern: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return pattern.view(values.dtype)


def _signed(pattern: int, width: int) -> int:
    return pattern - (1 << width) if pattern >> (width - 1) else pattern


def _distinct(limit: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """``count`` different numbers below ``limit``; no permutation of a large tensor's indices for a few of them."""
    if limit <= 4 * count:
        return torch.randperm(limit, generator=generator)[:count]
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        chosen.update(dict.fromkeys(torch.randint(limit, (count - len(chosen),), generator=generator).tolist()))
    return torch.tensor(list(chosen)[:count], dtype=torch.int64)
