"""Two tensor-parallel groups in lock step: a healthy one (ranks 0 and 1) and a sick one (ranks 2 and 3).

Both train the same model on the same batches. Every rank of the sick group has a twin in the healthy one, which holds the
same shards, so that whatever the two compute must have the same bits. Taps stand behind each attention and each feed-forward
sub-module, after its own computation and before the reduce-scatter of sequence parallelism: on its output in the forward,
on the gradient of its input in the backward. There the sick rank compares its value with its twin's and goes on with the
twin's, so that every sub-module starts from right inputs. After each step it takes over the twin's weights and moments too.

A tap is a step of autograd on the DTensor whose placement is still Partial; ``TappedOutput`` and ``TappedInput`` put it there.
Twins reach their taps in the same order, in the backward too, since the graphs are the same; each message carries its
tap's number as its tag, so that another order would wait, and never compare unlike tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import _disable_current_modes

from unsilent.determinism import Kernels, running_with
from unsilent.fingerprints import sums
from unsilent.lab.studies.llama import Llama, Shape, loss_of
from unsilent.lab.studies.submodule.abft import largest_residual
from unsilent.lab.studies.submodule.readings import WEIGHTS, Readings
from unsilent.lab.units import HEALTHY, PLACES, Unit
from unsilent.lab.units.device import SickDevice
from unsilent.training.data import TextData, standard_library_text

RANKS, GROUP = 4, 2
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01


@dataclass(frozen=True, kw_only=True)
class Run:
    """One unit, as both devices of the sick group, beside a healthy group; ``seed`` is of weights, text and faults."""

    unit: Unit
    shape: Shape
    seed: int
    steps: int


def run_rank(rank: int, size: int, run: Run) -> Readings:
    """One rank's part, for ``RankPool(4)``."""
    with running_with(Kernels.DETERMINISTIC):
        return _Rank(run).run()


# ---- taps ------------------------------------------------------------------------------------------------------------


