"""Capture of everything that a rerun of a rank's step needs, and the rerun itself.

A rerun never goes through the DDP wrapper and never touches the user's parameters: the inner module computes on leaf
copies that share the weights' storage, so ``.grad``, hooks on parameters and DDP's reducer see nothing of it.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from unsilent.attributes import Attributes
from unsilent.determinism import Kernels, running_with
from unsilent.errors import UsageError
from unsilent.fingerprints import combine, elements, sums_many, sums_of_gradients
from unsilent.generators import GeneratorStates, read_generators, write_generators
from unsilent.reduction import scale_
from unsilent.sharded_reduction import Handover
from unsilent.sharding import is_distributed, local
from unsilent.streams import Streams
from unsilent.weighing import share_of

LossFunction = Callable[[Any, Any], torch.Tensor]
_MOST_WATCHED = 1 << 22  # elements of a parameter without gradient that is looked at for writes of the forward


@dataclass
class MicroBatch:
    """What one forward and backward started from.

    ``buffers`` are those of the inner module when its forward began, after DDP's own broadcast. ``weight`` is what its
    loss is multiplied by where micro-batches count by their samples, else None. ``synchronised`` says that the wrapper
    had just given rank 0's buffers to all.
    """

    batch: Any
    generators: GeneratorStates
    buffers: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    weight: float | None = None
    synchronised: bool = False


@dataclass(frozen=True)
class Work:
    """A rank's work of one step: its micro-batches in order. A loss without a weight is divided by ``divide_by``."""

    step: int
    micro_batches: tuple[MicroBatch, ...]
    divide_by: int = 1

    def only(self, index: int) -> Work:
        """The same work cut down to one micro-batch; its loss is still divided by the full number."""
        return replace(self, micro_batches=(self.micro_batches[index],))


@dataclass(frozen=True)
class Reading:
    """The digests of one execution, on the device: int64[n, 2], a row for each name in ``names``."""

    names: tuple[str, ...]
    rows: torch.Tensor

    @property
    def digest(self) -> str:
        """16 hex digits over all rows; synchronises."""
        return f"{int(combine(self.rows)) & 0xFFFFFFFFFFFFFFFF:016x}"

    def differing(self, other: Reading) -> tuple[str, ...]:
        """The names whose rows differ; synchronises."""
        if self.names != other.names:
            return tuple(sorted(set(self.names) ^ set(other.names)))
        rows = (self.rows != other.rows).any(dim=1).tolist()
        return tuple(name for name, differs in zip(self.names, rows, strict=True) if differs)


@dataclass
class Execution:
    """The results of one rerun. ``gradients`` are scaled like the recorded ones and keyed by ``id(parameter)``.

    ``buffers`` are all tensors that the work's capture names, as the forward left them. ``attribute`` names one that the run
    has changed ("" where none); ``attributes`` are all of them as it left them, if it began with those that the live step began
    with. ``communicated`` says that the
    user's code used the job's process group, so that no rank may rerun it alone. ``extremes`` stand for gradients that were
    not kept: the least and the largest of their elements. ``reduced`` are the gradients of the step, by ``id(parameter)``, where
    the rerun has reduced them; ``.grad`` stayed as it was.
    """

    reading: Reading
    losses: list[torch.Tensor]
    gradients: dict[int, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    attribute: str
    attributes: Attributes | None = None
    communicated: bool = False
    extremes: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    reduced: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])

    @property
    def finite(self) -> bool:
        """Whether no loss and no gradient holds a NaN or Inf; synchronises."""
        values = (*self.losses, *map(elements, self.gradients.values()), *self.extremes)
        return all(bool(torch.isfinite(v).all()) for v in values)


@dataclass(frozen=True)
class _OnAccelerator:
    """A tensor on its way to another rank, which puts it on its own device."""

    host: torch.Tensor


