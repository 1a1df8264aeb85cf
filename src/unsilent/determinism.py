"""The mode in which an audit step and its replays run: kernels that repeat, everything put back afterwards."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
import torch.utils.deterministic
from torch.nn.attention import SDPBackend, sdpa_kernel

_DETERMINISTIC: Any = torch.utils.deterministic  # its switch is made at import, unseen by type checkers


class Kernels(str, Enum):
    """Which kernels an audit runs with, fastest first; calibration takes the first that repeats."""

    DETERMINISTIC = "deterministic"
    MATH_ATTENTION = "deterministic, math attention"
    DEFAULT = "default"


@contextmanager
def running_with(kernels: Kernels) -> Iterator[None]:
    """Run with the given kernels and restore every switch.

    An operation without a deterministic kernel runs as it is (``warn_only``): calibration, not a promise of the
    library, decides whether the work repeats.
    """
    if kernels is Kernels.DEFAULT:
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = _DETERMINISTIC.fill_uninitialized_memory
    cudnn = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
        warnings.filterwarnings("ignore", message=".*defaults to a non-deterministic algorithm.*")
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Filling fresh memory with NaN is a debugging aid of that mode and costs a pass over every output.
            _DETERMINISTIC.fill_uninitialized_memory = False
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
            if kernels is Kernels.MATH_ATTENTION:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            _DETERMINISTIC.fill_uninitialized_memory = fill
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


def missing_settings() -> list[str]:
    """What should have been set before CUDA starts and is not; empty on CPU."""
    if not torch.cuda.is_available():
        return []
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8"):
        return []
    return [
        "CUBLAS_WORKSPACE_CONFIG is not set: set it to :4096:8 before the process starts, or matmuls may not repeat"
    ]
