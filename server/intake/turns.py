"""Whose update the server asks for: so many bytes at a time, first come, first served.

Where all updates of a round together are more than the server wants on their way, each device first offers its own: it sends
what the update is, without a byte of it. When its turn comes, it is asked for the pieces. So neither the broker's queue nor
the server's memory has to hold them all, and none has to be sent twice.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from edgefl.wire.mqtt.messages import UpdateChunk

PATIENCE_S = 5.0
"""Whose turn it is and who sends nothing for so long loses it, and may offer again."""


@dataclass
class _Turn:
    offer: UpdateChunk
    heard: float


class Turns:
    """``nbytes``: of updates that are asked for at a time; one is in any case, however large. ``clock`` is monotonic."""

    def __init__(self, nbytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._nbytes = nbytes
        self._clock = clock
        self._waiting: OrderedDict[str, UpdateChunk] = OrderedDict()
        self._again: dict[str, UpdateChunk] = {}
        self._turns: OrderedDict[str, _Turn] = OrderedDict()  # who was silent longest comes first
        self._asked_bytes = 0

    def offer(self, device: str, offer: UpdateChunk) -> None:
        """A device has an update: ``offer`` is a chunk of it, of which the data are not looked at. One that offers the same
        while it has its turn is asked again, as it cannot have heard."""
        if self.has_heard(device, offer):
            self._again[device] = offer
            return
        self.over(device, but_waiting=True)
        self._waiting[device] = offer  # one that waits already keeps its place

    def has_heard(self, device: str, offer: UpdateChunk) -> bool:
        """Whether the device was asked for this very update."""
        turn = self._turns.get(device)
        return turn is not None and turn.offer == offer

    def fed(self, device: str) -> None:
        """A piece came of the device's update."""
        if (turn := self._turns.get(device)) is not None:
            turn.heard = self._clock()
            self._turns.move_to_end(device)

    def over(self, device: str, *, but_waiting: bool = False) -> None:
        """The device's update is whole, or nobody wants it."""
        if not but_waiting:
            self._waiting.pop(device, None)
        self._again.pop(device, None)
        if (turn := self._turns.pop(device, None)) is not None:
            self._asked_bytes -= turn.offer.size

    def clear(self) -> None:
        """The round is over."""
        self._waiting.clear()
        self._again.clear()
        self._turns.clear()
        self._asked_bytes = 0

    def next(self) -> list[tuple[str, UpdateChunk]]:
        """The devices whose turn it is from now on, or who have to be asked again, with what they offered."""
        now = self._clock()
        self._expire(now)
        begun, self._again = list(self._again.items()), {}
        while self._waiting:
            device, offer = next(iter(self._waiting.items()))
            if self._turns and self._asked_bytes + offer.size > self._nbytes:
                break
            del self._waiting[device]
            self._turns[device] = _Turn(offer, now)
            self._asked_bytes += offer.size
            begun.append((device, offer))
        return begun

    def wait(self) -> float | None:
        """Seconds until a turn may be over for want of pieces; None if nobody waits for one."""
        if not self._waiting or not self._turns:
            return None
        return max(0.0, next(iter(self._turns.values())).heard + PATIENCE_S - self._clock())

    def _expire(self, now: float) -> None:
        silent = takewhile(lambda each: now - each[1].heard >= PATIENCE_S, self._turns.items())
        for device in [name for name, _ in silent]:
            self.over(device, but_waiting=True)
