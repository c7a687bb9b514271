"""A browser's way to the broker: what its WebSocket carries goes on as MQTT over TCP or TLS, byte for byte.

So one address and one certificate serve the page and its messages, and a broker without passwords goes on listening to its
own machine alone: only who has the page's secret is let through.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.websockets import WebSocket, WebSocketDisconnect

from edgefl.wire.errors import ConfigError
from edgefl.wire.mqtt.address import Address

PROTOCOL = "mqtt"
MOST_BROWSERS = 512
_READ_BYTES = 1 << 16
_CONNECT_S = 10.0
_FULL, _NO_BROKER = 1013, 1011
"""Codes of RFC 6455's registry: try again later, and an error of ours."""


@dataclass
class Relay:
    """Connects browsers to ``broker``. ConfigError for one that wants what no browser has through this page."""

    broker: Address
    open: int = 0
    _context: ssl.SSLContext | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.broker.cert_file:
            raise ConfigError(
                f"the broker at {self.broker} asks for client certificates, which browsers of others do not have: give it a "
                "WebSocket listener with passwords and name that (`web_broker`)"
            )
        if self.broker.path:
            raise ConfigError(
                f"the broker at {self.broker} is reached by WebSocket already: name that address (`web_broker`)"
            )
        if self.broker.secure:
            self._context = ssl.create_default_context(cafile=self.broker.ca_file or None)
            if self.broker.alpn:
                self._context.set_alpn_protocols([self.broker.alpn])

    async def serve(self, browser: WebSocket) -> None:
        """Until one of both sides is gone. Nothing is read of one side before the other has taken what was read."""
        if PROTOCOL not in browser.scope["subprotocols"] or self.open >= MOST_BROWSERS:
            await browser.close(_FULL)
            return
        self.open += 1
        try:
            await self._connected(browser)
        finally:
            self.open -= 1

    async def _connected(self, browser: WebSocket) -> None:
        await browser.accept(PROTOCOL)
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    self.broker.host, self.broker.port, ssl=self._context
                )
        except (OSError, TimeoutError):
            await browser.close(_NO_BROKER)
            return
        both = [asyncio.create_task(_up(browser, writer)), asyncio.create_task(_down(reader, browser))]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            writer.close()
            with suppress(OSError, RuntimeError):
                await browser.close()


async def _up(browser: WebSocket, broker: asyncio.StreamWriter) -> None:
    with suppress(WebSocketDisconnect, OSError, KeyError):  # KeyError: text, which MQTT never sends
        while True:
            broker.write(await browser.receive_bytes())
            await broker.drain()


async def _down(broker: asyncio.StreamReader, browser: WebSocket) -> None:
    with suppress(WebSocketDisconnect, OSError):
        while piece := await broker.read(_READ_BYTES):
            await browser.send_bytes(piece)
