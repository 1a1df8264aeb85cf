"""The state of a run as one nested dictionary with names, and back into the live model and optimizer. No files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from unsilent.errors import CheckpointError, UsageError
from unsilent.fingerprints import Fingerprint, sums_many
from unsilent.inventory import Inventory

# DCP turns every mapping into keys of text and forgets empty ones. A mapping that would not come back as it was
# (MultiStepLR's milestones are keyed by int) is kept whole, as the second item of a tuple that begins with this word.
_WHOLE = "unsilent.whole"
_WORD = 1 << 64


class Stateful(Protocol):
    """A scaler or a scheduler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def collect(
    inventory: Inventory,
    *,
    steps: int,
    scaler: Stateful | None,
    scheduler: Stateful | None,
    guard: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Everything that a checkpoint keeps and that ranks share; tensors are the live ones, not copies.

    Raises:
        UsageError: the optimizer updates a parameter that the model does not hold, or keeps state of its own kind.
    """
    return {
        "model": {name: encode(value) for name, value in inventory.model.state_dict().items()},
        "optimizer": _optimizer_by_name(inventory),
        "scaler": None if scaler is None else encode(scaler.state_dict()),
        "scheduler": None if scheduler is None else encode(scheduler.state_dict()),
        "guard": encode(dict(guard or {})),
        "steps": steps,
    }


def _optimizer_by_name(inventory: Inventory) -> dict[str, Any]:
    # By hand: DCP's get_state_dict runs optimizer.step() when the optimizer has no state yet.
    optimizer = inventory.optimizer
    if optimizer is None:
        return {}
    packed = optimizer.state_dict()
    if extra := sorted(set(packed) - {"state", "param_groups"}):
        raise UsageError(f"{type(optimizer).__name__} keeps {extra} in its state_dict, which cannot be saved by name")
    names = _names_by_group(inventory)
    by_number = {
        number: name
        for group, of_group in zip(packed["param_groups"], names, strict=True)
        for number, name in zip(group["params"], of_group, strict=True)
    }
    return {
        "state": {
            by_number[number]: {str(key): encode(value) for key, value in state.items()}
            for number, state in packed["state"].items()
        },
        "param_groups": [
            {key: encode(value) for key, value in group.items() if key != "params"} | {"params": of_group}
            for group, of_group in zip(packed["param_groups"], names, strict=True)
        ],
    }


def _names_by_group(inventory: Inventory) -> list[list[str]]:
    assert inventory.optimizer is not None
    names = {id(p): name for name, p in inventory.parameters()}
    result: list[list[str]] = []
    for i, group in enumerate(inventory.optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            if id(p) not in names:
                raise UsageError(
                    f"the optimizer updates a parameter that the model does not hold (group {i}, number {j}, shape "
                    f"{list(p.shape)}): make it a parameter of the model, or it is lost when the run is resumed"
                )
        result.append([names[id(p)] for p in group["params"]])
    return result


def encode(value: Any) -> Any:
    """The value, with every mapping that DCP would change kept whole."""
    if isinstance(value, Mapping):
        if type(value) is dict and value and all(isinstance(key, str) for key in value):
            return {key: encode(item) for key, item in value.items()}
        return (_WHOLE, value)
    if type(value) is list:
        return [encode(item) for item in value]
    return value


def decode(value: Any) -> Any:
    """The inverse of :func:`encode`."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and value[0] == _WHOLE:
        return value[1]
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return value


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by the key that DCP gives them: the path, joined by dots."""
    return {".".join(map(str, path)): value for path, value in _walk((), tree)}


def tensors_in(tree: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in flat(tree).items() if isinstance(value, Tensor)}


def _walk(path: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk((*path, str(key)), item)
    elif isinstance(value, list) and _holds_more(value):
        for i, item in enumerate(value):
            yield from _walk((*path, i), item)
    else:
        yield path, value


def _holds_more(values: list[Any]) -> bool:
    # The same rule as DCP's own traversal: a list of plain values is one leaf.
    return any(isinstance(v, (Mapping, Tensor)) or (isinstance(v, list) and _holds_more(v)) for v in values)


def nested(leaves: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> dict[str, Any]:
    """Put leaves back into dictionaries and lists; a leaf without a path stays at the top."""
    root: dict[str | int, Any] = {}
    for key, value in leaves.items():
        path = paths.get(key, (key,))
        at = root
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = value
    return _with_lists(root)


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    if items and all(isinstance(key, int) for key in items):
        return [items[i] for i in sorted(items)]
    return items


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, Fingerprint]:
    """The fingerprint of each tensor; one wait per device.

    Raises:
        UsageError: a tensor is sparse, quantized, distributed or on the meta device.
    """
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append(name)
    result: dict[str, Fingerprint] = {}
    for names in by_device.values():
        rows = sums_many([tensors[name].detach() for name in names]).tolist()
        for name, (plain, weighted) in zip(names, rows, strict=True):
            tensor = tensors[name]
            dtype = str(tensor.dtype).removeprefix("torch.")
            result[name] = Fingerprint(plain % _WORD, weighted % _WORD, tuple(tensor.shape), dtype)
    return {name: result[name] for name in tensors}


def local_buffers(inventory: Inventory) -> set[str]:
    """The keys of buffers that ranks may hold with different bits (BatchNorm's running statistics)."""
    # By identity, so that a buffer with two names is the same under both of them.
    equal = {id(b) for name, b in inventory.model.named_buffers() if name in inventory.replicated_buffers}
    everything = inventory.model.named_buffers(remove_duplicate=False)
    return {f"model.{name}" for name, b in everything if id(b) not in equal}


def share_of(tree: dict[str, Any], rank: int, local: Iterable[str]) -> dict[str, Any]:
    """What this rank offers to DCP.

    Rank 0 offers all. The others offer only the tensors that are equal everywhere, so that the writing is spread and
    yet nothing that may differ is taken from a rank by chance.
    """
    if rank == 0:
        return tree
    left_out = {name.removeprefix("model.") for name in local}
    model = {k: v for k, v in tree["model"].items() if isinstance(v, Tensor) and k not in left_out}
    state = {
        name: {key: value for key, value in of_one.items() if isinstance(value, Tensor)}
        for name, of_one in tree["optimizer"].get("state", {}).items()
    }
    return {"model": model, "optimizer": {"state": state}}


def check_model(inventory: Inventory, saved: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]) -> None:
    """Compare names, shapes and dtypes; ``saved`` maps each key below ``model.`` to them, None for no tensor.

    Raises:
        UsageError: the checkpoint is of another model; the message says what differs first.
    """
    live = inventory.model.state_dict()
    another = "this checkpoint is of another model:"
    for name, value in live.items():
        if name not in saved and not (isinstance(value, Mapping) and not value):
            raise UsageError(f"{another} it has no {name!r}")
        if isinstance(value, Tensor):
            found = saved[name]
            if found is None:
                raise UsageError(f"{another} {name!r} is a tensor here and none there")
            shape, dtype = found
            if shape != tuple(value.shape):
                raise UsageError(f"{another} {name!r} has shape {list(value.shape)} here and {list(shape)} there")
            if dtype != value.dtype:
                raise UsageError(f"{another} {name!r} is {value.dtype} here and {dtype} there")
    for name in saved:
        if name not in live:
            raise UsageError(f"{another} it has {name!r}, which is not here")


def check_optimizer(inventory: Inventory, saved: Mapping[str, Any]) -> None:
    """Compare the parameter groups; groups that hold numbers in place of names are compared by their lengths.

    Raises:
        UsageError: the checkpoint is of another optimizer; the message says what differs first.
    """
    if inventory.optimizer is None or not saved:
        return
    live, groups = _names_by_group(inventory), saved.get("param_groups", [])
    another = "this checkpoint is of another optimizer:"
    if len(live) != len(groups):
        raise UsageError(f"{another} it has {len(live)} parameter groups here and {len(groups)} there")
    for i, (names, group) in enumerate(zip(live, groups, strict=True)):
        if len(names) != len(group["params"]):
            raise UsageError(f"{another} group {i} has {len(names)} parameters here and {len(group['params'])} there")
        for here, there in zip(names, group["params"], strict=True):
            if isinstance(there, str) and here != there:
                raise UsageError(f"{another} group {i} has {here!r} here where {there!r} is there")


def put_back(
    inventory: Inventory,
    tree: Mapping[str, Any],
    *,
    scaler: Stateful | None,
    scheduler: Stateful | None,
    buffers: Mapping[str, Tensor],
) -> None:
    """Copy a verified state into the live objects; ``buffers`` are this rank's own, where they differ from rank 0's.

    Raises:
        CheckpointError: an object did not take it; the run's state is then undefined.
    """
    model = {**tree["model"], **buffers}
    for name, value in inventory.model.state_dict().items():
        if isinstance(value, Mapping) and not value:  # DCP of others forgets an empty extra state
            model.setdefault(name, {})
    try:
        inventory.model.load_state_dict(model, strict=True)
        if inventory.optimizer is not None and tree.get("optimizer"):
            _put_optimizer(inventory.optimizer, tree["optimizer"])
        if scaler is not None and tree.get("scaler") is not None:
            scaler.load_state_dict(tree["scaler"])
        if scheduler is not None and tree.get("scheduler") is not None:
            scheduler.load_state_dict(tree["scheduler"])
    except Exception as error:
        raise CheckpointError(f"the verified state could not be put back: {type(error).__name__}: {error}") from error


@torch.no_grad()
def _put_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    # Not optimizer.load_state_dict: it casts fp32 moments to a bf16 parameter's dtype.
    states = saved.get("state", {})
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for p, key in zip(group["params"], saved_group["params"], strict=True):
            fresh = states.get(str(key), {})
            if not fresh:
                optimizer.state.pop(p, None)
                continue
            live = optimizer.state[p]
            for name in [name for name in live if name not in fresh]:
                del live[name]
            for name, value in fresh.items():
                live[name] = _put(value, live.get(name), _home(name, value, p, group), p)
        for name, value in saved_group.items():
            if name != "params":
                group[name] = _put(value, group.get(name), None, None)


def _home(name: str, value: Any, p: Tensor, group: Mapping[str, Any]) -> torch.device | None:
    # The counter stays on the CPU unless the kernel reads it on the device; torch's own rule.
    on_host = name == "step" and not (group.get("capturable") or group.get("fused"))
    return p.device if isinstance(value, Tensor) and not on_host else None


def _put(value: Any, live: Any, device: torch.device | None, like: Tensor | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    if isinstance(live, Tensor) and live.shape == value.shape and live.dtype == value.dtype:
        return live.copy_(value)  # in place, since compiled code and graphs may hold it
    if like is not None and like.shape == value.shape:
        return torch.empty_like(like, dtype=value.dtype, device=device or value.device).copy_(value)
    return value.to(device) if device is not None else value
