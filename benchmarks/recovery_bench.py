"""Seconds that each action of the ladder loses, against rolling the whole run back to the last checkpoint; in one run.

Every round, on the same ranks, with a guard of its own on the same model, has clean steps of each kind, one fault for
each of REPAIR, RECOMPUTE, HEAL and ROLLBACK, and the baseline. What an action loses is the time of its step less the
median of clean steps of that kind: finding out, acting and looking again are all in it. REPAIR is the progressive
recovery: only the faulty rank's share is computed anew, the others wait.

The baseline is really done: the run saves, goes on for half a checkpoint interval (what is lost on average), stops,
loads the checkpoint and runs those steps again. What is left out favours the baseline: no process is started anew, and
what the fault did before the alarm is not counted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from unsilent.lab.pool import RankPool

#: what is done in the first steps of a round: (forced checks, fault of this step, action that must follow)
PLAN: tuple[tuple[bool, str, str], ...] = (
    (True, "", ""), (True, "", ""), (False, "", ""), (True, "", ""), (False, "", ""),
    (True, "wrong gradient", "REPAIR"), (False, "", ""), (False, "NaN in the sum", "RECOMPUTE"),
    (True, "weight flips after it", ""), (True, "", "HEAL"),
    (False, "", ""), (True, "weight flips after it", ""), *[(False, "", "")] * 9, (True, "", "ROLLBACK"), (True, "", ""),
)  # fmt: skip
ACTIONS = ("REPAIR", "RECOMPUTE", "HEAL", "ROLLBACK")
GOAL, CLAIMED = 0.95, 0.87


def rounds_of(
    rank: int, size: int, preset: str, batch: int, length: int, rounds: int, stretch: int, directory: str
) -> dict[str, Any]:
    """All rounds on one rank: (kind of step, action, seconds) of each step, and the baselines' seconds."""
    import contextlib
    import hashlib
    import io
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import unsilent
    from unsilent.events import read
    from unsilent.lab.faults import Fault
    from unsilent.lab.inject import Injector
    from unsilent.training.model import build_model, make_loss_fn
    from unsilent.training.presets import preset as preset_of

    inner = build_model(preset_of(preset), seed=0)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    steps: list[tuple[str, str, float]] = []
    baselines: list[dict[str, Any]] = []
    acting: list[tuple[str, float]] = []

    def tokens(step: int) -> torch.Tensor:
        return torch.randint(0, 256, (batch, length + 1), generator=torch.Generator().manual_seed(step * 64 + rank))

    def bits() -> str:
        state = [v for p in model.parameters() for v in (p.detach(), *optimizer.state[p].values())]
        return hashlib.sha256(b"".join(v.contiguous().numpy().tobytes() for v in state)).hexdigest()

    def timed(work: Any) -> tuple[Any, float]:
        dist.barrier()
        begin = time.perf_counter()
        result = work()
        dist.barrier()
        return result, time.perf_counter() - begin

    def one_round(number: int) -> None:
        run = f"{directory}/{number}"
        config = unsilent.GuardConfig(
            node=f"node-{rank}", audit_every=100_000, replicas_every=100_000, snapshot_every=10, keep_batches=10,
            directory=run,
        )  # fmt: skip
        guard = unsilent.Guard(model, optimizer, make_loss_fn(), clip_norm=1.0, config=config)
        # Each fault on another rank: a device that errs a third time in one run is taken to be broken.
        options: dict[str, Any] = {"rank": rank, "world_size": size, "replaying": lambda: guard.replayer.running}
        weight = {"site": "weight", "target": "lm_head.weight", "pattern": "bit_flip", "bit": 20}
        flips = [i for i, (_, what, _) in enumerate(PLAN) if what.startswith("weight")]
        faults = [
            Fault(site="gradient", target="lm_head.weight", pattern="scale", factor=1.5, rank=number % size,
                  step=[what for _, what, _ in PLAN].index("wrong gradient")),
            Fault(site="reduction", pattern="nan", step=[what for _, what, _ in PLAN].index("NaN in the sum")),
            *(Fault(**weight, rank=(number + 1 + i) % size, step=step) for i, step in enumerate(flips)),
        ]  # fmt: skip
        injectors = [Injector(inner, optimizer, fault, **options) for fault in faults]
        for step, (forced, _, must) in enumerate(PLAN):
            for injector in injectors:
                injector.begin_step(step)
            outcome, seconds = timed(lambda s=step, f=forced: guard.step(tokens(s), saving=f))
            action = "" if outcome.verdict is None else outcome.action.value
            assert action == must, f"step {step}: {action} and not {must}: {outcome.verdict}"
            for injector in injectors:
                injector.after_update(step)
            if step > 2:  # the first ones warm up and hold the calibration
                steps.append(("all checks" if forced else "plain", action, seconds))
        for injector in injectors:
            injector.close()
        baseline(guard, Path(run) / "checkpoints")
        guard.close()
        if rank == 0:
            acting.extend((e.fields["action"], e.fields["seconds"]) for e in read(run).events if e.kind == "action")

    def baseline(guard: unsilent.Guard, root: Path) -> None:
        at = guard.steps
        path, saving = timed(lambda: guard.save(root))
        assert path is not None
        for step in range(at, at + stretch):
            _, seconds = timed(lambda s=step: guard.step(tokens(s)))
            steps.append(("plain", "", seconds))
        before = bits()
        loaded, loading = timed(lambda: guard.load(root, certified=True))
        assert loaded == at
        again = [timed(lambda s=step: guard.step(tokens(s)))[1] for step in range(at, at + stretch)]
        baselines.append({"saving_s": saving, "loading_s": loading, "again_s": again, "same_bits": bits() == before})

    with contextlib.redirect_stderr(io.StringIO()):
        for number in range(rounds):
            one_round(number)
    return {"steps": steps, "baselines": baselines, "acting": acting}


