"""F12: reduced gradients differ in bits between steps, bucket layouts and communicators on healthy machines."""

import hashlib

import pytest
import torch
import torch.distributed as dist

from tests.field.harness import EVERY_STEP, Case, assert_quiet


def reduced_in_two_layouts(rank: int, size: int) -> tuple[str, str]:
    """The same local values, all-reduced in one piece and in another layout."""
    local = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    whole, shifted = local.clone(), torch.cat([torch.zeros(333), local])
    dist.all_reduce(whole)
    dist.all_reduce(shifted)
    return tuple(hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in (whole, shifted[333:]))


def test_the_layout_really_changes_bits(pool3):
    one, other = pool3.results(reduced_in_two_layouts)[0]
    assert one != other


@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.002}])
def test_it_is_quiet(pool3, ddp):
    """DDP rebuilds its buckets after the first step, so the layout changes between these two."""
    assert_quiet(pool3, Case(config=EVERY_STEP, ddp=ddp, steps=2))
