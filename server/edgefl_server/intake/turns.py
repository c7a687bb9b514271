"""Queue of uploads: the server asks for so many bytes of updates at a time.

If the updates of a round together are more than the server wants on their way, each device first offers its own: it sends
the description of the update, without data. When its turn comes, the server asks it for the pieces. So neither the broker's
queue nor the server's memory has to hold them all, and no device sends its update twice.

A slow device, or a dishonest one, must not block the others. Two rules see to this:

* A turn that takes longer than usual reserves no bytes any more, so the next device uploads at the same time. If slow
  turns send nearly nothing, the next ones are waited for less. If they send much, more: not all are asked at once where all
  are slow.
* A turn is lost after a fair share of the time left, or after ``PATIENCE_S`` without a piece. Its device goes to the end of
  the line and keeps its pieces.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from edgefl.system.clock import steady_time
from edgefl.wire.mqtt.messages import UpdateChunk

PATIENCE_S = 5.0
"""Seconds without a piece after which a turn is lost, and the shortest time after which a turn with pieces is."""

SHORTEST_SLOW_S = 0.05
_SLOW = 1.5
"""Multiple of the usual time after which a turn is slow."""
_SLOW_OF_ROUND = 1 / 3
"""Part of the round's age at the turn's begin, after which it is slow too: slow turns must not double a round's time."""
_TURNS_KEPT = 16
_PACE_S = 0.5
"""Seconds over which the pace of a slow turn is measured."""
LOOK_S = 0.025
"""Seconds between two passes over the turns, so that a message costs the same however many there are."""


@dataclass
class _Turn:
    """``relative_pace``: of a slow turn, its bytes a second as a part of the usual ones, at most 1."""

    offer: UpdateChunk
    began: float
    heard: float
    measured: float
    nbytes: int = 0
    is_slow: bool = False
    relative_pace: float = 0.0

    def usual_s(self, pace: float) -> float:
        """Return the seconds that the update takes at the usual ``pace``, in bytes a second, or 0 for an unknown one."""
        return self.offer.size / pace if pace else PATIENCE_S

    def measure(self, now: float, pace: float) -> None:
        """Set the relative pace by what came since the last call."""
        self.relative_pace = min(
            1.0, self.nbytes / self.offer.size * self.usual_s(pace) / (now - self.measured)
        )
        self.nbytes, self.measured = 0, now


