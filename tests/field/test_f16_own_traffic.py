"""F16: two collectives in swapped order on the job's group corrupt gradients silently. The guard's traffic runs on a
group of its own, and every message begins with a fixed header, so that a disagreement is a clear error."""

import pytest
import torch
import torch.distributed as dist

from tests.field.harness import EVERY_STEP, Case, Session, assert_quiet
from unsilent.agreement import Agreement, Declaration
from unsilent.errors import RankFailure
from unsilent.lab.pool import Failed
from unsilent.world import World

PENDING = []


def start_a_collective(session: Session, step: int) -> None:
    """The job's own traffic is under way on the job's group while the guarded step runs, votes and audits."""
    for work, tensor in PENDING:
        work.wait()
        assert torch.equal(tensor, torch.full((1000,), float(sum(range(1, session.size + 1)))))
    PENDING.clear()
    tensor = torch.full((1000,), float(session.rank + 1))
    PENDING.append((dist.all_reduce(tensor, async_op=True), tensor))


def with_a_collective(model, batch):
    """The job also communicates inside its forward."""
    loss = model(batch).square().mean()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return loss / (1.0 + total)


def meet(rank: int, size: int, steps: tuple[int, ...], tags: tuple[int, ...], how: str) -> str:
    world = World(torch.device("cpu"), node=f"node{rank}")
    try:
        if how == "gather":
            return str(world.gather(rank, step=steps[rank], tag=tags[rank]))
        after, before = (rank + 1) % size, (rank - 1) % size
        return str(world.exchange([(after, rank)], [before], step=steps[rank], tag=tags[rank]))
    except (RuntimeError, RankFailure) as error:
        world.watcher.post(str(error))  # as a guard does
        return str(error)
    finally:
        world.close(together=False)


def agree(rank: int, size: int, steps: tuple[int, ...], phases: tuple[int, ...]) -> str:
    world = World(torch.device("cpu"), node=f"node{rank}")
    agreement = Agreement({"check": Declaration(flags=("alarm",), digests=("weights",))})
    vector = agreement.pack(step=steps[rank], phase=phases[rank], flags={("check", "alarm"): False}, digests={})
    try:
        agreed = agreement.unpack(world.reduce_max(vector))
        return str(not agreed.flags and not agreed.differing)
    except RuntimeError as error:
        return str(error)
    finally:
        world.close()


def groups(rank: int, size: int) -> bool:
    world = World(torch.device("cpu"), node=f"node{rank}")
    own = world.group is not None and world.group is not dist.group.WORLD
    world.close()
    return own


def test_the_jobs_traffic_and_the_guards_do_not_meet(pool3):
    assert pool3.results(groups) == [True] * 3
    assert_quiet(pool3, Case(config=EVERY_STEP, before_step=start_a_collective))


def test_nor_does_a_collective_inside_the_forward(pool3):
    assert_quiet(pool3, Case(config=EVERY_STEP, loss=with_a_collective))


@pytest.mark.parametrize("how", ["gather", "exchange"])
@pytest.mark.parametrize(
    ("steps", "tags", "words"),
    [((4, 5, 4), (20, 20, 20), "at step 5"), ((4, 4, 4), (20, 21, 20), "message 21")],
)
def test_ranks_in_different_places_get_a_clear_error_and_not_each_others_numbers(pool3, how, steps, tags, words):
    answers = pool3.results(meet, steps, tags, how)
    assert all(words in answer and "but rank" in answer for answer in answers), answers


def test_in_the_agreed_vector_too(pool3):
    assert pool3.results(agree, (4, 4, 4), (1, 1, 1)) == ["True"] * 3
    assert (
        pool3.results(agree, (4, 5, 4), (1, 1, 1))
        == ["the ranks are not in the same place: step is 4 on one and 5 on another"] * 3
    )
    assert (
        pool3.results(agree, (4, 4, 4), (1, 1, 2))
        == ["the ranks are not in the same place: phase is 1 on one and 2 on another"] * 3
    )


def steps_without_the_others(rank: int, size: int) -> str:
    """Rank 1 has done one step more than the others: it reaches the vector of step 1 with them at step 0."""
    import unsilent
    from tests.field.harness import mlp, noise, square

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(mlp())
    guard = unsilent.Guard(
        model, torch.optim.SGD(model.parameters(), 0.1), square, config=unsilent.GuardConfig(node=f"node{rank}")
    )
    guard.steps = int(rank == 1)
    guard.step(noise(0, rank))
    return "went on"


def test_a_guard_whose_ranks_have_lost_step_says_so_on_every_rank(pool3):
    answers = pool3.run_until_death(steps_without_the_others)
    for answer in answers:
        assert isinstance(answer, Failed) and answer.kind in ("RuntimeError", RankFailure.__name__), answer
        assert "rank 1 is at step 1" in answer.text and "step 0" in answer.text, answer.text
