"""``unsilent train``: trains a LLaMA on bytes of real text, guarded or, for comparison, not.

The order of a run: options are looked at, the ranks meet, model and data are made, the guard takes the step over, the
newest certified checkpoint is loaded, steps run, the last vote is held, and one line says how it ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unsilent.checkpoint import Status, checkpoints_in
from unsilent.checks.update import UpdateConfig
from unsilent.config import GuardConfig
from unsilent.errors import UsageError
from unsilent.events import add_start, excluded_nodes, plain, read, read_starts, write_exit
from unsilent.guard import Guard, Outcome
from unsilent.records import Action
from unsilent.screen import show
from unsilent.training.data import TextData, file_text, standard_library_text
from unsilent.training.ending import error_record, forget_last_run, record_error, say_error
from unsilent.training.model import MAX_POSITIONS, build_model, make_loss_fn, weights_sha256
from unsilent.training.presets import preset
from unsilent.training.progress import Screen
from unsilent.training.ranks import Ranks, join, node_of, ranks_from_environment
from unsilent.training.rate import rate
from unsilent.weighing import mean_loss, share_of

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``unsilent train`` is asked for; the command's help explains each."""

    out: Path
    preset: str = "tiny"
    steps: int = 60
    data: Path | None = None
    seed: int = 0
    batch: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    sequence_length: int | None = None
    accumulate: int = 1
    learning_rate: float = 1e-3
    warmup: int = 10
    clip: float = 1.0
    bf16: bool = False
    save_every: int | None = None
    eval_every: int | None = None
    audit_every: int | None = 100
    replicas_every: int | None = 10
    mode: str = "act"
    quarantine: str = "ask"
    update_rule: str = "off"
    sensitivity: str | None = None
    evidence: str = "digests"
    ledger: Path | None = None
    resume: bool = True
    require_localization: bool = False
    unguarded: bool = False
    node: str | None = None
    nodes_imitated: int | None = None

    def __post_init__(self) -> None:
        preset(self.preset)
        self.update_config()
        at_least = {"steps": 1, "batch": 1, "global_batch": 1, "micro_batch": 1, "sequence_length": 1, "accumulate": 1,
                    "seed": 0, "warmup": 0, "save_every": 1, "eval_every": 1}  # fmt: skip
        for name, smallest in at_least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise UsageError(f"--{name.replace('_', '-')} is {value}: it must be at least {smallest}")
        if not 0 < self.learning_rate < math.inf or not self.clip > 0:
            raise UsageError(f"--lr ({self.learning_rate}) and --clip ({self.clip}) must be positive")
        if self.length > MAX_POSITIONS:
            raise UsageError(f"--sequence-length is {self.length}: the models read at most {MAX_POSITIONS} tokens")
        if self.global_batch is not None and self.batch is not None:
            raise UsageError("--batch (samples per rank) and --global-batch (over all ranks) exclude one another")
        if self.micro_batch is not None and self.accumulate > 1:
            raise UsageError("--micro-batch and --accumulate exclude one another: each says how large a micro-batch is")
        if self.global_batch is None and self.samples % self.accumulate:
            raise UsageError(
                f"--accumulate {self.accumulate} does not divide the {self.samples} samples that each rank has per step"
            )
        if self.unguarded and self.save_every is not None:
            raise UsageError("--unguarded writes no checkpoints, since nothing could certify them: drop --save-every")

    @property
    def samples(self) -> int:
        """Samples per rank and step, where no global batch is given."""
        return self.batch if self.batch is not None else preset(self.preset).samples_per_rank

    def shared_out(self, ranks: int, earlier: Mapping[str, Any] | None) -> Options:
        """The same with the global batch and the micro-batch as numbers, so that they hold on any number of ranks.

        Args:
            earlier: the options of the start that this one goes on from: what is not said anew is as it was there.
        """
        was = earlier or {}
        total = self.global_batch or was.get("global_batch") or self.samples * ranks
        largest_share = math.ceil(total / ranks)
        micro_batch = self.micro_batch or was.get("micro_batch") or math.ceil(largest_share / self.accumulate)
        return replace(self, batch=None, global_batch=total, micro_batch=micro_batch, accumulate=1)

    def overruled_by(self, shared: Options, ranks: int) -> str:
        """What ``--batch`` or ``--accumulate`` asks for and is not done, since the run goes on as it began; "" if nothing.

        Args:
            shared: these options, :meth:`shared_out` over ``ranks``.
        """
        total, size = shared.global_batch or 0, shared.micro_batch
        told: list[str] = []
        if self.batch is not None and self.batch * ranks != total:
            told.append(
                f"{total} samples per step (--batch {self.batch} on {ranks} ranks would be {self.batch * ranks})"
            )
        if self.accumulate > 1 and (asked := math.ceil(math.ceil(total / ranks) / self.accumulate)) != size:
            told.append(f"micro-batches of {size} (--accumulate {self.accumulate} would make them {asked})")
        return f"the run goes on as it began, with {' and '.join(told)}" if told else ""

    @property
    def length(self) -> int:
        """Tokens per sample."""
        return self.sequence_length if self.sequence_length is not None else preset(self.preset).sequence_length

    def update_config(self) -> UpdateConfig | None:
        """Raises UsageError where the rule or the sensitivity is none that there is."""
        if self.update_rule == "off":
            if self.sensitivity is not None:
                raise UsageError("--sensitivity needs an --update-rule that it is the sensitivity of")
            return None
        chosen: Any = self.sensitivity
        with contextlib.suppress(TypeError, ValueError):  # else the name of a preset, or nothing
            chosen = float(chosen)
        return UpdateConfig(rule=self.update_rule, sensitivity=chosen)  # pyright: ignore[reportArgumentType]

    @property
    def checkpoints(self) -> Path:
        return self.out / CHECKPOINTS


