"""Who runs next and when a launch ends; agents that are plain processes stand in for torchrun's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unsilent import children, launch
from unsilent.checkpoint.certificate import Certificate, Status
from unsilent.checkpoint.files import read_certificate, write_certificate
from unsilent.cli import app
from unsilent.errors import UsageError
from unsilent.events import read, write_exclude
from unsilent.launch import MARK, Plan, plan_from, seats, why_not_again
from unsilent.screen import show

FOUR = ("a", "b", "c", "d")


def plan(directory: Path, *command: str, **options: Any) -> Plan:
    return Plan(**{"nodes": FOUR, "directory": directory, "command": command or ("train.py",), **options})


# ---- words of the command line ---------------------------------------------------------------------------------------


def words(**options: Any) -> Plan:
    given = {"nodes": "4", "spares": "0", "ranks_per_node": 1, "restarts": 3, "out": Path("o"), "command": ["x.py"],
             "run_on": ""}  # fmt: skip
    return plan_from(**{**given, **options})


def test_numbers_imitate_nodes_and_names_are_names() -> None:
    assert words(nodes="2", spares="2").nodes == ("node-0", "node-1")
    assert words(nodes="2", spares="2").spares == ("node-2", "node-3")
    assert words(nodes="a, b,c", spares="d").nodes == ("a", "b", "c")
    assert words(nodes="a,b", spares="d").spares == ("d",)


def test_a_digit_that_is_no_number_is_a_name() -> None:
    assert words(nodes="²").nodes == ("²",)


def test_the_run_directory_is_the_commands_own() -> None:
    assert words(out=None, command=["-m", "unsilent", "train", "--out", "r"]).directory == Path("r")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"nodes": "0"}, "--nodes is 0: it must be at least 1"),
        ({"nodes": "a,,b"}, "give a number, or names with commas"),
        ({"nodes": "a/b"}, "give a number, or names with commas"),
        ({"nodes": "a,b", "spares": "1"}, "--spares must give names, too"),
        ({"nodes": "a,b", "spares": "b"}, "named twice"),
        ({"restarts": -1}, "--restarts at least 0"),
        ({"ranks_per_node": 0}, "--nproc-per-node must be at least 1"),
        ({"out": None}, "launch needs the run directory"),
        ({"command": ["torchrun", "x.py"]}, "launch starts torchrun itself"),
        ({"command": ["-m", "unsilent", "train", "--nodes-imitated", "4"]}, "launch gives every node its name"),
        ({"run_on": "ssh {node}"}, "--run-on must hold {command}"),
    ],
)
def test_what_cannot_be_launched_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told.replace("{", "\\{")):
        words(**options)


# ---- who runs, and when it ends --------------------------------------------------------------------------------------


def test_a_spare_takes_the_place_of_the_bad_node_and_the_others_keep_theirs() -> None:
    assert seats(FOUR, (), {}) == FOUR
    assert seats(FOUR, (), {"b"}) == ("a", "c", "d")
    assert seats(FOUR, ("s", "t"), {"b"}) == ("a", "s", "c", "d")
    assert seats(FOUR, ("s", "t"), {"b", "s"}) == ("a", "t", "c", "d")
    assert seats(FOUR, ("s",), {"b", "c"}) == ("a", "s", "d")
    assert seats(FOUR, ("s",), {"s"}) == FOUR
    assert seats(("a",), (), {"a"}) == ()


def test_only_a_quarantine_of_a_node_that_ran_starts_it_again() -> None:
    def why(code: int = 11, left: int = 1, excluded: Sequence[str] = ("b",), nodes: Sequence[str] = ("a",)) -> str:
        return why_not_again(code, ran=("a", "b"), next_nodes=nodes, excluded=excluded, restarts_left=left)

    assert why() == ""
    assert "in order" in why(code=0)
    assert "only exit code 11" in why(code=10)
    assert "as often as --restarts" in why(left=0)
    assert "none of the nodes that ran" in why(excluded=("z",))
    assert "no node is left" in why(nodes=())


# ---- attempts, with plain processes for agents -----------------------------------------------------------------------

RUN = """
import json, os, pathlib, signal, sys, time
out, node = pathlib.Path(sys.argv[1]), os.environ["UNSILENT_NODE"]
def end(code, own, **more):
    (out / "exit.json").write_text(json.dumps({"exit_code": code, **more}))
    sys.exit(own)
def others():
    while True: time.sleep(0.05)
