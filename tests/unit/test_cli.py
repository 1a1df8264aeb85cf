"""The commands: what they print, what they refuse, and the codes they end with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import unsilent
from unsilent.checkpoint import CheckpointStore
from unsilent.cli import app
from unsilent.errors import CheckpointError, IntegrityLost, RankFailure, UsageError
from unsilent.events import EventLog, approved_nodes, read_exit, write_exclude, write_exit
from unsilent.execute import execute, out_of
from unsilent.inventory import Inventory
from unsilent.ledger import RunLedger
from unsilent.records import Kind, Site, Suspect, Verdict
from unsilent.training.ending import forget_last_run, record_error
from unsilent.training.loop import Options
from unsilent.training.ranks import node_of

VERDICT = Verdict(
    kind=Kind.PERSISTENT, site=Site.GRADIENT, step=7, reason="it comes back", check="audit",
    suspects=(Suspect(rank=2, node="node-2", device="cpu:0"),),
)  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "UNSILENT_NODE"):
        monkeypatch.delenv(name, raising=False)


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(result: Result, *words: str) -> None:
    """Exit code 2 and one sentence, which holds these words."""
    lines = result.stderr.splitlines()
    assert result.exit_code == 2
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("unsilent: ")
    assert all(word in lines[0] for word in words), lines[0]


def last_json(result: Result) -> dict:
    return json.loads(result.stdout.splitlines()[-1])


def run_of(directory: Path) -> Path:
    """A run that asked about node-2 and went on."""
    log = EventLog(directory, rank=0, run_id="r")
    log.write("run_started", 0, world_size=3, nodes=["node-0", "node-1", "node-2"], mode="act", quarantine="ask")
    log.write("verdict", 7, verdict=VERDICT, action="REPAIR")
    log.write("ask", 7, verdict=VERDICT, action="QUARANTINE")
    log.close()
    return directory


def checkpoints(root: Path) -> Path:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    store = CheckpointStore(root)
    for steps in (3, 6):
        store.save(Inventory(model, optimizer), steps=steps)
    return root


# ---- the door itself -------------------------------------------------------------------------------------------------


def test_a_word_that_is_no_command_or_option_is_a_usage_error() -> None:
    assert invoke("tarin").exit_code == 2
    assert invoke("train", "--stpes", 3).exit_code == 2
    assert invoke("train", "--steps", "many").exit_code == 2
    assert invoke("approve").exit_code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no"), 2),
        (CheckpointError("damaged"), 13),
        (IntegrityLost("lost", verdict=VERDICT), 10),
        (RankFailure(1, "gone"), 70),
    ],
)
def test_an_error_that_was_foreseen_is_one_sentence_and_its_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("unsilent.execute.execute", fail)
    result = invoke("exec", "--json", "--", "true")
    assert result.exit_code == code
    assert result.stderr == f"unsilent: {error}\n"
    assert last_json(result) == {"exit_code": code, "error": str(error)}


def test_an_error_that_nobody_foresaw_is_70_with_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("unsilent.execute.execute", fail)
    result = invoke("exec", "--", "true")
    assert result.exit_code == 70
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError: oh" in result.stderr


@pytest.mark.parametrize("words", [["report"], ["approve"], ["--help"]])
def test_what_only_reads_a_run_does_not_import_torch(words: list[str], tmp_path: Path) -> None:
    run = run_of(tmp_path)
    words = {"report": ["report", str(run), "--json"], "approve": ["approve", str(run), "node-2"]}.get(words[0], words)
    code = (
        "import sys\nfrom unsilent.cli import main\n"
        f"sys.argv = ['unsilent', *{words!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# ---- train: what is refused before anything starts -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--preset", "nano"], "there is no preset 'nano': one of tiny, 25m"),
        (["--steps", 0], "--steps is 0"),
        (["--batch", 3, "--accumulate", 2], "--accumulate 2 does not divide the 3 samples"),
        (["--sequence-length", 5000], "--sequence-length is 5000"),
        (["--lr", 0], "--lr (0.0)"),
        (["--unguarded", "--save-every", 3], "--unguarded writes no checkpoints"),
        (["--node", "a", "--nodes-imitated", 2], "--node and --nodes-imitated exclude one another"),
        (["--fault", "missing.toml"], "cannot read the fault file missing.toml"),
    ],
)
def test_train_refuses_in_one_sentence(words: list[object], sentence: str, tmp_path: Path) -> None:
    result = invoke("train", "--out", tmp_path, "--json", *words)
    refused(result, sentence)
    assert last_json(result)["exit_code"] == 2
    record = read_exit(tmp_path)
    assert record is not None
    assert record["exit_code"] == 2
    assert sentence in record["message"]


def test_train_refuses_an_unknown_fault_site_and_names_the_near_one(tmp_path: Path) -> None:
    fault = tmp_path / "fault.toml"
    fault.write_text("site = 'fowrard'\npattern = 'nan'\n")
    refused(invoke("train", "--out", tmp_path, "--fault", fault), "unknown site 'fowrard'", "'forward'")


def test_train_refuses_a_run_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(invoke("train", "--out", tmp_path / "file"), "cannot make the run directory")


def test_train_refuses_a_node_that_is_to_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "exclude.json").write_text('{"reasons": {"node-2": "sick"}}')
    refused(invoke("train", "--out", tmp_path, "--node", "node-2"), "node-2 is to be left out", "sick")


def test_a_node_may_be_named_by_rank_or_imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [node_of(rank, name=None, imitated=2) for rank in range(3)] == ["node-0", "node-1", "node-0"]
    assert node_of(3, name="host-{rank}", imitated=None) == "host-3"
    monkeypatch.setenv("UNSILENT_NODE", "n{rank}")
    assert node_of(1, name=None, imitated=None) == "n1"


def test_options_take_the_presets_widths() -> None:
    assert Options(out=Path("x")).samples == 4
    assert Options(out=Path("x"), preset="60m", batch=1).length == 256


def test_a_batch_that_cannot_be_sent_is_refused_before_anything_ran() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with unsilent.Guard(model, optimizer, lambda m, batch: m(batch["x"]).mean()) as guard:
        with pytest.raises(UsageError, match=r"the batch .* cannot be sent"):
            guard.step({"x": torch.ones(3, 2), "name": lambda: "no pickle"})
        assert guard.steps == 0
        assert list(guard.checks) == ["finite", "replicas", "audit"]


# ---- train: how a rank leaves ----------------------------------------------------------------------------------------


def test_the_first_rank_writes_the_outcome_and_says_it(tmp_path: Path) -> None:
    error = UsageError("no such thing")
    assert record_error(tmp_path, error, rank=1, step=0, met=False) == (2, True)
    assert record_error(tmp_path, error, rank=0, step=0, met=False) == (2, False)
    assert read_exit(tmp_path)["message"] == "no such thing"


def test_an_earlier_runs_outcome_does_not_count(tmp_path: Path) -> None:
    write_exit(tmp_path, 11, 5)
    assert record_error(tmp_path, UsageError("no"), rank=1, step=0, met=False) == (2, True)
    write_exit(tmp_path, 11, 5, attempt="process 1")
    forget_last_run(tmp_path)
    assert read_exit(tmp_path) is None


def test_what_this_run_wrote_stands(tmp_path: Path) -> None:
    write_exit(tmp_path, 11, 5)  # by the journal, after the ranks have met
    assert record_error(tmp_path, RuntimeError("later"), rank=1, step=5, met=True) == (70, True)
    assert read_exit(tmp_path)["exit_code"] == 11
    record_error(tmp_path, UsageError("mine"), rank=1, step=5, met=False)
    forget_last_run(tmp_path)  # rank 0 was slower than a rank that has failed already
    assert read_exit(tmp_path)["message"] == "mine"


def test_who_failed_knows_better_than_who_survived(tmp_path: Path) -> None:
    write_exit(tmp_path, 70, 5, rank_failure={"rank": 1, "error": "UsageError: no"})
    echo = RankFailure(1, "UsageError: no")
    assert record_error(tmp_path, echo, rank=0, step=5, met=True) == (70, False)
    assert record_error(tmp_path, UsageError("no"), rank=1, step=5, met=True) == (2, True)
    assert read_exit(tmp_path)["exit_code"] == 2


def test_an_error_after_the_end_is_not_hidden_by_a_zero(tmp_path: Path) -> None:
    write_exit(tmp_path, 0, 5)
    record_error(tmp_path, RuntimeError("at the evaluation"), rank=0, step=5, met=True)
    assert read_exit(tmp_path)["exit_code"] == 70


def test_one_survivor_says_who_failed(tmp_path: Path) -> None:
    write_exit(tmp_path, 70, 5, rank_failure={"rank": 0, "error": "gone"})
    said = [record_error(tmp_path, RankFailure(0, "gone"), rank=rank, step=5, met=True)[1] for rank in (1, 2, 3)]
    assert said == [True, False, False]


# ---- exec ------------------------------------------------------------------------------------------------------------


def python(code: str, *words: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, words)]


ENDS = "import sys; from unsilent.events import write_exit; write_exit(sys.argv[2], int(sys.argv[3]), 4); sys.exit(1)"


def test_exec_returns_the_runs_code_from_the_childs_own_out(tmp_path: Path) -> None:
    result = invoke("exec", "--json", "--", *python(ENDS, "--out", tmp_path, 11))
    assert result.exit_code == 11
    assert last_json(result)["outcome"]["step"] == 4
    assert last_json(result)["command_exit_code"] == 1
    assert invoke("exec", *python(ENDS, "--out", tmp_path, 12)).exit_code == 12  # "--" may be left out
    assert invoke("exec", "--run", tmp_path, "--", *python(ENDS, "x", tmp_path, 10)).exit_code == 10


def test_exec_does_not_take_an_earlier_runs_code(tmp_path: Path) -> None:
    write_exit(tmp_path, 11, 5)
    assert invoke("exec", "--run", tmp_path, "--", *python("raise SystemExit(3)")).exit_code == 3
    assert invoke("exec", "--", *python("raise SystemExit(4)")).exit_code == 4


def test_exec_never_turns_a_failure_into_a_zero(tmp_path: Path) -> None:
    result = invoke("exec", "--", *python(ENDS, "--out", tmp_path, 0))
    assert result.exit_code == 1
    assert "the run ended in order, but the command ended with 1" in result.stderr


def test_exec_tells_the_scheduler_only_what_it_can_read_and_keeps_the_runs_code(tmp_path: Path) -> None:
    refused(invoke("exec", "--scheduler", "kubeflow", "--", "true"), "give --run DIR")
    (tmp_path / "exclude.json").write_text("{")
    command = python(ENDS, "--out", tmp_path, 11)
    unread = invoke("exec", "--scheduler", "kubeflow", "--", *command)
    assert unread.exit_code == 11 and "exclude.json: cannot be understood" in unread.stderr
    assert "cannot be understood" not in invoke("exec", "--", *command).stderr
    (tmp_path / "exclude.json").unlink()
    write_exclude(tmp_path, ["n1"], "sick")
    assert invoke("exec", "--scheduler", "kubeflow", "--", *command).exit_code == 211


def test_a_screen_that_is_gone_does_not_change_the_code(tmp_path: Path) -> None:
    code = "from unsilent.screen import show\nfrom unsilent.training.loop import leave\nshow('y', out=True)\nleave(11)"
    with Path("/dev/full").open("w") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, check=False).returncode == 11


def test_exec_says_what_cannot_be_started() -> None:
    refused(invoke("exec", "--", "no-such-launcher"), "cannot start no-such-launcher")


def test_exec_gives_a_signals_number() -> None:
    assert execute(python("import os; os.kill(os.getpid(), 9)"), None).exit_code == 137


def test_out_is_found_in_a_command_line() -> None:
    assert out_of(["torchrun", "train", "--out", "a/b", "--steps", "3"]) == Path("a/b")
    assert out_of(["torchrun", "train", "--out=c"]) == Path("c")
    assert out_of(["torchrun", "--out"]) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_exec_passes_signals_on(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(21))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-m", "unsilent", "exec", "--", *python(code)])
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, number)
    assert process.wait(timeout=30) == 21


# ---- report, approve, verify, doctor ---------------------------------------------------------------------------------


def test_report_prints_the_run(tmp_path: Path) -> None:
    result = invoke("report", run_of(tmp_path), "--json", "--out", tmp_path / "more")
    assert result.exit_code == 0
    assert "What was found (1)" in result.stdout
    assert last_json(result)["asked"] == ["node-2"]
    assert last_json(result)["verdicts"][0]["kind"] == "PERSISTENT"
    assert "What was found (1)" in (tmp_path / "more" / "report.txt").read_text()


def test_report_refuses_what_is_no_run(tmp_path: Path) -> None:
    refused(invoke("report", tmp_path), "this is not a run directory")
    refused(invoke("report", tmp_path / "none"), "there is no such run directory")


def test_approve_writes_the_answer_the_run_waits_for(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    refused(invoke("approve", run, "node-1"), "did not ask about node 'node-1'", "it asked about node-2")
    result = invoke("approve", run, "node-2", "--json")
    assert result.exit_code == 0
    assert last_json(result)["approved"] == "node-2"
    assert approved_nodes(run) == {"node-2"}


def test_verify_takes_a_checkpoint_a_root_or_a_run(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "checkpoints")
    for directory, count in ((root / "step-00000003", 1), (root, 2), (tmp_path, 2)):
        result = invoke("verify", directory, "--json")
        assert result.exit_code == 0, result.output
        assert len(last_json(result)["checkpoints"]) == count
        assert "correct" not in result.stdout


def test_verify_names_file_and_tensor_of_the_damage(tmp_path: Path) -> None:
    root = checkpoints(tmp_path)
    file = next((root / "step-00000006").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    result = invoke("verify", tmp_path, "--json")
    assert result.exit_code == 13
    assert file.name in result.stdout
    assert "model.weight" in result.stdout
    assert "2 checkpoints, 1 failed" in result.stdout
    assert [bool(found) for found in last_json(result)["checkpoints"].values()] == [False, True]


def test_verify_refuses_what_holds_no_checkpoint(tmp_path: Path) -> None:
    refused(invoke("verify", tmp_path), "there is no checkpoint in it")
    refused(invoke("verify", tmp_path / "none"), "there is no such directory")


def test_doctor_shows_machine_layout_coverage_and_cost(tmp_path: Path) -> None:
    result = invoke("doctor", "--ranks", 6, "--nodes", 3, "--preset", "25m", "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    facts = last_json(result)
    nodes = [place["node"] for place in facts["places"]]
    assert nodes == ["node-0", "node-0", "node-1", "node-1", "node-2", "node-2"]
    assert all(nodes[auditor] != node for node, auditor in zip(nodes, facts["auditors"], strict=True))
    assert facts["environment"]["torch"] == torch.__version__
    assert facts["cost"]["bytes_kept_on_audit_steps"] == 4 * facts["cost"]["parameters"]
    assert {"finite", "replicas", "audit", "-"} == {row["check"] for row in facts["coverage"]}
    assert "NOT COVERED" in result.stdout
    assert json.loads((tmp_path / "doctor.json").read_text()) == facts


def test_doctor_says_what_a_layout_cannot_do() -> None:
    assert "three are needed" in invoke("doctor", "--ranks", 2).stdout
    refused(invoke("doctor", "--ranks", 2, "--nodes", 3), "2 ranks cannot run on 3 nodes")
    refused(invoke("doctor", "--preset", "nano"), "there is no preset 'nano'")


def test_doctor_shows_who_computes_together_and_what_must_be_equal() -> None:
    facts = last_json(invoke("doctor", "--mesh", "dp=3,tp=2", "--json"))
    assert facts["teams"] == [[0, 1], [2, 3], [4, 5]] and facts["auditors"] == [2, 3, 4, 5, 0, 1]
    assert any("tensor parallelism" in row["what"] for row in facts["alike"])
    said = " ".join(invoke("doctor", "--mesh", "dp=2,tp=2").stdout.split())
    assert "0, 1; 2, 3; a persistent fault names both sides" in said
    refused(invoke("doctor", "--mesh", "dp=2,tp"), "is not a list like dp=2,tp=4")
    refused(invoke("doctor", "--mesh", "dp=2,tp=2", "--data", "shard"), "--data names 'shard'")
    refused(invoke("doctor", "--mesh", "dp=2,tp=2", "--ranks", 3), "a mesh of 4 ranks does not fit 3 ranks")


def test_doctor_shows_what_is_switched_off() -> None:
    rows = last_json(invoke("doctor", "--audit-every", 0, "--replicas-every", 0, "--json"))["coverage"]
    # Settings and counters are compared in every step all the same.
    assert {(row["check"], row["site"]) for row in rows if row["covered"]} == {
        ("finite", "gradient"), ("finite", "reduction"), ("replicas", "optimizer")
    }  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have counters")
def test_doctor_says_plainly_that_there_are_no_counters() -> None:
    assert "none can be read" in " ".join(invoke("doctor").stdout.split())


# ---- the ledger ------------------------------------------------------------------------------------------------------


def ledger_of(directory: Path) -> Path:
    """A ledger that ``run_of``'s run has written to, in DIRECTORY/ledger, with one damaged line beside it."""
    ledger = directory / "ledger"
    log = EventLog(directory, rank=0, run_id="r")
    kept = RunLedger(ledger, run_id="r", say=print)
    places = [{"rank": rank, "node": f"node-{rank}", "device": "cpu:0", "environment": ""} for rank in range(3)]
    kept.note(log.write("run_started", 0, places=places, mode="act", ledger=str(ledger)))
    kept.worked = 8
    kept.note(log.write("verdict", 7, verdict=VERDICT, action="REPAIR", would="REPAIR"))
    log.write("ask", 7, verdict=VERDICT, action="QUARANTINE")
    kept.note(log.write("finished", 9, exit_code=0, tally={}))
    kept.close(9)
    log.close()
    (ledger / "run-bad.jsonl").write_text("{\n")
    return ledger


