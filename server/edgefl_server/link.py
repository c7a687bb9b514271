"""Whether the broker is there, since when it is not, and what people are told of it."""

from __future__ import annotations

from collections.abc import Callable

from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import Disconnected
from edgefl_server import events


class Link:
    """``down_since`` is None while the broker is there: at first it is not. ``clock`` gives epoch seconds."""

    def __init__(
        self,
        address: Address,
        federation: str,
        emit: Callable[[events.Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._address = address
        self._federation = federation
        self._emit = emit
        self._clock = clock
        self._told = False
        self.down_since: float | None = clock()

    @property
    def is_up(self) -> bool:
        return self.down_since is None

    def up(self) -> float:
        """Connected: the seconds that it was away."""
        if self._told:
            self._told = False
            self._emit(events.Online(broker=str(self._address)))
        now = self._clock()
        away, self.down_since = now - (self.down_since or now), None
        return away

    def down(self, event: Disconnected) -> None:
        """The connection was lost, or could not be made."""
        if self.down_since is None:
            self.down_since = self._clock()
        self._told = True
        rival = f"another client takes this server's place: does a second server of {self._federation!r} run?"
        self._emit(events.Offline(text=rival if event.rival else event.reason, retry_s=event.retry_s))