def summary(measured: dict[str, Any], interval: int) -> dict[str, Any]:
    """Per action the seconds lost, their share of a step and of a roll-back of the whole run."""
    steps, baselines = measured["steps"], measured["baselines"]
    clean = {
        kind: statistics.median(s for k, action, s in steps if k == kind and not action)
        for kind in ("plain", "all checks")
    }
    stretch = len(baselines[0]["again_s"])
    # Steps run again are summed as they were; where fewer were run than are lost on average they are scaled up.
    scale = interval / 2 / stretch
    whole = [b["loading_s"] + scale * sum(b["again_s"]) for b in baselines]
    base = statistics.median(whole)
    actions: dict[str, Any] = {}
    for name in ACTIONS:
        lost = [s - clean[kind] for kind, action, s in steps if action == name]
        acting = [s for action, s in measured["acting"] if action == name]
        actions[name] = {
            "count": len(lost),
            "lost_s": statistics.median(lost),
            "lost_s_interval_95": _interval(lost),
            "lost_s_most": max(lost),
            "acting_s": statistics.median(acting),
            "lost_steps": statistics.median(lost) / clean["plain"],
            "less_than_rolling_back": 1 - statistics.median(lost) / base,
            "less_than_rolling_back_worst": 1 - max(lost) / min(whole),
        }
    return {
        "clean_step_s": clean,
        "whole_run_rolled_back": {
            "count": len(whole),
            "checkpoint_interval_steps": interval,
            "steps_run_again": stretch,
            "scaled_by": scale,
            "loading_s": statistics.median(b["loading_s"] for b in baselines),
            "lost_s": base,
            "lost_s_interval_95": _interval(whole),
            "same_bits_as_before": all(b["same_bits"] for b in baselines),
        },
        "actions": actions,
    }


