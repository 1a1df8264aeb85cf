"""100,000 steps with a faulty minority, from a simulator that shares no code with the judge (fixed seeds).

Promised under the fault budget: a healthy rank is never blamed, however many of a minority are faulty; a single faulty
device among peers on at least three nodes is named whenever it erred in an execution, with the right kind.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.unit.simulator import BEHAVIOURS, HOST, Cluster, World, random_world, settle
from unsilent.judge import judge_audits
from unsilent.localize import audit_ring, next_replays
from unsilent.records import Kind

CHUNKS = 20
STEPS_PER_CHUNK = 5_000
MAX_ARBITERS = 3
AUDITS_PER_STEP = 6

BLAMING = (Kind.TRANSIENT, Kind.PERSISTENT)


def worlds(seed: int) -> list[tuple[World, tuple[int | None, ...]]]:
    rng = random.Random(f"worlds {seed}")
    made = [random_world(rng) for _ in range(250)]
    return [(world, audit_ring(world.places, world.groups)) for world in made]


def audited(world: World, ring: tuple[int | None, ...], faulty: dict[int, str], rng: random.Random) -> list[int]:
    """The audits that a faulty device takes part in (a few of them if they are many), and one healthy one."""
    near = [rank for rank, auditor in enumerate(ring) if rank in faulty or auditor in faulty]
    if len(near) > AUDITS_PER_STEP:
        near = rng.sample(near, AUDITS_PER_STEP)
    return sorted({*near, rng.randrange(len(world.places))})


def faults(world: World, rng: random.Random) -> dict[int, str]:
    """One faulty device in six of ten steps, one faulty host in twenty, otherwise any minority of devices."""
    ranks = len(world.places)
    if rng.random() < 0.05:
        node = rng.choice(world.places).node
        on_it = [place.rank for place in world.places if place.node == node]
        if 2 * len(on_it) < ranks:
            return dict.fromkeys(on_it, HOST)
    number = 1 if rng.random() < 0.6 else rng.randint(1, (ranks - 1) // 2)
    return {rank: rng.choice(BEHAVIOURS) for rank in rng.sample(range(ranks), number)}


def one_step(world: World, ring: tuple[int | None, ...], rng: random.Random, counts: Counter[str]) -> None:
    faulty = faults(world, rng)
    failing = rng.choice((0.1, 0.5)) if rng.random() < 0.05 else 0.0
    alarm = "the loss is not finite" if rng.random() < 0.03 else ""
    cluster = Cluster(world, faulty, rng, failing)

    evidences = []
    for auditee in audited(world, ring, faulty, rng):
        evidence, rounds = settle(
            cluster,
            auditee,
            ring[auditee],
            lambda known: next_replays(known, world.places, world.groups, max_arbiters=MAX_ARBITERS),
            alarm,
        )
        assert rounds <= 1 + MAX_ARBITERS
        evidences.append(evidence)
    verdicts = judge_audits(evidences, world.places)

    blamed = {suspect.rank for verdict in verdicts if verdict.kind in BLAMING for suspect in verdict.suspects}
    counts["steps"] += 1
    counts["steps with an error"] += bool(cluster.errors)
    counts["steps with several errors of several devices"] += len(cluster.errors) > 1
    counts["steps with a faulty host"] += HOST in faulty.values()
    counts["steps that blame"] += bool(blamed)
    counts["steps that blame a healthy rank"] += not blamed <= cluster.errors.keys()
    assert blamed <= cluster.errors.keys(), (faulty, evidences, verdicts)
    assert all(alarm for verdict in verdicts if verdict.kind is Kind.SOFTWARE), (faulty, evidences, verdicts)
    if not cluster.errors and not failing and not alarm:
        assert verdicts == ()

    if len(faulty) == 1 and cluster.errors and not failing and not alarm:
        (culprit, errors), *_ = cluster.errors.items()
        if len({place.node for place in world.peers(culprit)}) >= 3:
            counts["single faults on three nodes"] += 1
            counts["single faults on three nodes, named"] += blamed == {culprit}
            assert [verdict.kind for verdict in verdicts] == [Kind.PERSISTENT if errors >= 2 else Kind.TRANSIENT], (
                faulty,
                evidences,
                verdicts,
            )
            assert verdicts[0].suspects[0].node == world.places[culprit].node
            assert f"rank {culprit}" in verdicts[0].reason


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_healthy_rank_is_blamed_and_single_faults_are_named(chunk: int) -> None:
    counts: Counter[str] = Counter()
    rng = random.Random(f"steps {chunk}")
    pool = worlds(chunk)
    for _ in range(STEPS_PER_CHUNK):
        world, ring = rng.choice(pool)
        one_step(world, ring, rng, counts)

    assert counts["steps"] == STEPS_PER_CHUNK
    assert counts["steps that blame a healthy rank"] == 0
    assert counts["single faults on three nodes, named"] == counts["single faults on three nodes"]
    # The fuzz is worth something only if it meets what it is about.
    assert counts["single faults on three nodes"] >= STEPS_PER_CHUNK // 10
    assert counts["steps with several errors of several devices"] >= STEPS_PER_CHUNK // 20
    assert counts["steps with a faulty host"] >= STEPS_PER_CHUNK // 50
    assert counts["steps that blame"] >= STEPS_PER_CHUNK // 4


def test_the_fuzz_is_as_long_as_promised() -> None:
    assert CHUNKS * STEPS_PER_CHUNK == 100_000
