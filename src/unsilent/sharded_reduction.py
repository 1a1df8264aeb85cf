"""FSDP2's reduction, seen by the checks: the counterpart of ``reduction.py`` for models under ``fully_shard`` or ``replicate``.

Each module group's reduce-scatter takes a flat input, which holds this rank's accumulated local gradients of the whole
group, rank by rank. It is the place where a local gradient exists last, so audits compare this input: of the live step, and
of a rerun, in which nothing is communicated. No gradient of a whole group outlives its reduce-scatter. Where every rank holds
whole parameters (``replicate``) there is no reduce-scatter; torch fills the same flat input, and then asks for the memory of
the output, from which it all-reduces: that is where it is seen.

A rerun is a forward and backward of the model itself, with all its all-gathers, so all ranks make it in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from unsilent.fingerprints import sums
from unsilent.reduction import Bucket, Observer
from unsilent.sharding import fsdp_modules, is_torchs_own, module_groups
from unsilent.world import World

#: what becomes of a rerun's gradients once they are reduced: left in ``.grad``, or put aside, where ``.grad`` stays as it was
Reduces = Literal["in place", "aside"]


class Handover:
    """One rank's gradients on their way to a peer, which are to be reduced in place of its own.

    The first pass, in which ``source`` reruns the work of ``auditee``, leaves a chunk of every input on every peer of theirs; in
    the second the chunks come together at ``auditee``. So no rank holds a whole gradient for longer than its reduce-scatter.
    """

    def __init__(self, world: World, *, source: int, auditee: int) -> None:
        self.source, self.auditee = source, auditee
        self._world = world
        self._chunks: dict[int, torch.Tensor] = {}

    def take(self, index: int, values: torch.Tensor) -> None:
        """In the first pass, on every peer: spread what ``source`` has computed."""
        self._chunks[index] = self._world.scatter(values, self.source)

    def give(self, index: int, values: torch.Tensor) -> None:
        """In the second pass, on every peer: put it in place of what ``auditee`` has computed."""
        self._world.collect(self._chunks.pop(index), values, self.auditee)


@dataclass
class Recording:
    """What a rerun has shown, on the device: the sums of each group's input, and its extremes unless somebody observes it; at
    its end also the reduced gradients, by ``id(parameter)``, where they were put aside."""

    rows: dict[Hashable, torch.Tensor] = field(default_factory=dict[Hashable, torch.Tensor])
    extremes: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    reduced: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])


class ShardedReduction:
    """The gradient reduction of one model under ``fully_shard``; see :class:`unsilent.reduction.Reduction`.

    Args:
        model: the root module that was sharded.
        observers: called for every group's input, in this order.

    Raises:
        UsageError: the model is sharded in a way that cannot be guarded.
    """

    sharded = True
    reduces = True
    hooked = True
    scale = 1.0  # the reduction itself averages
    notice = ""
    grads_are_views = False

    def __init__(self, model: nn.Module, observers: list[Observer], world: World) -> None:
        self.inner = model
        self.observers = observers
        self.error: BaseException | None = None
        self._world = world
        self._inside = False
        self._seen = set[int]()  # groups whose gradients were reduced in this step
        self._recording: Recording | None = None
        self._silent = False
        self._take: Sequence[Handover] = ()
        self._give: Sequence[Handover] = ()
        self._observe: Callable[[torch.Tensor], None] | None = None
        self.groups = module_groups(model)
        self._originals = [(g.torch_group._reduce_scatter_comm, g.torch_group._all_gather_comm) for g in self.groups]
        for i, (group, (scatter, gather)) in enumerate(zip(self.groups, self._originals, strict=True)):
            seam = _ReduceScatter if group.scatters else _OutputOfAllReduce
            group.torch_group._reduce_scatter_comm = seam(self, i, group.name, scatter)
            group.torch_group._all_gather_comm = _AllGather(world, gather)

    @contextmanager
    def step(self, *, keep: bool) -> Iterator[None]:
        """Bracket one forward and backward. Nothing is kept of it, whatever ``keep`` says."""
        self.error = None
        self._empty()
        self._seen.clear()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self.reshard()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """No reduction in this backward: what it adds is reduced with the next one."""
        with self._flags(reduce=False, all_reduce=False):
            yield

    @contextmanager
    def again(
        self,
        *,
        reduces: Reduces | None,
        take: Sequence[Handover] = (),
        give: Sequence[Handover] = (),
        observe: Callable[[torch.Tensor], None] | None = None,
    ) -> Iterator[Recording]:
        """Bracket a rerun, on all ranks at once.

        Args:
            reduces: whether gradients are reduced, and where they are left; with None ``.grad`` stays as it was.
            take, give: gradients that are handed over in this pass.
            observe: sees each group's input just before it is reduced.
        """
        self._empty()
        silent = reduces is None
        gradients = [(p, p.grad) for p in self.inner.parameters()]
        hooks: list[tuple[Any, Any]] = [(p, p._post_accumulate_grad_hooks) for p in self.inner.parameters()]
        others = [(g.torch_group._partial_reduce_output, g.torch_group._all_reduce_hook) for g in self.groups]
        for group in self.groups if silent else ():
            group.torch_group._partial_reduce_output = group.torch_group._all_reduce_hook = None
        for parameter, _ in hooks:
            parameter.grad = None
            parameter._post_accumulate_grad_hooks = None  # the user's: an optimizer in backward would step
        recording = Recording()
        self._recording, self._silent, self._take, self._give, self._observe = recording, silent, take, give, observe
        done = False
        try:
            with self._flags(all_reduce=False if silent else None):
                yield recording
            done = True
        finally:
            self._recording, self._silent, self._take, self._give, self._observe = None, False, (), (), None
            if not done:
                self._clear()
            self.reshard()
            for (parameter, gradient), (_, hook) in zip(gradients, hooks, strict=True):
                if done and reduces == "aside" and parameter.grad is not None:
                    recording.reduced[id(parameter)] = parameter.grad
                if reduces != "in place" or not done:
                    parameter.grad = gradient
                parameter._post_accumulate_grad_hooks = hook
            for group, (partial, hook) in zip(self.groups, others, strict=True):
                group.torch_group._partial_reduce_output, group.torch_group._all_reduce_hook = partial, hook

    def reduce(self, index: int, name: str, values: torch.Tensor, go: Callable[[], Any]) -> Any:
        """What stands in the place of a group's reduce-scatter; ``go`` does it."""
        if self._recording is not None:
            for handover in self._give:
                handover.give(index, values)
            self._recording.rows[name] = sums(values)
            for handover in self._take:
                handover.take(index, values)
            if self._observe is not None:
                self._observe(values)
            else:
                self._recording.extremes += values.aminmax()
            return None if self._silent else go()
        if self._inside:
            self._seen.add(index)
            try:
                bucket = Bucket(index, values, self.groups[index].parameters, sums(values).reshape(1, 2), keys=(name,))
                for observer in self.observers:
                    observer.before_reduction(bucket)
            except BaseException as error:  # noqa: BLE001 - nothing may raise inside a backward; the step reports it
                self.error = error
        return go()

    def labels(self) -> list[tuple[str, Hashable]]:
        """A reading has a row for each module group."""
        return [(group.name, group.name) for group in self.groups if any(p.requires_grad for p in group.parameters)]

    def synchronises_buffers(self) -> bool:
        return False

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Nothing of a step's reduction is at hand once it is over."""
        return ()

    def unreduced(self) -> tuple[nn.Parameter, ...]:
        """Parameters that hold a gradient which no reduction has touched: they came after ``fully_shard``, or somebody has
        put another collective in our place. All of them where nothing was reduced at all."""
        seen = {id(p) for index in self._seen for p in self.groups[index].parameters}
        trained = [p for p in self.inner.parameters() if p.requires_grad]
        return tuple(p for p in trained if id(p) not in seen and (p.grad is not None or not self._seen))

    def forget(self) -> None:
        return

    def close(self) -> None:
        """Give back the collectives that were there before, unless somebody has put others in our place since."""
        for group, (scatter, gather) in zip(self.groups, self._originals, strict=True):
            if isinstance(group.torch_group._reduce_scatter_comm, _Seam):
                group.torch_group._reduce_scatter_comm = scatter
            if isinstance(group.torch_group._all_gather_comm, _AllGather):
                group.torch_group._all_gather_comm = gather

    @contextmanager
    def _flags(self, *, reduce: bool | None = None, all_reduce: bool | None = None) -> Iterator[None]:
        """Whether gradients are reduced over shards, and over replicas; None leaves it as the user has it."""
        before = [(g.torch_group.reduce_grads, g.torch_group.all_reduce_grads) for g in self.groups]
        for group in self.groups:
            if reduce is not None:
                group.torch_group.reduce_grads = reduce
            if all_reduce is not None:
                group.torch_group.all_reduce_grads = all_reduce
        try:
            yield
        finally:
            for group, (reduces, all_reduces) in zip(self.groups, before, strict=True):
                group.torch_group.reduce_grads, group.torch_group.all_reduce_grads = reduces, all_reduces

    def _empty(self) -> None:
        """Nothing is under way: what was filled when something raised is not the next input."""
        for group in self.groups:
            if isinstance(seam := group.torch_group._reduce_scatter_comm, _OutputOfAllReduce):
                seam.input = None

    def reshard(self) -> None:
        """A forward without a backward leaves weights gathered, and the next one would compute with old ones."""
        for module in fsdp_modules(self.inner):
            module.reshard()

    def _clear(self) -> None:
        """A rerun has raised in the middle: drop what it has left in torch's own state."""
        self.inner.reset_iter_state()  # type: ignore[operator]
        for group in self.groups:
            for parameter in group.torch_group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


