"""The run log and the small files beside it."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsilent import events, lines
from unsilent.errors import UsageError
from unsilent.events import (
    EventLog,
    approve,
    approved_nodes,
    asked_nodes,
    excluded_nodes,
    read,
    read_exit,
    write_exclude,
    write_exit,
)
from unsilent.lines import LineFile
from unsilent.records import Action, Kind, Site, Suspect, Verdict

VERDICT = Verdict(
    kind=Kind.PERSISTENT,
    site=Site.GRADIENT,
    step=4,
    reason="does not repeat",
    check="audit",
    suspects=(Suspect(rank=2, node="n2", device="cpu:0"),),
)


def log_in(directory: Path, rank: int | None = 0) -> EventLog:
    return EventLog(directory, rank=rank, run_id="r")


def test_a_verdict_fills_check_site_and_suspects(tmp_path: Path) -> None:
    event = log_in(tmp_path).write("verdict", 4, verdict=VERDICT, action=Action.REPAIR, seconds=0.5, note="x")
    assert event.fields["check"] == "audit"
    assert event.fields["site"] == "gradient"
    (line,) = read(tmp_path).events
    assert line.kind == "verdict"
    assert line.step == 4
    assert line.fields["suspects"] == [{"rank": 2, "node": "n2", "device": "cpu:0", "path": None}]
    assert line.fields["action"] == "REPAIR"
    assert line.fields["verdict"]["kind"] == "PERSISTENT"
    assert line.fields["note"] == "x"


def test_the_log_is_for_its_owner_only(tmp_path: Path) -> None:
    log_in(tmp_path).write("notice", 0)
    assert stat.S_IMODE((tmp_path / "events.jsonl").stat().st_mode) == 0o600


def test_a_second_log_appends(tmp_path: Path) -> None:
    log_in(tmp_path).write("notice", 0)
    log_in(tmp_path).write("notice", 1)
    assert [event.step for event in read(tmp_path).events] == [0, 1]


def test_values_that_json_lacks_are_written_as_words_and_tensors_as_shapes(tmp_path: Path) -> None:
    import torch

    log_in(tmp_path).write(
        "notice",
        0,
        bad=float("nan"),
        big=float("-inf"),
        number=np.float32(0.5),
        count=np.int64(3),
        where=tmp_path,
        names={"b", "a"},
        suspect=Suspect(rank=1),
        secret=torch.tensor([1234.5]),
    )
    fields = read(tmp_path).events[0].fields
    assert (fields["bad"], fields["big"], fields["number"], fields["count"]) == ("nan", "-inf", 0.5, 3)
    assert fields["where"] == str(tmp_path)
    assert fields["names"] == ["a", "b"]
    assert fields["suspect"]["rank"] == 1
    assert fields["secret"] == {"shape": [1], "dtype": "torch.float32"}
    assert "1234" not in (tmp_path / "events.jsonl").read_text()


def test_fields_with_a_meaning_of_their_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="rank"):
        log_in(tmp_path).write("notice", 0, rank=3)


def test_each_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_in(tmp_path)
    calls: list[bytes] = []
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        calls.append(data)
        return real(descriptor, data)

    monkeypatch.setattr(events.os, "write", write)
    log.write("verdict", 4, verdict=VERDICT)
    assert len(calls) == 1
    assert calls[0].endswith(b"\n")
    assert calls[0].count(b"\n") == 1


def test_a_full_disk_loses_events_counts_them_and_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_in(tmp_path)
    log.write("notice", 0)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(events.os, "write", full)
        log.write("notice", 1)
        log.write("verdict", 2, verdict=VERDICT)
    assert log.lost == 2
    assert "space" in log.problem
    log.write("notice", 3)
    log.write("notice", 4)
    assert log.problem == ""
    found = read(tmp_path).events
    assert [(event.step, event.fields.get("lost_before")) for event in found] == [(0, None), (3, 2), (4, None)]


def test_a_descriptor_whose_close_failed_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LineFile(tmp_path / "lines.jsonl")
    file.append({"n": 1}, durable=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        file.close()
    file.append({"n": 2}, durable=False)
    file.close()
    assert (tmp_path / "lines.jsonl").read_text() == '{"n": 1}\n{"n": 2}\n'


def test_a_really_full_file_system_is_survived() -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("no /dev/full here")
    log = EventLog(None, rank=0, run_id="r")
    log._file = LineFile(Path("/dev/full"))
    log.write("notice", 0)
    assert log.lost == 1


def test_half_a_line_that_fitted_is_not_glued_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_in(tmp_path)
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(events.os, "write", lambda descriptor, data: real(descriptor, data[:20]))
        log.write("notice", 1)
    log.write("notice", 2)
    found = read(tmp_path)
    assert [event.step for event in found.events] == [2]
    assert found.unreadable == 1
    assert log.lost == 1


def test_a_new_log_begins_after_the_half_line_of_a_killed_writer(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"schema": 1, "ti')
    log_in(tmp_path).write("notice", 5)
    found = read(tmp_path)
    assert [event.step for event in found.events] == [5]
    assert found.unreadable == 1


def test_without_a_directory_nothing_is_kept_and_nothing_is_lost() -> None:
    log = EventLog(None, rank=0, run_id="r")
    assert log.write("notice", 0, reason="x").fields["reason"] == "x"
    assert (log.lost, log.problem) == (0, "")


def test_a_directory_that_cannot_be_made_is_a_problem_and_no_exception(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = EventLog(tmp_path / "file" / "run", rank=0, run_id="r")
    assert log.problem
    log.write("notice", 0)
    assert log.lost == 1


def test_threads_and_processes_do_not_cut_each_others_lines(tmp_path: Path) -> None:
    code = (
        "import sys; from unsilent.events import EventLog\n"
        "log = EventLog(sys.argv[1], rank=int(sys.argv[2]), run_id='r')\n"
        "for step in range(200): log.write('notice', step, reason='x' * 300)\n"
    )
    others = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(rank)]) for rank in (1, 2)]
    log = log_in(tmp_path)
    threads = [
        threading.Thread(target=lambda: [log.write("notice", s, reason="y" * 300) for s in range(100)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait() for process in others] == [0, 0]
    found = read(tmp_path)
    assert (len(found.events), found.unreadable, found.torn) == (600, 0, False)


def test_a_thread_that_is_stuck_in_a_write_does_not_hold_the_watcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_LOCK_SECONDS", 0.01)
    log = log_in(tmp_path)
    with log._file._lock:
        log.write("rank_failure", 3, failed_rank=1, error="x")
    assert log.lost == 1
    assert "stuck" in log.problem


def test_reading_passes_over_a_torn_last_line_and_counts_broken_ones(tmp_path: Path) -> None:
    log_in(tmp_path).write("notice", 0)
    good = (tmp_path / "events.jsonl").read_text()
    newer = json.dumps({**json.loads(good), "schema": 99, "step": 7, "colour": "blue"}) + "\n"
    broken = '\x00\x00\x00\n[1, 2]\n{"schema": 1}\n\n'
    (tmp_path / "events.jsonl").write_text(good + broken + newer + good[: len(good) // 2])
    found = read(tmp_path)
    assert [event.step for event in found.events] == [0, 7]
    assert (found.unreadable, found.torn, found.newer) == (3, True, 1)
    assert found.events[1].fields["colour"] == "blue"


def test_reading_what_is_no_run_says_so_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such run directory"):
        read(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"not a run directory, it holds no events\.jsonl"):
        read(tmp_path)


def test_exit_is_written_whole_and_read_back(tmp_path: Path) -> None:
    assert write_exit(tmp_path / "new", 11, 40, VERDICT, resume_from="checkpoints/30")
    outcome = read_exit(tmp_path / "new")
    assert outcome is not None
    assert (outcome["exit_code"], outcome["step"], outcome["resume_from"]) == (11, 40, "checkpoints/30")
    assert outcome["verdict"]["suspects"][0]["node"] == "n2"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["exit.json"]


def test_exit_that_cannot_be_written_is_false_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_exit(tmp_path, 0, 1)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(events.os, "fsync", fail)
    assert not write_exit(tmp_path, 10, 2)
    outcome = read_exit(tmp_path)
    assert outcome is not None
    assert outcome["exit_code"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"exit_code": "0"}', "\x00" * 10])
def test_a_broken_exit_reads_as_none(tmp_path: Path, content: str) -> None:
    assert read_exit(tmp_path) is None
    (tmp_path / "exit.json").write_text(content)
    assert read_exit(tmp_path) is None


def test_excluded_nodes_add_up(tmp_path: Path) -> None:
    assert excluded_nodes(tmp_path) == {}
    assert write_exclude(tmp_path, ["n2"], "stuck lane")
    assert write_exclude(tmp_path, ["n3", "n4"], "other")
    assert excluded_nodes(tmp_path) == {"n2": "stuck lane", "n3": "other", "n4": "other"}
    record: dict[str, Any] = json.loads((tmp_path / "exclude.json").read_text())
    assert record["nodes"] == ["n2", "n3", "n4"]


def test_an_unreadable_exclusion_is_refused_when_read_and_kept_when_written(tmp_path: Path) -> None:
    (tmp_path / "exclude.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be understood"):
        excluded_nodes(tmp_path)
    assert write_exclude(tmp_path, ["n2"], "x")
    assert excluded_nodes(tmp_path) == {"n2": "x"}
    assert (tmp_path / "exclude.json.unreadable").read_text() == "{"


def test_a_person_approves_only_what_was_asked(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.write("run_started", 0)
    with pytest.raises(UsageError, match="asked about no node"):
        approve(tmp_path, "n2")
    log.write("ask", 4, verdict=VERDICT)
    with pytest.raises(UsageError, match="it asked about n2"):
        approve(tmp_path, "n3")
    assert approved_nodes(tmp_path) == frozenset()
    approve(tmp_path, "n2")
    approve(tmp_path, "n2")
    assert approved_nodes(tmp_path) == {"n2"}
    assert asked_nodes(read(tmp_path).events) == ("n2",)
    last = read(tmp_path).events[-1]
    assert (last.kind, last.step, last.fields["rank"], last.fields["node"]) == ("approved", -1, None, "n2")


def test_a_broken_approval_approves_nothing(tmp_path: Path) -> None:
    (tmp_path / "approved.json").write_text('{"nodes": ["n2"]}')
    assert approved_nodes(tmp_path) == frozenset()
