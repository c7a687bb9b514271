"""Relay of bytes between browsers' WebSockets and the broker (MQTT over TCP or TLS).

The page and its messages thus have one address and certificate. A broker without passwords keeps listening on its own
machine only, and only browsers with the page's secret pass.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.websockets import WebSocket, WebSocketDisconnect

from edgefl.errors import ConfigError
from edgefl.system.listener import kept, most_connections
from edgefl.wire.mqtt.address import Address

PROTOCOL = "mqtt"
MOST_BROWSERS = 512
"""Largest number of browsers; at most half of all connections, because the page needs the other half."""
_READ_BYTES = 1 << 16
_CONNECT_S = 10.0
_CONNECT, _MORE = 1, 128
_MOST_CONNECT = 64 * 1024
_FULL, _NO_BROKER, _REFUSED = 1013, 1011, 1008
"""Codes of RFC 6455's registry: try again later, an error of ours, and what is not allowed."""


@dataclass
class BrowserRelay:
    """Relay of browsers' WebSockets to ``broker``. ``open`` is the number of connected browsers.

    Raises:
        ConfigError: if the broker needs a client certificate, or is a WebSocket itself.
    """

    broker: Address
    open: int = 0
    _context: ssl.SSLContext | None = field(default=None, init=False, repr=False)
    _greeting: dict[asyncio.Timeout, None] = field(default_factory=dict, init=False, repr=False)
    """Deadlines of browsers without a CONNECT so far, oldest first."""

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
        """Relay bytes between a browser and the broker until one side closes. Each side is read only as fast as the
        other can write.

        If too many browsers are connected, the oldest connection without an MQTT CONNECT is closed; if all have sent
        one, this connection is closed.
        """
        is_full = self.open >= min(MOST_BROWSERS, most_connections() // 2)
        if PROTOCOL not in browser.scope["subprotocols"] or (is_full and not self._greeting):
            await browser.close(_FULL)
            return
        if is_full:
            oldest = next(iter(self._greeting))
            del self._greeting[oldest]
            if not oldest.expired():  # else its time ends in this moment
                oldest.reschedule(0.0)
        self.open += 1
        try:
            await self._connected(browser)
        finally:
            self.open -= 1

    async def _connected(self, browser: WebSocket) -> None:
        await browser.accept(PROTOCOL)
        greeting = await self._receive_connect(browser)
        if not greeting:
            await _close(browser, _REFUSED)
            return
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    self.broker.host, self.broker.port, ssl=self._context
                )
        except (OSError, TimeoutError):
            await _close(browser, _NO_BROKER)
            return
        writer.write(greeting)
        both = [asyncio.create_task(_up(browser, writer)), asyncio.create_task(_down(reader, browser))]
        try:
            with kept(browser.scope):
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            writer.close()
            await _close(browser)

    async def _receive_connect(self, browser: WebSocket) -> bytes:
        """Return the browser's first packet, a complete CONNECT of MQTT, or b"" if none arrives in time."""
        greeting = b""
        until = asyncio.timeout(_CONNECT_S)
        self._greeting[until] = None
        try:
            async with until:
                while not (size := _connect_size(greeting)) or len(greeting) < size:
                    greeting += await browser.receive_bytes()
                    if greeting[:1] and (greeting[0] >> 4 != _CONNECT or len(greeting) > _MOST_CONNECT):
                        return b""
        except (TimeoutError, WebSocketDisconnect, KeyError):  # KeyError: text, which MQTT never sends
            return b""
        finally:
            self._greeting.pop(until, None)
        return greeting


def _connect_size(data: bytes) -> int:
    """Return the size in bytes of the MQTT packet at the beginning of ``data``. It is 0 if the header is incomplete, and
    above the limit if it is invalid.
    """
    size = 0
    for place, digit in enumerate(data[1:5]):
        size += (digit & ~_MORE) << (7 * place)
        if not digit & _MORE:
            return size + place + 2
    return _MOST_CONNECT + 1 if len(data) >= 5 else 0


async def _close(browser: WebSocket, code: int = 1000) -> None:
    """Close the WebSocket, if it is still open."""
    with suppress(OSError, RuntimeError, WebSocketDisconnect):
        await browser.close(code)


async def _up(browser: WebSocket, broker: asyncio.StreamWriter) -> None:
    with suppress(WebSocketDisconnect, OSError, KeyError):  # KeyError: text, which MQTT never sends
        while True:
            broker.write(await browser.receive_bytes())
            await broker.drain()


async def _down(broker: asyncio.StreamReader, browser: WebSocket) -> None:
    with suppress(WebSocketDisconnect, OSError):
        while piece := await broker.read(_READ_BYTES):
            await browser.send_bytes(piece)
