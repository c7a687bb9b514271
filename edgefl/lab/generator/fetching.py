"""Blobs as a device fetches them: chunk by chunk, a window at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from edgefl.lab.generator.loop import Loop, Timer
from edgefl.wire.blobs import BlobRef
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.topics import Topics

_QOS = 0


class Line(Protocol):
    """The part of a connection that fetching needs."""

    def subscribe(self, topics: Sequence[str], qos: int) -> None: ...

    def unsubscribe(self, topics: Sequence[str]) -> None: ...


class Fetch:
    """Brings ``refs`` by a connection and calls ``done`` with their bytes, or with none where they are not to be kept.

    What does not come is asked for again, for as long as it takes.
    """

    def __init__(
        self,
        loop: Loop,
        topics: Topics,
        limits: Limits,
        refs: Sequence[BlobRef],
        done: Callable[[dict[str, bytes]], None],
        *,
        keep: bool,
    ) -> None:
        self._loop = loop
        self._limits = limits
        self._done = done
        self._keep = keep
        once = {ref.sha256: ref for ref in refs if ref.size}.values()
        self._waiting = [
            (topics.blob_chunk(ref.sha256, index), ref, index) for ref in once for index in range(ref.count)
        ]
        self._waiting.reverse()
        self._asked: dict[str, tuple[BlobRef, int]] = {}
        self._kept: dict[str, dict[int, bytes]] = {ref.sha256: {} for ref in refs}
        self._timer: Timer | None = None
        self._line: Line | None = None

    def begin(self, line: Line) -> None:
        """On a connection that is up; again on the next one where it broke."""
        self._line = line
        if self._asked:
            line.subscribe(list(self._asked), _QOS)
        self._ask()

    def deliver(self, topic: str, payload: bytes) -> None:
        """A message on a blob topic."""
        asked = self._asked.get(topic)
        if asked is None or not asked[0].accepts(asked[1], payload):
            return
        del self._asked[topic]
        if self._keep:
            self._kept[asked[0].sha256][asked[1]] = payload
        if self._line is not None:
            self._line.unsubscribe([topic])
        self._ask()

    def stop(self) -> None:
        """The connection is gone."""
        self._line = None
        self._hush()

    def _ask(self) -> None:
        self._hush()
        fresh = []
        while self._waiting and len(self._asked) < self._limits.fetch_window:
            topic, ref, index = self._waiting.pop()
            self._asked[topic] = ref, index
            fresh.append(topic)
        if not self._asked:
            self._done(
                {name: b"".join(parts[each] for each in sorted(parts)) for name, parts in self._kept.items()}
            )
            return
        if fresh and self._line is not None:
            self._line.subscribe(fresh, _QOS)
        self._timer = self._loop.later(self._limits.fetch_timeout_s, self._again)

    def _again(self) -> None:
        if self._line is not None:
            self._line.subscribe(list(self._asked), _QOS)
            self._ask()

    def _hush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
