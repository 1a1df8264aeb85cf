"""What is kept of a finding: one directory for each, so that a person can look at it later.

``evidence/<step>-<check>-<n>/evidence.json`` holds the record and, with level ``digests``, nothing else: no value of a
tensor leaves the process. Level ``slices`` adds a few elements of the tensors that a check hands over (gradients,
weights, activations); only ``full`` keeps them whole, and only ``full`` keeps anything of the batch, and what a rerun
needs (``bundle.py``). The whole folder has a size cap and keeps the newest bundles. Nothing here raises into training.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from unsilent.events import plain, read_starts

SCHEMA_VERSION = 1
FOLDER = "evidence"
_FITS_NOWHERE = 2**62


class Level(str, Enum):
    """How much of a finding is kept."""

    DIGESTS = "digests"
    SLICES = "slices"
    FULL = "full"


class EvidenceStore:
    """Writes bundles under ``directory/evidence``.

    Args:
        directory: the run directory; None keeps nothing.
        rank: the writer's global rank; several ranks may write beside each other.
        level: ``digests``, ``slices`` or ``full``.
        max_bytes: cap on the whole folder. A bundle that alone would exceed it is kept at the next lower level.
        keep: cap on the number of bundles; the oldest go first.
        slice_elements: how many elements of a tensor ``slices`` keeps.
        counters: reads the device's temperature, clocks and error counters at that moment.

    Attributes:
        lost: how many bundles could not be written.
        removed: how many bundles this writer removed to stay within the caps.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        rank: int,
        level: Level | str = Level.DIGESTS,
        max_bytes: int = 256 * 2**20,
        keep: int = 100,
        slice_elements: int = 256,
        counters: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self.root = None if directory is None else Path(directory) / FOLDER
        self.rank = rank
        self.level = Level(level)
        self.max_bytes = max_bytes
        self.keep = keep
        self.slice_elements = slice_elements
        self.lost = 0
        self.removed = 0
        self._counters = counters

    def save(
        self,
        step: int,
        check: str,
        record: Mapping[str, Any],
        *,
        tensors: Mapping[str, Any] | None = None,
        elements: Mapping[str, tuple[int, int]] | None = None,
        batch: Any = None,
        parts: Mapping[str, Any] | None = None,
    ) -> Path | None:
        """Write one bundle and return its directory, None when nothing could be written.

        Args:
            step: the step of the finding.
            check: the check that made it.
            record: verdict, digests and whatever else is plain; dataclasses and enums are turned into JSON values.
            tensors: name → tensor that differs; nothing of the batch may be among them.
            elements: name → flat element range at which ``slices`` keeps the tensor; else its first elements.
            batch: the batch of that step, kept by ``full`` only.
            parts: further content by name, the most important first, each kept as ``<name>.pt`` by ``full`` only. Where
                not all of it fits, the last ones are left out, and ``left_out`` says how many bytes each would take.
        """
        if self.root is None:
            return None
        try:
            return self._save(self.root, step, check, record, tensors or {}, elements or {}, batch, parts or {})
        except Exception:  # noqa: BLE001 - whatever a disk, a pickle or an odd tensor does, training goes on
            self.lost += 1
            return None

    def _save(
        self,
        root: Path,
        step: int,
        check: str,
        record: Mapping[str, Any],
        tensors: Mapping[str, Any],
        elements: Mapping[str, tuple[int, int]],
        batch: Any,
        parts: Mapping[str, Any],
    ) -> Path:
        level = self.level
        # Half the cap, so that one bundle never pushes all others out.
        if level is Level.FULL and _size_of(tensors) + _size_of(batch) > self.max_bytes // 2:
            level = Level.SLICES
        if level is Level.SLICES and len(tensors) * self.slice_elements * 16 > self.max_bytes // 2:
            level = Level.DIGESTS
        taken = _size_of(tensors) + _size_of(batch) if level is Level.FULL else 0
        kept, left_out = self._those_that_fit(level, taken, parts)
        body = {
            "schema": SCHEMA_VERSION,
            "time": round(time.time(), 6),
            "step": step,
            "check": check,
            "rank": self.rank,
            "level": level.value,
            "asked_level": self.level.value,
            "tensors": {name: plain(tensor) for name, tensor in tensors.items()},
            "device_counters": dict(self._counters()) if self._counters is not None else {},
            "record": plain(record),
            "left_out": left_out,
            "run": next(reversed(read_starts(root.parent)), None),
        }
        text = (json.dumps(body, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        bundle = self._new_bundle(root, step, check)
        try:
            if level is Level.SLICES and tensors:
                slices = {name: self._slice(tensor, elements.get(name)) for name, tensor in tensors.items()}
                _write_tensors(bundle / "slices.pt", slices)
            elif level is Level.FULL:
                if tensors:
                    _write_tensors(bundle / "tensors.pt", {n: t.detach().cpu() for n, t in tensors.items()})
                if batch is not None:
                    _write_tensors(bundle / "batch.pt", batch)
                for name in kept:
                    _write_tensors(bundle / f"{name}.pt", parts[name])
            _write(bundle / "evidence.json", text)  # last: a bundle without it was cut off
        except BaseException:
            shutil.rmtree(bundle, ignore_errors=True)
            raise
        self._make_room(root, newest=bundle)
        return bundle

    def _those_that_fit(
        self, level: Level, taken: int, parts: Mapping[str, Any]
    ) -> tuple[tuple[str, ...], dict[str, int]]:
        """(names of the parts that are kept, bytes of those that are not); below ``full`` none are, and none are missed."""
        kept: list[str] = []
        left_out: dict[str, int] = {}
        for name, content in parts.items() if self.level is Level.FULL else ():
            size = _size_of(content)
            if level is Level.FULL and not left_out and taken + size <= self.max_bytes // 2:
                kept.append(name)
                taken += size
            else:
                left_out[name] = size
        return tuple(kept), left_out

    def _new_bundle(self, root: Path, step: int, check: str) -> Path:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9_.]+", "_", check)
        for n in range(10_000):
            bundle = root / f"{step}-{name}-{n}"
            try:
                bundle.mkdir(mode=0o700)
            except FileExistsError:
                continue
            return bundle
        raise OSError(f"{root}: too many bundles for step {step}")

    def _slice(self, tensor: Any, span: tuple[int, int] | None) -> dict[str, Any]:
        flat = (tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()).reshape(-1)
        start = 0 if span is None else max(0, min(span[0], flat.numel()))
        stop = min(flat.numel(), start + self.slice_elements)
        return {"start": start, "values": flat[start:stop].cpu().clone()}

    def _make_room(self, root: Path, *, newest: Path) -> None:
        found: list[tuple[float, Path, int]] = []
        for bundle in root.iterdir():
            try:
                size = sum(file.stat().st_size for file in bundle.iterdir())
                found.append((bundle.stat().st_mtime, bundle, size))
            except OSError:
                continue  # another rank is removing it
        found.sort()
        total, count = sum(size for _, _, size in found), len(found)
        for _, bundle, size in found:
            if (count <= self.keep and total <= self.max_bytes) or bundle == newest:
                break
            shutil.rmtree(bundle, ignore_errors=True)
            total, count, self.removed = total - size, count - 1, self.removed + 1


def read_bundle(bundle: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The record of one bundle; None when it is missing or was cut off."""
    try:
        body = json.loads((Path(bundle) / "evidence.json").read_bytes())
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def device_counters(device: str | int | None) -> dict[str, Any]:
    """Temperature, clocks, power and error counters of an NVIDIA GPU, by UUID or index; {} where NVML has none.

    Every reading stands alone: what one driver does not offer is left out.
    """
    if device is None:
        return {}
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, no driver, no permission: all mean that there is nothing to read
        return {}
    try:
        handle = (
            nvml.nvmlDeviceGetHandleByUUID(device)
            if isinstance(device, str)
            else nvml.nvmlDeviceGetHandleByIndex(device)
        )
        return _read_counters(nvml, handle)
    except Exception:  # noqa: BLE001 - no such device: nothing to read
        return {}
    finally:
        nvml.nvmlShutdown()


def _read_counters(nvml: Any, handle: Any) -> dict[str, Any]:
    readings: dict[str, Callable[[], Any]] = {
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        "ecc_mode": lambda: "on" if nvml.nvmlDeviceGetEccMode(handle)[0] else "off",
        "remapped_rows": lambda: list(nvml.nvmlDeviceGetRemappedRows(handle)),
    }
    for span, counter in (("volatile", "NVML_VOLATILE_ECC"), ("aggregate", "NVML_AGGREGATE_ECC")):
        for name, error in (
            ("corrected", "NVML_MEMORY_ERROR_TYPE_CORRECTED"),
            ("uncorrected", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
        ):
            readings[f"ecc_{name}_{span}"] = lambda counter=counter, error=error: nvml.nvmlDeviceGetTotalEccErrors(
                handle, getattr(nvml, error), getattr(nvml, counter)
            )
    found: dict[str, Any] = {}
    for name, reading in readings.items():
        try:
            found[name] = reading()
        except Exception:  # noqa: BLE001 - this driver or card does not offer it
            continue
    return found


def _size_of(value: Any) -> int:
    if hasattr(value, "element_size"):
        return int(value.numel() * value.element_size())
    if isinstance(value, Mapping):
        return sum(_size_of(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_size_of(item) for item in value)
    if isinstance(value, str | bytes):
        return len(value)
    try:
        return len(pickle.dumps(value))
    except Exception:  # noqa: BLE001 - an object may raise anything; what cannot be written fits nowhere
        return _FITS_NOWHERE


def _write_tensors(path: Path, value: Any) -> None:
    import torch  # late: bundles of digests need none

    with os.fdopen(_create(path), "wb") as file:
        torch.save(value, file)


def _write(path: Path, data: bytes) -> None:
    with os.fdopen(_create(path), "wb") as file:
        file.write(data)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
