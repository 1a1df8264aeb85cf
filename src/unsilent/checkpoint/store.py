"""The directory in which a run keeps its checkpoints: written aside, published whole, trusted, distrusted, loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unsilent.checkpoint import attempts, dcp, files
from unsilent.checkpoint.certificate import Certificate, CheckRun, FileDigest, Status
from unsilent.checkpoint.draft import Draft, Facts, draft, must_agree, own_fingerprints, share
from unsilent.checkpoint.listing import Saved, checkpoints_in, load_order
from unsilent.checkpoint.loading import Live, Loaded, load_first_good
from unsilent.checkpoint.state import Stateful
from unsilent.checkpoint.together import Together
from unsilent.checkpoint.verification import now
from unsilent.errors import CheckpointError, UsageError
from unsilent.inventory import Inventory


class CheckpointStore:
    """The checkpoints under ``root``. Every method is called by all ranks, in the same order.

    Args:
        root: a directory that all ranks see; made when it is missing.
        group: a process group for the store's own traffic (gloo), never the one that the job reduces on.
        rank, world_size: in that group.
        keep: how many checkpoints to keep; the newest certified one is kept besides, and what others wrote is not ours
            to delete.

    Raises:
        UsageError: more than one rank without a group, or ``keep`` below 1.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        group: dist.ProcessGroup | None = None,
        rank: int = 0,
        world_size: int = 1,
        keep: int = 3,
    ) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep}: at least one checkpoint must be kept")
        self.root = Path(root)
        self.keep = keep
        self._ranks = Together(group, rank, world_size)

    # ------------------------------------------------------------------------------------------------------ saving

    def save(
        self,
        inventory: Inventory,
        *,
        steps: int,
        checks: Sequence[CheckRun] = (),
        status: Status = Status.CANDIDATE,
        scaler: Stateful | None = None,
        scheduler: Stateful | None = None,
        rng: Any = None,
        guard: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint aside, hash it, certify it, and only then give it its name.

        Fingerprints are taken from the tensors in memory before the write. All ranks must hold the same bits of what
        is replicated; what ranks may hold differently (some buffers) is kept for each rank. A checkpoint of the same
        number of steps is replaced.

        Args:
            steps: updates completed.
            rng: this rank's random state: anything that pickles; None to save none.
            guard: what the guard keeps of itself; rank 0's is saved.

        Raises:
            UsageError: a state that cannot be saved, or ranks at different steps.
            CheckpointError: the ranks' replicas differ, or a rank failed; every rank raises, naming it.
            OSError: a rank could not write; every rank raises, naming it.
        """
        name = files.step_name(steps)
        partial, final = files.partial_path(self.root, steps), self.root / name
        drafts: list[Draft] = []

        def prepare() -> Facts:
            if self._ranks.rank == 0:
                self.root.mkdir(parents=True, exist_ok=True)
                files.clean_partials(self.root)
            drafts.append(draft(inventory, steps=steps, scaler=scaler, scheduler=scheduler, rng=rng, guard=guard))
            return drafts[0].facts()

        facts = self._ranks.each(f"prepare {name}", prepare)
        mine = drafts[0]
        must_agree(mine, facts, self._ranks)
        certificate = Certificate(
            steps=steps,
            created=now(),
            torch=torch.__version__,
            status=status,
            world_size=self._ranks.world_size,
            checks=tuple(checks),
            tensors={n: f.to_json() for n, f in mine.prints.items()} | own_fingerprints(facts),
            rng={str(rank): f.rng for rank, f in enumerate(facts) if f.rng is not None},
        )
        tree = share(mine, facts, self._ranks.rank)
        self._ranks.each(f"write {name}", lambda: dcp.write(tree, partial, self._ranks.group))
        written = self._ranks.each(f"hash {name}", lambda: self._hash_mine(partial))

        def publish() -> Path:
            digests = {file: digest for part in written for file, digest in sorted(part.items())}
            final_certificate = replace(certificate, files=digests)
            # One that replaces a poisoned one came from the same past, or will be superseded soon: it inherits.
            poisoned = attempts.inherit(final, partial)
            if poisoned:
                final_certificate = final_certificate.with_status(Status.DISTRUSTED, poisoned)
            files.write_certificate(partial, final_certificate)
            files.publish(partial, final)
            return final

        path = self._ranks.first(f"publish {name}", publish)
        self._ranks.first("delete old checkpoints", lambda: self._retain(path))
        return path

    def _hash_mine(self, path: Path) -> dict[str, FileDigest]:
        # Each rank hashes what it wrote, rank 0 the rest, so that the reading is spread as the writing was.
        def owner(name: str) -> int:
            rank = files.written_by(name)
            return rank if rank is not None and rank < self._ranks.world_size else 0

        names = [n for n in files.files_in(path) if owner(n) == self._ranks.rank]
        return files.digests(path, names, sync=True)

    # ------------------------------------------------------------------------------------------------------- trust

    def candidates(self) -> list[Saved]:
        """All checkpoints of this directory, the oldest first, as rank 0 sees them."""
        return self._ranks.first("list the checkpoints", lambda: checkpoints_in(self.root))

    def newest(self, *, trusted: bool = True, certified: bool = False, before: int | None = None) -> Saved | None:
        """The newest checkpoint with a sound certificate; None when there is none. Its files are not verified here.

        Args:
            trusted: leave out distrusted ones.
            certified: take certified ones only.
            before: take only those with at most this many updates completed.
        """
        for saved in reversed(self.candidates()):
            if saved.status is None or (before is not None and saved.steps > before):
                continue
            if trusted and saved.status is Status.DISTRUSTED:
                continue
            if certified and saved.status is not Status.CERTIFIED:
                continue
            return saved
        return None

    def promote(self, steps: int) -> None:
        """Call a candidate certified; one that is certified already stays so.

        Raises:
            CheckpointError: there is none of that number, or it is distrusted, or its certificate is damaged.
            OSError: the certificate cannot be written.
        """
        self._mark(steps, Status.CERTIFIED, "")

    def distrust(self, steps: int, reason: str) -> None:
        """Take trust away from a checkpoint: it is never loaded or promoted again. The first reason stays.

        Raises:
            CheckpointError: there is none of that number, or its certificate is damaged.
            OSError: the certificate cannot be written.
        """
        self._mark(steps, Status.DISTRUSTED, reason)

    def distrust_after(self, steps: int, reason: str) -> list[int]:
        """Take trust away from every checkpoint with more than ``steps`` updates completed; returns their steps.

        One without a sound certificate is left out: it cannot be loaded as trusted anyway.

        Raises:
            OSError: a certificate cannot be written.
        """
        doubted = [s.steps for s in self.candidates() if s.steps > steps and s.status not in (None, Status.DISTRUSTED)]
        for one in doubted:
            self.distrust(one, reason)
        return doubted

    def _mark(self, steps: int, status: Status, reason: str) -> None:
        path = self.root / files.step_name(steps)

        def mark() -> None:
            certificate = files.read_certificate(path)
            if certificate is None:
                raise CheckpointError(f"{path} has no certificate")
            if certificate.status is Status.DISTRUSTED:
                if status is not Status.DISTRUSTED:
                    raise CheckpointError(f"{path} is distrusted ({certificate.reason}) and cannot be promoted")
            elif certificate.status is not status:
                files.write_certificate(path, certificate.with_status(status, reason))

        self._ranks.first(f"mark {path.name} as {status.value}", mark)

    def failed_after_load(self, path: Path, step: int) -> tuple[int, str]:
        """Hold it against the checkpoint at ``path`` that a run loaded from it failed at ``step``.

        Returns:
            How often it has happened by now, and why the checkpoint is distrusted from now on ("" while it is not).

        Raises:
            OSError: it cannot be written beside the checkpoint.
        """

        def count() -> tuple[int, str]:
            number = attempts.add(path, step)
            reason = attempts.exhausted(path)
            certificate = files.read_certificate(path) if reason else None
            if certificate is not None and certificate.status is not Status.DISTRUSTED:
                files.write_certificate(path, certificate.with_status(Status.DISTRUSTED, reason))
            return number, reason

        return self._ranks.first(f"count a failure after loading {path.name}", count)

    def retain(self) -> list[int]:
        """Delete what is beyond ``keep``; returns the steps deleted. Saving does it too.

        Distrusted ones go first, then the oldest; the newest certified one stays. Checkpoints without a certificate,
        or with one that cannot be read, are never deleted.

        Raises:
            OSError: a checkpoint cannot be taken away.
        """
        return self._ranks.first("delete old checkpoints", lambda: self._retain(None))

    def _retain(self, just_saved: Path | None) -> list[int]:
        ours = [s for s in checkpoints_in(self.root) if s.status is not None]
        certified = [s.path for s in ours if s.status is Status.CERTIFIED]
        protected = {*certified[-1:], *([just_saved] if just_saved else [])}
        distrusted = [s for s in ours if s.status is Status.DISTRUSTED]
        order = distrusted + [s for s in ours if s.status is not Status.DISTRUSTED]
        excess = len(ours) - self.keep
        gone: list[int] = []
        for saved in order:
            if len(gone) >= excess:
                break
            if saved.path not in protected:
                files.remove(saved.path)
                gone.append(saved.steps)
        return gone

    # ----------------------------------------------------------------------------------------------------- loading

    def load(
        self,
        inventory: Inventory,
        *,
        scaler: Stateful | None = None,
        scheduler: Stateful | None = None,
        path: Path | str | None = None,
        certified: bool = False,
    ) -> Loaded:
        """Load the newest checkpoint that is not distrusted and that verifies; nothing is copied before it has.

        Files are compared with their hashes first (rank 0 does it, all ranks follow); then they are read into fresh
        tensors, whose fingerprints every rank compares with the certificate. What is damaged is passed over with a
        notice, and the next older one is tried. Checkpoints without a certificate come last, with a notice.

        Args:
            path: load this one and no other; so it is, too, when ``root`` itself is a checkpoint.
            certified: pass over whatever is not certified.

        Raises:
            CheckpointError: nothing is left that can be loaded; the message says what was wrong with each.
            UsageError: the checkpoint is of another model or optimizer; the message says what differs first.
            OSError: the directory cannot be read.
        """
        order = self._ranks.first("list the checkpoints", lambda: load_order(self.root, path))
        if certified:
            order = [saved for saved in order if saved.status is Status.CERTIFIED]
        live = Live(inventory, scaler, scheduler)
        return load_first_good(order, live, self._ranks, self.root if path is None else Path(path))
