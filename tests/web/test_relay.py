"""The relay between browsers and the broker."""

from __future__ import annotations

import asyncio

from starlette.types import Message
from starlette.websockets import WebSocket

from edgefl.web.relay import MOST_BROWSERS, PROTOCOL, BrowserRelay
from edgefl.wire.mqtt.address import Address


class _Browser:
    """The browser's end of one WebSocket."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self._sent = asyncio.Queue[Message]()
        self._sent.put_nowait({"type": "websocket.connect"})
        scope = {"type": "websocket", "subprotocols": [PROTOCOL], "headers": []}
        self.socket = WebSocket(scope, self._sent.get, self._answer)

    async def _answer(self, message: Message) -> None:
        self.answers.append(message["type"])


async def _until_greeting(relay: BrowserRelay, browser: asyncio.Task[None]) -> None:
    while not relay._greeting and not browser.done():
        await asyncio.sleep(0)


async def _two_browsers(relay: BrowserRelay) -> tuple[_Browser, _Browser]:
    """Connect a second browser in the moment in which the time of the first is over."""
    relay.open = MOST_BROWSERS - 1
    first, second = _Browser(), _Browser()
    both = [asyncio.create_task(relay.serve(first.socket))]
    await _until_greeting(relay, both[0])
    next(iter(relay._greeting)).reschedule(0.0)
    both.append(asyncio.create_task(relay.serve(second.socket)))
    await both[0]
    await _until_greeting(relay, both[1])
    next(iter(relay._greeting)).reschedule(0.0)
    await both[1]
    return first, second


def test_a_full_relay_makes_room_while_the_time_of_a_browser_ends() -> None:
    for browser in asyncio.run(_two_browsers(BrowserRelay(Address("127.0.0.1", 1)))):
        assert browser.answers == ["websocket.accept", "websocket.close"]
