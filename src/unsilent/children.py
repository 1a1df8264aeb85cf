"""Processes that one of our commands starts: signals are passed on to them, and none outlives the others for long."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from unsilent.errors import UsageError

_ASK_FOR_THE_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# What the last two mean only the command knows; schedulers send them as a warning.
_FORWARDED = (*_ASK_FOR_THE_END, signal.SIGUSR1, signal.SIGUSR2)
_POLL_S = 0.1
#: torchrun gives its workers 30 seconds between SIGTERM and SIGKILL
_STOP_S = 40.0


class Children:
    """Starts processes and waits for them. As long as it is entered, signals go to them.

    Attributes:
        signals: those that ask for the end and have come so far.
    """

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._running: list[subprocess.Popen[bytes]] = []
        self._kept: dict[int, object] = {}

    def __enter__(self) -> Children:
        self._kept = {number: signal.signal(number, self._pass_on) for number in _FORWARDED}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for number, handler in self._kept.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        for child in self._running:
            _kill(child)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=_STOP_S)

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, log: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start one; what it says goes to ``log``, by default where ours goes.

        Raises:
            UsageError: it cannot be started.
        """
        try:
            with contextlib.ExitStack() as files:
                out = None if log is None else files.enter_context(log.open("ab"))
                # A session of its own: Ctrl-C on a terminal would reach it a second time, besides the one we pass on.
                child = subprocess.Popen(
                    command,
                    env=None if environment is None else dict(environment),
                    stdin=None if log is None else subprocess.DEVNULL,
                    stdout=out,
                    stderr=None if out is None else subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise UsageError(f"cannot start {command[0]}: {error.strerror or error}") from error
        self._running.append(child)
        for number in self.signals:  # those that came before there was anybody to pass them on to
            child.send_signal(number)
        return child

    def wait(self, *, patience_s: float | None = None, meanwhile: Callable[[], None] = lambda: None) -> list[int]:
        """Wait for all of them, and give their exit codes in the order of their ends.

        Args:
            patience_s: how long the others may go on once one has failed, or a signal has come; then they are ended.
                None waits for as long as it takes.
            meanwhile: called several times a second.
        """
        codes: list[int] = []
        terminate_at = kill_at = float("inf")
        while self._running:
            for child in [child for child in self._running if child.poll() is not None]:
                self._running.remove(child)
                codes.append(exit_code(child))
            now = time.monotonic()
            if patience_s is not None and (any(codes) or self.signals):
                terminate_at = min(terminate_at, now + patience_s)
            if now >= terminate_at and kill_at == float("inf"):
                kill_at = now + _STOP_S
                for child in self._running:
                    child.terminate()
            if now >= kill_at:
                for child in self._running:
                    _kill(child)
            meanwhile()
            if self._running:
                time.sleep(_POLL_S)
        return codes

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number in _ASK_FOR_THE_END:
            self.signals.append(number)
        for child in self._running:
            child.send_signal(number)


def exit_code(child: subprocess.Popen[bytes]) -> int:
    """What a process that is over has ended with; 128 and the signal's number when a signal ended it."""
    code = child.returncode
    return 128 - code if code < 0 else code


def kill_left_over(mark: str) -> int:
    """Kill the processes of this machine whose environment holds ``mark`` (``NAME=value``); how many there were.

    The workers of a torchrun that was killed live on, and would hold their devices against the next start.
    """
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                os.kill(int(folder.name), signal.SIGKILL)
                found += 1
    return found


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
