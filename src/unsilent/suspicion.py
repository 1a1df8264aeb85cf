"""What is held against the devices of this run: strikes from earlier runs, those of its own, and what each step was
blamed on when it ran before.

The earlier ones come from the ledger, and from the run directory's own log after a restart. Only rank 0 reads them; all
ranks get the same, so that all judge alike. For the same reason no rank looks at its clock: what fades during a run does
so with its steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from unsilent.errors import UsageError
from unsilent.events import read
from unsilent.journal import Journal
from unsilent.ledger import Device, read_directory, strike_history
from unsilent.records import Event, Kind, Suspect, Verdict
from unsilent.recurrence import (
    COMES_BACK,
    HALF_LIFE_DAYS,
    REMEMBERED,
    Strike,
    blames_a_device,
    device_of,
    in_hindsight,
    newest,
    seen_again,
    strikes,
)
from unsilent.world import World

_TAG_EARLIER, _TAG_BLAMED = 41, 42
#: After so many half-lives a thousandth is left of a strike: files that old are not opened.
_FORGOTTEN_S = 10 * HALF_LIFE_DAYS * 86_400
#: The start of a run does not wait longer for a ledger of very many runs.
_READ_WITHIN_S = 20.0
_STEPS_REMEMBERED = 4096  # a long run in which a device is wrong in every step must not grow
_SHOWN = 3
_OWN = ""  # the present run, among those of the strikes


@dataclass(frozen=True, kw_only=True)
class _Earlier:
    """What rank 0 has read, for all ranks."""

    strikes: Mapping[tuple[str, str], tuple[Strike, ...]] = field(default_factory=dict[Any, Any])
    now: float = 0.0


class Suspicion:
    """The memory of who was blamed. Every method is called by all ranks, with the same arguments.

    Args:
        directory: the run directory; its log tells what steps were blamed on before a restart.
        ledger: the directory of the ledger, None without one.
    """

    def __init__(
        self, world: World, journal: Journal, *, directory: str | Path | None, ledger: str | Path | None
    ) -> None:
        self._world, self._journal, self._directory, self._ledger = world, journal, directory, ledger
        self._now = 0.0
        self._step = -1
        self._times_back = self._reruns = 0
        self._earlier: dict[int, tuple[Strike, ...]] = {}  # by rank
        self._own: dict[int, dict[tuple[int, int], Strike]] = {}  # by rank, then by times gone back and step
        self._standing_differences: set[tuple[str, str]] = set()  # device and site of what nobody has put right
        self._blamed: dict[int, dict[int, set[str]]] = {}  # by step, then by reruns so far: devices, in words

    def recall(self) -> None:
        """At the start: what earlier runs have against the devices of this one."""
        if self._ledger is None:
            return
        mine = self._read_ledger(self._ledger) if self._world.rank == 0 else _Earlier()
        earlier: _Earlier = self._world.gather(mine, step=0, tag=_TAG_EARLIER)[0]
        self._now = earlier.now
        for place in self._world.places:
            history = earlier.strikes.get((place.node, place.device))
            if history:
                self._earlier[place.rank] = history
                held = strikes(history, 0, self._now)
                watched = ", enough to be watched" if held >= COMES_BACK else ""
                self._note(f"{place.node} {place.device} (rank {place.rank}) comes with {held:.2f} strikes{watched}")

    def resumed(self) -> None:
        """A checkpoint was loaded: what earlier starts in this run directory have blamed its steps on counts again."""
        if self._directory is None:
            return
        mine = self._read_log(self._directory) if self._world.rank == 0 else {}
        blamed: dict[int, set[str]] = self._world.gather(mine, step=0, tag=_TAG_BLAMED)[0]
        for step, devices in blamed.items():
            self._blamed.setdefault(step, {}).setdefault(-1, set()).update(devices)

    def begin_step(self, step: int) -> None:
        """A step begins. One that does not follow the last one shows that the run goes on from another state."""
        moved = step - (self._step + 1)
        if moved < 0:
            self._times_back += 1
            self._reruns += 1
        if moved:
            # Strikes keep their distance in steps that have been worked since.
            self._earlier = {rank: tuple(_later(s, moved) for s in kept) for rank, kept in self._earlier.items()}
            self._own = {rank: {at: _later(s, moved) for at, s in kept.items()} for rank, kept in self._own.items()}
        self._step = step

    def ran_again(self) -> None:
        """A rollback has run the last steps again, the one under way included."""
        self._reruns += 1

    def in_hindsight(self, verdict: Verdict) -> Verdict:
        """The verdict with what was found before taken into account."""
        ran_before = {
            device
            for reruns, devices in self._blamed.get(verdict.step, {}).items()
            if reruns < self._reruns
            for device in devices
        }
        judged = in_hindsight(verdict, strikes=self.strikes(verdict, before=verdict.step), blamed_before=ran_before)
        if judged.kind is Kind.SOFTWARE and judged is not verdict:
            self._acquit(verdict.step)
        return judged

    def strike(self, verdict: Verdict, step: int, *, acted_on: bool) -> None:
        """Count a verdict against the devices that it names, once for a step."""
        if not blames_a_device(verdict):
            return
        ranks = [suspect.rank for suspect in verdict.suspects if suspect.rank is not None]
        if len(ranks) > 1 and set(ranks) <= set(self._world.teams.of(ranks[0])):
            return  # they compute together, and all but one of them are healthy
        stays = seen_again(verdict.kind, verdict.site, acted_on=acted_on)
        blamed = self._blamed.setdefault(step, {}).setdefault(self._reruns, set())
        for suspect in verdict.suspects:
            device = device_of(suspect)
            if not device or suspect.rank is None:
                continue
            blamed.add(device)
            if stays and (device, verdict.site.value) in self._standing_differences:
                continue
            if stays:
                self._standing_differences.add((device, verdict.site.value))
            own, at = self._own.setdefault(suspect.rank, {}), (self._times_back, step)
            if at not in own or own[at].kind is Kind.TRANSIENT:
                own[at] = Strike(run=_OWN, kind=verdict.kind, step=step, time=self._now)
            while len(own) > REMEMBERED:
                del own[min(own)]
        while len(self._blamed) > _STEPS_REMEMBERED:
            del self._blamed[next(iter(self._blamed))]

    def strikes(self, verdict: Verdict, *, before: int) -> float:
        """The most that is held against a device which this verdict suspects, from before this run of step ``before``."""
        now = (self._times_back, before)
        return max((self._held(s.rank, now) for s in verdict.suspects if s.rank is not None), default=0.0)

    @property
    def struck(self) -> frozenset[int]:
        """The ranks against whose devices so much is held that every step is audited."""
        now = (self._times_back, self._step + 1)
        return frozenset(rank for rank in (*self._earlier, *self._own) if self._held(rank, now) >= COMES_BACK)

    def _held(self, rank: int, now: tuple[int, int]) -> float:
        own = [strike for at, strike in self._own.get(rank, {}).items() if at < now]
        return strikes([*self._earlier.get(rank, ()), *own], now[1], self._now)

    def _acquit(self, step: int) -> None:
        """Whoever this step was blamed on in this run is not held to it any more."""
        for own in self._own.values():
            for at in [at for at in own if at[1] == step]:
                del own[at]

    # ---- rank 0 reads ------------------------------------------------------------------------------------------------

    def _read_ledger(self, ledger: str | Path) -> _Earlier:
        now = time.time()
        try:
            Path(ledger).mkdir(parents=True, exist_ok=True)
            contents = read_directory(ledger, since=now - _FORGOTTEN_S, within_s=_READ_WITHIN_S)
        except (OSError, UsageError) as error:
            self._note(f"the ledger was not read, so nothing is known of earlier runs: {error}")
            return _Earlier(now=now)
        for problem in contents.problems[:_SHOWN]:
            self._note(f"ledger: {problem}")
        if len(contents.problems) > _SHOWN:
            self._note(f"ledger: {len(contents.problems) - _SHOWN} more lines were left out")
        here = {Device(node=p.node, device=p.device, rank=p.rank) for p in self._world.places}
        history = strike_history([run for run in contents.runs if run.run != self._journal.run_id])
        return _Earlier(now=now, strikes={(d.node, d.device): newest(s) for d, s in history.items() if d in here})

    def _read_log(self, directory: str | Path) -> dict[int, set[str]]:
        """By step, the devices that verdicts of earlier starts have named.

        Once a step has been called SOFTWARE for that, it begins anew: else a second bad device that shows up at the same
        step would never be named.
        """
        try:
            events = read(directory).events
        except UsageError as error:
            self._note(f"what earlier starts of this run have found is not known: {error}")
            return {}
        blamed: dict[int, set[str]] = {}
        for event in events:
            if event.kind == "verdict" and event.fields.get("run") != self._journal.run_id:
                devices = _named(event)
                if event.fields.get("verdict", {}).get("kind") == Kind.SOFTWARE.value:
                    blamed.pop(event.step, None)
                if devices:
                    blamed.setdefault(event.step, set()).update(devices)
        return blamed

    def _note(self, text: str) -> None:
        self._journal.write("notice", max(0, self._step), text=text)
        self._journal.say(text)


def _later(strike: Strike, steps: int) -> Strike:
    return replace(strike, step=strike.step + steps)


def _named(event: Event) -> set[str]:
    """The devices that a verdict in the log names as the source."""
    verdict = event.fields.get("verdict")
    kind = cast(dict[str, Any], verdict).get("kind") if isinstance(verdict, dict) else None
    if kind not in (Kind.TRANSIENT.value, Kind.PERSISTENT.value):
        return set()
    suspects = event.fields.get("suspects")
    found = [s for s in cast(list[Any], suspects) if isinstance(s, dict)] if isinstance(suspects, list) else []
    named = [Suspect(node=s.get("node"), device=s.get("device")) for s in cast(list[dict[str, Any]], found)]
    return {device for suspect in named if (device := device_of(suspect))}