class Comparison:
    """Compares this rank's values with its twin's, and keeps the readings. The work is done outside of any dispatch mode:
    a sick device spoils the model's operations, not the comparison."""

    def __init__(self, shape: Shape, steps: int) -> None:
        self.mesh, self.twin, self.sick = _ground()
        self._group = self.mesh.get_group("twins")
        self.readings = Readings.empty(steps=steps, layers=shape.layers)
        self._step = 0

    def begin(self, step: int) -> None:
        self._step = step
        self.readings.order.clear()

    def tapped(
        self, layer: int, place: int, value: torch.Tensor, products: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Read a value, the sum of ``products``, and return the healthy twin's."""
        with torch.no_grad(), _disable_current_modes():
            number, at = layer * len(PLACES) + place, (self._step, layer, place)
            self.readings.order.append(number)
            self.readings.elements[place] = value.numel()
            self.readings.abft[at] = largest_residual(products, value)
            self.readings.prints[at] = sums(value).numpy()
            right = self.healthy(value, tag=number + 1)
            differ = bits_differ(value, right)
            if differ.any():
                self.readings.add(at, value[differ].double().numpy(), right[differ].double().numpy())
            return right

    def healthy(self, value: torch.Tensor, *, tag: int = 0) -> torch.Tensor:
        """The healthy twin's value: it is sent by the one and received by the other."""
        value = value.contiguous()
        if not self.sick:
            dist.send(value, self.twin, group=self._group, tag=tag)
            return value
        right = torch.empty_like(value)
        dist.recv(right, self.twin, group=self._group, tag=tag)
        return right


def bits_differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two fp32 tensors differ in bits: a NaN equals the same NaN, and 0.0 differs from −0.0."""
    return one.contiguous().view(torch.int32) != other.contiguous().view(torch.int32)


class Tap:
    """One place of one layer, with the operands of the products that its value is the sum of."""

    def __init__(self, comparison: Comparison, layer: int, place: str) -> None:
        self._comparison, self._layer, self._place = comparison, layer, PLACES.index(place)
        self.products: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, value: DTensor) -> DTensor:
        if tuple(value.placements) != (Partial(),):
            raise RuntimeError(
                f"the tap {PLACES[self._place]} of layer {self._layer} stands on {value.placements}, not on a Partial: "
                f"its value has been reduced already, or is not the whole sub-module's"
            )
        local = self._comparison.tapped(self._layer, self._place, value.to_local(), self.products)
        self.products.clear()
        return DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )


class _InForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any, tap: Tap) -> Any:
        return tap(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any, tap: Tap) -> Any:
        ctx.tap = tap
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.tap(gradients[0]), None


class TappedOutput(RowwiseParallel):
    """Row-wise parallel, with a tap on the output before it is reduced and scattered."""

    def __init__(self, tap: Tap) -> None:
        super().__init__(output_layouts=Shard(1))
        self._tap = tap

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_pre_hook(self._remember)
        return module

    def _remember(self, module: Any, inputs: tuple[DTensor, ...]) -> None:
        self._tap.products.append((inputs[0].to_local().detach(), module.weight.to_local().detach().t()))

    def _prepare_output_fn(
        self, output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        outputs = _InForward.apply(outputs, self._tap)
        return super()._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)


class TappedInput(PrepareModuleInput):
    """Gathers the sequence before a sub-module, with a tap on the input's gradient before that is reduced and scattered."""

    def __init__(self, tap: Tap) -> None:
        super().__init__(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        self._tap = tap

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> Any:
        (value,) = super()._prepare_input_fn(inputs, device_mesh)
        return (_InBackward.apply(value, self._tap),)


class _Projection(ColwiseParallel):
    """Column-wise parallel; the tap on the input's gradient is told of the product that it is part of."""

    def __init__(self, tap: Tap) -> None:
        super().__init__()
        self._tap = tap

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(self._remember)
        return module

    def _remember(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        weight = module.weight.to_local().detach()
        output.register_hook(lambda gradient: self._tap.products.append((gradient, weight)))


def parallelize(model: Llama, comparison: Comparison) -> None:
    """Tensor and sequence parallel over this rank's group, with a tap at each place of each layer."""
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for layer in range(len(model.blocks)):
        for part, into, out in (("attention", "qkv", "o"), ("ffn", ("gate", "up"), "down")):
            forward = Tap(comparison, layer, f"forward_{part}")
            backward = Tap(comparison, layer, f"backward_{part}")
            name = f"blocks.{layer}.{part}"
            plan[f"{name}_norm"] = SequenceParallel()
            plan[name] = TappedInput(backward)
            plan |= {f"{name}.{projection}": _Projection(backward) for projection in into}
            plan[f"{name}.{out}"] = TappedOutput(forward)
    parallelize_module(model, comparison.mesh["tp"], plan)


@cache
def _ground() -> tuple[DeviceMesh, int, bool]:
    """The mesh of this process, its twin's rank, and whether it is in the sick group. The mesh's axis ``twins`` is the
    process group of a rank and its twin: comparisons have it for themselves."""
    mesh = init_device_mesh("cpu", (RANKS // GROUP, GROUP), mesh_dim_names=("twins", "tp"))
    rank = dist.get_rank()
    return mesh, (rank + GROUP) % RANKS, rank >= GROUP


# ---- training --------------------------------------------------------------------------------------------------------


class _Rank:
    """One rank's model, and its weights once more in a flat tensor, so that an update and a synchronisation are one call."""

    def __init__(self, run: Run) -> None:
        shape = run.shape
        self._run = run
        self._comparison = Comparison(shape, run.steps)
        self.model = Llama(shape, seed=run.seed)
        parallelize(self.model, self._comparison)
        self._data = TextData(
            standard_library_text(), sequence_length=shape.length, global_batch=shape.samples, seed=run.seed
        )
        self._parameters = list(self.model.parameters())
        self._local = [_local(p.detach()) for p in self._parameters]
        self._weights = nn.Parameter(torch.cat([local.flatten() for local in self._local]))
        self._optimizer = torch.optim.AdamW([self._weights], LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
        self._kinds = torch.cat(
            [
                torch.full((local.numel(),), _kind(name))
                for (name, _), local in zip(self.model.named_parameters(), self._local, strict=True)
            ]
        )

    def run(self) -> Readings:
        comparison, readings, run = self._comparison, self._comparison.readings, self._run
        readings.weight_elements[:] = torch.bincount(self._kinds, minlength=len(WEIGHTS)).numpy()
        unit = run.unit if comparison.sick else HEALTHY[0]
        device = SickDevice(unit, self.model, seed=run.seed, rank=dist.get_rank() % GROUP)
        # In its first pass DTensor works out its shardings, on fake tensors, which a device must not take for values.
        self._compute(self._data.batch(0))
        self._gradient()
        for step in range(run.steps):
            comparison.begin(step)
            batch = self._data.batch(step)
            with device.step(step):
                readings.loss[step] = self._compute(batch)
            gradient = self._gradient()
            wrong = self._kinds[bits_differ(gradient, comparison.healthy(gradient))]
            readings.weights[step] = torch.bincount(wrong, minlength=len(WEIGHTS)).numpy()
            self._update(gradient)
        readings.bursts.extend(device.bursts)
        return readings

    def _compute(self, batch: torch.Tensor) -> float:
        loss = loss_of(self.model, batch)
        loss.backward()
        return float(loss.detach())

    def _gradient(self) -> torch.Tensor:
        """This rank's shards of the gradient, fp32[parameters]; they are taken from the model."""
        shards = []
        for parameter in self._parameters:
            gradient: Any = parameter.grad
            if isinstance(parameter, DTensor):
                gradient = gradient.redistribute(placements=parameter.placements)
            shards.append(_local(gradient).flatten())
            parameter.grad = None
        return torch.cat(shards)

    def _update(self, gradient: torch.Tensor) -> None:
        """AdamW, then the healthy twin's weights and moments."""
        self._weights.grad = gradient
        self._optimizer.step()
        state = self._optimizer.state[self._weights]
        ours = (self._weights.detach(), state["exp_avg"], state["exp_avg_sq"])
        for own, right in zip(ours, self._comparison.healthy(torch.stack(ours)), strict=True):
            own.copy_(right)
        for local, part in zip(self._local, ours[0].split([x.numel() for x in self._local]), strict=True):
            local.copy_(part.view_as(local))


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _kind(name: str) -> int:
    """Whose weight it is, as an index of ``WEIGHTS``."""
    parts = name.split(".")
    return next((WEIGHTS.index(kind) for kind in WEIGHTS[:2] if kind in parts), WEIGHTS.index("other"))
