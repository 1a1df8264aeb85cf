"""Modules whose work no rank can run again, recognised by what they hold: captured CUDA graphs, autotuned kernels, FP8.

None of it runs on a CPU, so all of it is told from names and settings, and none has been tried on a device that has it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

_AUTOTUNING = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
_FP8 = ("torchao.float8", "transformer_engine")


def reason_against(module: nn.Module) -> str:
    """Why the work of this very module cannot be run again, and what to do, to follow its name; "" where nothing is known."""
    settings = _compiler_settings(module)
    if any(settings.get(name) for name in _AUTOTUNING):
        return (
            "is compiled with autotuning, in which each rank measures which kernel it takes, so that healthy ranks may compute "
            "other bits: compile it without max-autotune"
        )
    if settings.get("triton.cudagraphs") or _captured(module):
        return (
            "runs from captured CUDA graphs, which read and write the memory that they were captured with: a rerun would go over "
            "the step's own; use it without them (compile without reduce-overhead)"
        )
    if any(kind.__module__.startswith(_FP8) for kind in type(module).__mro__):
        return (
            "is made for FP8, whose scales come from a history that its forward moves and may keep outside of buffers, and no "
            "guard has been run with one yet: use torch's own modules in bf16"
        )
    return ""


def autotunes_by_default() -> bool:
    """Whether whatever is compiled from now on is autotuned; what nobody has imported yet, nobody has switched on."""
    config: Any = sys.modules.get("torch._inductor.config")
    return any(getattr(config, name, False) for name in _AUTOTUNING)


def _compiler_settings(module: nn.Module) -> Mapping[str, Any]:
    """What this module was compiled with, by ``torch.compile(module)`` or ``module.compile()``; empty where it was not."""
    context: Any = vars(module).get("dynamo_ctx")
    if context is not None:
        return getattr(context, "compiler_config", None) or {}
    settings: Any = getattr(module._compiled_call_impl, "get_compiler_config", None)
    return (settings() if settings is not None else None) or {}


def _captured(module: nn.Module) -> bool:
    """Whether ``make_graphed_callables`` has replaced its forward, or it holds a graph of its own."""
    forward: Any = vars(module).get("forward")
    return "make_graphed_callables" in getattr(forward, "__qualname__", "") or any(
        type(value).__name__ == "CUDAGraph" for value in vars(module).values()
    )