def options_to_json(options: Options) -> dict[str, Any]:
    """Plain values; the path of the text is made absolute."""
    data = None if options.data is None else options.data.resolve()
    return plain(asdict(replace(options, data=data)))


def options_from_json(record: Mapping[str, Any]) -> Options:
    """The inverse of :func:`options_to_json`; what this version does not know is left out.

    Raises:
        UsageError: the values are none that ``unsilent train`` takes.
    """
    known = {field.name for field in fields(Options)}
    values = {key: value for key, value in record.items() if key in known}
    paths = {key: Path(values[key]) for key in ("out", "data", "ledger") if values.get(key) is not None}
    try:
        return Options(**{**values, **paths, "clip": float(values["clip"])})  # JSON has no infinity: it is a word there
    except (KeyError, TypeError) as error:
        raise UsageError(f"the run was not started with options that are understood here: {error}") from error


@dataclass(kw_only=True)
class Result:
    """How a run ended, for people and for ``--json``; rank 0's is printed."""

    exit_code: int = 0
    guarded: bool = True
    world_size: int = 1
    nodes: list[str] = field(default_factory=list[str])
    steps: int = 0
    resumed_from: int | None = None
    loss: float | None = None
    evaluation_loss: float | None = None
    weights_sha256: str = ""
    checks: dict[str, int] = field(default_factory=dict[str, int])
    verdicts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    faults: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    seconds: float = 0.0


class Injects(Protocol):
    """One fault of ``--fault``, put into the run by the lab."""

    fired: int

    @property
    def fault(self) -> Any: ...
    def begin_step(self, step: int) -> None: ...
    def after_update(self, step: int) -> None: ...
    def close(self) -> None: ...


class Inject(Protocol):
    """Puts the faults into a model; ``replaying`` tells whether the guard is replaying at that moment."""

    def __call__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        rank: int,
        world_size: int,
        node: str,
        replaying: Callable[[], bool],
    ) -> Sequence[Injects]: ...


def run(
    out: Path, make_options: Callable[[], Options], read_faults: Callable[[], Inject] | None, *, as_json: bool
) -> int:
    """The command on one rank: train, put the outcome on disk, say it once. Returns the exit code of this rank."""
    trainer: Trainer | None = None
    ranks: Ranks | None = None
    try:
        _make(out)
        ranks = ranks_from_environment()
        if ranks.rank == 0:
            forget_last_run(out)
        options = make_options()
        inject = None if read_faults is None else read_faults()
        trainer = Trainer(options, ranks, inject)
        result = trainer.run()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the outcome is on disk before this rank leaves
        code, speaks = record_error(
            out,
            error,
            rank=0 if ranks is None else ranks.rank,
            step=0 if trainer is None else trainer.steps,
            met=trainer is not None and trainer.met,
        )
        if speaks:
            say_error(error)
        if speaks and as_json:
            show(json.dumps(error_record(error, code)), out=True)
        return code
    if ranks.rank == 0:
        show(_last_line(result), out=True)
        if as_json:
            show(json.dumps(plain(asdict(result))), out=True)
    return result.exit_code


