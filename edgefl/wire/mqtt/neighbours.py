"""Search for other federations on a broker, to detect a misspelled federation name.

A search uses a session of its own. If an access list forbids reading other federations, the broker returns nothing or
ends that session, and the main session is not affected.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from edgefl.errors import ProtocolError
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.events import Disconnected, EventSink, IncomingMessage
from edgefl.wire.mqtt.messages import AnyMessage, Round, Status
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import ROOT

_LONGEST_S = 10.0
_QUIET_S = 1.0
"""Seconds of silence after which all retained messages have arrived: a broker sends them at once."""
_LONGEST_PAUSE_S = 3600.0
_MOST_NAMED = 5


@dataclass(frozen=True)
class Neighbours:
    """Federations found on a broker, by name.

    Attributes:
        rounds: State of the last announced round (``open``, ``closed`` or ``done``) of each federation with a server.
        devices: Names of the online devices of each federation.
    """

    rounds: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def served(self, but: str) -> list[str]:
        """Return the names of the federations other than ``but`` that have announced a round."""
        return [name for name in self.rounds if name != but]

    def unserved(self, but: str) -> dict[str, Sequence[str]]:
        """Return the devices of each federation other than ``but`` that has announced no round, or whose run is over."""
        return {
            name: devices
            for name, devices in self.devices.items()
            if name != but and self.rounds.get(name, "done") == "done"
        }


@dataclass(frozen=True)
class NeighbourSearch:
    """Search for the federations on a broker.

    Attributes:
        address: Broker.
        client_id: Client id of the search's session.
        filters: Topic filters such as :data:`edgefl.wire.mqtt.topics.ALL_ROUNDS`.
        limits: Limits of the session.
    """

    address: Address
    client_id: str
    filters: Sequence[str]
    limits: Limits

    def run(self) -> Neighbours:
        """Search for some seconds and return the result. It is empty if the broker cannot be reached."""
        session = Session(self.address, self.client_id, limits=self.limits, clean=True)
        session.subscribe(self.filters)
        rounds: dict[str, str] = {}
        devices: dict[str, list[str]] = {}
        session.start()
        try:
            for message in _retained(session):
                federation, *rest = message.topic.removeprefix(f"{ROOT}/").split("/")
                match rest:
                    case ["rounds", "current"] if (announced := _read(Round, message)) is not None:
                        rounds[federation] = announced.state
                    case ["devices", device, "status"] if (
                        status := _read(Status, message)
                    ) and status.online:
                        devices.setdefault(federation, []).append(device)
        finally:
            session.stop(drain_s=0.0)
        return Neighbours(
            dict(sorted(rounds.items())), {name: sorted(devices[name]) for name in sorted(devices)}
        )


def _retained(session: Session) -> Iterator[IncomingMessage]:
    """Yield incoming messages until none arrived for a second, or the connection ends."""
    deadline, patience = time.monotonic() + _LONGEST_S, _LONGEST_S
    while (left := deadline - time.monotonic()) > 0:
        try:
            event = session.inbox.get(timeout=min(left, patience))
        except queue.Empty:
            return
        if isinstance(event, Disconnected):
            if event.waiting:
                continue
            return
        if isinstance(event, IncomingMessage):
            yield event
        patience = _QUIET_S


def _read(kind: type[AnyMessage], message: IncomingMessage) -> AnyMessage | None:
    """Return the message, unverified, or None if it is malformed."""
    try:
        return peek(kind, message.payload)
    except ProtocolError:
        return None


class NeighbourMonitor:
    """Search that is repeated in a thread while a client finds no server, or a server no device.

    The pause doubles after each search.

    Args:
        search: Search to run.
        results: Receiver of each result. It is called on the search's thread.
        pause_s: Seconds until the first search.
    """

    def __init__(self, search: NeighbourSearch, results: EventSink[Neighbours], pause_s: float) -> None:
        self._search = search
        self._results = results
        self._shortest = pause_s
        self._pause = pause_s
        self._next: float | None = None
        self._thread: threading.Thread | None = None
        self._looked = False

    def step(self, *, alone: bool) -> float | None:
        """Start a search if one is due. The owner calls it whenever it wakes up.

        Args:
            alone: True if the client finds no partner. False cancels the next search and resets the pause.

        Returns:
            Seconds until the next search, or None if ``alone`` is False.
        """
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
                self._thread = threading.Thread(target=self._look, name="neighbour-search", daemon=True)
                self._thread.start()
        return self._next - now

    def has_looked(self) -> bool:
        """Return True if a search has ended since the last call, and reset that flag."""
        if not self._looked:
            return False
        self._looked = False
        return True

    def _look(self) -> None:
        try:
            self._results.put(self._search.run())
        finally:
            self._looked = True


def list_devices(devices: Sequence[str]) -> str:
    """Return a list of device names for display, such as ``phone-1, phone-2 and 3 more``."""
    more = len(devices) - _MOST_NAMED
    shown = ", ".join(devices[:_MOST_NAMED])
    return f"{shown} and {more} more" if more > 0 else shown
