"""Schedule of uploads: the server requests a bounded number of bytes of updates at a time.

If the updates of a round together exceed that number, each device first sends an offer, which describes its update
without data. The server requests the chunks when the device's turn begins. So neither the broker's queue nor the
server's memory has to hold all updates, and no device sends its update twice.

A slow or malicious device must not block the others. Two rules ensure that:

* A turn that takes longer than usual no longer reserves bytes, so the next device uploads at the same time. If slow
  turns send
almost nothing, the scheduler waits less for the following ones. If they send much, it waits longer; otherwise it
would request all updates at once from a fleet of slow devices.
* A turn ends after a fair share of the time left, or after ``IDLE_S`` without a chunk. Its device moves to the end of
  the queue,
and its chunks are kept.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from dataclasses import dataclass

from edgefl.system.clock import Clock, steady_time
from edgefl.wire.mqtt.messages import UpdateChunk

IDLE_S = 5.0
"""Seconds without a chunk after which a turn is lost, and the shortest time after which a turn with chunks is."""
MIN_SLOW_S = 0.05
SCAN_S = 0.025
"""Seconds between two passes over the turns, so that a message costs the same however many there are."""
_SLOW = 1.5
"""Multiple of the usual time after which a turn is slow."""
_SLOW_OF_ROUND = 1 / 3
"""Part of the round's age at the turn's begin, after which it is slow too: slow turns must not double a round's time."""
_MAX_RATES = 16
_MEASURE_S = 0.5
"""Seconds over which the rate of a slow turn is measured."""


@dataclass
class _Turn:
    """Upload in progress, which the server has requested from a device.

    Attributes:
        offer: Description of the update.
        began: Time of the request.
        last_chunk: Time of the last chunk.
        measured: Time of the last measurement of the rate.
        nbytes: Bytes received since the last measurement.
        is_slow: True if the upload takes longer than usual, so that it reserves no bytes.
        relative_rate: Rate of a slow upload as a fraction of the usual rate, at most 1.
    """

    offer: UpdateChunk
    began: float
    last_chunk: float
    measured: float
    nbytes: int = 0
    is_slow: bool = False
    relative_rate: float = 0.0

    def usual_s(self, rate: float) -> float:
        """Return the seconds that the upload takes at the usual ``rate`` (bytes a second); IDLE_S if the rate is 0
        (unknown).
        """
        return self.offer.size / rate if rate else IDLE_S

    def measure(self, now: float, rate: float) -> None:
        """Set ``relative_rate`` to the rate since the last call, relative to the usual ``rate`` (bytes a second)."""
        self.relative_rate = min(
            1.0, self.nbytes / self.offer.size * self.usual_s(rate) / (now - self.measured)
        )
        self.nbytes, self.measured = 0, now