def pack(work: Work) -> bytes:
    """Turn work into bytes for another rank.

    Raises:
        UsageError: the batch holds something that cannot be pickled; the message names its type.
    """

    def to_host(leaf: Any) -> Any:
        return _OnAccelerator(leaf.cpu()) if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" else leaf

    parts = [
        replace(m, batch=tree_map(to_host, m.batch), buffers=tree_map(to_host, m.buffers)) for m in work.micro_batches
    ]
    try:
        return pickle.dumps(replace(work, micro_batches=tuple(parts)), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        kind = type(work.micro_batches[0].batch).__name__
        raise UsageError(
            f"the batch (a {kind}) cannot be sent to the rank that audits it: {error}; pass tensors and plain "
            "containers, or switch the audit off with audit_every=None"
        ) from error


def unpack(data: bytes, device: torch.device) -> Work:
    """The inverse of :func:`pack`; tensors that were on an accelerator come to ``device``."""

    def to_device(leaf: Any) -> Any:
        return leaf.host.to(device) if isinstance(leaf, _OnAccelerator) else leaf

    work: Work = pickle.loads(data)  # noqa: S301 - from a rank of the same job
    parts = [
        replace(m, batch=tree_map(to_device, m.batch), buffers=tree_map(to_device, m.buffers))
        for m in work.micro_batches
    ]
    return replace(work, micro_batches=tuple(parts))


class Recorder:
    """Captures the live step, in the inner module's forward pre-hook, which is installed once and stays.

    Args:
        inner: the module under the DDP wrapper.
        synchronises: whether the wrapper's forward that is running has given rank 0's buffers to all.
    """

    def __init__(self, inner: nn.Module, *, synchronises: Callable[[], bool] = lambda: False) -> None:
        self.inner = inner
        self._synchronises = synchronises
        self._micro_batches: list[MicroBatch] = []
        self._open: MicroBatch | None = None
        self._divide_by: int | None = None
        self.attributes: Attributes | None = None
        #: the attribute that this step's forward has changed, as ``module.attribute``; "" where none
        self.attribute = ""
        #: the parameter that this step's forward has written, though it is not in the capture; "" where none
        self.outside_state = ""
        #: parameters that forwards write (codebooks), by name; captured as buffers are
        self.written: dict[str, nn.Parameter] = {
            n: p
            for n, p in inner.named_parameters()
            if not p.requires_grad and p.numel() <= _MOST_WATCHED and not is_distributed(p)
        }
        self._written_is_known = False
        #: sums of all parameters after the forward and backward of an audited step; None in other steps
        self.rows: torch.Tensor | None = None
        self._handle = inner.register_forward_pre_hook(_OnlyHere(self._before_forward))

    def begin_step(self, *, watch_attributes: bool, divide_by: int | None = None) -> None:
        """Forget the last step; ``watch_attributes`` also snapshots what modules keep outside their buffers.

        Args:
            divide_by: what each loss is divided by; None for the number of micro-batches.
        """
        self._micro_batches.clear()
        self._divide_by = divide_by
        self.attribute = self.outside_state = ""
        self.attributes = Attributes(self.inner) if watch_attributes else None
        self.rows = sums_many([local(p) for p in self.inner.parameters()]) if watch_attributes else None

    def begin_micro_batch(self, batch: Any, weight: float | None = None) -> None:
        """Copy the batch's tensors (a user may change them in place) and the generators."""
        self._open = MicroBatch(batch=copy_batch(batch), generators=read_generators(), weight=weight)
        self._micro_batches.append(self._open)

    def end_step(self) -> None:
        self._open = None
        if not self._written_is_known and self._micro_batches and self._micro_batches[0].buffers:
            self._written_is_known = True
            for name, parameter in list(self.written.items()):
                if torch.equal(self._micro_batches[0].buffers[name], parameter.detach()):
                    del self.written[name]
                    for micro_batch in self._micro_batches:
                        micro_batch.buffers.pop(name, None)
        if self.attributes is not None:
            self.attribute, self.outside_state = self.attributes.changed(), self._newly_written()

    def _newly_written(self) -> str:
        """A parameter that this forward wrote, which nobody had expected; from the next step on it is captured."""
        assert self.rows is not None
        rows = sums_many([local(p) for p in self.inner.parameters()])
        differs = (rows != self.rows).any(dim=1).tolist()
        new = {
            n: p
            for (n, p), d in zip(self.inner.named_parameters(), differs, strict=True)
            if d and n not in self.written
        }
        self.written |= new
        self.rows = rows
        return next(iter(new), "")

    def written_now(self) -> dict[str, torch.Tensor]:
        """The tensors that the capture names (buffers, and parameters that forwards write), as they are now."""
        names = self._micro_batches[0].buffers if self._micro_batches else {}
        return named(self.inner, names)

    def work(self, step: int) -> Work:
        """Everything captured since :meth:`begin_step`."""
        divide_by = self._divide_by or len(self._micro_batches)
        return Work(step=step, micro_batches=tuple(self._micro_batches), divide_by=divide_by)

    def close(self) -> None:
        self._handle.remove()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._open is not None and not self._open.buffers:
            first = len(self._micro_batches) == 1
            written = self.written if first else {}  # later micro-batches begin with what the ones before have written
            state = {**dict(module.named_buffers()), **written}
            self._open.buffers = {n: b.detach().clone() for n, b in state.items()}
            self._open.synchronised = self._synchronises()
            self._open = None


class _OnlyHere:
    """A hook that does nothing in a copy of the model: an average of the weights, say, or a pickled one."""

    def __init__(self, hook: Callable[[nn.Module, Any], None] | None = None) -> None:
        self._hook = hook

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._hook is not None:
            self._hook(module, args)

    def __reduce__(self) -> Any:
        return _OnlyHere, ()


class Replayer:
    """Reruns work on the inner module and leaves no trace.

    Args:
        inner: the module under the DDP wrapper.
        loss_fn: the user's function; called with ``inner`` in place of the wrapper.
        scale_loss: multiplies a loss by the scaler's scale, as the live step does; identity without a scaler.
        scale: what gradients are multiplied by after the backward, as the reduction did before they were recorded.
        written: parameters that forwards write, by name; the recorder keeps it up to date.
        traffic: how many collectives the job's group has begun so far.
        streams: on which the micro-batches of a recovery are spread; None keeps them on one.

    Attributes:
        together: a rerun communicates, so all ranks must make it at the same time.
    """

    together = False

    def __init__(
        self,
        inner: nn.Module,
        loss_fn: LossFunction,
        *,
        scale_loss: Callable[[torch.Tensor], torch.Tensor],
        scale: float,
        written: Mapping[str, nn.Parameter],
        traffic: Callable[[], int] = lambda: 0,
        streams: Streams | None = None,
    ) -> None:
        self.inner = inner
        self.streams = streams
        self.loss_fn = loss_fn
        self.scale_loss = scale_loss
        self.scale = scale
        self.written = written
        self.traffic = traffic
        self.running = False

    def run(
        self,
        work: Work,
        *,
        kernels: Kernels,
        start: Attributes | None = None,
        spread: bool = False,
        reduced: bool = False,
        take: Sequence[Handover] = (),
    ) -> Execution:
        """Compute loss, local gradients and written buffers of ``work`` with this rank's weights.

        Args:
            kernels: the mode that the recorded run had.
            start: attributes to begin from, where the live step took a snapshot of them.
            spread: micro-batches may overlap on the device; those that write buffers never do.
            reduced: where all ranks rerun together, reduce the gradients and keep them with the result; else without meaning.
            take: where all ranks rerun together, gradients that are handed over in this rerun; else without meaning.

        Raises:
            Exception: whatever the user's code raises; everything is put back first.
        """
        streams = self.streams if spread and not work.micro_batches[0].buffers else None
        with self._preserved(), running_with(kernels):
            if start is not None:
                start.restore()
            before, traffic = Attributes(self.inner), self.traffic()
            with self._leaves() as leaves:
                losses: list[torch.Tensor] = []
                for i, micro_batch in enumerate(work.micro_batches):
                    # Later ones begin with what the ones before have written here: their captures would bring back
                    # what a faulty forward wrote.
                    if i == 0 or micro_batch.synchronised:
                        self._restore_buffers(micro_batch.buffers)
                    write_generators(micro_batch.generators)
                    torch.clear_autocast_cache()
                    with streams.turn(i) if streams is not None else contextlib.nullcontext():
                        loss = self.loss_fn(self.inner, copy_batch(micro_batch.batch))
                        losses.append(loss.detach())
                        loss = share_of(loss, weight=micro_batch.weight, divide_by=work.divide_by)
                        # Gradients accumulate in this order all the same: autograd orders the streams of one leaf.
                        self.scale_loss(loss).backward()
                gradients = {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
            if streams is not None:
                streams.join([*losses, *gradients.values()])
            if self.scale != 1.0:
                for gradient in gradients.values():
                    scale_(gradient, self.scale)
            buffers = {n: t.clone() for n, t in named(self.inner, work.micro_batches[0].buffers).items()}
            attribute, communicated = before.changed(), self.traffic() != traffic
            left = Attributes(self.inner) if start is not None else None
            reading = read_execution(self.inner, losses, gradients, buffers)
        return Execution(
            reading=reading,
            losses=losses,
            gradients=gradients,
            buffers=buffers,
            attribute=attribute,
            attributes=left,
            communicated=communicated,
        )

    def adopt(self, run: Execution) -> None:
        """Leave in the live module what ``run``, this rank's rerun of its own work, has left: buffers and attributes."""
        if run.attributes is not None:
            run.attributes.restore()
        self._restore_buffers(run.buffers)

    def write_buffers(self, buffers: dict[str, torch.Tensor]) -> None:
        """Set the buffers of the live module, after a repair replaced a forward that had written them wrongly."""
        self._restore_buffers(buffers)

    @contextlib.contextmanager
    def _leaves(self) -> Iterator[dict[int, nn.Parameter]]:
        """Swap every parameter for a leaf that shares its storage; tied parameters stay tied."""
        leaves: dict[int, nn.Parameter] = {}
        swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for module in self.inner.modules():
                for name, parameter in list(module._parameters.items()):
                    if parameter is None:
                        continue
                    if id(parameter) not in leaves:
                        leaves[id(parameter)] = _leaf(parameter)
                    swapped.append((module, name, parameter))
                    # setattr and not the dictionary: some modules (RNNs) keep their own list of weights in step.
                    setattr(module, name, leaves[id(parameter)])
            yield leaves
        finally:
            for module, name, parameter in swapped:
                setattr(module, name, parameter)

    @contextlib.contextmanager
    def _preserved(self) -> Iterator[None]:
        """Put back generators, buffers, attributes and training flags, whatever happens."""
        generators = read_generators()
        buffers = {n: b.detach().clone() for n, b in {**dict(self.inner.named_buffers()), **self.written}.items()}
        attributes = Attributes(self.inner)
        training = [(m, m.training) for m in self.inner.modules()]
        self.running = True
        try:
            with torch.enable_grad():
                yield
        finally:
            self.running = False
            for module, flag in training:
                module.training = flag
            attributes.restore()
            self._restore_buffers(buffers)
            write_generators(generators)
            torch.clear_autocast_cache()

    def _restore_buffers(self, buffers: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in {**dict(self.inner.named_buffers()), **self.written}.items():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])


def read_execution(
    inner: nn.Module,
    losses: Sequence[torch.Tensor],
    gradients: dict[int, torch.Tensor],
    buffers: dict[str, torch.Tensor],
) -> Reading:
    """Digest loss, gradients (absent ones read as zeros do) and buffers, a row each, without synchronising."""
    present = [key for key in (id(p) for p in inner.parameters()) if key in gradients]
    rows = sums_of_gradients([gradients[key] for key in present])
    labels: list[tuple[str, Hashable]] = [(n, id(p)) for n, p in inner.named_parameters() if p.requires_grad]
    return assemble(losses, labels, dict(zip(present, rows, strict=True)), buffers)


def assemble(
    losses: Sequence[torch.Tensor],
    labels: Sequence[tuple[str, Hashable]],
    rows: Mapping[Any, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> Reading:
    """The same where the gradients' sums are known already: ``labels`` are names and the keys of their ``rows``."""
    device = next((t.device for t in (*losses, *rows.values())), torch.device("cpu"))
    nothing = torch.zeros(2, dtype=torch.int64, device=device)
    gradient_rows = [rows[key].to(device) if key in rows else nothing for _, key in labels]
    names = (
        *(f"loss[{i}]" for i in range(len(losses))),
        *(f"gradient.{n}" for n, _ in labels),
        *(f"buffer.{n}" for n in buffers),
    )
    loss_rows = list(sums_many([loss.reshape(1) for loss in losses]))  # none where the loop kept them to itself
    buffer_rows = list(sums_many(list(buffers.values())).to(device)) if buffers else []
    return Reading(names=names, rows=torch.stack([*loss_rows, *gradient_rows, *buffer_rows]))


def named(inner: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Buffers and parameters by name, detached, in the order of ``names``; what the model lacks is left out."""
    live: dict[str, torch.Tensor] = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
    return {name: live[name].detach() for name in names if name in live}


def copy_batch(batch: Any) -> Any:
    """A copy of any pytree whose tensors have their own memory."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, batch)


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter over the same storage, with the same tensor hooks (they change gradients, so replays need them)."""
    leaf = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    leaf._backward_hooks = parameter._backward_hooks
    for key, value in vars(parameter).items():
        if not key.startswith("_"):
            setattr(leaf, key, value)
    return leaf
