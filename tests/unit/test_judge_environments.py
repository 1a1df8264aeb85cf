"""Ranks of unlike environments: their replicas may differ in bits, and a vote must not blame them for it."""

import pytest

from unsilent.judge import differs_by_environment, judge_audits, judge_votes
from unsilent.records import AuditEvidence, Execution, Kind, Place, Site, VoteEvidence


def places(environments: str) -> list[Place]:
    return [Place(rank=r, node=f"n{r}", device=f"d{r}", environment=e) for r, e in enumerate(environments)]


def votes(digests: str, site: Site = Site.WEIGHTS) -> list[VoteEvidence]:
    clean = VoteEvidence(step=1, site=site, tensor="clean", digests=("k",) * len(digests))
    return [VoteEvidence(step=1, site=site, tensor="w", digests=tuple(digests)), clean]


@pytest.mark.parametrize(
    ("environments", "digests", "kind", "ranks"),
    [
        ("aaba", "xxyx", Kind.INCONCLUSIVE, []),  # the odd one drifts
        ("aabb", "xxyy", Kind.INCONCLUSIVE, []),  # two halves drift apart
        ("abc", "xyz", Kind.INCONCLUSIVE, []),  # each is the only one of its kind
        ("aaab", "xzxy", Kind.TRANSIENT, [1]),  # one among the likes is wrong, and the odd one drifts
        ("aaab", "xzxx", Kind.TRANSIENT, [1]),
        ("aabb", "xxyz", Kind.INCONCLUSIVE, []),  # two of a kind cannot outvote each other
        ("aaaa", "xxyx", Kind.TRANSIENT, [2]),
    ],
)
def test_one_vote(environments, digests, kind, ranks):
    verdict = judge_votes(votes(digests), places(environments))[0]
    assert verdict.kind is kind and [s.rank for s in verdict.suspects] == ranks and verdict.tensors == ("w",)


def test_what_is_known_is_not_said_again():
    (vote, clean) = votes("xxyx")
    assert differs_by_environment(vote, places("aaba")) and not differs_by_environment(clean, places("aaba"))
    assert judge_votes([vote, clean], places("aaba"), unlike_is_known=True) == ()
    assert judge_votes(votes("xzyx"), places("aaba"), unlike_is_known=True)[0].kind is not None


def test_a_reduced_gradient_is_the_same_everywhere():
    (verdict,) = judge_votes(votes("xxyx", Site.REDUCTION), places("aaba"))
    assert verdict.kind is Kind.TRANSIENT and [s.rank for s in verdict.suspects] == [2]


def executions(*made: tuple[int, str, bool]) -> tuple[Execution, ...]:
    return tuple(Execution(rank=r, digest=d, finite=f, recorded=i == 0) for i, (r, d, f) in enumerate(made))


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        ([(0, "a", False), (1, "b", False), (0, "c", False), (0, "d", False), (1, "e", False)], Kind.SOFTWARE),
        ([(0, "a", False), (1, "b", True), (0, "c", True), (0, "d", True), (1, "e", True)], Kind.INCONCLUSIVE),
        ([(0, "a", False), (1, "b", True), (0, "c", False), (0, "d", False), (1, "e", True)], Kind.INCONCLUSIVE),
    ],
)
def test_a_bad_number_in_work_that_does_not_repeat(made, kind):
    """All get NaN, each with other bits beside it: a common cause. Where some do not, nobody can tell."""
    evidence = AuditEvidence(step=1, auditee=0, auditor=1, executions=executions(*made), alarm="NaN")
    (verdict,) = judge_audits([evidence], places("aaa"))
    assert verdict.kind is kind and not [s for s in verdict.suspects if s.device or s.node]
    assert "torch.use_deterministic_algorithms" in verdict.reason
