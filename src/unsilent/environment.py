"""What decides the bits of a computation besides its inputs: library, processor, threads, precision switches."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

_BIT_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Facts that must be alike before two machines may be compared bit for bit."""

    torch: str
    cpu: str
    cpu_capability: str
    threads: int
    gpu: str
    driver: str
    precision: str
    variables: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """12 hex digits; equal digests promise equal bits for equal work, as far as is known."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:12]


def read_environment(device: torch.device) -> Environment:
    """Read the environment of this process; touches CUDA only when ``device`` is a CUDA device."""
    gpu = driver = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = f"{properties.name} {properties.major}.{properties.minor} {properties.total_memory >> 20} MiB"
        driver = f"{torch.version.cuda} {torch.backends.cudnn.version()}"
    return Environment(
        torch=torch.__version__,
        cpu=_cpu_model(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        gpu=gpu,
        driver=driver,
        precision=torch.get_float32_matmul_precision(),
        variables=tuple((name, os.environ[name]) for name in _BIT_VARIABLES if name in os.environ),
    )


def _cpu_model() -> str:
    """The processor's own name; family, model and stepping too, since one marketing name covers several."""
    fields = ("model name", "cpu family", "model", "stepping")
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return " ".join(value.strip() for key, value in pairs if key.strip() in fields)


def node_name(argument: str | None = None) -> str:
    """The name of this host: the argument, else UNSILENT_NODE, NODE_NAME, SLURMD_NODENAME, else the hostname."""
    names = (argument, *(os.environ.get(n) for n in ("UNSILENT_NODE", "NODE_NAME", "SLURMD_NODENAME")))
    return next((name for name in names if name), socket.gethostname())


def device_name(device: torch.device) -> str:
    """The device's UUID where torch knows it, else its type and index."""
    if device.type == "cuda":
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        if uuid is not None:
            return f"GPU-{uuid}"
    return f"{device.type}:{device.index or 0}"


def machine_identity() -> str:
    """Equal for two processes that can see each other's process ids: same boot, same process-id namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return f"unknown:{socket.gethostname()}:{os.getpid()}"
