"""Looks after what lies at the broker for devices: whoever may write there can clear or replace it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from edgefl.errors import ProtocolError
from edgefl.wire.mqtt.envelope import unwrap
from edgefl_server.events import Event, Warned
from edgefl_server.publish.publisher import Publisher

_HEARD_S = 2.0
"""For the broker to send what it retains, before all of it is published again."""
_ANNOUNCE_S = 1.0
_BLOBS_S = 30.0
"""At most so often, whatever others do: an announcement is small, and a model is not."""


class Watch:
    """Restores the announcement when another one takes its place, and the blobs when a device cannot find some.

    It reports each connection to the publisher, and then what the broker still retains. ``came`` takes what arrives on the
    announcement's topic, ``failed`` what a device says of an attempt that failed, and ``step`` is called now and then.
    """

    def __init__(
        self,
        publisher: Publisher,
        own: bytes,
        emit: Callable[[Event], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._publisher = publisher
        self._own = own
        self._emit = emit
        self._clock = clock
        self._announced = self._sent = self._heard_by = 0.0
        self._due = False
        self._told = False
        self._lost = ""

    def connected(self, *, resumed: bool) -> None:
        """Report a connection. If the broker ``resumed`` our session, wait for the announcement that it retains."""
        self._publisher.connected(resumed=resumed)
        self._heard_by = self._clock() + _HEARD_S

    def disconnected(self) -> None:
        """The broker is away."""
        self._publisher.disconnected()

    def came(self, payload: bytes, *, retained: bool = False) -> None:
        """Our own announcement, or somebody else's."""
        if self._publisher.asking:
            if retained:  # else it was on its way when the connection ended
                self._publisher.heard(payload)
            return
        if not self._publisher.is_foreign(payload):
            return
        if not self._told and not self._is_ours(payload):  # one of an earlier process of ours is no news
            self._told = True
            text = "somebody else cleared or replaced the announcement at the broker; it is published again each time"
            self._emit(Warned(tier="", text=text))
        self._due = True
        self.step()

    def _is_ours(self, payload: bytes) -> bool:
        with suppress(ProtocolError):
            envelope = unwrap(payload)
            return envelope is not None and envelope.key == self._own
        return False

    def failed(self) -> None:
        """A device could not do its round: maybe chunks that it needs were cleared."""
        if self._publisher.online and self._clock() - self._sent >= _BLOBS_S:
            self._sent = self._clock()
            self._publisher.restore_blobs()
            if (lost := self._publisher.lost()) != self._lost:
                self._lost = lost
                if lost:
                    self._emit(Warned(tier="", text=lost))

    def step(self) -> float | None:
        """Seconds until something is to be restored; None if nothing is."""
        if self._publisher.asking:
            if (left := self._heard_by - self._clock()) > 0:
                return left
            self._publisher.heard(b"")
        if not self._due or not self._publisher.online:
            return None
        wait = self._announced + _ANNOUNCE_S - self._clock()
        if 0 < wait <= _ANNOUNCE_S:
            return wait
        self._due, self._announced = False, self._clock()
        self._publisher.restore()
        return None
