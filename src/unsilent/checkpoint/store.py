"""The directory in which a run keeps its checkpoints: written aside, published whole, trusted, distrusted, loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unsilent.checkpoint import attempts, dcp, files
from unsilent.checkpoint.certificate import Certificate, CheckRun, FileDigest, Status
from unsilent.checkpoint.draft import (
    Draft,
    Facts,
    draft,
    fingerprints,
    first_holders,
    must_agree,
    own_fingerprints,
    share,
)
from unsilent.checkpoint.listing import Saved, checkpoints_in, load_order, look
from unsilent.checkpoint.loading import Live, Loaded, load_first_good
from unsilent.checkpoint.state import Stateful
from unsilent.checkpoint.together import Together
from unsilent.checkpoint.verification import now, verify_files
from unsilent.errors import CheckpointError, UsageError
from unsilent.inventory import Inventory


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A run came to grief after a load.

    Attributes:
        count: how often at that step by now.
        reason: why the checkpoint is distrusted from now on, "" while it is not.
        distrusted: updates completed of all checkpoints that lose their trust by it, the loaded one first.
    """

    count: int
    reason: str = ""
    distrusted: tuple[int, ...] = ()


class CheckpointStore:
    """The checkpoints under ``root``. Every method is called by all ranks, in the same order.

    Args:
        root: a directory that all ranks see; made when it is missing.
        group: a process group for the store's own traffic (gloo), never the one that the job reduces on.
        rank, world_size: in that group.
        keep: how many checkpoints to keep, the newest certified one among them; that one and the one just written are
            never deleted. One without a certificate is not counted, and not deleted to make room.

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
        may_differ: bool = False,
    ) -> Path:
        """Write a checkpoint aside, hash it, certify it, and only then give it its name.

        Fingerprints are taken from the tensors in memory before the write; of a tensor whose blocks lie on several ranks they
        are put together from the sums of the blocks. All ranks must hold the same bits of what several of them hold; what
        ranks may hold differently (some buffers) is kept for each rank. A checkpoint of the same
        number of steps is replaced, also one without a certificate; but a certified one that is whole is not replaced by
        one that is less: it stays, and nothing is written.

        Args:
            steps: updates completed.
            rng: this rank's random state: anything that pickles; None to save none.
            guard: what the guard keeps of itself; rank 0's is saved.
            may_differ: write it even if the replicas differ; then it holds those of the lowest ranks, as a candidate for ever.

        Returns:
            The directory of the checkpoint of that number of steps; :meth:`status_of` says how far it is trusted.

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
                files.finish_replacing(self.root)
            drafts.append(
                draft(inventory, self._ranks, steps=steps, scaler=scaler, scheduler=scheduler, rng=rng, guard=guard)
            )
            return drafts[0].facts()

        facts = self._ranks.each(f"prepare {name}", prepare)
        alike = must_agree(drafts[0], facts, self._ranks, may_differ=may_differ)
        prints = fingerprints(drafts[0], facts, self._ranks, same=alike)
        mine, before = first_holders(drafts[0], facts, self._ranks)
        status = status if alike else Status.CANDIDATE
        if status is not Status.CERTIFIED and self._ranks.first(f"look at {name}", lambda: _is_certified(final)):
            return final
        certificate = Certificate(
            steps=steps,
            created=now(),
            torch=torch.__version__,
            status=status,
            reason="" if alike else "the replicas differed when it was written: it holds those of the lowest ranks",
            world_size=self._ranks.world_size,
            checks=tuple(checks),
            tensors={n: f.to_json() for n, f in prints.items()} | own_fingerprints(facts),
            rng={str(rank): f.rng for rank, f in enumerate(facts) if f.rng is not None},
        )
        tree = share(mine, facts, self._ranks.rank, same=alike, before=before)
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
        return self._ranks.first("list the checkpoints", lambda: checkpoints_in(self._tidied()))

    def _tidied(self) -> Path:
        with contextlib.suppress(OSError):  # one that cannot be given its name back is listed where it lies
            files.finish_replacing(self.root)
        return self.root

    def status_of(self, path: Path) -> Status | None:
        """How far the checkpoint at ``path`` is trusted; None when it has no sound certificate, or is not there."""
        saved = self._ranks.first(f"look at {path.name}", lambda: look(path))
        return None if saved is None else saved.status

    def newest_certified(self, *, at_most: int | None = None) -> Saved | None:
        """The newest certified checkpoint, with ``at_most`` so many updates completed; None when there is none.

        Its files are not verified here.
        """
        certified = [s for s in self.candidates() if s.status is Status.CERTIFIED]
        return next((s for s in reversed(certified) if at_most is None or s.steps <= at_most), None)

    def promote(self, steps: int) -> None:
        """Call a candidate certified; one that is certified already stays so.

        Raises:
            CheckpointError: there is none of that number, or its certificate is damaged or says why it cannot be.
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

    def _mark(self, steps: int, status: Status, reason: str) -> None:
        path = self.root / files.step_name(steps)

        def mark() -> None:
            certificate = files.read_certificate(path)
            if certificate is None:
                raise CheckpointError(f"{path} has no certificate")
            if status is Status.CERTIFIED and (certificate.reason or certificate.status is Status.DISTRUSTED):
                raise CheckpointError(
                    f"{path} is {certificate.status.value} ({certificate.reason}) and cannot be promoted"
                )
            if certificate.status not in (status, Status.DISTRUSTED):
                files.write_certificate(path, certificate.with_status(status, reason))

        self._ranks.first(f"mark {path.name} as {status.value}", mark)

    def failed_after_load(self, path: Path, step: int, *, loaded: int) -> Failure | None:
        """Hold it against the checkpoint at ``path`` that a run loaded from it failed at ``step``.

        It counts soon after the load, and at any distance where a newer checkpoint has run out of attempts at that very
        step. When the attempts of this one run out it is distrusted, with older ones (:mod:`unsilent.checkpoint.attempts`).

        Args:
            loaded: updates completed at the load.

        Returns:
            None where the checkpoint is not concerned.

        Raises:
            OSError: it cannot be written beside the checkpoint.
        """

        def count() -> Failure | None:
            around = checkpoints_in(self.root)
            ran_out = [s.path for s in around if s.steps > loaded and attempts.exhausted(s.path)]
            known = any(attempts.read(newer).get(step, 0) >= attempts.LIMIT for newer in ran_out)
            if step - loaded >= attempts.SOON and not known:
                return None
            number = attempts.add(path, step)
            reason = attempts.exhausted(path)
            if not reason:
                return Failure(count=number)
            _distrust_on_disk(path, reason)
            older = [s for s in reversed(around) if s.steps < loaded and not _is_distrusted(s)]
            older = older[: attempts.at_once(len(ran_out)) - 1]
            for saved in older:
                why = f"{path.name} and {len(ran_out)} newer ones were poisoned, and it may be so too: {reason}"
                attempts.condemn(saved.path, why)
                _distrust_on_disk(saved.path, why)
            return Failure(count=number, reason=reason, distrusted=(loaded, *(s.steps for s in older)))

        return self._ranks.first(f"count a failure after loading {path.name}", count)

    def _retain(self, just_saved: Path) -> None:
        """Delete what is beyond ``keep``: distrusted ones first, then the oldest."""
        ours = [s for s in checkpoints_in(self.root) if s.status is not None]
        certified = [s.path for s in ours if s.status is Status.CERTIFIED]
        protected = {*certified[-1:], just_saved}
        distrusted = [s for s in ours if s.status is Status.DISTRUSTED]
        order = distrusted + [s for s in ours if s.status is not Status.DISTRUSTED]
        excess = max(0, len(ours) - self.keep)
        for saved in [s for s in order if s.path not in protected][:excess]:
            files.remove(saved.path)

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
        order = self._ranks.first("list the checkpoints", lambda: load_order(self._tidied(), path))
        if certified:
            order = [saved for saved in order if saved.status is Status.CERTIFIED]
        live = Live(inventory, scaler, scheduler)
        return load_first_good(order, live, self._ranks, self.root if path is None else Path(path))


def _is_certified(path: Path) -> bool:
    """Whether a certified checkpoint stands there whose files are what its certificate says."""
    try:
        certificate = files.read_certificate(path)
    except CheckpointError:
        return False
    return certificate is not None and certificate.status is Status.CERTIFIED and not verify_files(path, certificate)


def _is_distrusted(saved: Saved) -> bool:
    return saved.damaged or saved.status is Status.DISTRUSTED or attempts.distrusted(saved.path) != ""


def _distrust_on_disk(path: Path, reason: str) -> None:
    """Mark its certificate, if it has one that can be read."""
    with contextlib.suppress(CheckpointError):
        certificate = files.read_certificate(path)
        if certificate is not None and certificate.status is not Status.DISTRUSTED:
            files.write_certificate(path, certificate.with_status(Status.DISTRUSTED, reason))
