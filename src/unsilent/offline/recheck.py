"""``unsilent recheck``: reruns a stretch of a run from a checkpoint and compares it with the run's own log.

The rerun writes a log of its own, with the fingerprints of every step, and two logs are compared. Where they differ the
stretch is rerun a second time: what repeats nowhere is nobody's fault.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsilent.checkpoint import Status
from unsilent.checkpoint.listing import look
from unsilent.errors import EXIT_INTERNAL, EXIT_OK, CheckpointError, UnsilentError, UsageError
from unsilent.events import plain, read, read_starts, write_exit
from unsilent.execute import execute
from unsilent.offline.judge import judge_stretch
from unsilent.offline.prints import Difference, Start, compare, starts_of

if TYPE_CHECKING:
    from unsilent.training.ranks import Ranks

RECORD = "recheck.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be rerun, and what it is compared with.

    Attributes:
        begin: the updates that the checkpoint holds.
        first, last: the steps asked about. Those before them are compared, too: what differs there explains the rest.
        start: how the run was made, from its ``run.json``.
        logged: what its log says of that start.
    """

    checkpoint: Path
    begin: int
    first: int
    last: int
    start: dict[str, Any]
    logged: Start

    @property
    def world_size(self) -> int:
        return int(self.start["world_size"])


def plan(checkpoint: Path, steps: str, run: Path, out: Path) -> Plan:
    """Find the start of the run that holds these steps; everything that can be refused is refused here.

    Raises:
        UsageError: there is nothing to rerun or nothing to compare with; the message says what to ask for instead.
        CheckpointError: the checkpoint is damaged or distrusted.
    """
    if out.resolve() == run.resolve():
        raise UsageError(f"--out is {out}, the run's own directory: how the run has ended would be overwritten")
    saved = look(checkpoint)
    if saved is None:
        raise UsageError(f"{checkpoint}: there is no checkpoint")
    if saved.damaged or saved.status is Status.DISTRUSTED:
        raise CheckpointError(f"{checkpoint} cannot be trusted to begin from: {saved.reason}")
    match = re.fullmatch(r"(\d+)\.\.(\d+)", steps)
    if match is None or int(match[1]) > int(match[2]):
        raise UsageError(f"--steps is {steps!r}: it must be A..B, the first and the last step to compare")
    first, last = int(match[1]), int(match[2])
    if first < saved.steps:
        raise UsageError(
            f"{checkpoint} holds {saved.steps} updates, so nothing before step {saved.steps} can be rerun from it"
        )
    made = {str(start.get("run")): start for start in read_starts(run)}
    logged = _logged(starts_of(read(run).events), run, saved.steps, first, last)
    start = made.get(logged.run)
    if start is None or start.get("command") != "train":
        raise UsageError(
            f"{run}: its run.json does not say how this start was made; only runs of unsilent train can be rerun here"
        )
    return Plan(checkpoint=checkpoint, begin=saved.steps, first=first, last=last, start=start, logged=logged)


def _logged(starts: list[Start], run: Path, begin: int, first: int, last: int) -> Start:
    """The newest start that ran from ``begin`` on and logged something of these steps."""
    for start in reversed(starts):
        began = start.first is not None and start.first <= begin
        if began and start.tells_of(first, last):
            return start
    known = "; ".join(f"{min(s.states)} to {max(s.states)}" for s in starts if s.states)
    raise UsageError(
        f"{run}: no start of the run has passed {begin} updates and logged fingerprints of steps {first} to {last}; "
        + (f"its starts logged: {known} updates" if known else "its log holds none (replicas_every=None writes none)")
    )