class UploadScheduler:
    """Scheduler of uploads: a queue of devices that have offered their update, and the uploads that are requested now.

    Args:
        nbytes: Bytes of updates to request at a time. One update is requested in any case, however large.
        clock: Seconds, never set back; the deadlines are on the same clock.
    """

    def __init__(self, nbytes: int, clock: Clock = steady_time) -> None:
        self._nbytes = nbytes
        self._clock = clock
        self._queue: OrderedDict[str, UpdateChunk] = OrderedDict()
        self._repeated: dict[str, UpdateChunk] = {}
        self._turns: dict[str, _Turn] = {}
        self._sending: dict[str, float] = {}
        """Queued devices that lost a turn and still send: the time of the last chunk."""
        self._lost: list[str] = []
        self._rates: deque[float] = deque(maxlen=_MAX_RATES)
        """Bytes a second of the last updates that arrived complete in one turn."""
        self._requested_bytes = 0
        self._slow = 0
        self._scan_at = -math.inf

    def offer(self, device: str, offer: UpdateChunk) -> None:
        """Queue a device with the offer of its update. A queued device keeps its position.

        If its update is requested already, the request was lost, and :meth:`next` returns it again.

        Args:
            device: Name of the device.
            offer: Chunk of its update without data.
        """
        if self.is_requested(device, offer):
            self._repeated[device] = offer
            return
        self._end(device)
        self._sending.pop(device, None)
        self._queue[device] = offer  # a queued device keeps its position

    def is_requested(self, device: str, offer: UpdateChunk) -> bool:
        """Return True if the upload of the update with exactly this offer (a chunk without data) is requested now."""
        turn = self._turns.get(device)
        return turn is not None and turn.offer == offer

    def note_chunk(self, device: str, chunk: UpdateChunk) -> None:
        """Note that a chunk of an update arrived, to measure the rate of the device's upload.

        Does nothing for a device that is not uploading.
        """
        if (turn := self._turns.get(device)) is not None:
            turn.last_chunk = self._clock()
            turn.nbytes += len(chunk.data) if chunk.sha256 == turn.offer.sha256 else 0
        elif device in self._sending:
            self._sending[device] = self._clock()

    def remove(self, device: str, *, is_complete: bool = False) -> None:
        """Remove a device from the queue, or end its upload.

        ``is_complete``: its update arrived complete, so the rate of the upload is measured.
        """
        if is_complete and (turn := self._turns.get(device)) is not None:
            self._rates.append(turn.offer.size / max(1e-3, self._clock() - turn.began))
        self._queue.pop(device, None)
        self._sending.pop(device, None)
        self._end(device)

    def clear(self) -> None:
        """Remove all devices because the round is over."""
        for device in [*self._turns]:
            self._end(device)
        self._queue.clear()
        self._sending.clear()
        self._lost.clear()

    def next(self, opened: float, deadline: float) -> list[tuple[str, UpdateChunk]]:
        """Begin the uploads for which there is room, and return the (device, offer) pairs to request updates from.

        The pairs include lost requests to repeat. Uploads that took too long are ended before.

        Args:
            opened: Begin of the round.
            deadline: End of the round, so that each queued device gets a part of the time left.
        """
        now = self._clock()
        if self._queue and now >= self._scan_at:
            self._scan(now, opened, deadline)
            self._scan_at = now + SCAN_S
        requests, self._repeated = list(self._repeated.items()), {}
        while self._queue and self._has_room(next(iter(self._queue.values())).size):
            device, offer = self._queue.popitem(last=False)
            self._turns[device] = _Turn(offer, now, now, now)
            self._requested_bytes += offer.size
            # A device on a slow link still sends: a request would make it send what is in its queue twice.
            if now - self._sending.pop(device, -math.inf) >= IDLE_S:
                requests.append((device, offer))
        return requests

    def take_lost(self) -> list[str]:
        """Return the devices whose upload was ended because it took too long since the last call. Each is returned once."""
        lost, self._lost = self._lost, []
        return lost

    def due_in(self) -> float | None:
        """Return the seconds until :meth:`next` may have a new result without a message; None if no device is queued."""
        if not self._queue or not self._turns:
            return None
        return max(0.0, self._scan_at - self._clock())

    def _has_room(self, size: int) -> bool:
        return len(self._turns) == self._slow or self._requested_bytes + size <= self._nbytes

    def _scan(self, now: float, opened: float, deadline: float) -> None:
        """Mark slow uploads, and end those that took too long or had no chunk for too long.

        Their devices are queued again.
        """
        rate = statistics.median(self._rates) if self._rates else 0.0
        for turn in self._turns.values():
            if turn.is_slow and now - turn.measured >= _MEASURE_S:
                turn.measure(now, rate)
        busy = sum(turn.relative_rate for turn in self._turns.values() if turn.is_slow)
        share = 1 / (len(self._queue) + 1)
        for device, turn in [*self._turns.items()]:
            slow_s = max(
                MIN_SLOW_S, min(IDLE_S, _SLOW * turn.usual_s(rate), _SLOW_OF_ROUND * (turn.began - opened))
            )
            if not turn.is_slow and now - turn.began >= slow_s * (1 + busy) / (1 + self._slow - busy):
                turn.is_slow = True
                turn.measure(now, rate)
                busy += turn.relative_rate
                self._slow += 1
                self._requested_bytes -= turn.offer.size
            longest_s = max(IDLE_S, share * (deadline - turn.began))
            if now - turn.last_chunk >= IDLE_S or now - turn.began >= longest_s:
                self._end(device)
                self._queue[device] = turn.offer
                self._sending[device] = turn.last_chunk
                self._lost.append(device)

    def _end(self, device: str) -> None:
        """End the device's upload, if it has one, and release the bytes that it reserved."""
        self._repeated.pop(device, None)
        if (turn := self._turns.pop(device, None)) is None:
            return
        if turn.is_slow:
            self._slow -= 1
        else:
            self._requested_bytes -= turn.offer.size
