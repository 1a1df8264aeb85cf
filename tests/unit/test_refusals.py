"""What cannot be guarded is refused before anything is touched, with one sentence that says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import unsilent


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Stands for torch's own, which cannot be made without a process group."""

    _overlap_with_ddp = True


class FullyShardedDataParallel(nn.Linear):
    """Stands for torch's own, which cannot be made without a process group."""


def refused(model: nn.Module, optimizer: Any = torch.optim.SGD) -> str:
    with pytest.raises(unsilent.UsageError) as error:
        unsilent.Guard(model, optimizer(model.parameters(), lr=0.1), lambda m, b: m(b).sum())
    return str(error.value)


def test_an_optimizer_in_backward() -> None:
    model = nn.Linear(2, 2)
    model.bias.register_post_accumulate_grad_hook(lambda p: None)
    assert "bias has a hook that runs once its gradient is there" in refused(model)


def test_updates_inside_of_backward() -> None:
    assert "leave overlap_with_ddp out" in refused(nn.Linear(2, 2), ZeroRedundancyOptimizer)


def test_batchnorm_that_communicates() -> None:
    said = refused(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    assert "module 1 is a SyncBatchNorm" in said and "wait for the others" in said


def test_a_sharded_model() -> None:
    assert "sharded by FSDP" in refused(nn.Sequential(FullyShardedDataParallel(2, 2)))


@pytest.mark.parametrize(
    ("others", "why"),
    [
        (
            lambda m: [torch.optim.AdamW([m.bias, m.weight])],
            r"parameter 1 of optimizer 1 \(AdamW, .* is in optimizer 0 too",
        ),
        (lambda m: [ZeroRedundancyOptimizer([m.bias], lr=0.1)], "guarded only where it is the single one"),
        (lambda m: [torch.optim.LBFGS([m.bias])], "LBFGS stands among the optimizers"),
        (lambda m: [torch.optim.lr_scheduler.StepLR], "a type stands among the optimizers, and is none"),
        (lambda m: [torch.optim.AdamW([nn.Parameter(torch.zeros(2))])], "a parameter that the model does not hold"),
    ],
    ids=["a parameter in two of them", "ZeRO", "LBFGS", "no optimizer", "a parameter of another model"],
)
def test_several_optimizers_that_do_not_go_together(others: Any, why: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(unsilent.UsageError, match=why):
        unsilent.Guard(model, [torch.optim.Muon([model.weight]), *others(model)], lambda m, b: m(b).sum())


def test_optimizers_that_are_given_otherwise_than_as_a_list() -> None:
    model = nn.Linear(2, 2)
    named: Any = {"all": torch.optim.AdamW(model.parameters())}
    with pytest.raises(unsilent.UsageError, match="give them as a list"):
        unsilent.Guard(model, named, lambda m, b: m(b).sum())
    with pytest.raises(unsilent.UsageError, match="list of optimizers is empty"):
        unsilent.Guard(model, [], lambda m, b: m(b).sum())


def test_an_optimizer_that_runs_the_model_itself() -> None:
    assert "LBFGS runs the model several times" in refused(nn.Linear(2, 2), torch.optim.LBFGS)


# ---- what does not run on a CPU, by stand-ins ------------------------------------------------------------------------


def make_graphed_callables(module: nn.Module) -> nn.Module:
    """What torch's own leaves behind, which needs a GPU."""

    def new_fwd(*args: torch.Tensor) -> torch.Tensor:
        return type(module).forward(module, *args)

    module.forward = new_fwd
    return module


class CUDAGraph:
    """Stands for torch's own, which needs a GPU."""


def test_a_module_that_was_captured_in_cuda_graphs() -> None:
    assert torch.cuda.make_graphed_callables.__name__ == make_graphed_callables.__name__
    said = refused(nn.Sequential(nn.Linear(2, 2), make_graphed_callables(nn.Linear(2, 2))))
    assert "module 1 runs from captured CUDA graphs" in said and "use it without them" in said


def test_a_module_that_holds_a_cuda_graph() -> None:
    model = nn.Linear(2, 2)
    model.graph = CUDAGraph()  # type: ignore[assignment]
    assert "module Linear runs from captured CUDA graphs" in refused(model)


#: importing Inductor makes torch warn of its own code
INDUCTOR = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@INDUCTOR
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"mode": "reduce-overhead"}, "captured CUDA graphs"),
        ({"mode": "max-autotune"}, "compiled with autotuning"),
        ({"mode": "max-autotune-no-cudagraphs"}, "compiled with autotuning"),
        ({"options": {"coordinate_descent_tuning": True}}, "compiled with autotuning"),
    ],
)
def test_a_compiled_module_with_them_or_with_autotuning(options: Any, word: str, in_place: bool) -> None:
    layer: Any = nn.Linear(2, 2)
    if in_place:
        layer.compile(**options)
    else:
        layer = torch.compile(layer, **options)
    said = refused(nn.Sequential(nn.Linear(2, 2), layer))
    assert "module 1" in said and word in said


@INDUCTOR
def test_autotuning_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as config

    monkeypatch.setattr(config, "max_autotune", True)
    assert "torch._inductor.config switches autotuning on" in refused(nn.Linear(2, 2))


@INDUCTOR
@pytest.mark.parametrize("options", [{}, {"backend": "aot_eager"}, {"mode": "default"}])
def test_what_is_compiled_otherwise_is_taken(options: Any) -> None:
    layer: Any = torch.compile(nn.Linear(2, 2), **options)
    unsilent.Guard(layer, torch.optim.SGD(layer.parameters(), 0.1), lambda m, b: m(b).sum()).close()


@pytest.mark.parametrize("library", ["torchao.float8.float8_linear", "transformer_engine.pytorch.module.linear"])
def test_fp8(library: str) -> None:
    layer = type("Linear", (nn.Linear,), {"__module__": library})(2, 2)
    said = refused(nn.Sequential(layer))
    assert "module 0 is made for FP8" in said and "in bf16" in said
