"""Who else is on a broker: for whoever hears nothing of its own federation, as a name is easily mistaken.

A look is a clean session of its own. Where an access list forbids to read what belongs to others, the broker says nothing or
ends this session, and the one that works stands.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from edgefl.wire.errors import ProtocolError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.messages import AnyMessage, Round, Status
from edgefl.wire.mqtt.session import Address, Down, Incoming, Session
from edgefl.wire.mqtt.topics import ROOT

_LONGEST_S = 10.0
_QUIET_S = 1.0
"""A broker sends what it retains at once: when nothing came for that long, all of it is there."""
_LONGEST_PAUSE_S = 3600.0
_MOST_NAMED = 5


@dataclass(frozen=True)
class Neighbours:
    """The federations on a broker: the state of the round that each one's server announced last, and each one's devices
    that are online. Names are sorted."""

    rounds: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def served(self, but: str) -> list[str]:
        """Federations other than ``but`` whose server announced something."""
        return [name for name in self.rounds if name != but]

    def unserved(self, but: str) -> dict[str, Sequence[str]]:
        """The devices of federations other than ``but`` that no server trains: none announced itself, or it is done."""
        return {
            name: devices
            for name, devices in self.devices.items()
            if name != but and self.rounds.get(name, "done") == "done"
        }


def look(address: Address, client_id: str, filters: Sequence[str], limits: Limits) -> Neighbours:
    """What ``filters`` (:data:`edgefl.wire.mqtt.topics.ALL_ROUNDS` and the like) bring within a few seconds; nothing where
    the broker is away."""
    session = Session(address, client_id, limits=limits, clean=True)
    session.subscribe(filters)
    rounds: dict[str, str] = {}
    devices: dict[str, list[str]] = {}
    session.start()
    try:
        for message in _retained(session):
            federation, *rest = message.topic.removeprefix(f"{ROOT}/").split("/")
            match rest:
                case ["rounds", "current"] if (announced := _read(Round, message)) is not None:
                    rounds[federation] = announced.state
                case ["devices", device, "status"] if (status := _read(Status, message)) and status.online:
                    devices.setdefault(federation, []).append(device)
    finally:
        session.stop(drain_s=0.0)
    return Neighbours(dict(sorted(rounds.items())), {name: sorted(devices[name]) for name in sorted(devices)})


def _retained(session: Session) -> Iterator[Incoming]:
    """Messages until it falls silent, or the connection ends."""
    deadline, patience = time.monotonic() + _LONGEST_S, _LONGEST_S
    while (left := deadline - time.monotonic()) > 0:
        try:
            event = session.inbox.get(timeout=min(left, patience))
        except queue.Empty:
            return
        if isinstance(event, Down):
            if event.waiting:
                continue
            return
        if isinstance(event, Incoming):
            yield event
        patience = _QUIET_S


def _read(kind: type[AnyMessage], message: Incoming) -> AnyMessage | None:
    try:
        return peek(kind, message.payload)
    except ProtocolError:
        return None


class Lookout:
    """Looks around while its owner is alone, in a thread of its own: first after ``pause_s``, then after twice as long each
    time. ``found`` is called on that thread. The owner calls :meth:`step` whenever it wakes."""

    def __init__(
        self, see: Callable[[], Neighbours], found: Callable[[Neighbours], None], pause_s: float
    ) -> None:
        self._see = see
        self._found = found
        self._shortest = pause_s
        self._pause = pause_s
        self._next: float | None = None
        self._thread: threading.Thread | None = None
        self._looked = False

    def step(self, *, alone: bool) -> float | None:
        """Seconds until the next look; None where there is company."""
        now = time.monotonic()
        if not alone:
            self._next, self._pause = None, self._shortest
            return None
        if self._next is None:
            self._next = now + self._pause
        if now >= self._next:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
            self._next = now + self._pause
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._look, name="lookout", daemon=True)
                self._thread.start()
        return self._next - now

    def has_looked(self) -> bool:
        """Whether a look has ended since this was last asked."""
        if not self._looked:
            return False
        self._looked = False
        return True

    def _look(self) -> None:
        try:
            self._found(self._see())
        finally:
            self._looked = True


def named(devices: Sequence[str]) -> str:
    """``phone-1, phone-2 and 3 more``."""
    more = len(devices) - _MOST_NAMED
    shown = ", ".join(devices[:_MOST_NAMED])
    return f"{shown} and {more} more" if more > 0 else shown