class Turns:
    """Devices that wait for their turn, and devices that have it.

    Args:
        nbytes: Bytes of updates to ask for at a time. One update is requested in any case, however large.
        clock: Seconds, never set back; the deadlines are on the same clock.
    """

    def __init__(self, nbytes: int, clock: Callable[[], float] = steady_time) -> None:
        self._nbytes = nbytes
        self._clock = clock
        self._waiting: OrderedDict[str, UpdateChunk] = OrderedDict()
        self._again: dict[str, UpdateChunk] = {}
        self._turns: dict[str, _Turn] = {}
        self._sending: dict[str, float] = {}
        """Devices in the line that lost a turn and still send: the time of the last piece."""
        self._lost: list[str] = []
        self._paces: deque[float] = deque(maxlen=_TURNS_KEPT)
        """Bytes a second of the last updates that came whole in one turn."""
        self._asked_bytes = 0
        self._slow = 0
        self._look_at = -math.inf

    def offer(self, device: str, offer: UpdateChunk) -> None:
        """Add a device to the line. ``offer`` is a chunk of its update without data. If the device offers the same update
        during its turn, ask it again, because it cannot have heard."""
        if self.has_heard(device, offer):
            self._again[device] = offer
            return
        self._end(device)
        self._sending.pop(device, None)
        self._waiting[device] = offer  # one that waits already keeps its place

    def has_heard(self, device: str, offer: UpdateChunk) -> bool:
        """Return True if the server requested this very update."""
        turn = self._turns.get(device)
        return turn is not None and turn.offer == offer

    def fed(self, device: str, piece: UpdateChunk) -> None:
        """Note that a piece of the device's update has come."""
        if (turn := self._turns.get(device)) is not None:
            turn.heard = self._clock()
            turn.nbytes += len(piece.data) if piece.sha256 == turn.offer.sha256 else 0
        elif device in self._sending:
            self._sending[device] = self._clock()

    def over(self, device: str, *, whole: bool = False) -> None:
        """Remove the device: its update is whole, or not wanted."""
        if whole and (turn := self._turns.get(device)) is not None:
            self._paces.append(turn.offer.size / max(1e-3, self._clock() - turn.began))
        self._waiting.pop(device, None)
        self._sending.pop(device, None)
        self._end(device)

    def clear(self) -> None:
        """Forget all devices: the round is over."""
        for device in [*self._turns]:
            self._end(device)
        self._waiting.clear()
        self._sending.clear()
        self._lost.clear()

    def next(self, opened: float, deadline: float) -> list[tuple[str, UpdateChunk]]:
        """Return the devices to ask now, with their offers: those whose turn begins, and those to be asked again.

        Args:
            opened: Begin of the round.
            deadline: End of the round, so that everybody in the line gets a part of the time left.
        """
        now = self._clock()
        if self._waiting and now >= self._look_at:
            self._look(now, opened, deadline)
            self._look_at = now + LOOK_S
        begun, self._again = list(self._again.items()), {}
        while self._waiting and self._has_room(next(iter(self._waiting.values())).size):
            device, offer = self._waiting.popitem(last=False)
            self._turns[device] = _Turn(offer, now, now, now)
            self._asked_bytes += offer.size
            # A slow link would send what is in its queue twice.
            if now - self._sending.pop(device, -math.inf) >= PATIENCE_S:
                begun.append((device, offer))
        return begun

    def take_lost(self) -> list[str]:
        """Return the devices that lost a turn since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def wait(self) -> float | None:
        """Return the seconds until :meth:`next` may have news without a message; None if no device waits for a turn."""
        if not self._waiting or not self._turns:
            return None
        return max(0.0, self._look_at - self._clock())

    def _has_room(self, size: int) -> bool:
        return len(self._turns) == self._slow or self._asked_bytes + size <= self._nbytes

    def _look(self, now: float, opened: float, deadline: float) -> None:
        """Mark the turns that are slow, and end those that are lost."""
        pace = statistics.median(self._paces) if self._paces else 0.0
        for turn in self._turns.values():
            if turn.is_slow and now - turn.measured >= _PACE_S:
                turn.measure(now, pace)
        busy = sum(turn.relative_pace for turn in self._turns.values() if turn.is_slow)
        share = 1 / (len(self._waiting) + 1)
        for device, turn in [*self._turns.items()]:
            slow_s = max(
                SHORTEST_SLOW_S,
                min(PATIENCE_S, _SLOW * turn.usual_s(pace), _SLOW_OF_ROUND * (turn.began - opened)),
            )
            if not turn.is_slow and now - turn.began >= slow_s * (1 + busy) / (1 + self._slow - busy):
                turn.is_slow = True
                turn.measure(now, pace)
                busy += turn.relative_pace
                self._slow += 1
                self._asked_bytes -= turn.offer.size
            longest_s = max(PATIENCE_S, share * (deadline - turn.began))
            if now - turn.heard >= PATIENCE_S or now - turn.began >= longest_s:
                self._end(device)
                self._waiting[device] = turn.offer
                self._sending[device] = turn.heard
                self._lost.append(device)

    def _end(self, device: str) -> None:
        """End the device's turn, if it has one."""
        self._again.pop(device, None)
        if (turn := self._turns.pop(device, None)) is None:
            return
        if turn.is_slow:
            self._slow -= 1
        else:
            self._asked_bytes -= turn.offer.size