print("this is", node, flush=True)
"""


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Plan]:
    """Agents that run a few lines of Python, and bounds of a second or two."""
    monkeypatch.setattr(launch, "PATIENCE_S", 1.0)
    monkeypatch.setattr(children, "_STOP_S", 2.0)

    def made(code: str, **options: Any) -> Plan:
        command = [sys.executable, "-c", RUN + code, str(tmp_path)]
        monkeypatch.setattr(launch._Launch, "_agent", lambda *_: command)
        return plan(tmp_path, **options)

    return made


def code_of(wanted: Plan) -> int:
    return launch.launch(wanted)["exit_code"]


def record(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "launch.json").read_text())


def test_a_node_that_is_taken_out_is_left_out_and_the_rest_ends(agents: Any, tmp_path: Path, capfd: Any) -> None:
    again = agents(
        "from unsilent.events import write_exclude\n"
        "if node == 'c':\n write_exclude(out, ['c'], 'it was wrong')\n end(11, 1)\n"
        "sys.exit(1 if not (out / 'exclude.json').exists() or node == 'c' else 0)\n"
    )
    assert code_of(again) == 0
    first, second = record(tmp_path)["attempts"]
    assert (first["nodes"], first["exit_code"], first["agents"]["c"]) == ([*FOUR], 11, 1)
    assert first["decision"] == "start again on a, b, d"
    assert (second["nodes"], second["exit_code"]) == (["a", "b", "d"], 0)
    assert first["port"] != second["port"] and first["logs"] != second["logs"]
    assert (Path(first["logs"]) / "c.log").read_text() == "this is c\n"
    said = capfd.readouterr().err
    assert "c is taken out: starting again on a, b, d, from the beginning" in said
    assert "this is a" in said and "this is b" not in said
    notices = [event.fields["text"] for event in read(tmp_path).events]
    assert any("c is taken out" in text for text in notices)


def test_every_other_code_ends_it(agents: Any, tmp_path: Path) -> None:
    assert code_of(agents("end(10, 1)")) == 10
    assert code_of(agents("sys.exit(3 if node == 'b' else 0)")) == 3
    assert code_of(agents("end(0, 5)")) == 5
    assert code_of(agents("end(0, 0)")) == 0
    assert [len(record(tmp_path)["attempts"])] == [1]


def test_it_is_started_again_only_so_often(agents: Any, tmp_path: Path, capfd: Any) -> None:
    worse = agents("from unsilent.events import write_exclude\nwrite_exclude(out, [node], 'x')\nend(11, 1)", restarts=1)
    worse = Plan(**{**vars(worse), "nodes": ("a",), "spares": ("b", "c", "d")})
    assert code_of(worse) == 11
    attempts = record(tmp_path)["attempts"]
    assert [attempt["nodes"] for attempt in attempts] == [["a"], ["b"]]
    assert "as often as --restarts allows" in attempts[-1]["decision"]
    assert "as often as --restarts allows" in capfd.readouterr().err


def test_a_quarantine_that_names_nobody_is_not_repeated(agents: Any, tmp_path: Path) -> None:
    assert code_of(agents("end(11, 1)")) == 11
    assert "names none of the nodes" in record(tmp_path)["attempts"][0]["decision"]


def test_nodes_that_are_out_already_do_not_start(agents: Any, tmp_path: Path) -> None:
    write_exclude(tmp_path, ["b"], "earlier")
    assert code_of(agents("end(0, 0)")) == 0
    assert record(tmp_path)["attempts"][0]["nodes"] == ["a", "c", "d"]
    write_exclude(tmp_path, FOUR, "earlier")
    with pytest.raises(UsageError, match="there is none to start on"):
        launch.launch(agents("end(0, 0)"))


def test_an_agent_that_dies_takes_the_others_with_it(agents: Any, tmp_path: Path) -> None:
    begin = time.monotonic()
    dies = agents("if node == 'c': os.kill(os.getpid(), signal.SIGKILL)\nothers()")
    assert code_of(dies) == 137
    assert time.monotonic() - begin < 30
    assert set(record(tmp_path)["attempts"][0]["agents"].values()) == {137, 143}


def test_one_that_does_not_listen_is_killed_with_what_it_has_started(agents: Any, tmp_path: Path) -> None:
    deaf = agents(
        "import subprocess\n"
        "if node == 'c': sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if node == 'd': subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "others()"
    )
    assert code_of(deaf) == 7
    attempt = record(tmp_path)["attempts"][0]
    assert attempt["agents"] == {"a": 137, "b": 137, "c": 7, "d": 137} and attempt["killed"] == 1
    identity = Path(attempt["logs"]).name.removesuffix("-1")  # of this launch: others may be running on this machine
    assert children.kill_left_over(f"{MARK}={identity}.1") == 0


def test_what_cannot_be_read_or_written_on_the_way_leaves_the_runs_own_code(
    agents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes_c_out = "from unsilent.events import write_exclude\nwrite_exclude(out, ['c'], 'x')\nend(11, 1)"
    begun = agents(takes_c_out)
    monkeypatch.setattr(launch, "_free_port", lambda: (tmp_path / "launch" / f"{job.identity}-2").write_text("") or 1)
    job = launch._Launch(begun)
    assert job.run()["exit_code"] == 11
    assert "it cannot be started again: cannot make" in record(tmp_path)["attempts"][0]["decision"]
    (tmp_path / "exclude.json").unlink()
    assert code_of(agents("(out / 'exclude.json').write_text('{')\nend(11, 1)")) == 11
    assert "exclude.json: cannot be understood" in record(tmp_path)["attempts"][0]["decision"]


def test_a_screen_that_is_gone_does_not_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = launch._Follow(tmp_path / "log")
    follow.show()  # no such file
    (tmp_path / "log").write_text("words")
    with monkeypatch.context() as patch, Path("/dev/full").open("w") as full:
        patch.setattr(sys, "stderr", full)
        follow.show()
        show("more words")
        patch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_leftovers_are_killed_after_an_exception_and_left_alone_after_a_good_end(
    agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    monkeypatch.setattr(launch, "kill_left_over", lambda mark: looked.append(mark) or 0)
    assert code_of(agents("end(0, 0)")) == 0 and looked == []
    monkeypatch.setattr(launch._Follow, "show", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        launch.launch(agents("others()"))
    assert len(looked) == 1


def test_a_script_may_be_called_like_an_interpreter(tmp_path: Path) -> None:
    for name in ("python_train.py", "torchrun_me.py", "python3.py"):
        plan(tmp_path, name)
    for name in ("python", "/usr/bin/python3", "python3.11", "torchrun"):
        with pytest.raises(UsageError, match="launch starts torchrun itself"):
            plan(tmp_path, name)


def test_a_warning_signal_is_passed_on_and_asks_for_no_end() -> None:
    with children.Children() as started:
        child = started.start(["sleep", "600"])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert started.wait() == [128 + signal.SIGUSR1] and started.signals == []
        assert children.exit_code(child) == 128 + signal.SIGUSR1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_signals_reach_every_agent_and_nothing_is_started_again(number: signal.Signals, tmp_path: Path) -> None:
    code = RUN + (f"signal.signal({int(number)}, lambda *_: sys.exit(21))\n(out / node).touch()\nothers()")
    run = (
        "from pathlib import Path; import sys; from unsilent import launch\n"
        f"launch._Launch._agent = lambda *_: [sys.executable, '-c', {code!r}, {str(tmp_path)!r}]\n"
        f"sys.exit(launch.launch(launch.Plan(nodes={FOUR!r}, directory=Path({str(tmp_path)!r}), command=('x',)))['exit_code'])"
    )
    process = subprocess.Popen([sys.executable, "-c", run], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not all((tmp_path / node).exists() for node in FOUR) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, number)
    assert process.wait(timeout=30) == 21
    (attempt,) = record(tmp_path)["attempts"]
    assert set(attempt["agents"].values()) == {21} and f"signal {int(number)}" in attempt["decision"]


def test_a_newer_checkpoint_than_the_verdict_trusts_is_marked(agents: Any, tmp_path: Path) -> None:
    for steps in (2, 4, 6):
        path = tmp_path / "checkpoints" / f"step-{steps:08d}"
        path.mkdir(parents=True)
        write_certificate(path, Certificate(steps=steps, created="now", torch="2", status=Status.CERTIFIED))
    named = tmp_path / "checkpoints" / "step-00000002"
    again = agents(
        "from unsilent.events import write_exclude\n"
        f"if node == 'c':\n write_exclude(out, ['c'], 'x')\n end(11, 1, resume_from={str(named)!r})\n"
        "sys.exit(1 if node == 'c' else 0)\n"
    )
    assert code_of(again) == 0
    found = {steps: read_certificate(tmp_path / "checkpoints" / f"step-{steps:08d}") for steps in (2, 4, 6)}
    assert {steps: c.status.value for steps, c in found.items() if c is not None} == {
        2: "certified", 4: "distrusted", 6: "distrusted",
    }  # fmt: skip


def test_a_line_for_the_shell_runs_the_agent_on_its_node(tmp_path: Path) -> None:
    line = launch._Launch(plan(tmp_path, "train.py", "a b", run_on="ssh -tt {node} {command}"))._agent(
        "b", 1, FOUR, 29500, "m"
    )
    assert line[:2] == ["sh", "-c"] and line[2].startswith("exec ssh -tt b 'cd ")
    assert "--master-addr a" in line[2] and "--node-rank 1" in line[2] and "UNSILENT_NODE=b" in line[2]


def test_the_command_says_what_is_wrong_and_gives_its_record(agents: Any, tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["launch", "--nodes", "2", "--", "x.py"])
    assert refused.exit_code == 2 and "launch needs the run directory" in refused.stderr
    agents("end(0, 0)")
    done = CliRunner().invoke(app, ["launch", "--nodes", "2", "--out", str(tmp_path), "--json", "--", "x.py"])
    assert done.exit_code == 0
    assert json.loads(done.stdout.splitlines()[-1])["launch"]["plan"]["nodes"] == ["node-0", "node-1"]
