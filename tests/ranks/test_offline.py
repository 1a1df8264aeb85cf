"""Questions after the fact, about runs on 3 and 4 ranks: ``unsilent replay`` of a finding, ``unsilent recheck`` of steps.

Faults go into real tensors; neither command is told of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import offline_job, train_job
from unsilent.bundle import read
from unsilent.events import read_starts
from unsilent.lab.pool import RankPool
from unsilent.offline import recheck
from unsilent.offline.prints import starts_of

ROOT = Path(__file__).parents[2]
PATIENCE = 280.0  # s; the first work of a new process compiles and imports a lot, and machines may be busy
SMALL = ["--batch", "2", "--sequence-length", "16", "--accumulate", "2", "--steps", "12", "--save-every", "4"]
UNSEEN = """
site = "forward"
pattern = "relative"
relative = 0.5
target = "model.layers.2.self_attn.o_proj"
rank = 2
step = 6
"""


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def command(*words: object) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of a command in a process of its own."""
    line = [sys.executable, "-m", "unsilent", *(str(word) for word in words), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT, timeout=240)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def bundles_with_work(out: Path) -> list[Path]:
    found = [path for path in sorted((out / "evidence").iterdir()) if (path / "work.pt").is_file()]
    assert found
    return found


# ---- replay ----------------------------------------------------------------------------------------------------------


def test_a_transient_does_not_come_out_again(pool3: RankPool, tmp_path: Path) -> None:
    """Dropout, batch norm, two micro-batches and a loss scaler: all of that is in the bundle."""
    results = pool3.results(offline_job.train, tmp_path, offline_job.ONCE, timeout=PATIENCE)
    assert results[0] == (["2 TRANSIENT REPAIR"], 0) and results[2][1] == 1
    (first, *_) = bundles_with_work(tmp_path)
    code, record = command("replay", first, "--entry", "tests.ranks.offline_job:make")
    assert (code, record["outcome"], record["auditee"]) == (0, "as replayed", 2), record
    recorded = next(e["digest"] for e in record["executions"] if e["recorded"])
    assert record["reruns"] == [record["agreed"]] * 2
    assert recorded not in record["reruns"]


def test_a_machine_with_the_same_defect_gives_the_recorded_value(pool4: RankPool, tmp_path: Path) -> None:
    pool4.results(offline_job.train, tmp_path, offline_job.STUCK, timeout=PATIENCE)
    own = next(path for path in bundles_with_work(tmp_path) if read(path).auditee == 2 and read(path).reading)
    code, record = command("replay", own, "--entry", "tests.ranks.offline_job:make_sick")
    assert (code, record["outcome"]) == (10, "as recorded"), record
    assert record["differs_from_recorded"] == []
    code, record = command("replay", own, "--entry", "tests.ranks.offline_job:make")
    assert (code, record["outcome"]) == (0, "as replayed"), record
    assert any(name.startswith("gradient.first") for name in record["differs_from_recorded"])


def test_a_finding_of_unsilent_train_needs_no_entry(pool3: RankPool, tmp_path: Path) -> None:
    fault = tmp_path / "fault.toml"
    fault.write_text(UNSEEN.replace("step = 6", "step = 3"))
    words = [*SMALL, "--steps", "4", "--evidence", "full", "--nodes-imitated", "3", "--fault", str(fault), "--bf16"]
    result = pool3.results(train_job.train, tmp_path / "run", words, timeout=PATIENCE)[0]
    assert result is not None
    assert [verdict["kind"] for verdict in result["verdicts"]] == ["TRANSIENT"]
    code, record = command("replay", bundles_with_work(tmp_path / "run")[0])
    assert (code, record["outcome"], record["step"]) == (0, "as replayed", 3), record


# ---- recheck ---------------------------------------------------------------------------------------------------------


def recheck_here(rank: int, size: int, checkpoint: Path, steps: str, run: Path, out: Path) -> dict[str, Any]:
    """The command on the ranks of a pool; rank 0's record."""
    here = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in here.items()})
    try:
        code = recheck.on_ranks(recheck.plan(checkpoint, steps, run, out), out, as_json=False)
    finally:
        for name in here:
            del os.environ[name]
    record = json.loads((out / "recheck.json").read_text()) if rank == 0 else {}
    assert code in (0, record.get("exit_code", code))
    return record


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.fixture(scope="module")
def ranks(pool3: RankPool) -> RankPool:
    """Reruns of a stretch do not depend on the number of ranks; a replay of a finding is tried at 4 as well."""
    return pool3


