"""The page's own loop: asks its source for what is new, and hands it to whoever looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress

from starlette.applications import Starlette

from edgefl.system.listener import most_connections
from edgefl_server.dashboard.known.fleet import Fleet
from edgefl_server.dashboard.known.source import Source
from edgefl_server.dashboard.shown.glance import Glance

MOST_STREAMS = 100
"""Pages, and followers, that are kept new at a time: each costs memory, and a look a second."""
_PAUSE_S = 0.5


class Hub:
    """``glance`` is what is known; ``ready`` once all that was kept is. ``error`` is what ended the loop: the page must end
    with it, as nothing that it shows would change any more."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.glance = Glance(Fleet())
        self.ready = False
        self.error: BaseException | None = None
        self._followers: set[Callable[[bytes], None]] = set()
        self._streams = 0
        self._ending = asyncio.Event()

    @property
    def fleet(self) -> Fleet:
        return self.glance.fleet

    @property
    def ending(self) -> bool:
        """Whether the page's process is to end: streams, which would go on for ever, do so by themselves."""
        return self._ending.is_set()

    def end(self) -> None:
        self._ending.set()

    async def pause(self, seconds: float) -> None:
        """Wait so long, or until the process is to end."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)

    @property
    def full(self) -> bool:
        """Whether no stream more is to begin."""
        return self._streams >= min(MOST_STREAMS, most_connections() // 2)

    async def counted(self, stream: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
        """``stream``, which counts for as long as somebody reads it."""
        self._streams += 1
        try:
            async with aclosing(stream):
                async for piece in stream:
                    yield piece
        finally:
            self._streams -= 1

    @contextmanager
    def following(self, take: Callable[[bytes], None]) -> Iterator[None]:
        """``take`` is handed each line of the feed that comes meanwhile."""
        self._followers.add(take)
        try:
            yield
        finally:
            self._followers.discard(take)

    def _line(self, line: bytes) -> None:
        for take in self._followers:
            take(line)

    @asynccontextmanager
    async def running(self, _app: Starlette) -> AsyncIterator[None]:
        """While the page is served."""
        task = asyncio.create_task(self._run())
        task.add_done_callback(self._ended)
        try:
            yield
        finally:
            task.cancel()
            self._source.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.error = error
            self.end()

    async def _run(self) -> None:
        fleet = await asyncio.to_thread(self._source.begin)
        fleet.tick += 1
        self.glance, self.ready = Glance(fleet), True
        while not self.ending:
            # What changes from here on has the next tick: whoever looked before must be told of it.
            fleet.tick += 1
            if not self._source.poll(fleet, self._line):
                fleet.tick -= 1
            await self.pause(_PAUSE_S)
