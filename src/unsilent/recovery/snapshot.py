"""A trusted copy of the state in host memory: what ROLLBACK goes back to.

It is taken at the start of a step whose vote found all replicas alike, and it is believed later only if its bits still
give the fingerprints that the vote has read from the live tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unsilent.fingerprints import sums_many
from unsilent.inventory import Entry, Inventory, state_of

#: what each parameter group says besides its parameters: learning rate, betas, ...
Settings = tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state at the start of ``step``.

    Attributes:
        tensors: weights and optimizer state by their names in the inventory, in host memory (pinned for a GPU).
        rows: the sums of each of them, int64[2], as the vote read them from the live tensors.
        settings: of each parameter group.
        plain: for each parameter with optimizer state, all its keys, and the values that are no tensors.
        scaler, scheduler: their state, None where there is none.
    """

    step: int
    tensors: dict[str, torch.Tensor]
    rows: dict[str, torch.Tensor]
    settings: Settings
    plain: dict[int, dict[str, Any]]
    scaler: dict[str, Any] | None
    scheduler: dict[str, Any] | None

    def damage(self) -> str:
        """The first tensor whose bits are not those that the vote read, "" when all are."""
        names = list(self.tensors)
        if not names:
            return ""
        then = torch.stack([self.rows[name] for name in names]).cpu()  # waits until the copies have arrived, too
        now = sums_many([self.tensors[name] for name in names])
        differs = (now != then).any(dim=1).tolist()
        return next((name for name, wrong in zip(names, differs, strict=True) if wrong), "")


def take(
    step: int,
    inventory: Inventory,
    rows: Mapping[str, torch.Tensor],
    *,
    scaler: Any,
    scheduler: Any,
    reuse: Snapshot | None,
) -> Snapshot:
    """Copy the state; from a GPU the copies run while the host goes on, and before anything writes the tensors.

    Args:
        rows: the sums that a vote has just read, by name; a tensor without one is new since then and not copied.
        reuse: an older snapshot whose memory may be overwritten.
    """
    tensors: dict[str, torch.Tensor] = {}
    for entry in _replicated(inventory):
        if entry.name not in rows:
            continue
        old = None if reuse is None else reuse.tensors.get(entry.name)
        fits = old is not None and old.shape == entry.tensor.shape and old.dtype == entry.tensor.dtype
        home = old if fits else torch.empty_like(entry.tensor, device="cpu", pin_memory=entry.tensor.is_cuda)
        assert home is not None
        tensors[entry.name] = home.copy_(entry.tensor, non_blocking=True)
    optimizer = inventory.optimizer
    return Snapshot(
        step=step,
        tensors=tensors,
        rows={name: rows[name] for name in tensors},
        settings=settings_of(optimizer),
        plain={id(p): _plain(state) for p, state in state_of(optimizer).items()} if optimizer is not None else {},
        scaler=None if scaler is None else copy.deepcopy(scaler.state_dict()),
        scheduler=None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
    )


def restore(snapshot: Snapshot, inventory: Inventory, *, scaler: Any, scheduler: Any) -> None:
    """Make the live state that of the snapshot; optimizer state that did not exist then is dropped."""
    with torch.no_grad():
        for entry in _replicated(inventory):
            if entry.name in snapshot.tensors:
                entry.tensor.copy_(snapshot.tensors[entry.name])
    optimizer = inventory.optimizer
    if optimizer is not None:
        kept = state_of(optimizer)
        for parameter in list(kept):
            had = snapshot.plain.get(id(parameter))
            if had is None:
                del kept[parameter]
                continue
            state = kept[parameter]
            for key in set(state) - set(had):
                del state[key]
            state.update({key: copy.deepcopy(v) for key, v in had.items() if v is not _TENSOR})
        put_settings(optimizer, snapshot.settings)
    if scheduler is not None and snapshot.scheduler is not None:
        scheduler.load_state_dict(copy.deepcopy(snapshot.scheduler))
    if scaler is not None and snapshot.scaler is not None:
        scaler.load_state_dict(copy.deepcopy(snapshot.scaler))
    # Inside autocast the old weights would live on: their low-precision copies are cached.
    torch.clear_autocast_cache()


def settings_of(optimizer: torch.optim.Optimizer | None) -> Settings:
    """A copy of what each parameter group says besides its parameters."""
    groups = [] if optimizer is None else optimizer.param_groups
    return tuple({k: _copy(v) for k, v in group.items() if k != "params"} for group in groups)


def put_settings(optimizer: torch.optim.Optimizer, settings: Settings) -> None:
    """The inverse of :func:`settings_of`."""
    with torch.no_grad():
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)  # a learning rate that others hold on to
                else:
                    group[key] = _copy(value)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _replicated(inventory: Inventory) -> list[Entry]:
    """Weights and optimizer state; buffers come back with the work of the step, which has captured them."""
    return [*inventory.weights(), *inventory.optimizer_state()]


_TENSOR = object()


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _TENSOR if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in state.items()}
