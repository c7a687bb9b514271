"""Main loop of the dashboard: polls its source and provides the state to all open pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress

from starlette.applications import Starlette

from edgefl.system.listener import most_connections
from edgefl_server.dashboard.state.fleet import Fleet
from edgefl_server.dashboard.state.source import Source
from edgefl_server.dashboard.views.summary import FleetSnapshot

MOST_STREAMS = 100
"""Limit of open pages and followers: each costs memory, and an update a second."""
_PAUSE_S = 0.5


_MOST_WAITING = 20_000


class Follower:
    """Queue of new feed lines for another dashboard that follows this one.

    ``is_overrun`` is True if too many lines were queued. It must then start again with the whole state.
    """

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.is_overrun = False

    def extend(self, lines: list[bytes]) -> None:
        """Queue new lines. If too many are queued already, mark the follower as overrun instead."""
        self.is_overrun = self.is_overrun or len(self.lines) + len(lines) > _MOST_WAITING
        if not self.is_overrun:
            self.lines += lines


class Hub:
    """Current state of the fleet, polled from a source.

    Attributes:
        glance: Snapshot of the fleet.
        ready: True once the stored state is loaded.
        error: Exception that ended the polling loop; None while it runs. After an error the process must end, as the
            snapshot would no longer change.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.glance = FleetSnapshot(Fleet())
        self.ready = False
        self.error: BaseException | None = None
        self._followers: set[Follower] = set()
        self._streams = 0
        self._ending = asyncio.Event()

    @property
    def fleet(self) -> Fleet:
        """Current state of the fleet."""
        return self.glance.fleet

    @property
    def ending(self) -> bool:
        """True if the process is about to end. Streams have no end of their own, so they check it."""
        return self._ending.is_set()

    def end(self) -> None:
        """Mark the process as about to end: :attr:`ending` becomes True, and all pauses end."""
        self._ending.set()

    async def pause(self, seconds: float) -> None:
        """Wait ``seconds``, or until the process is about to end."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)

    @property
    def full(self) -> bool:
        """True if the limit of open streams is reached."""
        return self._streams >= min(MOST_STREAMS, most_connections() // 2)

    async def counted(self, stream: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
        """Yield all items of ``stream``, which counts as an open stream until it is closed."""
        self._streams += 1
        try:
            async with aclosing(stream):
                async for piece in stream:
                    yield piece
        finally:
            self._streams -= 1

    @contextmanager
    def following(self, follower: Follower) -> Iterator[None]:
        """Context in which each new line of the feed is queued for ``follower``."""
        self._followers.add(follower)
        try:
            yield
        finally:
            self._followers.discard(follower)

    @asynccontextmanager
    async def running(self, _app: Starlette) -> AsyncIterator[None]:
        """Context of the web application: polls the source in a background task, and closes the source at the end."""
        task = asyncio.create_task(self._run())
        task.add_done_callback(self._stop_on_error)
        try:
            yield
        finally:
            task.cancel()
            self._source.close()

    def _stop_on_error(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.error = error
            self.end()

    async def _run(self) -> None:
        fleet = await asyncio.to_thread(self._source.begin)
        fleet.tick += 1
        self.glance, self.ready = FleetSnapshot(fleet), True
        while not self.ending:
            # Later changes have the next tick, so that pages that are up to date receive them.
            fleet.tick += 1
            lines: list[bytes] = []
            if not self._source.poll(fleet, lines):
                fleet.tick -= 1
            for follower in self._followers:
                follower.extend(lines)
            await self.pause(_PAUSE_S)
