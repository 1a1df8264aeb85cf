"""Puts one fault into a running job: wrong values in real tensors, below autograd, and the right ones kept beside them.

Hook points are permanent and the same on every rank; whether a value is touched is decided by data alone. When nothing
fires, no bit of the run changes. Each process injects for its own rank, whichever rank's batch it is working on.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from unsilent.checks import replicas
from unsilent.errors import UsageError
from unsilent.lab.corruption import bits, corrupted_values, positions, positions_at_rate, seeded
from unsilent.lab.faults import GROUP, Fault
from unsilent.lab.operations import Operation, Operations
from unsilent.sharding import is_distributed, local

KEPT_ELEMENTS = 1024
"""Elements of one injection whose values are kept; a stuck lane may hit many more."""
KEPT_INJECTIONS = 4096
"""Injections that are kept; a persistent fault in a long run makes many more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Injection:
    """What one execution got.

    Attributes:
        elements, pristine, corrupted: flat indices, right and wrong values (on the CPU, same dtype), the first
            ``KEPT_ELEMENTS`` of them.
        size: how many elements were hit in all.
        changed: how many of those now have other bits (zeroing a zero changes nothing).
        replay: whether a replay was hit, not the live run.
        execution_count: how often the target had been executed by then, replays and this execution included.
    """

    step: int
    site: str
    target: str
    elements: torch.Tensor
    pristine: torch.Tensor
    corrupted: torch.Tensor
    execution_count: int
    replay: bool
    size: int
    changed: int


@dataclass(kw_only=True)
class _Executions:
    """How often the target was executed: in all, by replays, and live since the step began."""

    total: int = 0
    replays: int = 0
    live: int = 0
    attempts: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, kw_only=True)
class _Shot:
    """The decision to corrupt one execution, made before the values exist."""

    step: int
    replay: bool
    execution_count: int
    generator: torch.Generator


