"""How ranks live and end together: nobody fails alone, and whoever ends says why before it leaves."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from unsilent.errors import CorruptionError, RankFailure
from unsilent.journal import Journal
from unsilent.world import World

#: the mark of an error that all ranks raise together: it is no rank's failure, however far it goes
_SHARED = "_unsilent_shared"


@contextlib.contextmanager
def together(world: World, journal: Journal, *shared: type[Exception]) -> Iterator[None]:
    """No rank fails alone: what is raised here is told to the others, and what they told is raised here.

    Errors of the types ``shared`` are those that all ranks raise anyway: they are no rank's failure.
    """
    try:
        yield
    except (CorruptionError, *shared) as error:
        setattr(error, _SHARED, True)
        raise
    except RankFailure:
        journal.wait_for_exit(3.0)
        raise
    except BaseException as error:
        # A broken connection is the echo of another rank's end; its own reason is worth waiting for.
        echo = isinstance(error, RuntimeError) and world.size > 1
        known = world.watcher.failure
        if known is None and echo:
            known = world.watcher.wait_for_failure(10.0 if _sounds_like_a_connection(error) else 0.3)
        if known is not None:
            journal.wait_for_exit(3.0)
            world.watcher.raise_if_failed()
        tell(world, journal, error)
        raise


def tell(world: World, journal: Journal, error: BaseException) -> None:
    """This rank leaves because of ``error``: the others learn it, unless they raise it too or it is their own news."""
    if isinstance(error, (CorruptionError, RankFailure)) or getattr(error, _SHARED, False):
        return
    watcher = world.watcher
    if world.size > 1 and watcher.failure is None and not watcher.posted and not watcher.closed:
        watcher.post(f"{type(error).__name__}: {error}")
        journal.wait_for_exit(3.0)


def tell_at_end(world: World, journal: Journal, error: BaseException) -> None:
    """Like :func:`tell`, for an error outside a step that ends the guard; what only ends a loop or a script is none."""
    ends_well = isinstance(error, StopIteration) or (isinstance(error, SystemExit) and error.code in (None, 0))
    if not ends_well:
        tell(world, journal, error)


class HeldSignal:
    """Holds SIGTERM for two seconds, so that a survivor can put on disk which rank failed before it leaves.

    torchrun sends it 0.1 s after the first worker ended. A handler that somebody else installed is left alone.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._installed = False
        with contextlib.suppress(ValueError):  # not the main thread
            if world.size > 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._handle)
                self._installed = True

    def release(self) -> None:
        """Give the signal back, unless somebody else has taken it since."""
        if self._installed:
            self._installed = False
            with contextlib.suppress(ValueError):
                if signal.getsignal(signal.SIGTERM) == self._handle:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, number: int, frame: object) -> None:
        self._world.watcher.wait_for_failure(2.0)
        self._world.watcher.raise_if_failed()
        # Nobody had failed: somebody outside ends this rank, and peers that live on must not call it a crash.
        self._world.watcher.post("it was ended by SIGTERM")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


class Guarding(Protocol):
    """What the end of the process needs of a guard."""

    world: World
    journal: Journal

    def detach(self, *, together: bool) -> None: ...


def close_at_exit(guard: Guarding) -> Callable[[], None]:
    """Register the end of a process that never closes its guard; it tells the others whether it ended well.

    Returns:
        What was registered, for ``atexit.unregister``.
    """
    reference: Any = weakref.ref(guard)

    def at_exit() -> None:
        alive: Guarding | None = reference()
        if alive is None or alive.world.watcher.closed:
            return
        # Python tells nobody of a SystemExit at this point: the others find out when they wait for this rank.
        error = getattr(sys, "last_value", None)
        if error is not None:
            tell(alive.world, alive.journal, error)
        alive.detach(together=False)

    atexit.register(at_exit)
    return at_exit


def _sounds_like_a_connection(error: BaseException) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("connection", "gloo", "nccl", "socket", "peer", "reduction failed"))