def under_launcher() -> bool:
    """Whether torchrun has started this process as one rank of several."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1


def start_ranks(wanted: Plan, out: Path, words: list[str]) -> int:
    """Start as many ranks here as the run had, with this same command; returns the exit code of what they found."""
    os.environ["OMP_NUM_THREADS"] = str(wanted.start["environment"]["threads"])  # the thread count decides bits
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(wanted.world_size)]
    return execute([sys.executable, *launcher, "-m", "unsilent", "recheck", *words], out).exit_code


def on_ranks(wanted: Plan, out: Path, *, as_json: bool) -> int:
    """Rerun on these ranks and compare; all ranks call it. Rank 0 says what came out, and writes it into ``out``.

    Returns:
        What this process ends with. Under a launcher an answer is no failure, of which it would only make a long report:
        there the exit code stands in ``out/exit.json``, as for every run.
    """
    from unsilent.training.ranks import ranks_from_environment

    ranks = ranks_from_environment()
    try:
        record = recheck(wanted, ranks, out)
    except UnsilentError as error:
        # What one rank meets the others meet, or are told: it is said once.
        record = {"exit_code": error.exit_code, "error": str(error)}
        if ranks.rank == 0:
            print(f"unsilent: {error}", file=sys.stderr, flush=True)
    except Exception as error:  # noqa: BLE001 - the contract: exit code 70, with the traceback
        record = {"exit_code": EXIT_INTERNAL, "error": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
    if ranks.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        write_exit(out, record["exit_code"], wanted.last, message=record.get("reason") or record["error"])
        if "outcome" in record:
            print(f"steps {wanted.first}..{wanted.last}: {record['outcome']}: {record['reason']}")
        if as_json:
            print(json.dumps(record), flush=True)
    answered = "error" not in record
    return EXIT_OK if answered and under_launcher() else int(record["exit_code"])


def recheck(wanted: Plan, ranks: Ranks, out: Path) -> dict[str, Any]:
    """The comparison itself; the whole record on rank 0, on the others its exit code only.

    Raises:
        UsageError, CheckpointError: as :func:`unsilent.training.stretch.run_again`; or other ranks than the run had.
    """
    import torch.distributed as dist

    from unsilent.determinism import Kernels
    from unsilent.environment import read_environment
    from unsilent.offline.replay import differences
    from unsilent.training.loop import options_from_json
    from unsilent.training.stretch import Stretch, run_again

    if ranks.size != wanted.world_size:
        raise UsageError(
            f"the run had {wanted.world_size} ranks and here are {ranks.size}: gradients summed over other ranks differ in bits"
        )
    stretch = Stretch(
        options=options_from_json(wanted.start["options"]),
        data_sha256=wanted.start["data_sha256"],
        checkpoint=wanted.checkpoint,
        until=wanted.last,
        fresh_layout=wanted.logged.first == wanted.begin,
        kernels={step: Kernels(kernels) for step, kernels in wanted.logged.kernels.items()},
    )
    reruns: list[Start] = []
    found: list[tuple[tuple[int, ...], Difference | None]] = []
    for number in (1, 2):
        place = out / f"rerun-{number}"
        (place / "events.jsonl").unlink(missing_ok=True) if ranks.rank == 0 else None
        run_again(stretch, ranks, place)
        told: list[Any] = [None]  # whether it differs, or why it cannot be compared: all ranks go on together
        if ranks.rank == 0:
            try:
                reruns.append(next(reversed(starts_of(read(place).events)), Start(run="")))
                _must_begin_alike(wanted, reruns[-1])
                found.append(compare(wanted.logged, reruns[-1], begin=wanted.begin, last=wanted.last))
                told = [found[-1][1] is not None]
            except UnsilentError as error:
                told = [error]
        if ranks.size > 1:
            dist.broadcast_object_list(told, src=0, device=ranks.device)
        if isinstance(told[0], UnsilentError):
            raise told[0]
        if not told[0]:
            break
    if ranks.rank != 0:
        return {"exit_code": EXIT_OK}
    here = plain(asdict(read_environment(ranks.device)))
    unlike = differences(wanted.start["environment"], here)
    second = found[1][1] if len(found) > 1 else None
    between = compare(*reruns, begin=wanted.begin, last=wanted.last)[1] if len(reruns) > 1 else None
    answer = judge_stretch(
        found[0][1], second, reruns_differ=between, found=[v for one in reruns for v in one.verdicts], unlike=unlike,
        unsteady=wanted.logged.unsteady,
    )  # fmt: skip
    reached = max(found[0][0], default=wanted.begin)
    not_reached = (
        f"; the run logged nothing of this stretch after {reached} updates, so nothing is said of the updates from step "
        f"{reached} on"
        if found[0][1] is None and reached <= wanted.last
        else ""
    )
    return {
        "exit_code": answer.exit_code,
        "outcome": answer.outcome.value,
        "reason": answer.reason + not_reached,
        "from": str(wanted.checkpoint),
        "begin": wanted.begin,
        "steps": [wanted.first, wanted.last],
        "start": wanted.logged.run,
        "compared_after": list(found[0][0]),
        "first_difference": None if found[0][1] is None else asdict(found[0][1]) | {"steps": found[0][1].steps},
        "reruns": len(reruns),
        "environment": unlike,
    }


def _must_begin_alike(wanted: Plan, again: Start) -> None:
    logged, loaded = wanted.logged.states.get(wanted.begin, {}), again.states.get(wanted.begin, {})
    differing = [site for site in ("weights", "optimizer_state") if site in logged and logged[site] != loaded.get(site)]
    if differing:
        raise CheckpointError(
            f"{wanted.checkpoint} does not hold the {' and '.join(differing)} that the run's log has for {wanted.begin} "
            "updates: it is of another run, or of another start of it"
        )
