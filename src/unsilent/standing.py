"""What is trusted by now: devices with their strikes, clean audits and votes, and the checkpoints that rest on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from unsilent.checkpoint import CheckpointStore, CheckRun, Saved, Status, Trust, attempts
from unsilent.checkpoint.files import step_name
from unsilent.errors import CheckpointError
from unsilent.events import approved_nodes
from unsilent.journal import Journal
from unsilent.policy import trust_lost
from unsilent.records import STATE_SITES, Kind, Verdict
from unsilent.suspicion import Suspicion
from unsilent.world import World

T = TypeVar("T")

_VOTES_KEPT = 4096  # an asynchronous writer may ask long after; and yet a long run must not grow


class Standing:
    """The memory of one run. Every method is called by all ranks, with the same arguments.

    Args:
        observe: nothing is changed: no checkpoint is marked as distrusted, and no step is audited that was not due.

    Attributes:
        last_clean_vote: the last step whose vote, after it had used weights and optimizer state, found them alike; -1
            when there was none. A vote at a save is not among them: the step that uses that state comes after it.
        last_clean_audit: the last step in which every rank passed a bitwise audit, also one before the restart that a
            certified checkpoint rests on; -1 when there was none.
        audited_up_to: the same, but only of work that the present state rests on: a rollback takes back the steps that
            it has run again.
        vouched: the last step up to which every rank's work is vouched for: by a clean audit, or, where a device is audited
            in every step, by audits whose findings were put right.
        certifies_nothing: why checkpoints cannot be certified any more, "" while they can.
        pending: nodes that wait for a person's approval.
        suspicion: what is held against the devices.
    """

    def __init__(
        self,
        world: World,
        journal: Journal,
        *,
        directory: str | Path | None,
        keep: int,
        ledger: str | Path | None = None,
        observe: bool = False,
    ) -> None:
        self._world, self._journal, self._directory, self._keep = world, journal, directory, keep
        self.suspicion = Suspicion(world, journal, directory=directory, ledger=ledger)
        self._observe = observe
        self.last_clean_vote = self.last_clean_audit = self.audited_up_to = self.vouched = -1
        self.certifies_nothing = ""
        self.pending: set[str] = set()
        self._votes: dict[int, bool] = {}  # by updates completed, the oldest first: were the replicas alike?
        self._doubted_after: int | None = None  # set with certifies_nothing
        self._candidates: set[tuple[Path, int]] = set()  # root and updates of what a clean audit will certify
        self._withdrawn: set[tuple[Path, int]] = set()
        self._stores: dict[Path, CheckpointStore] = {}
        self._loaded: tuple[CheckpointStore, Path, int] | None = None

    def begin_anew(
        self,
        steps: int,
        *,
        store: CheckpointStore | None = None,
        path: Path | None = None,
        status: Status | None = None,
    ) -> None:
        """The run goes on from another state: what was found out about the one before no longer counts.

        Args:
            steps: updates completed.
            store, path, status: where it was loaded from and how far it was trusted there; None for a state that the
                user has loaded.
        """
        self.last_clean_vote = self.last_clean_audit = self.audited_up_to = self.vouched = -1
        self._loaded = None
        self._votes.clear()
        self._candidates.clear()
        # A doubted state stays one: observe mode marks none, so that it may be loaded again.
        if self._doubted_after is None or steps <= self._doubted_after or status is Status.CERTIFIED:
            self.certifies_nothing, self._doubted_after = "", None
        if store is None or path is None:
            return
        self._loaded = (store, path, steps)
        self.suspicion.resumed()
        if status is Status.CERTIFIED:
            self.last_clean_audit = steps - 1
        else:  # the audits that certified ones rest on vouch for the states up to theirs
            certified = self._on_disk(
                steps,
                f"the checkpoints in {store.root} could not be listed",
                lambda: store.newest_certified(at_most=steps),
            )
            self.last_clean_audit = -1 if certified is None else certified.steps - 1
        self.vouched = self.audited_up_to = self.last_clean_audit

    def not_finite_after_load(self, step: int) -> str:
        """A bad number that no device made stops the run at ``step``; it may be held against the checkpoint loaded last.

        Returns:
            What became of the checkpoint, in words; "" when it is not concerned.
        """
        if self._loaded is None:
            return ""
        store, path, steps = self._loaded
        try:
            failure = store.failed_after_load(path, step, loaded=steps)
        except (OSError, CheckpointError) as error:
            return f"that checkpoint {path} was loaded {step - steps} steps before could not be noted: {error}"
        if failure is None:
            return ""
        limit = f"attempt {failure.count} of {attempts.LIMIT} at this step"
        said = f"{path} was loaded {step - steps} steps before: {limit}"
        if failure.distrusted:
            self._candidates -= {(store.root, one) for one in failure.distrusted}
            self._journal.write(
                "trust_withdrawn", step, steps=list(failure.distrusted), path=str(path), reason=failure.reason
            )
            older = len(failure.distrusted) - 1
            those = f" and {older} older ones are" if older else " is"
            said += f", and it{those} not loaded any more"
        return said

    # ---- devices -----------------------------------------------------------------------------------------------------

    @property
    def watches_a_device(self) -> bool:
        """Whether so much is held against some device that every step is audited; never in observe mode."""
        return bool(self.suspicion.struck) and not self._observe

    def strike(self, verdict: Verdict, step: int, *, acted_on: bool = True) -> None:
        """Count a verdict against its devices; a PERSISTENT one takes the trust from all since their last clean audit.

        Args:
            acted_on: what it calls for is done.
        """
        self.suspicion.strike(verdict, step, acted_on=acted_on)
        if verdict.kind is Kind.PERSISTENT:
            self._withdraw(verdict, [s.rank for s in verdict.suspects if s.rank is not None], step)

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
        """Every rank passed an audit of this step: candidates of states up to the one after it are certified."""
        self._journal.audit_passed()
        self.last_clean_audit = self.audited_up_to = self.vouched = step
        if self.certifies_nothing:
            return
        for root, steps in sorted(c for c in self._candidates if c[1] <= step + 1):
            path = str(root / step_name(steps))
            try:
                self._stores[root].promote(steps)
            except CheckpointError:  # deleted or distrusted by now
                pass
            except OSError as error:  # a disk that fails does not end a healthy step; the next audit tries again
                self._note(step, f"{path} could not be called certified: {error}")
                continue
            else:
                self._journal.write(
                    "checkpoint", step, steps=steps, path=path, status="certified", reason=f"audited at step {step}"
                )
            self._candidates.discard((root, steps))

    def mended(self, step: int) -> None:
        """What an audit found at this step was put right with values that healthy devices agree on."""
        if self.vouched >= step - 1:
            self.vouched = step

    def rolled_back(self, start: int, step: int, *, by_others: Collection[int]) -> None:
        """The steps from ``start`` to the one before ``step`` were run again, and that one may be under way.

        Args:
            by_others: the ranks whose share was run by another, so that nothing of their own work is left in it.
        """
        self.audited_up_to = min(self.audited_up_to, start - 1)
        struck = self.suspicion.struck
        undone = bool(struck) and struck <= set(by_others) and start <= self.vouched + 1
        self.vouched = step - 1 if undone else min(self.vouched, start - 1)
        if undone and self._doubted_after is not None and start <= self._doubted_after:
            self.certifies_nothing, self._doubted_after = "", None
        self.suspicion.ran_again()

    def voted(self, steps: int, *, alike: bool) -> None:
        """A vote over the state after ``steps`` updates. One that found a difference is not made good by a later one."""
        self._votes[steps] = alike and self._votes.get(steps, True)
        while len(self._votes) > _VOTES_KEPT:
            del self._votes[next(iter(self._votes))]

    def status_of_next(self, steps: int) -> Status:
        """How far a checkpoint of the present state is trusted: the last step was audited, or an audit must follow."""
        certified = self.audited_up_to >= steps - 1 >= 0 and not self.certifies_nothing
        return Status.CERTIFIED if certified else Status.CANDIDATE

    def saved(self, store: CheckpointStore, steps: int, path: Path, status: Status | None, *, alike: bool) -> None:
        """A checkpoint stands there: remember a candidate, and distrust it at once where nothing can be certified.

        Args:
            status: how far it is trusted on disk.
            alike: the vote over the state found no difference.
        """
        key = (store.root, steps)
        self._candidates.discard(key)
        self._withdrawn.discard(key)
        if status is not Status.CANDIDATE:
            return
        if self.certifies_nothing:
            self._withdrawn.add(key)
            if not self._observe:
                store.distrust(steps, self.certifies_nothing)
                self._journal.write(
                    "trust_withdrawn", steps, steps=[steps], path=str(path), reason=self.certifies_nothing
                )
            self._journal.say(f"the checkpoint of step {steps} is not certified: {self.certifies_nothing}")
        elif alike:
            self._candidates.add(key)

    def newest_store(self) -> CheckpointStore | None:
        """The store that this run has used last, None before it used any."""
        return next(reversed(self._stores.values()), None)

    def newest_certified(self, *, at_most: int) -> Saved | None:
        """The newest certified checkpoint there of at most so many updates; None when there is none."""
        store = self.newest_store()
        if store is None:
            return None
        return self._on_disk(
            at_most,
            f"the checkpoints in {store.root} could not be listed",
            lambda: store.newest_certified(at_most=at_most),
        )

    def resume_from(self) -> str | None:
        """The newest certified checkpoint that this run knows of."""
        found = [
            self._on_disk(-1, f"the checkpoints in {store.root} could not be listed", store.newest_certified)
            for store in self._stores.values()
        ]
        newest = max((s for s in found if s is not None), key=lambda s: s.steps, default=None)
        return None if newest is None else str(newest.path)

    def check_runs(self, steps: int, checks: Sequence[str]) -> tuple[CheckRun, ...]:
        """What has been checked about the present state, for its certificate."""
        runs = [CheckRun(check="finite", steps=(steps - 1, steps - 1))] if "finite" in checks and steps else []
        voted = max((s for s, alike in self._votes.items() if alike), default=None)
        if voted is not None:
            runs.append(CheckRun(check="replicas", steps=(voted, voted)))
        if self.audited_up_to >= 0:
            runs.append(CheckRun(check="audit", steps=(self.audited_up_to, self.audited_up_to)))
        return tuple(runs)

    def trust(self) -> Trust:
        """For writers of their own: what is known when they ask whether a state may be called certified."""
        audited = self.audited_up_to if self.audited_up_to >= 0 else None
        votes = frozenset(steps for steps, alike in self._votes.items() if alike)
        return Trust(
            clean_audits=(audited,) * self._world.size, clean_replicas=votes, doubted_after=self._doubted_after
        )

    def unrepaired(self, verdict: Verdict, step: int) -> None:
        """Observe mode lets pass what act mode would have put right: no state from here on is called certified."""
        before = step - 1 if verdict.site in STATE_SITES else step
        self._doubt(f"observe mode did not put right what was found at step {step}: {verdict.reason}", after=before)

    def _doubt(self, reason: str, *, after: int) -> None:
        self.certifies_nothing = self.certifies_nothing or reason
        self._doubted_after = after if self._doubted_after is None else min(after, self._doubted_after)

    def _withdraw(self, verdict: Verdict, ranks: list[int], step: int) -> None:
        clean = [self.last_clean_audit] if self.last_clean_audit >= 0 else []
        for store in self._stores.values():
            known = self._on_disk(step, f"the checkpoints in {store.root} could not be listed", store.candidates) or []
            trusted = (Status.CANDIDATE, Status.CERTIFIED)
            saved = [s for s in known if s.status in trusted and (store.root, s.steps) not in self._withdrawn]
            lost = trust_lost(
                verdict,
                candidates=[s.steps for s in saved],
                certified={s.steps for s in saved if s.status is Status.CERTIFIED},
                clean_audits=dict.fromkeys(ranks, clean),
            )
            steps = list(lost.distrusted)
            if not steps:
                continue
            if self._observe:
                self._note(
                    step, f"act mode would withdraw its trust from checkpoints {steps} in {store.root}: {lost.reason}"
                )
            else:
                for one in steps:
                    self._distrust(store, one, lost.reason, step)
                self._journal.write("trust_withdrawn", step, verdict=verdict, steps=steps, reason=lost.reason)
            withdrawn = {(store.root, one) for one in steps}
            self._candidates -= withdrawn
            self._withdrawn |= withdrawn
        if self.vouched < step - 1:
            since = f"at step {self.last_clean_audit}" if self.last_clean_audit >= 0 else "never"
            reason = (
                f"rank {ranks[0] if ranks else '?'} was wrong at step {verdict.step} and its last clean audit was "
                f"{since}: what it did in between has reached every replica"
            )
            self._doubt(reason, after=self.last_clean_audit + 1)

    def _distrust(self, store: CheckpointStore, steps: int, reason: str, step: int) -> None:
        """Mark it; one that cannot be marked is not promoted either, since it is no candidate of this run any more."""
        with contextlib.suppress(CheckpointError):  # deleted, or without a sound certificate
            try:
                store.distrust(steps, reason)
            except OSError as error:
                self._note(step, f"{store.root / step_name(steps)} could not be marked as distrusted: {error}")

    def _on_disk(self, step: int, otherwise: str, look: Callable[[], T]) -> T | None:
        """Look at the disk in the middle of a step: one that fails is noted, and does not end a healthy run."""
        try:
            return look()
        except (OSError, CheckpointError) as error:
            self._note(step, f"{otherwise}: {error}")
            return None

    def _note(self, step: int, text: str) -> None:
        self._journal.write("notice", step, text=text)
        self._journal.say(text)