@pytest.fixture(scope="module")
def clean(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Votes every other step, audits when saving: those steps run with other kernels."""
    out = tmp_path_factory.mktemp("clean")
    ranks.results(train_job.train, out, [*SMALL, "--replicas-every", "2"], timeout=PATIENCE)
    return out


@pytest.fixture(scope="module")
def wrong(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One wrong activation in step 6, and nobody looks."""
    out = tmp_path_factory.mktemp("wrong")
    (out / "fault.toml").write_text(UNSEEN)
    words = [*SMALL, "--audit-every", "0", "--replicas-every", "2", "--fault", str(out / "fault.toml")]
    result = ranks.results(train_job.train, out, words, timeout=PATIENCE)[0]
    assert result is not None
    assert result["verdicts"] == [] and result["faults"][0]["fired"] == 1
    return out


def step(run: Path, steps: int) -> Path:
    return run / "checkpoints" / f"step-{steps:08}"


@pytest.mark.parametrize("begin", [4, 8])
def test_a_clean_stretch_comes_out_the_same(ranks: RankPool, clean: Path, tmp_path: Path, begin: int) -> None:
    """Bit for bit, in a fresh process: in the run's own layout of buckets, from its checkpoint."""
    before = contents(clean)
    record = ranks.results(recheck_here, step(clean, begin), f"{begin}..11", clean, tmp_path)[0]
    assert (record["exit_code"], record["outcome"]) == (0, "same"), record
    assert record["reruns"] == 1
    # Of each step there are votes on the way; 12 is the one when saving.
    assert set(record["compared_after"]) >= {begin, 10, 12}
    assert contents(clean) == before


def test_a_fault_that_no_check_looked_at_is_found(ranks: RankPool, wrong: Path, tmp_path: Path) -> None:
    record = ranks.results(recheck_here, step(wrong, 4), "4..11", wrong, tmp_path)[0]
    assert (record["exit_code"], record["outcome"], record["reruns"]) == (10, "different", 2), record
    first, last = record["first_difference"]["steps"]
    assert first <= 6 <= last <= first + 1
    assert "two reruns agree with each other" in record["reason"]


def test_what_came_after_the_fault_comes_out_the_same_from_there(ranks: RankPool, wrong: Path, tmp_path: Path) -> None:
    """The later steps were computed rightly, from a state that was wrong already."""
    record = ranks.results(recheck_here, step(wrong, 8), "8..11", wrong, tmp_path)[0]
    assert (record["exit_code"], record["outcome"]) == (0, "same"), record


def test_a_run_that_was_resumed_is_rerun_as_it_was(ranks: RankPool, clean: Path, tmp_path: Path) -> None:
    """Its first step reduced in the layout of a fresh DDP object, and so does the rerun's."""
    run = tmp_path / "run"
    shutil.copytree(clean, run)
    for steps in (8, 12):
        shutil.rmtree(step(run, steps))
    ranks.results(train_job.train, run, [*SMALL, "--replicas-every", "2"])
    assert len(read_starts(run)) == 2
    record = ranks.results(recheck_here, step(run, 4), "4..11", run, tmp_path / "out")[0]
    assert record["start"] == read_starts(run)[1]["run"]
    assert (record["exit_code"], record["outcome"]) == (0, "same"), record


def test_a_checkpoint_of_another_run_is_refused(ranks: RankPool, clean: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(clean, run)
    log = run / "events.jsonl"
    after_4 = next(one.states[4]["weights"] for one in starts_of(recheck.read(run).events))
    log.write_text(log.read_text().replace(after_4, "0" * 16))
    record = ranks.results(recheck_here, step(run, 4), "4..11", run, tmp_path / "out")[0]
    assert record["exit_code"] == 13
    assert "it is of another run" in record["error"]


def test_a_damaged_checkpoint_is_refused(pool3: RankPool, clean: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(clean, run)
    file = next(path for path in step(run, 4).iterdir() if path.suffix == ".distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    record = pool3.results(recheck_here, step(run, 4), "4..11", run, tmp_path / "out")[0]
    assert record["exit_code"] == 13


def test_the_command_starts_the_ranks_itself(wrong: Path, tmp_path: Path) -> None:
    """As a person calls it; torchrun is started underneath, with as many ranks as the run had."""
    code, record = command("recheck", "--from", step(wrong, 4), "--steps", "4..11", "--out", tmp_path)
    assert (code, record["outcome"]) == (10, "different"), record
    assert json.loads((tmp_path / "exit.json").read_text())["exit_code"] == 10
