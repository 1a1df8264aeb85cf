"""Pools of ranks that many tests share: starting one costs seconds, so it is started once and kept warm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unsilent.lab.pool import RankPool


@pytest.fixture(scope="session")
def pool3() -> Iterator[RankPool]:
    """Three gloo ranks."""
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[RankPool]:
    """Four gloo ranks."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(params=[3, 4], ids=["3 ranks", "4 ranks"])
def pool(request: pytest.FixtureRequest) -> RankPool:
    """Each test runs at 3 and at 4 ranks: some errors hide behind powers of two."""
    return request.getfixturevalue(f"pool{request.param}")