def _interval(values: list[float]) -> list[float]:
    """Of the median, by a bootstrap."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(1000))
    return [medians[25], medians[975]]


def table(result: dict[str, Any]) -> str:
    """The page ``recovery.md``."""
    found, whole = result["summary"], result["summary"]["whole_run_rolled_back"]
    plain, checked = found["clean_step_s"]["plain"], found["clean_step_s"]["all checks"]
    scaled = (
        "nothing is scaled" if whole["scaled_by"] == 1 else f"scaled by {whole['scaled_by']:.1f} to half the interval"
    )
    lines = [
        "# Seconds lost per recovery, measured", "",
        f"Command: `{result['command']}`. {result['date']}, torch {result['torch']}, {result['machine']}; preset "
        f"`{result['preset']}` ({result['tokens_per_rank']} tokens per rank and step, AdamW, clipping). Load of the machine "
        f"while it ran: {result['load'][0]:.0f} to {result['load'][1]:.0f} on {result['cpus']} cores. Raw times: `recovery.json`.",
        "",
        f"A clean step takes {plain:.3f} s, one with all checks {checked:.3f} s (medians). Lost is the time of the step in "
        "which the fault was found less that of a clean step of its kind: finding out, acting and looking again.", "",
        "| action | count | lost, median | 95 % interval of it | most | of it acting | in plain steps | less than rolling back "
        "| worst against best |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in found["actions"].items():
        low, high = row["lost_s_interval_95"]
        lines.append(
            f"| {name} | {row['count']} | {row['lost_s']:.3f} s | {low:.3f} … {high:.3f} s | {row['lost_s_most']:.3f} s | "
            f"{row['acting_s']:.3f} s | {row['lost_steps']:.1f} | {100 * row['less_than_rolling_back']:.1f} % | "
            f"{100 * row['less_than_rolling_back_worst']:.1f} % |"
        )
    low, high = whole["lost_s_interval_95"]
    lines += [
        f"| whole run back to its checkpoint | {whole['count']} | {whole['lost_s']:.2f} s | {low:.2f} … {high:.2f} s | | | "
        f"{whole['lost_s'] / plain:.1f} | | |", "",
        f"The baseline, in the same run: a certified checkpoint every {whole['checkpoint_interval_steps']} steps, of which half "
        f"an interval is lost on average. Each time the run saved, went on, loaded the checkpoint again "
        f"({whole['loading_s']:.3f} s) and ran {whole['steps_run_again']} steps again; {scaled}. It ended with the bits that it "
        f"had before: {whole['same_bits_as_before']}. Processes were not started anew, which a real roll-back also pays for.",
        "",
        "REPAIR is the progressive recovery: the faulty rank's share alone is computed anew, by its auditor, and reduced again "
        "with what the others still have. ROLLBACK runs again the 10 steps since the copy in host memory, and the present one.",
    ]  # fmt: skip
    step_again = (whole["lost_s"] - whole["loading_s"]) / (whole["checkpoint_interval_steps"] / 2)
    repair = found["actions"]["REPAIR"]
    enough = 2 * max(0.0, repair["lost_s"] / (1 - GOAL) - whole["loading_s"]) / step_again
    met = "met" if repair["less_than_rolling_back"] >= GOAL else "not met"
    lines += [
        "",
        f"| goal | measured | |\n|---|---|---|\n| REPAIR, at least {100 * GOAL:.0f} % less than rolling the whole run back (the source "
        f"that the idea is from claims {100 * CLAIMED:.0f} %, without support) | {100 * repair['less_than_rolling_back']:.1f} % "
        f"(median) | {met} |\n| an audited transient put right in at most one step time | acting "
        f"{repair['acting_s'] / plain:.2f} steps; with the replays that find out who is wrong {repair['lost_steps']:.2f} | "
        f"{'met' if repair['lost_steps'] <= 1 else 'acting only' if repair['acting_s'] <= plain else 'not met'} |",
        "",
        f"The share depends on how much a checkpoint loses: REPAIR stays {100 * GOAL:.0f} % below the baseline where checkpoints "
        f"are {enough:.0f} steps apart or more.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--ranks", type=int, default=3, help="ranks on this machine, one thread each")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of one sample")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--interval", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--stretch", type=int, help="steps really run again; half the interval by default")
    parser.add_argument("--out", type=Path, help="write recovery.json and recovery.md into this folder")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.stretch, options.length = 1, 4, 32
    stretch = options.stretch or options.interval // 2
    load = [os.getloadavg()[0]]
    with RankPool(options.ranks) as pool, tempfile.TemporaryDirectory() as directory:
        shape = (options.preset, options.batch, options.length)
        measured = pool.results(rounds_of, *shape, options.rounds, stretch, directory, timeout=7200)[0]
    load.append(os.getloadavg()[0])
    import torch

    result = {
        "command": " ".join(["python", "benchmarks/recovery_bench.py", *(sys.argv[1:] if arguments is None else [])]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {options.ranks} gloo ranks of "
        "one thread on one machine",
        "cpus": os.cpu_count(),
        "load": sorted(load),
        "preset": options.preset,
        "tokens_per_rank": options.batch * options.length,
        "rounds": options.rounds,
        "summary": summary(measured, options.interval),
        "per_step": measured,
    }
    page = table(result)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "recovery.json").write_text(json.dumps(result) + "\n")
        (options.out / "recovery.md").write_text(page)
    print(page)
    return result


if __name__ == "__main__":
    main()
