"""What is trusted by now: devices with their strikes, clean audits and votes, and the checkpoints that rest on them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from unsilent.checkpoint import CheckpointStore, CheckRun, Status, Trust, attempts
from unsilent.checkpoint.files import step_name
from unsilent.errors import CheckpointError
from unsilent.events import approved_nodes
from unsilent.journal import Journal
from unsilent.policy import trust_lost
from unsilent.records import Verdict
from unsilent.world import World


class Standing:
    """The memory of one run. Every method is called by all ranks, with the same arguments.

    Attributes:
        last_clean_vote: the last step whose vote found weights and optimizer state alike; -1 when there was none.
        last_clean_audit: the last step in which every rank passed a bitwise audit; -1 when there was none.
        certifies_nothing: why checkpoints cannot be certified any more, "" while they can.
        pending: nodes that wait for a person's approval.
    """

    def __init__(self, world: World, journal: Journal, *, directory: str | Path | None, keep: int) -> None:
        self._world, self._journal, self._directory, self._keep = world, journal, directory, keep
        self.last_clean_vote = self.last_clean_audit = -1
        self.certifies_nothing = ""
        self.pending: set[str] = set()
        self._strikes: dict[int, int] = {}
        self._candidates: set[int] = set()
        self._stores: dict[Path, CheckpointStore] = {}
        self._loaded: tuple[CheckpointStore, Path, int] | None = None

    def begin_anew(self, store: CheckpointStore, path: Path, steps: int) -> None:
        """A checkpoint was loaded: what was found out about the state before no longer counts."""
        self.last_clean_vote = self.last_clean_audit = -1
        self._loaded = (store, path, steps)

    def not_finite_after_load(self, step: int) -> str:
        """A bad number that no device made stops the run at ``step``; soon after a load it is held against the checkpoint.

        Returns:
            What became of the checkpoint, in words; "" when it is not concerned.
        """
        if self._loaded is None or step - self._loaded[2] >= attempts.SOON:
            return ""
        store, path, steps = self._loaded
        try:
            count, distrusted = store.failed_after_load(path, step)
        except (OSError, CheckpointError) as error:
            return f"that checkpoint {path} was loaded {step - steps} steps before could not be noted: {error}"
        said = f"{path} was loaded {step - steps} steps before: attempt {count} of {attempts.LIMIT} at this step"
        if distrusted:
            self._candidates.discard(steps)
            self._journal.write("trust_withdrawn", step, steps=[steps], path=str(path), reason=distrusted)
            said += ", and it is not loaded any more"
        return said

    # ---- devices -----------------------------------------------------------------------------------------------------

    @property
    def watches_a_device(self) -> bool:
        """Whether some device has a strike, so that every step is audited."""
        return bool(self._strikes)

    def strikes(self, verdict: Verdict) -> int:
        """PERSISTENT verdicts so far on the devices that this verdict suspects."""
        return max((self._strikes.get(s.rank, 0) for s in verdict.suspects if s.rank is not None), default=0)

    def strike(self, verdict: Verdict, step: int) -> None:
        """A PERSISTENT verdict: count it, and withdraw trust from all since the device's last clean audit."""
        ranks = [s.rank for s in verdict.suspects if s.rank is not None]
        for rank in ranks:
            self._strikes[rank] = self._strikes.get(rank, 0) + 1
        self._withdraw(verdict, ranks, step)

    def approved(self) -> frozenset[str]:
        """The nodes that a person has approved for taking out, as rank 0 reads them; asked only while one waits."""
        if not self.pending or self._directory is None:
            return frozenset()
        names = approved_nodes(self._directory) if self._world.rank == 0 else frozenset[str]()
        return self._world.gather(names, step=0, tag=40)[0]

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def store(self, root: str | Path) -> CheckpointStore:
        """The checkpoints under ``root``."""
        key = Path(root)
        if key not in self._stores:
            self._stores[key] = CheckpointStore(
                key, group=self._world.group, rank=self._world.rank, world_size=self._world.size, keep=self._keep
            )
        return self._stores[key]

    def audited(self, step: int) -> None:
        """Every rank passed an audit of this step: candidates written since the clean audit before are certified."""
        self.last_clean_audit = step
        if self.certifies_nothing:
            return
        for steps in sorted(self._candidates):
            for store in self._stores.values():
                with contextlib.suppress(CheckpointError):
                    store.promote(steps)
                    path = str(store.root / step_name(steps))
                    self._journal.write(
                        "checkpoint", step, steps=steps, path=path, status="certified", reason=f"audited at step {step}"
                    )
        self._candidates.clear()

    def status_of_next(self, steps: int) -> Status:
        """How far a checkpoint of the present state is trusted: the last step was audited, or an audit must follow."""
        certified = self.last_clean_audit >= steps - 1 >= 0 and not self.certifies_nothing
        return Status.CERTIFIED if certified else Status.CANDIDATE

    def saved(self, store: CheckpointStore, steps: int, path: Path, status: Status) -> None:
        """A checkpoint was written: remember a candidate, and distrust it at once where nothing can be certified."""
        if self.certifies_nothing:
            store.distrust(steps, self.certifies_nothing)
            self._journal.write("trust_withdrawn", steps, steps=[steps], path=str(path), reason=self.certifies_nothing)
            self._journal.say(f"the checkpoint of step {steps} is not certified: {self.certifies_nothing}")
        elif status is Status.CANDIDATE:
            self._candidates.add(steps)

    def resume_from(self) -> str | None:
        """The newest certified checkpoint that this run knows of."""
        newest = [s for store in self._stores.values() if (s := store.newest(certified=True)) is not None]
        return str(max(newest, key=lambda s: s.steps).path) if newest else None

    def check_runs(self, steps: int, checks: Sequence[str]) -> tuple[CheckRun, ...]:
        """What has been checked about the present state, for its certificate."""
        runs = [CheckRun(check="finite", steps=(steps - 1, steps - 1))] if "finite" in checks and steps else []
        if self.last_clean_vote >= 0:
            runs.append(CheckRun(check="replicas", steps=(self.last_clean_vote, self.last_clean_vote)))
        if self.last_clean_audit >= 0:
            runs.append(CheckRun(check="audit", steps=(self.last_clean_audit, self.last_clean_audit)))
        return tuple(runs)

    def trust(self) -> Trust:
        """For writers of their own: what is known when they ask whether a state may be called certified."""
        audited = self.last_clean_audit if self.last_clean_audit >= 0 else None
        votes = {self.last_clean_vote, self.last_clean_vote + 1} if self.last_clean_vote >= 0 else set[int]()
        doubted = self.last_clean_audit + 1 if self.certifies_nothing else None
        return Trust(clean_audits=(audited,) * self._world.size, clean_replicas=votes, doubted_after=doubted)

    def _withdraw(self, verdict: Verdict, ranks: list[int], step: int) -> None:
        clean = [self.last_clean_audit] if self.last_clean_audit >= 0 else []
        for store in self._stores.values():
            saved = store.candidates()
            lost = trust_lost(
                verdict,
                candidates=[s.steps for s in saved],
                certified={s.steps for s in saved if s.status is Status.CERTIFIED},
                clean_audits=dict.fromkeys(ranks, clean),
            )
            for steps in lost.distrusted:
                with contextlib.suppress(CheckpointError):
                    store.distrust(steps, lost.reason)
            if lost.distrusted:
                steps = list(lost.distrusted)
                self._journal.write("trust_withdrawn", step, verdict=verdict, steps=steps, reason=lost.reason)
            self._candidates -= set(lost.distrusted)
        if self.last_clean_audit < step - 1 and not self.certifies_nothing:
            since = f"at step {self.last_clean_audit}" if self.last_clean_audit >= 0 else "never"
            self.certifies_nothing = (
                f"rank {ranks[0] if ranks else '?'} was wrong at step {verdict.step} and its last clean audit was "
                f"{since}: what it did in between has reached every replica"
            )
