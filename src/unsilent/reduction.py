"""The one place where DDP's gradients pass: our communication hook, what it lets checks see, and reducing again.

The hook reduces exactly as DDP does by default: multiply by 1/W (never divide: other bits at 3 ranks), then all-reduce
on the job's group. It hands DDP a future of our own, so that the watcher can complete it when a rank has failed.

DDP has one hook slot, and what lies in it can never be taken out. So a :class:`_Slot` lies there, which hands each
bucket to the reduction of the guard that is open, and reduces as DDP does when none is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unsilent.errors import RankFailure, UsageError
from unsilent.fingerprints import sums_of_gradients
from unsilent.fingerprints.fused import scale_and_sum
from unsilent.inventory import is_partitioned
from unsilent.sharding import is_distributed, module_groups
from unsilent.unsupported import autotunes_by_default, reason_against
from unsilent.watcher import Watcher


@dataclass(frozen=True)
class Bucket:
    """One bucket of the step that is running.

    ``buffer`` is flat, in the gradients' dtype; it holds the local values already multiplied by 1/W until the
    reduction, and the reduced values after it. ``parameters`` lie in it one after the other, without gaps. A sparse gradient
    is a bucket of its own, and stays in its parameter's shape. ``rows``
    (the sums of each parameter's part, int64[n, 2]) and ``finite`` are known when the pass that scaled the local values
    has seen them too; else they are None, and an observer looks for itself. ``keys`` says what the rows are of where that is
    not one parameter each.
    """

    index: int
    buffer: torch.Tensor
    parameters: tuple[nn.Parameter, ...]
    rows: torch.Tensor | None = None
    finite: bool | None = None
    keys: tuple[Hashable, ...] | None = None

    def sums(self) -> Iterator[tuple[Hashable, torch.Tensor]]:
        """The sums of each part, int64[2], by ``id(parameter)`` or what ``keys`` says."""
        rows = self.rows if self.rows is not None else sums_of_gradients([view for _, view in self.views()])
        return zip(self.keys or [id(p) for p in self.parameters], rows, strict=True)

    def views(self, buffer: torch.Tensor | None = None) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter with its slice of ``buffer`` (this bucket's own by default), in the parameter's shape."""
        flat = self.buffer if buffer is None else buffer
        if flat.is_sparse:
            yield self.parameters[0], flat
            return
        at = 0
        for parameter in self.parameters:
            part = flat[at : at + parameter.numel()]
            # DDP keeps the memory format of a dense parameter (channels_last, say) inside the bucket.
            stride = None if parameter.is_contiguous() else parameter.stride()
            view = part.view(parameter.shape) if stride is None else part.as_strided(parameter.shape, stride)
            yield parameter, view
            at += parameter.numel()

    def pack(self, gradients: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """A new flat buffer of this layout, filled from ``gradients`` (by ``id(parameter)``).

        Gradients that are absent count as zero, as DDP counts unused parameters; they must be scaled already.
        """
        device = self.parameters[0].device
        if self.buffer.is_sparse:
            own = gradients.get(id(self.parameters[0]))
            return torch.zeros_like(self.parameters[0], layout=torch.sparse_coo) if own is None else own.clone()
        buffer = torch.zeros(self.buffer.shape, dtype=self.buffer.dtype, device=device)
        for parameter, view in self.views(buffer):
            if id(parameter) in gradients:
                view.copy_(gradients[id(parameter)])
        return buffer


class Observer(Protocol):
    """Sees every bucket before the reduction. Called in backward: it must not raise, communicate or synchronise."""

    def before_reduction(self, bucket: Bucket) -> None: ...


class Reduction:
    """The gradient reduction of one model: plain (nothing is reduced), observed only, or through our hook.

    Args:
        model: what the user trains: a plain module or a DistributedDataParallel.
        observers: called for every bucket in this order.

    Attributes:
        hooked: our hook reduces; REPAIR is possible.
        scale: what local gradients were multiplied by before an observer saw them.
        notice: why the reduction is not ours, "" when it is or when there is none.
    """

    sharded = False

    def __init__(self, model: nn.Module, observers: list[Observer], watcher: Watcher) -> None:
        self.ddp, self.inner = unwrap(model)
        self.observers = observers
        self.hooked = False
        self.scale = 1.0
        self.notice = ""
        self.error: BaseException | None = None
        self._keep = False
        self._buckets: dict[int, Bucket] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._pending: dict[int, Any] = {}  # futures that backward waits for; torch types an exception as a result
        self._observed: list[Any] = []
        self._slot: _Slot | None = None
        self._inside = False  # a guarded step's forward and backward
        if self.ddp is None:
            return
        self.world_size = dist.get_world_size(self.ddp.process_group)
        slot = _slot_of(self.ddp)
        if slot is None and any(not isinstance(state, _Slot) for _, state in self.ddp._comm_hooks):
            self.notice = "the model already has a communication hook: local gradients are seen, REPAIR is not possible"
            self._observe_parameters()
            return
        self.scale = 1.0 / self.world_size
        if slot is None:
            slot = _Slot(self.ddp.process_group, self.scale)
            self.ddp.register_comm_hook(slot, _hook)
        slot.current = self
        self._slot = slot
        self.hooked = True
        watcher.on_failure(self._wake)
        watcher.on_wait(self._waits)

    @contextmanager
    def step(self, *, keep: bool) -> Iterator[None]:
        """Bracket one forward and backward; ``keep`` holds a copy of the local buckets until :meth:`forget`."""
        self.forget()
        self._keep = keep and self.hooked
        self._buckets.clear()
        self.error = None
        self._inside = True
        try:
            yield
        finally:
            self._inside = self._keep = False
            with self._lock:
                self._pending.clear()

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced over ranks at all."""
        return self.ddp is not None

    def accumulating(self) -> AbstractContextManager[None]:
        """No reduction in this backward: what it adds is reduced with the next one."""
        return nullcontext() if self.ddp is None else self.ddp.no_sync()

    def reshard(self) -> None:
        """Weights are whole here."""

    def labels(self) -> list[tuple[str, Hashable]]:
        """What a reading has a row for: names of parameters, and the keys of their rows."""
        return [(name, id(p)) for name, p in self.inner.named_parameters() if p.requires_grad]

    def forget(self) -> None:
        """Drop the copies of local buckets, if any."""
        self._kept.clear()

    def put_right(self, index: int, local: torch.Tensor) -> None:
        """What this rank reduces in this bucket is another value now: its kept copy, if there is one, follows."""
        if index in self._kept:
            self._kept[index].copy_(local)

    @property
    def kept(self) -> bool:
        """Whether the local buckets of the current step are at hand."""
        return bool(self._kept) and len(self._kept) == len(self._buckets)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of the current step in index order, as far as they were reduced."""
        return tuple(self._buckets[i] for i in sorted(self._buckets))

    def synchronises_buffers(self) -> bool:
        """Whether the wrapper's forward, at this moment, begins with rank 0's buffers on all ranks."""
        return self.ddp is not None and bool(self.ddp._check_sync_bufs_pre_fwd())

    @property
    def grads_are_views(self) -> bool:
        """Whether ``.grad`` of the parameters lies inside the buckets."""
        return self.ddp is not None and self.ddp.gradient_as_bucket_view

    def unreduced(self) -> tuple[nn.Parameter, ...]:
        """Parameters that hold a gradient no reduction has touched; empty when all is well or nothing reduces."""
        if self.ddp is None or not self.hooked:
            return ()
        seen = {id(p) for bucket in self._buckets.values() for p in bucket.parameters}
        if not self._finished():
            seen = set[int]()
        # The wrapper's parameters, not the inner module's: a layer may have been hung on the wrapper itself.
        return tuple(p for p in self.ddp.parameters() if p.grad is not None and id(p) not in seen)

    def local(self, index: int, gradients: Mapping[int, torch.Tensor] | None = None) -> torch.Tensor:
        """A new flat local buffer of one bucket: the kept copy, or packed from ``gradients``; see :meth:`Bucket.pack`."""
        return self._kept[index].clone() if gradients is None else self._buckets[index].pack(gradients)

    def write(self, index: int, reduced: torch.Tensor) -> None:
        """Put a reduced buffer where the optimizer looks: into ``.grad`` of its parameters, and into the bucket."""
        bucket = self._buckets[index]
        bucket.buffer.copy_(reduced)
        for parameter, view in bucket.views(reduced):
            if parameter.grad is not None:
                parameter.grad.copy_(view)

    def close(self) -> None:
        """See no gradient any more. Our hook stays in its slot, and reduces exactly as before, for nobody."""
        for handle in self._observed:
            handle.remove()
        if self._slot is not None and self._slot.current is self:
            self._slot.current = None
        self.forget()

    def _finished(self) -> bool:
        """Whether DDP's reducer has reduced all its buckets in this backward."""
        assert self.ddp is not None
        try:
            self.ddp._check_reducer_finalized()
        except RuntimeError:
            return False
        return bool(self._buckets)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The communication hook: what DDP does by default, seen by the observers."""
        buffer = bucket.buffer()
        parameters: tuple[Any, ...] = tuple(bucket.parameters())
        seen = self._scale_and_look(buffer, parameters) if self._inside else None
        if seen is None:
            scale_(buffer, self.scale)
        if self._inside:
            rows, finite = seen or (None, None)
            self._show(Bucket(bucket.index(), buffer, parameters, rows, finite))
        devices: Any = [buffer.device] if buffer.is_cuda else []
        future: Any = torch.futures.Future(devices=devices)
        with self._lock:
            self._pending[id(future)] = future
        assert self.ddp is not None
        work = dist.all_reduce(buffer, group=self.ddp.process_group, async_op=True)
        assert work is not None
        work.get_future().add_done_callback(lambda done: self._complete(future, done))
        return future

    def _scale_and_look(
        self, buffer: torch.Tensor, parameters: tuple[nn.Parameter, ...]
    ) -> tuple[torch.Tensor, bool] | None:
        """Scale, fingerprint and check in one pass over the memory, where that can be done; None where it cannot."""
        if buffer.is_sparse or not all(p.is_contiguous() for p in parameters):
            return None  # its part of the bucket is not in the order that fingerprints count in
        return scale_and_sum(buffer, self.scale, [p.numel() for p in parameters])

    def _show(self, bucket: Bucket) -> None:
        self._buckets[bucket.index] = bucket
        try:
            for observer in self.observers:
                observer.before_reduction(bucket)
            if self._keep:
                self._kept[bucket.index] = bucket.buffer.clone()
        except BaseException as error:  # noqa: BLE001 - nothing may raise inside a hook; the step reports it
            self.error = error

    def _waits(self) -> bool:
        """Whether backward waits for the others."""
        return bool(self._pending)

    def _complete(self, future: Any, done: Any) -> None:
        with self._lock:
            self._pending.pop(id(future), None)
            if future.done():
                return
            try:
                value = done.value()
                future.set_result(value[0] if isinstance(value, list) else value)
            except BaseException as error:  # noqa: BLE001 - a broken connection: backward gets it
                future.set_exception(RuntimeError(f"the reduction failed: {error}"))

    def _wake(self, failure: RankFailure) -> None:
        with self._lock:
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(RuntimeError(str(failure)))

    def _observe_parameters(self) -> None:
        """With a user's hook in the slot: see each accumulated local gradient just before the reducer takes it."""
        for i, parameter in enumerate(self.inner.parameters()):
            if parameter.requires_grad:
                self._observed.append(parameter.register_post_accumulate_grad_hook(self._observe(i)))

    def _observe(self, index: int) -> Callable[[torch.Tensor], None]:
        def see(parameter: torch.Tensor) -> None:
            assert self.ddp is not None and parameter.grad is not None
            if not self._inside or not self.ddp.require_backward_grad_sync:
                return
            gradient = parameter.grad.detach()
            buffer = gradient if gradient.is_sparse else gradient.reshape(-1)
            seen = Bucket(index, buffer, (parameter,))  # type: ignore[arg-type]
            try:
                for observer in self.observers:
                    observer.before_reduction(seen)
            except BaseException as error:  # noqa: BLE001 - nothing may raise inside a hook; the step reports it
                self.error = error

        return see


class _Slot:
    """What lies in DDP's hook slot for good: whose turn it is to reduce, nobody's once the guard has been closed."""

    def __init__(self, group: Any, scale: float) -> None:
        self.current: Reduction | None = None
        self.group, self._scale = group, scale

    def __reduce__(self) -> Any:
        return _Slot, (None, self._scale)  # the reducer of a copied wrapper has no hook: this is empty there

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self.current is not None:
            return self.current.reduce(bucket)
        work = dist.all_reduce(scale_(bucket.buffer(), self._scale), group=self.group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])


def _hook(slot, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    return slot.reduce(bucket)


def scale_(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """What DDP does with a local gradient before the sum: it multiplies, and divides a sparse one, which rounds otherwise."""
    return gradient.div_(round(1 / scale)) if gradient.is_sparse else gradient.mul_(scale)


def _slot_of(ddp: DistributedDataParallel) -> _Slot | None:
    """Our slot, if a guard of this model was there before."""
    return next((s for _, s in ddp._comm_hooks if isinstance(s, _Slot) and s.group is not None), None)


def unwrap(model: nn.Module) -> tuple[DistributedDataParallel | None, nn.Module]:
    """(the DDP wrapper or None, the module that computes)."""
    return (model, model.module) if isinstance(model, DistributedDataParallel) else (None, model)


def _compiled_around_ddp(model: nn.Module) -> bool:
    """Whether the DDP wrapper was compiled, by ``torch.compile(ddp)`` or ``ddp.compile()``, and not the module inside it."""
    inside = getattr(model, "_orig_mod", None)
    return isinstance(inside, DistributedDataParallel) or (
        isinstance(model, DistributedDataParallel) and model._compiled_call_impl is not None
    )


def check_supported(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Refuse, with the reason, what this version cannot guard.

    Raises:
        UsageError: FSDP1, DTensor parameters outside of FSDP2, sparse embeddings under FSDP2, SyncBatchNorm, captured CUDA
            graphs, autotuning, FP8, a compiled DDP wrapper, an optimizer in backward or one that runs the model itself.
    """
    _, inner = unwrap(model)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS runs the model several times inside of its step, where no check could stop a wrong value: use an optimizer "
            "that takes its gradients as they are"
        )
    if autotunes_by_default():
        raise UsageError(
            "torch._inductor.config switches autotuning on, in which each rank measures which kernel it takes, so that healthy "
            "ranks may compute other bits: switch it off"
        )
    if _compiled_around_ddp(model):
        raise UsageError(
            "the DistributedDataParallel wrapper itself is compiled, and a rerun, which must not call it, would not run the "
            "compiled code: use DistributedDataParallel(torch.compile(model))"
        )
    sharded = {id(p) for group in module_groups(inner) for p in group.parameters}
    if is_partitioned(optimizer) and getattr(optimizer, "_overlap_with_ddp", False):
        raise UsageError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates weights inside of backward, before a check could stop it: "
            "leave overlap_with_ddp out"
        )
    for name, parameter in inner.named_parameters():
        if parameter._post_accumulate_grad_hooks or hasattr(parameter, "_in_backward_optimizers"):
            raise UsageError(
                f"{name} has a hook that runs once its gradient is there (register_post_accumulate_grad_hook, an optimizer in "
                "backward): a wrong gradient would be used before a check could stop it; take it off (register_hook may stay)"
            )
        if is_distributed(parameter) and id(parameter) not in sharded:
            raise UsageError(
                f"{name} is a DTensor that no fully_shard has made: of sharded models only those under FSDP2 are guarded yet"
            )
    for name, module in inner.named_modules():
        why = reason_against(module)
        if why:
            raise UsageError(f"module {name or type(module).__name__} {why}")
        if sharded and getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise UsageError(f"module {name} makes sparse gradients, which fully_shard cannot reduce: set sparse=False")
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise UsageError(f"module {name or 'model'} is sharded by FSDP1: use fully_shard (FSDP2)")
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                f"module {name} is a SyncBatchNorm, whose forward communicates: a rank that replays it alone would wait "
                "for the others; use BatchNorm"
            )
