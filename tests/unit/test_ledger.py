"""What is known of each device over runs: how lines get to disk, what survives damage, and what the numbers say."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest

from tests.golden.make_ledger import PLACES, TALLY, approve, make
from unsilent.errors import UsageError
from unsilent.events import EventLog
from unsilent.ledger import (
    Contents,
    Device,
    RunLedger,
    build,
    database,
    note_approval,
    read_database,
    read_directory,
    strike_history,
    writing,
)
from unsilent.ledger.database import file_system_of, is_network
from unsilent.ledger.entries import EntryKind, parse
from unsilent.ledger.history import cases, device_records, host_records, lower_bound, precision
from unsilent.ledger.reading import Found, Problem, Run, fold
from unsilent.records import Kind, Site, Suspect, Verdict
from unsilent.recurrence import strikes
from unsilent.report import ledger as report
from unsilent.report.text import as_text

GOLDEN = Path(__file__).parents[1] / "golden" / "ledger-v1.jsonl"
T, P, S, I = Kind.TRANSIENT, Kind.PERSISTENT, Kind.SOFTWARE, Kind.INCONCLUSIVE  # noqa: E741


def lines_of(ledger: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(ledger.iterdir()) for line in path.read_text().splitlines()]


class Job:
    """One run that writes to a ledger, without a guard."""

    def __init__(self, ledger: Path, run_id: str, *, directory: str | None = None) -> None:
        self.said: list[str] = []
        self._log = EventLog(None, rank=0, run_id=run_id)
        self.kept = RunLedger(ledger, run_id=run_id, say=self.said.append)
        self.note("run_started", 0, places=PLACES, mode="act", directory=directory)

    def note(self, kind: Any, step: int, **fields: Any) -> None:
        self.kept.note(self._log.write(kind, step, **fields))

    def found(self, kind: Kind, step: int, *ranks: int, check: str = "audit", **fields: Any) -> None:
        suspects = tuple(Suspect(rank=rank, node=f"node{rank}", device="cpu:0") for rank in ranks)
        verdict = Verdict(kind=kind, site=Site.GRADIENT, step=step, reason="x", check=check, suspects=suspects)
        fields = {"action": "REPAIR", "would": "REPAIR", **fields}
        self.kept.worked = step + 1
        self.note("verdict", step, verdict=verdict, **fields)

    def end(self, steps: int = 20) -> None:
        self.kept.worked = steps
        self.note("finished", steps, exit_code=0, tally=TALLY)
        self.kept.close(steps)


# ---- the format ------------------------------------------------------------------------------------------------------


def test_the_golden_lines_are_still_written_byte_for_byte(tmp_path: Path) -> None:
    make(tmp_path / "run", tmp_path / "ledger")
    approve(tmp_path / "run")
    names = ("run-run-1.jsonl", "run-run-1.approved-0a1b2c3d.jsonl")
    assert "".join((tmp_path / "ledger" / name).read_text() for name in names) == GOLDEN.read_text()


def test_the_golden_lines_hold_every_kind_follow_the_schema_and_are_read(tmp_path: Path) -> None:
    schema = json.loads(files("unsilent.schemas").joinpath("ledger.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    lines = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    for line in lines:
        jsonschema.Draft202012Validator(schema).validate(line)
    assert {line["kind"] for line in lines} == set(get_args(EntryKind)) == set(schema["properties"]["kind"]["enum"])
    (tmp_path / "run-1.jsonl").write_bytes(GOLDEN.read_bytes())
    (run,) = read_directory(tmp_path).runs
    assert (run.run, run.worked, run.passed, run.exit_code, run.approved) == ("run-1", 12, 7, 0, {"node2"})
    assert [found.kind for found in run.found] == [T, S, P]
    assert run.found[0].devices == (Device(node="node2", device="cpu:0", rank=2),)
    assert run.checks == TALLY and run.directory == "/runs/1" and run.versions["torch"] == "2.13.0"


def test_a_later_version_is_read_as_far_as_it_is_understood(tmp_path: Path) -> None:
    job = Job(tmp_path, "r")
    job.end()
    line = lines_of(tmp_path)[0]
    later = [{**line, "schema": 2, "kind": "weather", "rain": True}, {**line, "schema": 2, "colour": "blue"}]
    (tmp_path / "run-later.jsonl").write_text("".join(json.dumps(one) + "\n" for one in later))
    contents = read_directory(tmp_path)
    assert (len(contents.runs), contents.newer, contents.problems) == (1, 2, ())


# ---- writing ---------------------------------------------------------------------------------------------------------


def test_a_device_whose_node_could_not_be_judged_is_kept_with_its_node_and_that_word(tmp_path: Path) -> None:
    job = Job(tmp_path, "r")
    alone = Verdict(
        kind=T, site=Site.GRADIENT, step=3, reason="x", check="audit",
        suspects=(Suspect(rank=1, device="cpu:0"), Suspect(rank=2, path="batch")),
    )  # fmt: skip
    job.note("verdict", 3, verdict=alone, action="REPAIR", would="REPAIR")
    assert lines_of(tmp_path)[1]["suspects"] == [{"rank": 1, "node": "node1", "device": "cpu:0", "host_known": False}]
    contents = read_directory(tmp_path)
    assert device_records(contents.runs, 0.0)[0].node == "node1"
    assert all(record.named_in == 0 for record in host_records(contents.runs, 0.0))


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, "r")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        job.found(T, 3, 2)
        job.found(T, 4, 2)
    assert len(job.said) == 1 and "No space left on device" in job.said[0] and "training goes on" in job.said[0]
    job.end()
    kinds = [(line["kind"], line.get("lost_before")) for line in lines_of(tmp_path)]
    assert kinds == [("run_started", None), ("run_ended", 2)]


def test_a_really_full_device_and_a_ledger_that_is_no_directory_are_survived(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    job = Job(tmp_path / "file" / "ledger", "r")
    job.found(P, 3, 2)
    job.end()
    assert len(job.said) == 1
    if os.access("/dev/full", os.W_OK):
        (tmp_path / "run-full.jsonl").symlink_to("/dev/full")
        full = Job(tmp_path, "full")
        full.end()
        assert len(full.said) == 1 and "No space left" in full.said[0]


def test_a_device_that_is_wrong_in_every_step_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MOST_VERDICTS", 5)
    job = Job(tmp_path, "r")
    for step in range(12):
        job.found(P, step, 2)
    job.end()
    assert [line["kind"] for line in lines_of(tmp_path)].count("verdict") == 5
    (run,) = read_directory(tmp_path).runs
    assert run.left_out == 7


def test_a_run_that_left_without_a_word_says_that_it_left(tmp_path: Path) -> None:
    job = Job(tmp_path, "r")
    job.kept.worked = 9
    job.kept.close(8)
    job.kept.close(8)
    (run,) = read_directory(tmp_path).runs
    assert (run.ended, run.exit_code, run.worked) == (True, None, 9)


def test_an_approval_is_a_file_of_its_own_and_counts(tmp_path: Path) -> None:
    make(tmp_path / "run", tmp_path / "ledger")
    before = set((tmp_path / "ledger").iterdir())
    assert note_approval(tmp_path / "run", "node2") == ""
    assert note_approval(tmp_path / "run", "node1") == ""  # nobody asked about it
    (new,) = set((tmp_path / "ledger").iterdir()) - before
    assert json.loads(new.read_text())["node"] == "node2"
    (case,) = cases(read_directory(tmp_path / "ledger").runs)
    assert case.confirmed == "person"


def test_an_approval_that_the_ledger_cannot_take_says_why(tmp_path: Path) -> None:
    make(tmp_path / "run", tmp_path / "ledger")
    (tmp_path / "ledger").rename(tmp_path / "gone")
    (tmp_path / "ledger").write_text("")
    assert note_approval(tmp_path / "run", "node2") != ""
    EventLog(tmp_path / "other", rank=0, run_id="r").write("notice", 0)
    assert note_approval(tmp_path / "other", "node2") == ""


# ---- reading what is damaged -----------------------------------------------------------------------------------------

DAMAGED = {
    "not JSON": b"{\n",
    "not a JSON object": b"[1]\n",
    "not text": b"\xff\xfe\x00\n",
    "no schema version": b"{}\n",
    "time is not a number": b'{"schema": 1, "time": NaN}\n',
    "beyond the year 9999": b'{"schema": 1, "time": 253402300800, "kind": "progress", "run": "r", "worked": 1,'
    b' "passed": 0, "step": 1}\n',
    "text that is none": b'{"schema": 1, "time": 1, "kind": "progress", "run": "\\ud800", "worked": 1, "passed": 0,'
    b' "step": 1}\n',
    "acquits are not": b'{"schema": 1, "time": 1, "kind": "verdict", "run": "r", "worked": 1, "passed": 0, "step": 1,'
    b' "verdict": "SOFTWARE", "site": "gradient", "check": "audit", "suspects": [], "acquits": [1]}\n',
    "run is not a text": b'{"schema": 1, "time": 1, "kind": "progress", "run": 3}\n',
    "worked is not a count": b'{"schema": 1, "time": 1, "kind": "progress", "run": "r", "worked": -1}\n',
    "step is not": b'{"schema": 1, "time": 1, "kind": "progress", "run": "r", "worked": 1, "passed": 0, "step": true}\n',
    "kind 'surprise' is unknown": b'{"schema": 1, "time": 1, "kind": "surprise", "run": "r", "worked": 1, "passed": 0,'
    b' "step": 1}\n',
    "verdict 'BAD' is unknown": b'{"schema": 1, "time": 1, "kind": "verdict", "run": "r", "worked": 1, "passed": 0,'
    b' "step": 1, "verdict": "BAD"}\n',
    "one of its suspects": b'{"schema": 1, "time": 1, "kind": "verdict", "run": "r", "worked": 1, "passed": 0, "step": 1,'
    b' "verdict": "TRANSIENT", "site": "gradient", "check": "audit", "suspects": [{"rank": 1}]}\n',
    "cut off": b'{"schema": 1, "time": 1',
}


@pytest.mark.parametrize(("reason", "line"), DAMAGED.items(), ids=DAMAGED.keys())
def test_a_damaged_line_is_named_with_file_and_number_and_left_out(tmp_path: Path, reason: str, line: bytes) -> None:
    Job(tmp_path, "good").end()
    good = (tmp_path / "run-good.jsonl").read_bytes()
    (tmp_path / "run-bad.jsonl").write_bytes(good + b"\n" + line)
    contents = read_directory(tmp_path)
    (problem,) = contents.problems
    assert str(problem).startswith("run-bad.jsonl, line 4: left out, ") and reason in problem.reason
    assert [run.exit_code for run in contents.runs] == [0]
    assert told(contents) and build(tmp_path, tmp_path / "ledger.sqlite").problems == contents.problems


def test_whatever_a_line_holds_it_is_an_entry_or_a_reason() -> None:
    for line in GOLDEN.read_text().splitlines():
        whole = json.loads(line)
        for key in whole:
            for value in (None, [], {}, "x", -1, 1.5, 10**400, True, [{}], [None], {"rank": "1"}):
                with contextlib.suppress(ValueError):
                    fold([parse(json.dumps({**whole, key: value}))])


def test_a_file_that_cannot_be_read_and_what_is_no_ledger_file(tmp_path: Path) -> None:
    Job(tmp_path, "good").end()
    (tmp_path / "run-folder.jsonl").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    contents = read_directory(tmp_path)
    assert [(p.file, p.line) for p in contents.problems] == [("run-folder.jsonl", 0)] and len(contents.runs) == 1
    with pytest.raises(UsageError, match="there is no such ledger directory"):
        read_directory(tmp_path / "none")


def test_old_files_are_not_opened_and_reading_ends_in_time(tmp_path: Path) -> None:
    for name in ("old", "new"):
        Job(tmp_path, name).end()
    os.utime(tmp_path / "run-old.jsonl", (1000, 1000))
    assert [run.run for run in read_directory(tmp_path, since=2000).runs] == ["new"]
    late = read_directory(tmp_path, within_s=-1.0)
    assert late.runs == () and "2 of 2 files" in late.problems[0].reason


def test_a_run_whose_first_line_was_lost_still_tells_whom_it_named(tmp_path: Path) -> None:
    job = Job(tmp_path, "r")
    job.found(P, 3, 2)
    job.end()
    path = tmp_path / "run-r.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    (record,) = device_records(read_directory(tmp_path).runs, 0.0)
    assert (record.node, record.named_in, record.runs) == ("node2", 1, 1)


# ---- SQLite ----------------------------------------------------------------------------------------------------------


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(path) as connection:
        found = connection.execute(query).fetchall()
    connection.close()
    return found


def test_building_again_or_with_more_files_gives_the_same_rows(tmp_path: Path) -> None:
    ledger, out = tmp_path / "ledger", tmp_path / "x" / "ledger.sqlite"
    first = Job(ledger, "a")
    first.found(P, 3, 2)
    first.end()
    assert (build(ledger, out).added, build(ledger, out).added) == (3, 0)
    before = rows(out, "SELECT * FROM lines ORDER BY file, line")
    second = Job(ledger, "b")
    second.found(T, 5, 1)
    second.end()
    built = build(ledger, out)
    assert (built.added, built.lines, built.runs, built.problems) == (3, 6, 2, ())
    assert rows(out, "SELECT * FROM lines WHERE run = 'a' ORDER BY file, line") == before
    (ledger / "run-a.jsonl").unlink()
    assert build(ledger, out).runs == 2  # what was folded in stays
    assert read_database(out).runs[0].found[0].devices[0].node == "node2"


def test_the_database_says_what_the_files_say(tmp_path: Path) -> None:
    ledger, out = tmp_path / "ledger", tmp_path / "ledger.sqlite"
    make(tmp_path / "run", ledger)
    approve(tmp_path / "run")
    job = Job(ledger, "b")
    job.found(T, 5, 1)
    build(ledger, out)
    assert read_database(out) == read_directory(ledger)
    assert rows(out, "SELECT run, worked, exit_code FROM runs ORDER BY run") == [("b", 6, None), ("run-1", 12, 0)]
    assert rows(out, "SELECT node, count(DISTINCT run) FROM suspects GROUP BY node ORDER BY node") == [
        ("node1", 1), ("node2", 1)
    ]  # fmt: skip
    assert rows(out, "SELECT count(*) FROM places") == [(8,)]
    assert rows(out, "SELECT check_name, site FROM verdicts WHERE verdict = 'SOFTWARE'") == [("finite", "gradient")]


def test_problems_are_kept_and_a_line_that_was_cut_off_may_be_whole_later(tmp_path: Path) -> None:
    ledger, out = tmp_path / "ledger", tmp_path / "ledger.sqlite"
    Job(ledger, "a").end()
    path = ledger / "run-a.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert [p.line for p in build(ledger, out).problems] == [2]
    assert read_database(out).problems[0].line == 2
    path.write_bytes(whole)
    assert build(ledger, out).problems == () == read_database(out).problems


def test_the_wal_is_used_on_a_local_disk_and_refused_on_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = tmp_path / "ledger"
    Job(ledger, "a").end()
    local = build(ledger, tmp_path / "local.sqlite")
    assert (local.journal, local.notice) == ("wal", "")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(database, "_MOUNTS", mounts)
    shared = build(ledger, tmp_path / "shared.sqlite")
    assert shared.journal == "delete"
    assert f"nfs4 at {tmp_path}" in shared.notice and "WAL" in shared.notice and "memory" in shared.notice
    assert read_database(tmp_path / "shared.sqlite") == read_database(tmp_path / "local.sqlite")
    assert sorted(path.name for path in tmp_path.glob("*.sqlite*")) == ["local.sqlite", "shared.sqlite"]


def test_the_file_system_is_that_of_the_longest_mount(tmp_path: Path) -> None:
    mounts = (
        "/dev/sda1 / ext4 rw 0 0\n"
        "srv:/home /home nfs rw 0 0\n"
        "tmpfs /home/me/fast\\040disk tmpfs rw 0 0\n"
        "x /home/me/s3 fuse.s3fs rw 0 0\nbroken\n"
    )
    at = {
        path: file_system_of(Path(path), mounts)[0]
        for path in ("/var/x", "/home/you", "/home/me/fast disk/y", "/home2")
    }
    assert at == {"/var/x": "ext4", "/home/you": "nfs", "/home/me/fast disk/y": "tmpfs", "/home2": "ext4"}
    assert is_network(file_system_of(Path("/home/me/s3/l.sqlite"), mounts)[0])
    assert file_system_of(Path("/x"), "") == ("", "") and not is_network("")
    for name in ("nfs4", "cifs", "lustre", "gpfs", "fuse.sshfs", "ceph", "beegfs"):
        assert is_network(name)
    for name in ("ext4", "xfs", "tmpfs", "overlay", "zfs", "fuseblk"):
        assert not is_network(name)


def test_what_is_no_database_of_ours_is_refused_in_one_sentence(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    Job(ledger, "a").end()
    (tmp_path / "text.sqlite").write_text("no database at all, but some text that is long enough\n" * 50)
    with pytest.raises(UsageError, match="cannot be built"):
        build(ledger, tmp_path / "text.sqlite")
    with contextlib.closing(sqlite3.connect(tmp_path / "foreign.sqlite")) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
        connection.commit()
    with pytest.raises(UsageError, match="a database of something else"):
        build(ledger, tmp_path / "foreign.sqlite")
    assert rows(tmp_path / "foreign.sqlite", "SELECT name FROM sqlite_master") == [("recipes",)]
    with pytest.raises(UsageError, match="is no ledger"):
        read_database(tmp_path / "text.sqlite")
    with pytest.raises(UsageError, match="there is no such file"):
        read_database(tmp_path / "none.sqlite")
    with pytest.raises(UsageError, match="no such ledger directory"):
        build(tmp_path / "none", tmp_path / "new.sqlite")
    assert not (tmp_path / "new.sqlite").exists()
    with pytest.raises(UsageError, match="cannot be written"):
        build(ledger, tmp_path / "text.sqlite" / "x.sqlite")
    with sqlite3.connect(tmp_path / "newer.sqlite") as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(UsageError, match="a newer version"):
        build(ledger, tmp_path / "newer.sqlite")


# ---- over runs -------------------------------------------------------------------------------------------------------

HERE = tuple(Device(node=f"node{rank}", device="cpu:0", rank=rank) for rank in range(4))


def found(kind: Kind, step: int, *ranks: int, check: str = "audit", time: float = 0.0, **changes: Any) -> Found:
    return replace(
        Found(
            kind=kind, site=Site.GRADIENT, check=check, step=step, time=time or float(step), worked=step + 1,
            devices=tuple(HERE[rank] for rank in ranks), acted_on=True,
        ),
        **changes,
    )  # fmt: skip


def run(
    name: str, *all_found: Found, worked: int = 100, directory: str = "", approved: str = "", at: float = 0.0
) -> Run:
    return Run(
        run=name, started=at, last=at + worked, directory=directory, places=HERE, worked=worked, passed=worked // 10,
        found=list(all_found), approved={approved} if approved else set(), ended=True, exit_code=0,
    )  # fmt: skip


def test_a_strike_stands_as_far_back_as_its_device_has_worked_since() -> None:
    runs = [run("a", found(P, 30, 2)), run("b"), run("c", found(T, 9, 2), found(T, 9, 2, check="replicas"))]
    assert list(strike_history(runs)) == [HERE[2]]
    assert [(s.run, s.kind, s.step) for s in strike_history(runs)[HERE[2]]] == [("a", P, 31 - 300), ("c", T, 10 - 100)]


def test_a_device_that_did_not_take_part_does_not_work_its_strike_off() -> None:
    elsewhere = run("b")
    elsewhere.places = HERE[:2]
    (strike,) = strike_history([run("a", found(P, 30, 2)), elsewhere])[HERE[2]]
    assert strike.step == 31 - 100


def test_a_difference_that_nobody_put_right_is_one_strike_however_often_it_is_seen() -> None:
    weights: dict[str, Any] = {"site": Site.WEIGHTS, "check": "replicas", "acted_on": False}
    observed = run("a", *(found(T, step, 2, **weights) for step in (10, 20, 30)))
    assert len(strike_history([observed])[HERE[2]]) == 1
    healed = run("a", *(found(T, step, 2, **{**weights, "acted_on": True}) for step in (10, 20, 30)))
    assert len(strike_history([healed])[HERE[2]]) == 3


def test_hosts_that_come_back_stand_first() -> None:
    runs = [run("a", found(P, 3, 2)), run("b", found(T, 5, 2), found(P, 6, 1)), run("c", found(T, 7, 2))]
    first, second, *rest = host_records(runs, 0.0)
    assert (first.node, first.named_in, first.runs, first.persistent, first.transient) == ("node2", 3, 3, 1, 2)
    assert (second.node, second.named_in) == ("node1", 1)
    assert {record.node for record in rest} == {"node0", "node3"} and all(r.strikes == 0 for r in rest)
    assert first.strikes == pytest.approx(1 + 2 / 3, rel=0.05)
    assert strikes(strike_history(runs)[HERE[2]], 0, 0.0) == pytest.approx(first.strikes)


@pytest.mark.parametrize(
    ("runs", "confirmed", "by"),
    [
        ([run("a", found(T, 3, 2))], 0, {}),
        ([run("a", found(P, 3, 2))], 1, {"replays": 1}),
        ([run("a", found(T, 3, 2), found(T, 9, 2))], 1, {"again": 1}),
        ([run("a", found(T, 3, 2)), run("b", found(T, 3, 2))], 2, {"again": 2}),
        ([run("a", found(T, 3, 2), approved="node2")], 1, {"person": 1}),
        ([run("a", found(T, 3, 2)), run("b", found(T, 3, 1))], 0, {}),
    ],
)
def test_a_case_is_confirmed_by_replays_by_coming_back_or_by_a_person(
    runs: list[Run], confirmed: int, by: dict[str, int]
) -> None:
    (audit,) = precision(runs)
    assert (audit.confirmed, audit.by) == (confirmed, by)
    assert audit.named == len(runs)


def test_a_step_that_later_failed_on_another_device_refutes_and_takes_the_strike_back() -> None:
    runs = [
        run("a", found(P, 7, 1, time=1.0), directory="/job"),
        run("b", found(S, 7, time=2.0, acquits=("node1 cpu:0",)), directory="/job", at=2.0),
    ]
    (case,) = cases(runs)
    assert case.refuted and case.confirmed == ""
    assert strike_history(runs) == {} and all(record.named_in == 0 for record in device_records(runs, 9.0))
    (audit,) = precision(runs)
    assert (audit.named, audit.confirmed, audit.refuted, audit.software) == (1, 0, 1, 1)
    acquits = {"acquits": ("node1 cpu:0",)}
    other_job = [runs[0], run("b", found(S, 7, time=2.0, **acquits), directory="/other", at=2.0)]
    assert not cases(other_job)[0].refuted
    same_look = [run("a", found(P, 7, 1, time=1.0), found(S, 7, time=1.1, **acquits), directory="/job")]
    assert not cases(same_look)[0].refuted
    of_somebody_else = [runs[0], run("b", found(S, 7, time=2.0, acquits=("node2 cpu:0",)), directory="/job", at=2.0)]
    of_nobody = [runs[0], run("b", found(S, 7, time=2.0, check="finite"), directory="/job", at=2.0)]
    assert not cases(of_somebody_else)[0].refuted and not cases(of_nobody)[0].refuted


def test_a_refuted_blame_is_no_second_look_that_confirms() -> None:
    runs = [
        run("a", found(T, 7, 1, time=1.0), directory="/job"),
        run("b", found(S, 7, time=2.0, acquits=("node1 cpu:0",)), directory="/job", at=2.0),
        run("c", found(T, 3, 1, time=3.0), at=3.0),
    ]
    assert [(case.run, case.refuted, case.confirmed) for case in cases(runs)] == [("a", True, ""), ("c", False, "")]


def test_whom_a_verdict_acquits_stands_in_its_line_and_is_read(tmp_path: Path) -> None:
    job = Job(tmp_path, "r")
    verdict = Verdict(kind=S, site=Site.GRADIENT, step=3, reason="x", check="audit", acquits=("node1 cpu:0",))
    job.note("verdict", 3, verdict=verdict, action="STOP", would="STOP")
    job.found(S, 4)
    assert ["acquits" in line for line in lines_of(tmp_path)] == [False, True, False]
    (read,) = read_directory(tmp_path).runs
    assert [found.acquits for found in read.found] == [("node1 cpu:0",), ()]


def test_the_lower_bound_counts_each_device_once() -> None:
    (often,) = precision([run(f"run{i}", found(P, 3, 2)) for i in range(7)])
    assert (often.named, often.confirmed, often.devices, often.sure) == (7, 7, 1, 1)
    assert often.lower_bound == pytest.approx(0.05)
    (two,) = precision([run("a", found(P, 3, 2), found(T, 5, 1))])
    assert (two.devices, two.sure) == (2, 1) and two.lower_bound == pytest.approx(lower_bound(1, 2))


def test_verdicts_that_blame_nobody_are_counted_apart() -> None:
    (audit,) = precision([run("a", found(I, 3, 1, 2), found(S, 4))])
    assert (audit.alarms, audit.named, audit.software, audit.inconclusive, audit.lower_bound) == (2, 0, 1, 1, 0.0)


def test_the_lower_bound_is_the_exact_binomial_one() -> None:
    assert lower_bound(0, 5) == lower_bound(0, 0) == 0.0
    for n in (1, 7, 59, 300):
        assert lower_bound(n, n) == pytest.approx(0.05 ** (1 / n))
    assert lower_bound(9, 10) == pytest.approx(0.6058, abs=1e-4)  # tables of Clopper and Pearson
    assert lower_bound(50, 100) == pytest.approx(0.4136, abs=1e-4)
    bounds = [lower_bound(k, 20) for k in range(21)]
    assert bounds == sorted(bounds) and all(bound < k / 20 for k, bound in enumerate(bounds) if k)


# ---- the report ------------------------------------------------------------------------------------------------------


def told(contents: Contents, now: float = 0.0) -> str:
    text = as_text(report.render(contents, source="here", now=now), width=200)
    return " ".join(text.split())


def test_the_report_names_who_comes_back_and_how_each_check_has_done() -> None:
    runs = tuple(run(f"run{i}", found(P, 3, 2), at=i * 1000.0) for i in range(7))
    text = told(Contents(runs=runs, problems=(Problem(file="run-x.jsonl", line=3, reason="it is not JSON"),)))
    assert "Hosts that were named (1 of 4)" in text and "3 hosts never named" in text
    assert "node2 7 of 7 6.8" in text and "comes back" in text
    assert "audit: 7 of 7 cases in which it named a device were confirmed (7 in another step or run); " in text
    assert "95% lower bound 5%, from 1 device" in text
    assert "halves with each 30 days and with each 10,000 steps" in text
    assert "run-x.jsonl, line 3: left out, it is not JSON" in text


def test_the_report_of_nothing_and_of_clean_runs_says_so_and_praises_nobody() -> None:
    assert "It holds no run." in told(Contents(runs=()))
    clean = told(Contents(runs=(run("a"),)))
    assert "Hosts: 4, none of them was ever named." in clean and "No check has raised an alarm so far." in clean
    assert "correct" not in clean


def test_the_same_as_json() -> None:
    body = report.as_json(Contents(runs=(run("a", found(T, 3, 2)),)), source="here", now=50.0)
    assert json.loads(json.dumps(body)) == body
    assert (body["runs"], body["hosts"][0]["node"], body["checks"][0]["named"]) == (1, "node2", 1)


def test_jobs_of_other_people_may_read_a_file_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        Job(tmp_path, "r").end()
    finally:
        os.umask(before)
    assert (tmp_path / "run-r.jsonl").stat().st_mode & 0o777 == 0o644