class _Seam:
    """What stands in a module group in place of ``original``, torch's or the user's own reduce-scatter."""

    def __init__(self, reduction: ShardedReduction, index: int, name: str, original: Any) -> None:
        self._reduction, self._index, self._name, self._original = reduction, index, name, original

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._original.allocate(size, dtype=dtype, device=device)


class _OutputOfAllReduce(_Seam):
    """Where a group has no reduce-scatter: torch asks for memory for the input, fills it, and asks for that of the output."""

    input: torch.Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        values, made = self.input, super().allocate(size, dtype=dtype, device=device)
        self.input = made if values is None else None
        if values is not None:
            self._reduction.reduce(self._index, self._name, values, lambda: None)
        return made


class _ReduceScatter(_Seam):
    """A group with a reduce-scatter calls this with its input."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        def go() -> Any:
            return _in_reach(
                self._reduction._world, self._original, async_op,
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op,
            )  # fmt: skip

        return self._reduction.reduce(self._index, self._name, input_tensor, go)


class _AllGather:
    """What a module group calls in place of ``original``: the same, but a rank that waits in it can be woken."""

    def __init__(self, world: World, original: Any) -> None:
        self._world, self._original = world, original

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._original.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        return _in_reach(
            self._world, self._original, async_op,
            output_tensor=output_tensor, input_tensor=input_tensor, group=group,
        )  # fmt: skip


def _in_reach(world: World, original: Any, async_op: bool, **call: Any) -> Any:
    """The collective; where torch's own would block this thread, the watcher can wake it when another rank has failed."""
    if async_op or not call["input_tensor"].is_cpu or not is_torchs_own(original):
        return original(**call, async_op=async_op)
    world.wait(original(**call, async_op=True))
    return None