def leave(code: int) -> NoReturn:
    """Ranks of a job go without Python's own exit: gloo with DDP aborts there in about one run of eight."""
    said = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            said = False  # nobody listens any more: Python's own exit would make that a code of its own
    if not said or (dist.is_available() and dist.is_initialized()):
        os._exit(code)
    sys.exit(code)


class Trainer:
    """One rank of a training run.

    Attributes:
        met: the ranks have met.
        steps: updates completed.
    """

    def __init__(self, options: Options, ranks: Ranks, inject: Inject | None) -> None:
        self.options, self.ranks, self.inject = options, ranks, inject
        self.met = False
        self.result = Result(guarded=not options.unguarded, world_size=ranks.size)
        self._steps = 0
        self._guard: Guard | None = None
        self._injectors: Sequence[Injects] = ()
        self._overruled = ""

    @property
    def steps(self) -> int:
        return self._steps if self._guard is None else self._guard.steps

    def run(self) -> Result:
        """The whole run.

        Raises:
            UsageError, CheckpointError, CorruptionError, RankFailure: as the guard and the checkpoints do.
        """
        begin = time.monotonic()
        node = self._node()
        join(self.ranks)
        self.met = True
        self._build()
        self._put_faults_in(node)
        with self._guarded(node):
            self._resume()
            loss = self._train()
            self._close()
        self._sum_up(loss)
        self.result.seconds = round(time.monotonic() - begin, 3)
        return self.result

    # ---- before the first step ---------------------------------------------------------------------------------------

    def _node(self) -> str:
        options, ranks = self.options, self.ranks
        node = node_of(ranks.rank, name=options.node, imitated=options.nodes_imitated)
        excluded = excluded_nodes(options.out)
        if node in excluded:
            raise UsageError(
                f"{node} is to be left out, says {options.out}/exclude.json ({excluded[node]}): start without it"
            )
        return node

    def _build(self) -> None:
        ranks = self.ranks
        asked = self.options
        self.options = options = asked.shared_out(ranks.size, self._earlier())
        self._overruled = asked.overruled_by(options, ranks.size)
        torch.manual_seed(options.seed)
        text = standard_library_text() if options.data is None else file_text(options.data)
        self.data = TextData(
            text,
            sequence_length=options.length,
            global_batch=options.global_batch or ranks.size,
            world_size=ranks.size,
            seed=options.seed,
        )
        self.inner = build_model(preset(options.preset), seed=options.seed, device=ranks.device)
        self.model: nn.Module = self.inner
        if ranks.size > 1:
            own = [ranks.device.index] if ranks.device.type == "cuda" else None
            self.model = DistributedDataParallel(self.inner, device_ids=own)
        self.loss_fn = make_loss_fn(bf16=options.bf16)
        self.optimizer = torch.optim.AdamW(self.inner.parameters(), lr=options.learning_rate)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)

    def _earlier(self) -> dict[str, Any] | None:
        """The options of the start that this one goes on from, None where the run begins anew; rank 0 looks."""
        options = self.options
        found: list[Any] = [None]
        if self.ranks.rank == 0 and options.resume and not options.unguarded:
            certified = any(saved.status is Status.CERTIFIED for saved in checkpoints_in(options.checkpoints))
            starts = read_starts(options.out) if certified or excluded_nodes(options.out) else []
            found = [starts[-1].get("options") if starts else None]
        if self.ranks.size > 1:
            dist.broadcast_object_list(found, src=0, device=self.ranks.device)
        return found[0]

    def _rate(self, step: int) -> float:
        return rate(step, warmup=self.options.warmup, steps=self.options.steps)

    def _put_faults_in(self, node: str) -> None:
        if self.inject is not None:
            self._injectors = self.inject(
                self.inner,
                self.optimizer,
                rank=self.ranks.rank,
                world_size=self.ranks.size,
                node=node,
                replaying=lambda: self._guard is not None and self._guard.replayer.running,
            )

    def _guarded(self, node: str) -> contextlib.AbstractContextManager[Any]:
        options = self.options
        if options.unguarded:
            self.result.nodes = [node]
            return contextlib.nullcontext()
        config = GuardConfig(
            mode=options.mode,  # pyright: ignore[reportArgumentType] - GuardConfig refuses what it does not know
            quarantine=options.quarantine,  # pyright: ignore[reportArgumentType]
            audit_every=options.audit_every,
            replicas_every=options.replicas_every,
            save_every=options.save_every,
            total_steps=options.steps,
            directory=options.out,
            evidence=options.evidence,  # pyright: ignore[reportArgumentType]
            ledger=options.ledger,
            node=node,
            require_localization=options.require_localization,
            update=options.update_config(),
        )
        self._guard = Guard(
            self.model,
            self.optimizer,
            self.loss_fn,
            scheduler=self.scheduler,
            clip_norm=options.clip,
            config=config,
        )
        self.result.nodes = list(self._guard.world.nodes)
        if self.ranks.rank == 0:
            add_start(options.out, self._start(self._guard))
        return self._guard

    def _start(self, guard: Guard) -> dict[str, Any]:
        """How this start was made, so that ``unsilent recheck`` and ``unsilent replay`` can make it again."""
        return {
            "run": guard.journal.run_id,
            "command": "train",
            "options": options_to_json(self.options),
            "data_sha256": self.data.digest,
            "world_size": self.ranks.size,
            "environment": asdict(guard.world.environment),
        }

    def _resume(self) -> None:
        """Load the newest certified checkpoint that verifies. Candidates are passed over: nothing vouches for them.

        Raises:
            CheckpointError: there are certified ones, and none of them verifies; to begin anew would hide that.
        """
        guard, root = self._guard, self.options.checkpoints
        if guard is None or not self.options.resume:
            return
        saved = checkpoints_in(root) if self.ranks.rank == 0 else []
        saved = guard.world.gather(saved, step=0, tag=3)[0]
        if any(one.status is Status.CERTIFIED for one in saved):
            self.result.resumed_from = guard.load(root, certified=True)
            self._notice(f"resumed from {root}: {guard.steps} steps are done")
        elif saved:
            self._notice(f"{root} holds no certified checkpoint: the run begins at step 0")
        if self._overruled:
            self._notice(self._overruled)
        size, total = self.options.micro_batch or self.data.global_batch, self.data.global_batch
        if not self.data.divides_into(size):
            shares = ", ".join(str(self.data.count(rank)) for rank in range(self.ranks.size))
            self._notice(f"{total} samples per step do not divide evenly over the ranks ({shares}): each counts alike")

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _train(self) -> torch.Tensor | None:
        """All steps that are left; the loss of the last one on this rank."""
        options, alarms = self.options, 0
        loss: torch.Tensor | None = None
        with Screen(rank=self.ranks.rank, total=options.steps, done=self.steps) as screen:
            while self.steps < options.steps:
                step = self.steps
                for injector in self._injectors:
                    injector.begin_step(step)
                outcome = self._step(step)
                for injector in self._injectors:
                    injector.after_update(step)
                loss, alarms = outcome.loss, alarms + (outcome.verdict is not None)
                self._save()
                screen.step(self.steps, loss, checks=sum(self._checks().values()), alarms=alarms)
                if options.eval_every is not None and self.steps % options.eval_every == 0 and self.ranks.rank == 0:
                    screen.say(f"step {self.steps}: evaluation loss {self._evaluate():.4f}")
        return loss

    def _step(self, step: int) -> Outcome:
        size = self.options.micro_batch or self.data.global_batch
        parts = list(self.data.batch(step, self.ranks.rank).to(self.ranks.device).split(size))
        # Where all ranks have the same, each part counts alike and nothing needs to be agreed on.
        samples = None if self.data.divides_into(size) else [len(part) for part in parts]
        if self._guard is not None:
            return self._guard.step(micro_batches=parts, samples=samples)
        return self._plain_step(step, parts, samples)

    def _plain_step(self, step: int, parts: list[torch.Tensor], samples: list[int] | None) -> Outcome:
        """What a step is without a guard; a guarded one without a fault gives the same bits."""
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        weights: list[float | None] = [None] * len(parts)
        if samples is not None:
            weights = [n * self.ranks.size / self.data.global_batch for n in samples]
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            ddp = self.model if isinstance(self.model, DistributedDataParallel) and not last else None
            with contextlib.nullcontext() if ddp is None else ddp.no_sync():
                loss = self.loss_fn(self.model, part)
                losses.append(loss.detach())
                share_of(loss, weight=weights[i], divide_by=len(parts)).backward()
        nn.utils.clip_grad_norm_(self.inner.parameters(), self.options.clip)
        self.optimizer.step()
        self.scheduler.step()
        self._steps += 1
        return Outcome(loss=mean_loss(losses, weights), step=step, action=Action.CONTINUE)

    def _save(self) -> None:
        every = self.options.save_every
        if self._guard is None or every is None:
            return
        if self.steps % every == 0 or self.steps == self.options.steps:
            self._guard.save(self.options.checkpoints)

    @torch.no_grad()
    def _evaluate(self) -> float:
        """Mean loss over samples that are never trained on."""
        self.inner.eval()
        try:
            batch = self.data.evaluation_batch().to(self.ranks.device)
            parts = batch.split(self.options.micro_batch or len(batch))
            return sum(float(self.loss_fn(self.inner, part)) * len(part) for part in parts) / len(batch)
        finally:
            self.inner.train()

    # ---- after the last step -----------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Leave together, with exit.json on disk."""
        for injector in self._injectors:
            injector.close()
        self._count_faults()
        if self._guard is not None:
            self._guard.close()
            return
        if self.ranks.rank == 0:
            write_exit(self.options.out, 0, self.steps)
        if self.ranks.size > 1:
            dist.barrier()

    def _count_faults(self) -> None:
        """A fault that touched no value tests nothing, so nobody may take the run for a test."""
        fired = self._over_ranks([float(injector.fired) for injector in self._injectors])
        for injector, count in zip(self._injectors, fired, strict=True):
            fault = injector.fault
            self.result.faults.append({**fault.to_json(), "fired": int(count)})
            if count == 0:
                self._notice(f"the fault never fired: {fault.describe()}")

    def _sum_up(self, loss: torch.Tensor | None) -> None:
        result = self.result
        result.steps, result.checks = self.steps, self._checks()
        if loss is not None:
            share = self.data.count(self.ranks.rank) / self.data.global_batch
            result.loss = self._over_ranks([float(loss) * share])[0]
        if self.ranks.rank == 0:
            result.evaluation_loss = self._evaluate()
            result.weights_sha256 = weights_sha256(self.inner)
            result.verdicts = [] if self._guard is None else _verdicts(self.options.out)

    def _checks(self) -> dict[str, int]:
        return {} if self._guard is None else self._guard.counts

    def _over_ranks(self, values: list[float]) -> list[float]:
        """The sum over ranks of each value."""
        if self.ranks.size == 1 or not values:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.ranks.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def _notice(self, text: str) -> None:
        if self._guard is not None:
            self._guard.journal.write("notice", self.steps, text=text)
            self._guard.journal.say(text)
        elif self.ranks.rank == 0:
            show(f"unsilent: {text}")


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the run directory {out}: {error.strerror or error}") from error


