"""The state of a run as one nested dictionary with names, and back into the live model and optimizer. No files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from unsilent.errors import CheckpointError, UsageError
from unsilent.fingerprints import Fingerprint, sums_many
from unsilent.inventory import Inventory, is_partitioned, state_of
from unsilent.sharding import Block, block_of, is_distributed, local

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
    # A partitioned one has no state_dict of its own part: the parts of all ranks make one state, by their names.
    packed = optimizer.state_dict() if not is_partitioned(optimizer) else _packed(optimizer)
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


def _packed(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What this rank keeps, as ``state_dict`` would number it."""
    numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    return {
        "state": {numbers[id(p)]: dict(of_one) for p, of_one in state_of(optimizer).items()},
        "param_groups": [
            {**group, "params": [numbers[id(p)] for p in group["params"]]} for group in optimizer.param_groups
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


def blocks(inventory: Inventory, tree: Mapping[str, Any]) -> dict[str, Block]:
    """What this rank holds of each tensor of the state, and who must hold the same.

    Raises:
        UsageError: a distributed tensor has no block on this rank.
    """
    model = inventory.model
    first = {id(p): name for name, p in model.named_parameters()}
    keys = {f"model.{name}": f"model.{first[id(p)]}" for name, p in model.named_parameters(remove_duplicate=False)}
    copies = {entry.name: entry.copies for entry in inventory.entries()}
    found: dict[str, Block] = {}
    for key, tensor in tensors_in(tree).items():
        entry = keys.get(key, key.replace("optimizer.state.", "optimizer.", 1))
        block = block_of(tensor)
        found[key] = block if block.spread else replace(block, holders=copies.get(entry))
    return found


def local_buffers(inventory: Inventory) -> set[str]:
    """The keys of buffers that ranks may hold with different bits (BatchNorm's running statistics)."""
    # By identity, so that a buffer with two names is the same under both of them.
    equal = {id(b) for name, b in inventory.model.named_buffers() if name in inventory.replicated_buffers}
    everything = inventory.model.named_buffers(remove_duplicate=False)
    return {f"model.{name}" for name, b in everything if id(b) not in equal}


def share_of(
    tree: dict[str, Any], rank: int, local: Iterable[str], before: Collection[str] | None = None
) -> dict[str, Any]:
    """What this rank offers to DCP.

    Rank 0 offers all. The others offer only the tensors that are equal everywhere, so that the writing is spread and
    yet nothing that may differ is taken from a rank by chance.

    Args:
        before: the names in the model that a lower rank holds too; None for all. A rank offers all of what it is the first
            to hold.
    """
    if rank == 0:
        return tree
    left_out = {name.removeprefix("model.") for name in local}

    def offers(name: str, value: Any, *, differs: bool = False) -> bool:
        return (isinstance(value, Tensor) and not differs) or (before is not None and name not in before)

    model = {k: v for k, v in tree["model"].items() if offers(k, v, differs=k in left_out)}
    state = {
        name: {key: value for key, value in of_one.items() if offers(name, value)}
        for name, of_one in tree["optimizer"].get("state", {}).items()
    }
    return {"model": model, "optimizer": {"state": state}}


def keep(tree: dict[str, Any], wanted: Callable[[str], bool]) -> dict[str, Any]:
    """A rank's share of model and optimizer, with the wanted tensors only."""
    model = {k: v for k, v in tree["model"].items() if wanted(f"model.{k}")}
    state = {
        name: {k: v for k, v in of_one.items() if wanted(f"optimizer.state.{name}.{k}")}
        for name, of_one in tree["optimizer"]["state"].items()
    }
    return {"model": model, "optimizer": {"state": state}}


def names_in(inventory: Inventory) -> list[str]:
    """What this rank's model holds, by name; ranks that do not hold the same have other names."""
    return sorted(inventory.model.state_dict())


def groups_in(tree: Mapping[str, Any]) -> list[list[str]]:
    """The names of the parameters in each group of the optimizer."""
    return [list(group["params"]) for group in tree["optimizer"].get("param_groups", [])]


def with_groups(tree: dict[str, Any], everyone: list[list[list[str]]]) -> dict[str, Any]:
    """The state with the parameter groups of all ranks, for ranks that hold parts of the model.

    Raises:
        UsageError: the ranks have unequally many groups.
    """
    if len({len(groups) for groups in everyone}) > 1:
        raise UsageError(
            f"the ranks' optimizers have {[len(groups) for groups in everyone]} parameter groups: give them equally many, "
            "empty ones too"
        )
    groups = [
        {**group, "params": list(dict.fromkeys(name for theirs in everyone for name in theirs[i]))}
        for i, group in enumerate(tree["optimizer"].get("param_groups", []))
    ]
    return {**tree, "optimizer": {**tree["optimizer"], "param_groups": groups}} if groups else tree


def without(tree: dict[str, Any], elsewhere: Collection[str]) -> dict[str, Any]:
    """The state without what only other ranks hold: parameters in the optimizer's groups."""
    saved = tree.get("optimizer") or {}
    if not elsewhere or "param_groups" not in saved:
        return tree
    groups = [{**g, "params": [name for name in g["params"] if name not in elsewhere]} for g in saved["param_groups"]]
    return {**tree, "optimizer": {**saved, "param_groups": groups}}


def patterns(
    inventory: Inventory,
    saved: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None],
    paths: Mapping[str, tuple[str | int, ...]],
) -> dict[str, Tensor]:
    """The distributed tensor of which a saved one takes the shards, by key; what each rank needs whole is not in it.

    Raises:
        UsageError: nothing here says how a tensor of the optimizer's state is sharded.
    """
    found = {f"model.{n}": v for n, v in inventory.model.state_dict().items() if isinstance(v, Tensor)}
    parameters = dict(inventory.parameters())
    numbered: list[str] = []
    for key, of in saved.items():
        path = paths.get(key, ())
        if of is None or len(path) != 4 or path[:2] != ("optimizer", "state"):
            continue
        name = str(path[2])
        if inventory.optimizer is not None and name not in parameters and name.isdigit():  # of torch's own state_dict
            numbered = numbered or [one for group in _names_by_group(inventory) for one in group]
            name = numbered[int(name)] if int(name) < len(numbered) else name
        p = parameters.get(name)
        if p is None or inventory.optimizer is None:
            continue
        live = state_of(inventory.optimizer).get(p, {}).get(str(path[3]))
        pattern = live if isinstance(live, Tensor) else p
        if of[0] and is_distributed(pattern) and tuple(pattern.shape) != of[0]:
            raise UsageError(
                f"nothing says how {key!r} of shape {list(of[0])} is sharded, since its parameter has shape {list(p.shape)}: "
                "load after the optimizer's first step"
            )
        if of[0]:
            found[key] = pattern
    return {key: pattern for key, pattern in found.items() if key in saved and is_distributed(pattern)}


def check_model(
    inventory: Inventory,
    saved: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None],
    elsewhere: Collection[str] = (),
) -> None:
    """Compare names, shapes and dtypes; ``saved`` maps each key below ``model.`` to them, None for no tensor.

    Args:
        elsewhere: names that only other ranks hold.

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
        if name not in live and name not in elsewhere:
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
    known = {str(name) for group in groups for name in group["params"]}
    if extra := sorted(str(name) for name in saved.get("state", {}) if str(name) not in known):
        raise UsageError(f"{another} it has state of {extra[0]!r}, which is in none of its groups")


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
        if isinstance(value, Tensor) and is_distributed(value):  # this rank's block of it
            local(value).copy_(model[name])
            model[name] = value
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
    states, kept = saved.get("state", {}), state_of(optimizer)
    owned = {id(p) for group in _kept_groups(optimizer) for p in group["params"]}
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for p, key in zip(group["params"], saved_group["params"], strict=True):
            fresh = states.get(str(key), {}) if id(p) in owned else {}
            if not fresh:
                kept.pop(p, None)
                continue
            live = kept[p]
            for name in [name for name in live if name not in fresh]:
                del live[name]
            for name, value in fresh.items():
                held = live.get(name)
                like = held if isinstance(held, Tensor) and is_distributed(p) else p
                live[name] = _put(value, held, _home(name, value, p, group), like)
        for name, value in saved_group.items():
            if name != "params":
                group[name] = _put(value, group.get(name), None, None)


def _kept_groups(optimizer: Any) -> list[dict[str, Any]]:
    """The groups of the parameters whose state this rank keeps."""
    return optimizer.optim.param_groups if is_partitioned(optimizer) else optimizer.param_groups


def _home(name: str, value: Any, p: Tensor, group: Mapping[str, Any]) -> torch.device | None:
    # The counter stays on the CPU unless the kernel reads it on the device; torch's own rule.
    on_host = name == "step" and not (group.get("capturable") or group.get("fused"))
    return p.device if isinstance(value, Tensor) and not on_host else None


def _put(value: Any, live: Any, device: torch.device | None, like: Tensor | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    if isinstance(live, Tensor) and local(live).shape == value.shape and live.dtype == value.dtype:
        local(live).copy_(value)  # in place, since compiled code and graphs may hold it
        return live
    if like is not None and local(like).shape == value.shape:
        home = like.device if is_distributed(like) else device or value.device
        fresh = torch.empty_like(like, dtype=value.dtype, device=home)
        local(fresh).copy_(value)
        return fresh
    return value.to(device) if device is not None else value
