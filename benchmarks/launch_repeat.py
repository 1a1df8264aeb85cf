"""Launches a run with a bad node again and again: four imitated nodes, a stuck lane on node-2, `unsilent launch`.

Every run must end by itself with exit code 0 and at the last step: on the three nodes that are left, or on four where a
spare waits. About a minute for each on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from unsilent.events import excluded_nodes, read_exit
from unsilent.ledger import read_directory

STEPS = 6
TRAIN = ["--batch", "2", "--sequence-length", "16", "--steps", str(STEPS), "--save-every", "2"]
STUCK = """
site = "forward"
pattern = "stuck_lane"
target = "model.layers.0.mlp"
node = "node-2"
from_step = 3
"""
BAD = "node-2"
KINDS = {
    "left": ([], ["node-0", "node-1", "node-3"]),
    "spare": (["--spares", "1"], ["node-0", "node-1", "node-4", "node-3"]),
}


class Launched:
    """How one launch ended, and what each start of the run has said about itself."""

    def __init__(self, out: Path, *, options: list[str], fault: str | None = STUCK, timeout: float = 1800) -> None:
        self.out = out
        out.mkdir(parents=True)
        train = ["-m", "unsilent", "train", *TRAIN, "--quarantine", "auto", "--json", "--ledger", str(out / "ledger")]
        if fault is not None:
            (out / "fault.toml").write_text(fault)
            train += ["--fault", str(out / "fault.toml")]
        command = [sys.executable, "-m", "unsilent", "launch", *options, "--", *train, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
        self.code, self.everything = done.returncode, done.stdout + done.stderr
        assert (out / "launch.json").is_file(), self.everything
        self.attempts: list[dict[str, Any]] = json.loads((out / "launch.json").read_text())["attempts"]

    def result(self, attempt: int) -> dict[str, Any]:
        """What rank 0 has printed with ``--json``."""
        made = self.attempts[attempt]
        lines = (Path(made["logs"]) / f"{made['nodes'][0]}.log").read_text().splitlines()
        return json.loads(next(line for line in lines if line.startswith("{")))

    def problems(self, clean: dict[str, Any], last_nodes: list[str]) -> list[str]:
        """What is not as it must be; the loss must be that of the clean run on four nodes, since the samples are."""
        found: list[str] = []

        def must(true: bool, problem: str) -> None:
            if not true:
                found.append(problem)

        must(self.code == 0, f"the launch ended with {self.code}")
        must([a["exit_code"] for a in self.attempts] == [11, 0], f"attempts: {[a['decision'] for a in self.attempts]}")
        must(self.attempts[-1]["nodes"] == last_nodes, f"it ended on {self.attempts[-1]['nodes']}")
        must(list(excluded_nodes(self.out)) == [BAD], f"exclude.json names {list(excluded_nodes(self.out))}")
        must((read_exit(self.out) or {}).get("step") == STEPS, f"exit.json says {read_exit(self.out)}")
        if found:
            return found
        outcome, result = self.attempts[0]["outcome"], self.result(1)
        must([s["node"] for s in outcome["verdict"]["suspects"]] == [BAD], f"suspects {outcome['verdict']['suspects']}")
        must(f"step-{result['resumed_from']:08d}" == Path(outcome["resume_from"]).name, "it resumed from elsewhere")
        must(sorted(result["nodes"]) == sorted(last_nodes), f"the run itself names {result['nodes']}")
        must(not result["verdicts"] and not result["faults"][0]["fired"], "the fault has followed to another node")
        for what in ("loss", "evaluation_loss"):
            near = abs(result[what] - clean[what]) <= 1e-4 * abs(clean[what])
            must(near, f"{what} is {result[what]}, and {clean[what]} without a fault")
        runs = read_directory(self.out / "ledger").runs
        must(
            [r.exit_code for r in runs] == [11, 0], f"the ledger has runs that ended with {[r.exit_code for r in runs]}"
        )
        named = {d.node for r in runs for f in r.found for d in f.devices}
        must(named == {BAD}, f"the ledger names {sorted(named)}")
        return found


def repeat(out: Path, *, times: int, kinds: list[str]) -> dict[str, Any]:
    """All runs, one after another; their directories are under ``out``."""
    work = out / "runs"
    shutil.rmtree(work, ignore_errors=True)
    clean_run = Launched(work / "clean", options=["--nodes", "4"], fault=None)
    assert clean_run.code == 0, clean_run.everything
    clean = clean_run.result(0)
    rows: list[dict[str, Any]] = []
    record: dict[str, Any] = {
        "command": f"python benchmarks/launch_repeat.py --times {times}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"architecture": platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "steps": STEPS,
        "clean": {key: clean[key] for key in ("loss", "evaluation_loss")},
        "runs": rows,
    }
    for i in range(times):
        for kind in kinds:
            options, last_nodes = KINDS[kind]
            run = Launched(work / f"{kind}-{i}", options=["--nodes", "4", *options])
            problems = run.problems(clean, last_nodes)
            row: dict[str, Any] = {"kind": kind, "run": i, "exit_code": run.code, "problems": problems}
            row["seconds"] = [attempt["seconds"] for attempt in run.attempts]
            if not problems:
                row |= {key: run.result(1)[key] for key in ("loss", "evaluation_loss", "resumed_from")}
                shutil.rmtree(run.out)
            rows.append(row)
            (out / "launch.json").write_text(json.dumps(record, indent=2) + "\n")  # what is done is done
            print(
                f"{kind} {i + 1} of {times}: {'; '.join(problems) or 'as it must be'}, {row['seconds']} s", flush=True
            )
    return record


def page(record: dict[str, Any]) -> str:
    """The record for people."""
    machine, versions = record["machine"], record["versions"]
    lines = [
        "# Restart without a bad node",
        "",
        f"Command: `{record['command']}`. {record['date']}, torch {versions['torch']}, Python {versions['python']}, "
        f"{machine['architecture']}, {machine['cores']} cores, gloo. Other work ran on the machine, so that the seconds "
        "are upper bounds.",
        "",
        "Four imitated nodes on one machine, one rank each, under `unsilent launch`; a stuck lane on node-2 from step 3 "
        f"on; {record['steps']} steps, a checkpoint every 2. A run is right when it ends by itself with exit code 0 at the "
        "last step on the right nodes, resumed from the checkpoint that the verdict named; when `exclude.json` and the "
        "ledger name node-2 and nobody else; and when loss and evaluation loss at the end are, within 1e-4, those of a "
        "run without a fault on four nodes.",
        "",
        "| after the restart | runs | right | seconds until node-2 was out | seconds of the second start | evaluation loss |",
        "|---|---|---|---|---|---|",
    ]
    words = {"left": "on the 3 nodes that are left", "spare": "on 4 nodes, with a spare"}
    for kind in KINDS:
        rows = [row for row in record["runs"] if row["kind"] == kind]
        if not rows:
            continue
        right = [row for row in rows if not row["problems"]]
        before, after = ([row["seconds"][i] for row in right] for i in (0, 1))
        losses = sorted({round(row["evaluation_loss"], 6) for row in right})
        lines.append(
            f"| {words[kind]} | {len(rows)} | {len(right)} | {_median(before)} | {_median(after)} "
            f"| {', '.join(f'{loss:.6f}' for loss in losses)} |"
        )
    lines += ["", f"Without a fault, on four nodes: evaluation loss {record['clean']['evaluation_loss']:.6f}.", ""]
    wrong = [
        f"- {row['kind']}, run {row['run']}: {'; '.join(row['problems'])}" for row in record["runs"] if row["problems"]
    ]
    return "\n".join([*lines, *wrong, *([""] if wrong else [])])


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})" if values else "-"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="runs of each kind")
    parser.add_argument("--out", type=Path, default=Path("out/launch"))
    parser.add_argument("--quick", action="store_true", help="one run, without a spare")
    options = parser.parse_args(arguments)
    times, kinds = (1, ["left"]) if options.quick else (options.times, list(KINDS))
    record = repeat(options.out, times=times, kinds=kinds)
    (options.out / "launch.md").write_text(page(record))
    print(page(record))
    return 0 if not any(row["problems"] for row in record["runs"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