class Injector:
    """Injects ``fault`` on this rank.

    The loop calls ``begin_step(step)`` before each step and ``after_update(step)`` after its update. Between the two, and
    only in steps in which a fault of an operation may fire, every operation below autograd passes through Python.

    Reduction faults wrap ``torch.distributed.all_reduce`` on the job's default group: the gradients must be reduced by
    a communication hook written in Python, since DDP's built-in reducer never passes there.

    Args:
        model: the inner module, not its DDP wrapper.
        optimizer: needed for faults of the optimizer's state and arithmetic, and of its operations.
        node: the name of the node that this rank runs on.
        replaying: tells whether the executions of this moment are a guard's replays; may be set later.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        fault: Fault,
        *,
        rank: int,
        world_size: int,
        node: str = "",
        replaying: Callable[[], bool] = lambda: False,
    ) -> None:
        if fault.rank is not None and fault.rank >= world_size:
            raise UsageError(f"the fault is on rank {fault.rank}, but the job has ranks 0 to {world_size - 1} only")
        self.fault = fault
        self.replaying = replaying
        self.record: list[Injection] = []
        self.fired = 0
        self._here = fault.everywhere or fault.rank == rank or (fault.node != "" and fault.node == node)
        self._optimizer = optimizer
        self._step: int | None = None
        self._spent: set[int] = set()
        self._executions = _Executions()
        self._positions: dict[torch.Size, torch.Tensor] = {}
        self._closers: list[Callable[[], None]] = []
        self._closed = False
        self._parameter: nn.Parameter = nn.Parameter(torch.empty(0))  # the target, where that is a parameter
        self._operations: Operations | None = None
        self._seen: AbstractContextManager[None] | None = None  # open while operations are looked at
        self._install(model)

    def begin_step(self, step: int) -> None:
        """Says which step the following executions belong to."""
        self._step = step
        self._executions.live = 0
        # A step that is run again after a rollback is a new try: a fault with a probability draws anew.
        self._executions.attempts[step] = self._executions.attempts.get(step, 0) + 1
        self._look_away()
        if self._operations is not None and self._here and self.fault.in_force(step):
            self._seen = self._operations.seen(self._on_operation)
            self._seen.__enter__()

    def after_update(self, step: int) -> None:
        """Corrupts a weight or a moment, if that is the fault and ``step`` is one of its steps."""
        self._look_away()
        if self.fault.site not in ("weight", "optimizer_state"):
            return
        # .data: real memory does not bump autograd's version counter either.
        state = local((self._state() if self.fault.in_force(step) else self._parameter).data)
        shot = self._draw(step, state)
        if shot is not None:
            self._corrupt(state, shot)

    def close(self) -> None:
        """Takes all hooks out again."""
        self._closed = True
        self._look_away()
        while self._closers:
            self._closers.pop()()

    def __enter__(self) -> Injector:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- where ---------------------------------------------------------------------------------------------------------

    def _install(self, model: nn.Module) -> None:
        site, target = self.fault.site, self.fault.target
        if site in ("forward", "backward"):
            module = _named("module", target, dict(model.named_modules(remove_duplicate=False)))
            hook = self._on_output if site == "forward" else self._watch_output
            self._closers.append(module.register_forward_hook(hook).remove)
        elif site == "ids":
            module = _named("module", target, dict(model.named_modules(remove_duplicate=False)))
            if not isinstance(module, nn.Embedding):
                raise UsageError(f"module {target!r} is no nn.Embedding: it looks up no ids that could be wrong")
            self._closers.append(module.register_forward_pre_hook(self._on_ids).remove)
        elif site == "operation":
            if not hasattr(torch.ops.aten, target):
                raise UsageError(f"torch has no ATen operation {target!r}: name it without its overload, such as 'mm'")
            if self.fault.module:
                _named("module", self.fault.module, dict(model.named_modules(remove_duplicate=False)))
            self._operations = Operations(model, self._optimizer)
            self._closers.append(self._operations.close)
        elif site == "comparison":
            self._wrap_fingerprints()
        elif site == "reduction":
            # What never fits would never fire, and a hook of the reduction is no place to raise.
            widest = max(model.parameters(), key=lambda p: p.dtype.itemsize, default=None)
            if self.fault.bit is not None and widest is not None and self.fault.bit >= 8 * widest.dtype.itemsize:
                raise UsageError(f"there is no bit {self.fault.bit} in gradients of {widest.dtype}")
            self._wrap_all_reduce()
        else:
            # A tied parameter answers to each of its names.
            self._parameter = _named("parameter", target, dict(model.named_parameters(remove_duplicate=False)))
            if site == "optimizer_state":
                self._require_state()
            else:
                self._check_fit(self._parameter)
            if site == "optimizer":
                self._watch_update()
            if site == "gradient":
                if is_distributed(self._parameter):
                    raise UsageError(
                        f"parameter {target!r} is sharded, and its gradient passes no hook: put the fault into the backward "
                        "of its module"
                    )
                if not self._parameter.requires_grad:
                    raise UsageError(f"parameter {target!r} is frozen: it has no gradient to corrupt")
                self._closers.append(self._parameter.register_hook(self._on_gradient).remove)

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        leaves, structure = tree_flatten(output)
        i = _first_floating(leaves)
        if i is None:
            return None
        shot = self._draw(self._step, leaves[i])
        if shot is None:
            return None
        # The clone passes gradients through unchanged; its values are then changed where autograd does not look. The
        # module's own output stays right, so what its backward saved, or an input that it returned, is not touched.
        wrong = leaves[i].clone()
        self._corrupt(wrong.data, shot)
        leaves[i] = wrong
        return tree_unflatten(leaves, structure)

    def _watch_output(self, module: nn.Module, args: Any, output: Any) -> None:
        leaves = tree_flatten(output)[0]
        i = _first_floating(leaves)
        if i is not None and leaves[i].grad_fn is not None:
            leaves[i].register_hook(self._on_gradient)

    def _on_gradient(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None
        shot = self._draw(self._step, gradient)
        if shot is None:
            return None
        wrong = gradient.detach().clone()
        self._corrupt(wrong, shot)
        return wrong

    def _on_ids(self, module: nn.Embedding, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        shot = self._draw(self._step, args[0])
        if shot is None:
            return None
        wrong = args[0].clone()
        # A lookup beyond the table would raise, and be no silent fault: such an id wraps around, as in "id modulo".
        self._corrupt(wrong, shot, modulo=module.num_embeddings)
        return (wrong, *args[1:])

    def _on_operation(self, operation: Operation, result: torch.Tensor) -> None:
        fault = self.fault
        if operation.name != fault.target or (fault.phase and operation.phase != fault.phase):
            return
        inside = operation.module == fault.module or operation.module.startswith(f"{fault.module}.")
        if fault.module and not inside:
            return
        if self._misfit(result) is None:  # the operation comes in many sizes
            shot = self._draw(self._step, result)
            if shot is not None:
                self._corrupt(result, shot)

    def _look_away(self) -> None:
        if self._seen is not None:
            self._seen.__exit__(None, None, None)
            self._seen = None

    def _watch_update(self) -> None:
        """Wrong arithmetic of one parameter's update: what was added to it is corrupted, not what stood there."""
        if self._optimizer is None:
            raise UsageError("a fault of the optimizer needs an optimizer")
        before: list[torch.Tensor] = []

        def begin(*_: Any) -> None:
            before.clear()
            if self._step is not None and self.fault.in_force(self._step) and self._here:
                before.append(self._parameter.detach().clone())

        def end(*_: Any) -> None:
            # Drawn on every rank, so that all of them refuse together what does not fit.
            shot = self._draw(self._step, self._parameter)
            if shot is None or not before:
                return
            after = self._parameter.data
            update = after - before[0]
            right = update.clone()
            self._corrupt(update, shot)
            changed = bits(update) != bits(right)
            after[changed] = (before[0] + update)[changed]

        self._closers.append(self._optimizer.register_step_pre_hook(begin).remove)
        self._closers.append(self._optimizer.register_step_post_hook(end).remove)

    def _wrap_fingerprints(self) -> None:
        """Wrong digests: the sums that a vote takes are corrupted on this rank before anybody compares them."""
        original = replicas.sums_of_gradients

        def sums_and_err(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            rows = original(tensors)
            shot = self._draw(self._step, rows) if self._misfit(rows) is None else None
            if shot is not None:
                self._corrupt(rows, shot)
            return rows

        def restore() -> None:
            if replicas.sums_of_gradients is sums_and_err:
                replicas.sums_of_gradients = original

        replicas.sums_of_gradients = sums_and_err
        self._closers.append(restore)

    def _state(self) -> torch.Tensor:
        if self.fault.site == "weight":
            return self._parameter
        self._require_state()
        assert self._optimizer is not None
        state = self._optimizer.state.get(self._parameter, {})
        if self.fault.key not in state:
            raise UsageError(f"the optimizer keeps no state for {self.fault.target!r}: it has not been updated yet")
        return state[self.fault.key]

    def _require_state(self) -> None:
        if self._optimizer is None:
            raise UsageError("a fault of the optimizer_state needs an optimizer")
        state: dict[str, Any] = self._optimizer.state.get(self._parameter, {})
        keys = [k for k, v in state.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]
        # Optimizers create their state at the first update: before it, an empty state proves nothing.
        if state and self.fault.key not in keys:
            raise UsageError(f"the optimizer has no state {self.fault.key!r}: it keeps {', '.join(keys) or 'none'}")

    def _wrap_all_reduce(self) -> None:
        original = dist.all_reduce

        def all_reduce(
            tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            of_the_job = group is None or group is dist.group.WORLD
            hit = of_the_job and _is_floating(tensor) and self._misfit(tensor) is None
            # Drawn before the collective: nothing may raise in a callback of the communication thread.
            shot = self._draw(self._step, tensor) if hit else None
            if shot is None:
                return original(tensor, op=op, group=group, async_op=async_op)
            work = original(tensor, op=op, group=group, async_op=async_op)
            if work is None:
                self._corrupt(tensor.detach(), shot)
                return None

            def deliver(reduced: torch.futures.Future[Any]) -> Any:
                value = reduced.value()
                self._corrupt(tensor.detach(), shot)
                return value

            return _WrongWork(work, work.get_future().then(deliver))

        def restore() -> None:
            # If somebody has wrapped it since, ours stays below theirs; closed, it passes everything through.
            if dist.all_reduce is all_reduce:
                dist.all_reduce = original

        dist.all_reduce = all_reduce
        self._closers.append(restore)

    # -- when ----------------------------------------------------------------------------------------------------------

    def _draw(self, step: int | None, tensor: torch.Tensor) -> _Shot | None:
        """Counts one execution of the target, which gave ``tensor``, and decides whether it is corrupted."""
        n, fault, replay = self._executions, self.fault, self.replaying()
        n.total += 1
        if replay:
            n.replays += 1
        else:
            n.live += 1
        if step is None or self._closed or not fault.in_force(step) or _dense(tensor).numel() == 0:
            return None
        self._check_fit(tensor)  # on every rank, so that all of them refuse together
        if not self._here:
            return None
        if fault.during_replay == "only" and not replay:
            return None
        if fault.one_shot:
            # One execution in each step: a live one, or the auditor's or arbiter's where those are what is wrong.
            if replay != (fault.during_replay == "only") or step in self._spent:
                return None
            self._spent.add(step)
        elif replay and fault.during_replay == "off":
            return None
        if fault.off and (n.total - 1) % (fault.on + fault.off) >= fault.on:
            return None
        # Live executions are numbered apart from replays, so a guarded and an unguarded run meet the same live faults.
        number = ("replay", n.replays) if replay else ("live", n.live)
        generator = seeded(fault.seed, step, n.attempts.get(step, 0), *number)
        # In double precision: single numbers have 24 bits, and would make 6e-8 of 2e-9.
        chance = torch.rand((), dtype=torch.float64, generator=generator) if fault.probability < 1 else 0.0
        if chance >= fault.probability:
            return None
        return _Shot(step=step, replay=replay, execution_count=n.total, generator=generator)

    # -- how -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _corrupt(self, tensor: torch.Tensor, shot: _Shot, *, modulo: int | None = None) -> None:
        tensor = _dense(tensor)
        elements = self._elements(tensor.shape, shot)
        if len(elements) == 0:
            return
        grid = tensor.view(1) if tensor.dim() == 0 else tensor
        place = torch.unravel_index(elements.to(tensor.device), grid.shape)
        pristine = grid[place].cpu()
        corrupted = corrupted_values(pristine, self.fault, shot.generator)
        if modulo is not None:
            corrupted %= modulo
        grid[place] = corrupted.to(tensor.device)
        self.fired += 1
        if len(self.record) < KEPT_INJECTIONS:
            self.record.append(
                Injection(
                    step=shot.step,
                    site=self.fault.site,
                    target=self.fault.target,
                    elements=elements[:KEPT_ELEMENTS].clone(),
                    pristine=pristine[:KEPT_ELEMENTS].clone(),
                    corrupted=corrupted[:KEPT_ELEMENTS].clone(),
                    execution_count=shot.execution_count,
                    replay=shot.replay,
                    size=len(elements),
                    changed=int((bits(pristine) != bits(corrupted)).sum()),
                )
            )

    def _elements(self, shape: torch.Size, shot: _Shot) -> torch.Tensor:
        if self.fault.rate is not None:  # other elements each time
            return positions_at_rate(math.prod(shape), self.fault.rate, shot.generator)
        if shape not in self._positions:
            self._positions[shape] = positions(shape, self.fault)
        return self._positions[shape]

    def _check_fit(self, tensor: torch.Tensor) -> None:
        misfit = self._misfit(tensor)
        if misfit is not None:
            raise UsageError(misfit)

    def _misfit(self, tensor: torch.Tensor) -> str | None:
        """Why the fault's elements or bit do not lie inside this tensor, None if they do."""
        fault, shape, width = self.fault, _dense(tensor).shape, 8 * tensor.dtype.itemsize
        if fault.bit is not None and fault.bit >= width:
            return f"there is no bit {fault.bit} in {self._what()}: {tensor.dtype} has {width} bits"
        if fault.pattern == "stuck_lane":
            columns = shape[-1] if shape else 1
            if fault.element is not None and fault.element >= columns:
                return f"there is no column {fault.element} in {self._what()}, which has {columns}"
            return None
        first, count, size = fault.element or 0, fault.count * fault.lane, math.prod(shape)
        if fault.rate is not None or fault.share is not None:
            return None
        if fault.period is not None:
            count = (fault.count - 1) * GROUP + 1  # groups, of which the last may be cut off by the tensor's end
        if size and first + count > size:
            return f"{count} elements from {first} on do not fit into {self._what()}, which has {size}"
        return None

    def _what(self) -> str:
        return repr(self.fault.target) if self.fault.target else "the reduced tensor"


class _WrongWork:
    """The handle of an asynchronous reduction that is over only when its result has been corrupted."""

    def __init__(self, work: Any, future: torch.futures.Future[Any]) -> None:
        self._work = work
        self._future = future

    def wait(self, *timeout: Any) -> bool:
        self._work.wait(*timeout)
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, this rank's part of a distributed one, or the values of a sparse gradient."""
    if is_distributed(tensor):
        return local(tensor)
    return tensor._values() if tensor.is_sparse else tensor


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _first_floating(leaves: list[Any]) -> int | None:
    return next((i for i, leaf in enumerate(leaves) if _is_floating(leaf)), None)


def _named(what: str, name: str, known: dict[str, Any]) -> Any:
    if name in known and name:
        return known[name]
    close = difflib.get_close_matches(name, [k for k in known if k], n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"it has, for example, {_some(known)}"
    raise UsageError(f"the model has no {what} {name!r}: {hint}")


def _some(known: dict[str, Any]) -> str:
    return ", ".join(repr(k) for k in list(known) if k)[:200] or "none"