def test_ledger_build_and_report_name_the_host_and_the_damaged_line(tmp_path: Path) -> None:
    ledger, out = ledger_of(tmp_path), tmp_path / "ledger.sqlite"
    result = invoke("ledger", "build", ledger, "--out", out, "--json")
    assert result.exit_code == 0
    assert result.stderr == "unsilent: run-bad.jsonl, line 1: left out, it is not JSON\n"
    assert last_json(result) == {
        "exit_code": 0, "ledger": str(out), "runs": 1, "lines": 3, "added": 3, "journal": "wal", "notice": "",
        "problems": [{"file": "run-bad.jsonl", "line": 1, "reason": "it is not JSON"}],
    }  # fmt: skip
    assert last_json(invoke("ledger", "build", ledger, "--out", out, "--json"))["added"] == 0
    for source in (out, ledger):
        report = invoke("report", "--ledger", source, "--json", "--out", tmp_path / "more")
        assert report.exit_code == 0, report.output
        body = last_json(report)
        assert (body["runs"], body["hosts"][0]["node"], body["hosts"][0]["named_in"]) == (1, "node-2", 1)
        assert "Hosts that were named (1 of 3)" in report.stdout
        assert "Hosts that were named (1 of 3)" in (tmp_path / "more" / "report.txt").read_text()


def test_approve_counts_in_the_ledger_of_the_run(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    assert invoke("approve", tmp_path, "node-2").exit_code == 0
    (audit,) = last_json(invoke("report", "--ledger", ledger, "--json"))["checks"]
    assert audit["by"] == {"person": 1}


def test_report_takes_a_run_or_a_ledger(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    refused(invoke("report"), "one of the two")
    refused(invoke("report", tmp_path, "--ledger", ledger), "one of the two")
    refused(invoke("report", "--ledger", tmp_path / "none.sqlite"), "there is no such file")
    refused(invoke("ledger", "build", tmp_path / "none", "--out", tmp_path / "x.sqlite"), "no such ledger directory")


def test_a_ledger_is_read_without_torch(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    for words in (["ledger", "build", str(ledger), "--out", str(tmp_path / "x")], ["report", "--ledger", str(ledger)]):
        code = (
            f"import sys\nfrom unsilent.cli import main\nsys.argv = ['unsilent', *{words!r}]\n"
            "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
