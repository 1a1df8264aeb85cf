"""``unsilent replay``: reruns the work of one finding in a fresh process, from what its bundle holds."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unsilent.bundle import WEIGHTS, WORK, Bundle, read
from unsilent.checks.audit import Strength
from unsilent.determinism import Kernels
from unsilent.environment import read_environment
from unsilent.errors import UsageError
from unsilent.events import plain
from unsilent.offline.judge import Answer, judge_finding
from unsilent.replay import LossFunction, Reading, Replayer

RERUNS = 2  # one that differs may be chance; two that agree are a value


def replay(path: Path, *, entry: str | None, trusted: bool) -> tuple[Answer, dict[str, Any]]:
    """Rerun a finding: the answer, and the facts behind it for ``--json``.

    Args:
        path: the bundle's directory.
        entry: ``module:function``; the function takes nothing and returns (model, loss_fn) as the training program had
            them. None for a run of ``unsilent train``, whose model is known.
        trusted: the batch may be unpickled whatever it is made of.

    Raises:
        UsageError: the bundle lacks something that a rerun needs, or the model is not the one of the run.
    """
    bundle = read(path, trusted=trusted)
    _must_be_whole(bundle)
    with _as_recorded(bundle.environment):
        device = _device(bundle)
        model, loss_fn = _from_entry(entry) if entry is not None else _from_run(bundle, device)
        model = model.to(device)
        _put_weights(model, bundle)
        here = plain(asdict(read_environment(device)))
        readings = _rerun(bundle, model, loss_fn, device)
    unlike = differences(bundle.environment, here)
    answer = judge_finding(bundle.executions, bundle.agreed, [r.digest for r in readings], unlike=unlike)
    recorded = _recorded(bundle)
    return answer, {
        "exit_code": answer.exit_code,
        "outcome": answer.outcome.value,
        "reason": answer.reason,
        "step": bundle.step,
        "auditee": bundle.auditee,
        "executions": [dict(execution) for execution in bundle.executions],
        "agreed": bundle.agreed,
        "reruns": [reading.digest for reading in readings],
        "differs_from_recorded": list(readings[0].differing(recorded)) if recorded is not None else None,
        "environment": unlike,
    }


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """In what two environments differ, in words."""
    return [
        f"{name} is {here.get(name)!r} here and was {there.get(name)!r} there"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]


def _must_be_whole(bundle: Bundle) -> None:
    missing = [name for name, part in ((WORK, bundle.work), (WEIGHTS, bundle.weights)) if part is None]
    if not missing:
        return
    sizes = [f"{name} ({bundle.left_out[name]:,} bytes)" for name in missing if name in bundle.left_out]
    if len(sizes) < len(missing):
        raise UsageError(f"{bundle.path}: {' and '.join(missing)} of step {bundle.step} are no longer in the bundle")
    raise UsageError(
        f"{bundle.path}: {' and '.join(sizes)} of step {bundle.step} did not fit under the cap of the evidence folder, so "
        f"the work cannot be rerun from here; unsilent recheck reruns step {bundle.step} from a checkpoint before it"
    )


@contextlib.contextmanager
def _as_recorded(environment: Mapping[str, Any]) -> Iterator[None]:
    """What decides the bits and can be set in a running process is set as it was there, and put back."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(int(environment.get("threads", threads)))
    torch.set_float32_matmul_precision(str(environment.get("precision", precision)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def _device(bundle: Bundle) -> torch.device:
    """A device of the kind that the work ran on; where there is none, the CPU, whose environment differs and is named."""
    on_gpu = bool(bundle.environment.get("gpu")) and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _from_entry(entry: str) -> tuple[nn.Module, LossFunction]:
    name, _, function = entry.partition(":")
    if not name or not function:
        raise UsageError(f"--entry is {entry!r}: it must be module:function")
    # As `python -m` does: a program is found where one stands.
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds text
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        make: Callable[[], Any] = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--entry {entry} cannot be found: {error}") from error
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise UsageError(f"--entry {entry} must return (model, loss_fn), as the program gives them to the guard")
    return made


def _from_run(bundle: Bundle, device: torch.device) -> tuple[nn.Module, LossFunction]:
    from unsilent.training.loop import options_from_json
    from unsilent.training.model import build_model, make_loss_fn
    from unsilent.training.presets import preset

    if bundle.run is None or bundle.run.get("command") != "train":
        raise UsageError(
            f"{bundle.path}: the run was not started by unsilent train, so nobody here knows its model: add "
            "--entry module:function, a function that returns (model, loss_fn)"
        )
    options = options_from_json(bundle.run["options"])
    return build_model(preset(options.preset), seed=options.seed, device=device), make_loss_fn(bf16=options.bf16)


def _put_weights(model: nn.Module, bundle: Bundle) -> None:
    assert bundle.weights is not None
    live = dict(model.named_parameters())
    for name in live.keys() ^ bundle.weights.keys():
        where = "the bundle" if name in live else "the model"
        raise UsageError(f"{bundle.path}: {where} has no parameter {name!r}: this is not the model of the run")
    with torch.no_grad():
        for name, parameter in live.items():
            saved = bundle.weights[name]
            if saved.shape != parameter.shape or saved.dtype != parameter.dtype:
                raise UsageError(
                    f"{bundle.path}: {name!r} is {saved.dtype} of shape {list(saved.shape)} there and {parameter.dtype} of "
                    f"shape {list(parameter.shape)} here: this is not the model of the run"
                )
            parameter.copy_(saved)
    for name, module in model.named_modules():
        module.training = name not in bundle.evaluating


def _rerun(bundle: Bundle, model: nn.Module, loss_fn: LossFunction, device: torch.device) -> list[Reading]:
    assert bundle.work is not None
    work = bundle.work
    written = {n: p for n, p in model.named_parameters() if n in work.micro_batches[0].buffers}
    replayer = Replayer(
        model, loss_fn, scale_loss=_scaler(bundle.loss_scale, device), scale=bundle.scale, written=written
    )
    readings = [replayer.run(work, kernels=Kernels(bundle.kernels)).reading for _ in range(RERUNS)]
    return [_comparable(reading, bundle) for reading in readings]


def _scaler(scale: float | None, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Multiplies as GradScaler does: by a tensor of fp32."""
    if scale is None:
        return lambda loss: loss
    factor = torch.full((), scale, dtype=torch.float32, device=device)
    return lambda loss: loss * factor


def _recorded(bundle: Bundle) -> Reading | None:
    if bundle.reading is None:
        return None
    return _comparable(Reading(names=tuple(bundle.reading["names"]), rows=bundle.reading["rows"]), bundle)


def _comparable(reading: Reading, bundle: Bundle) -> Reading:
    """On the host, and cut down to what the run's audits compared."""
    loss_only = bundle.strength == Strength.LOSS_ONLY.value
    is_loss = [name.startswith("loss[") for name in reading.names]
    keep = [i for i, loss in enumerate(is_loss) if (bundle.losses if loss else not loss_only)]
    return Reading(names=tuple(reading.names[i] for i in keep), rows=reading.rows.cpu()[keep])
