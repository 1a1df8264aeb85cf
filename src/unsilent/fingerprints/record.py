"""The fingerprint as a value on the host: compared, stored, printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unsilent.errors import UsageError
from unsilent.fingerprints.compute import sums

_WORD = 1 << 64


@dataclass(frozen=True)
class Fingerprint:
    """Two sums of a tensor's bits (unsigned, below 2^64) with its shape and dtype.

    Equal if and only if bits, shape and dtype are equal, up to hash collisions. Unlike ``torch.equal`` it tells 0.0
    from -0.0, and a NaN equals itself if its bits do.
    """

    plain: int
    weighted: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def hex(self) -> str:
        """32 hexadecimal digits: the plain sum, then the weighted one."""
        return f"{self.plain:016x}{self.weighted:016x}"

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON types (numbers of 64 bits as hexadecimal digits, since JSON readers round large ones)."""
        return {"hex": self.hex, "shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fingerprint:
        """The inverse of ``to_json``. Raises UsageError where ``data`` is not what it returns."""
        try:
            digits, shape, dtype = data["hex"], data["shape"], data["dtype"]
            if len(digits) != 32 or not isinstance(dtype, str):
                raise ValueError(digits)
            return cls(int(digits[:16], 16), int(digits[16:], 16), tuple(int(size) for size in shape), dtype)
        except (KeyError, TypeError, ValueError) as problem:
            raise UsageError(f"this is not a fingerprint: {data!r}") from problem


def fingerprint(tensor: Tensor) -> Fingerprint:
    """The fingerprint of a tensor's logical values in row-major order, however they lie in memory.

    Waits for the tensor's device. Strided, expanded, conjugated, negated and requires_grad tensors are accepted.

    Raises:
        UsageError: the tensor is sparse, quantized, nested, distributed or on the meta device.
    """
    plain, weighted = (value % _WORD for value in sums(tensor).tolist())
    return Fingerprint(plain, weighted, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