def _verdicts(out: Path) -> list[dict[str, Any]]:
    """The verdicts of this start, from the run's own log: the saves' and the last vote's are among them."""
    try:
        events = read(out).events
    except UsageError:  # the disk would not take the log: the guard has said so
        return []
    first = max((i for i, e in enumerate(events) if e.kind == "run_started"), default=0)
    return [
        {
            **e.fields["verdict"],
            "action": e.fields.get("action"),
            "would": e.fields.get("would"),
        }
        for e in events[first:]
        if e.kind == "verdict"
    ]


def _last_line(result: Result) -> str:
    loss = "none (nothing was left to train)" if result.loss is None else f"{result.loss:.6f}"
    ran = ", ".join(f"{name} {count}" for name, count in result.checks.items())
    checks = f"{sum(result.checks.values())} checks ({ran})" if result.guarded else "unguarded"
    found = "; ".join(_words(v) for v in result.verdicts) or "none"
    return (
        f"unsilent: {result.steps} steps, loss {loss}, evaluation loss {result.evaluation_loss:.6f}, {checks}, "
        f"verdicts: {found}, weights SHA-256 {result.weights_sha256}"
    )


def _words(verdict: dict[str, Any]) -> str:
    who = ", ".join(f"rank {s['rank']} on {s['node']}" for s in verdict["suspects"] if s.get("rank") is not None)
    return f"step {verdict['step']} {verdict['kind']} {verdict['site']} ({who or 'nobody named'}) {verdict['action']}"
