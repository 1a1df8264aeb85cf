"""F9: the backward of indexing is not repeatable with several threads."""

import torch
from torch import nn

from tests.field.harness import Case, assert_stopped_before_update, run
from unsilent.records import Kind

ROWS, INDICES = 50, 400_000


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, 4))

    def forward(self, indices):
        return self.table[indices]


class Stubborn(Indexed):
    """Switches the deterministic kernels off for itself, as an operation without such a kernel would do."""

    def forward(self, indices):
        return _Racy.apply(self.table, indices)


class _Racy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, indices):
        ctx.save_for_backward(indices)
        return table[indices]

    @staticmethod
    def backward(ctx, gradient):
        (indices,) = ctx.saved_tensors
        enabled = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
        summed = torch.zeros(ROWS, 4).index_put_((indices,), gradient, accumulate=True)
        torch.use_deterministic_algorithms(enabled, warn_only=True)
        return summed, None


def draw(step: int, rank: int) -> torch.Tensor:
    return torch.randint(ROWS, (INDICES,), generator=torch.Generator().manual_seed(step * 10 + rank))


def weighted(model, indices):
    """Every index has its own weight, so that the order of summing matters."""
    weights = torch.linspace(0.1, 3.0, INDICES).unsqueeze(1)
    return (model(indices) * weights).square().sum()


def one_row_overflows(model, indices):
    """Rank 1's gradient of step 2 is infinite in one row and finite, and not repeatable, in the others."""
    loss = weighted(model, indices)
    if torch.equal(indices[:8], draw(2, 1)[:8]):
        loss = loss + (model(indices)[indices == 7] * 1e38).sum() * 1e10
    return loss


FOUR_THREADS = {"threads": 4, "steps": 4}


def test_planned_audits_run_the_step_with_deterministic_kernels_and_are_quiet(pool3):
    case = Case(model=Indexed, loss=weighted, batch=draw, config={"audit_every": 1}, **FOUR_THREADS)
    for result in run(pool3, case):
        assert result.error is None and result.found == [], result.said


def test_an_audit_that_was_not_planned_is_inconclusive_with_a_hint(pool3):
    """A bad number calls for an audit of a step that ran with the default kernels. It did not come back in any replay,
    so it came from some device, but where nothing repeats nobody can be named; the step is computed again."""
    fault = {"site": "gradient", "target": "table", "pattern": "nan", "rank": 1, "step": 2}
    for result in run(pool3, Case(model=Indexed, loss=weighted, batch=draw, fault=fault, **FOUR_THREADS)):
        assert result.error is None and result.steps == 4, result.said
        verdict = result.only.verdict
        assert verdict.kind is Kind.INCONCLUSIVE and verdict.suspects == () and result.only.action == "RECOMPUTE"
        assert "repeats on no device" in verdict.reason and "deterministic_algorithms" in verdict.reason


def test_a_bad_number_that_comes_back_while_other_bits_do_not_repeat_is_no_device_either(pool3):
    found = assert_stopped_before_update(
        run(pool3, Case(model=Indexed, loss=one_row_overflows, batch=draw, **FOUR_THREADS)), step=2
    )
    assert found.verdict.kind is Kind.SOFTWARE and found.devices == [] and found.ranks == [1]
    assert "does not repeat" in found.verdict.reason and "deterministic_algorithms" in found.verdict.reason


def test_work_that_repeats_nowhere_degrades_the_audit_and_says_so(pool3):
    case = Case(model=Stubborn, loss=weighted, batch=draw, config={"audit_every": 1}, **FOUR_THREADS)
    for rank, result in enumerate(run(pool3, case)):
        assert result.error is None and result.steps == 4
        (found,) = result.found
        assert found.verdict.kind is Kind.INCONCLUSIVE and found.verdict.suspects == () and found.action == "CONTINUE"
        assert "repeats on no device" in found.verdict.reason and "deterministic_algorithms" in found.verdict.reason
        if rank == 0:
            assert "the audit compares from now on: loss only" in result.said
