"""Web server with bounded connections, for every page that this package serves.

A connection is *pending* while its request is not whole, or its client does not read the answer: either ends it after
``REQUEST_S``. The server has fewer connections than descriptors. If it has no room it ends the connection that is pending
longest, so a request that comes at once is answered beside any number of idle connections.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import ssl
import sys
import time
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 10.0
_RESERVED = 128
"""Descriptors for files and for what is no connection of a client."""
_MOST_CONNECTIONS = 2000
_LEAST_CONNECTIONS = 16
_BACKLOG = 1024
_ENDING = 64
"""Connections that were told to end and still have a descriptor: the loop closes them before it accepts more."""
_TICKS = 5
_LOG_S = 60.0
_MOST_MESSAGES = 100


def most_connections() -> int:
    """Return the number of connections that the descriptors of this process allow, each with another one behind it."""
    if sys.platform == "win32":
        return 512
    import resource

    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(_LEAST_CONNECTIONS, min(_MOST_CONNECTIONS, (descriptors - _RESERVED) // 2))


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address; port 0 is any that is free. OSError if it cannot be had."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    try:
        if port:  # of free ports the system would else hand out one that another process is about to take
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def certificate_fault(cert_file: str, key_file: str, names: str) -> str:
    """Return what is wrong with a certificate and its key, which settings called ``names`` name; empty if nothing is."""
    if bool(cert_file) != bool(key_file):
        return f"a certificate and its key go together: name both ({names}), or none"
    try:
        if cert_file:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert_file, key_file, password=lambda: "")
    except (OSError, ValueError) as error:
        return (
            f"the certificate {cert_file} with the key {key_file} cannot be used ({error}): name PEM files that belong "
            "together and can be read, the key without a password"
        )
    return ""


class _ClientSocket(socket.socket):
    """A client's connection. ``pending_since``: since when the client is awaited; None while it is answered."""

    pending_since: float | None = None
    accepted_by: _BoundedSocket | None = None

    def close(self) -> None:
        """Close it, and make room for another one."""
        if self.accepted_by is not None:
            self.accepted_by.open.pop(self, None)
        super().close()

    def end(self) -> None:
        """Have the event loop close it."""
        self.pending_since = None
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class _BoundedSocket(socket.socket):
    """A listening socket that accepts a bounded number of connections."""

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(fileno=listening.detach())
        self.open: dict[_ClientSocket, None] = {}
        self._most = most_connections()
        self._poll = select.poll()
        self._poll.register(self, select.POLLIN)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection for the event loop.

        Raises:
            BlockingIOError: No connection waits, or the loop has to close some first.
            OSError: All connections are being answered. The loop tries again after a second.
        """
        if len(self.open) >= self._most:
            if len(self.open) >= self._most + _ENDING or not self._poll.poll(0):
                raise BlockingIOError
            if not self._make_room():
                raise OSError(errno.EMFILE, "there is no room for another connection")
        accepted, address = super().accept()
        connection = _ClientSocket(fileno=accepted.detach())
        connection.pending_since, connection.accepted_by = time.monotonic(), self
        self.open[connection] = None
        return connection, address

    def end_late(self) -> None:
        """End the connections whose request did not come in time."""
        late = time.monotonic() - REQUEST_S
        for connection in [*self.open]:
            if connection.pending_since is not None and connection.pending_since < late:
                connection.end()

    def _make_room(self) -> bool:
        pending = [each for each in self.open if each.pending_since is not None]
        if not pending:
            return False
        min(pending, key=lambda each: each.pending_since or 0.0).end()
        return True


class _Http(H11Protocol):
    """HTTP on a connection that knows whether its request is whole."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._note(is_pending=True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note()

    def _note(self, *, is_pending: bool = False) -> None:
        connection = getattr(self.transport.get_extra_info("socket"), "_sock", None)
        if not isinstance(connection, _ClientSocket):
            return
        if not is_pending and self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            connection.pending_since = None
        elif connection.pending_since is None:
            connection.pending_since = time.monotonic()


class _OnceAMinute(logging.Filter):
    """Drops a message that was logged within the last minute: clients must not fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is to be logged."""
        key, now = str(record.msg)[:200], record.created
        if abs(now - self._logged.get(key, -_LOG_S)) < _LOG_S:
            return False
        if len(self._logged) >= _MOST_MESSAGES:
            self._logged.clear()
        self._logged[key] = now
        return True


class WebServer(uvicorn.Server):
    """A uvicorn server with bounded connections.

    Args:
        app: The ASGI application.
        options: Of ``uvicorn.Config``; what all pages have in common has a default.
    """

    def __init__(self, app: Any, **options: Any) -> None:
        common = {"log_level": "warning", "access_log": False, "server_header": False, "backlog": _BACKLOG}
        super().__init__(uvicorn.Config(app, http=_Http, loop="asyncio", **{**common, **options}))
        self._listening: list[_BoundedSocket] = []
        for name in ("asyncio", "uvicorn.error"):
            logger = logging.getLogger(name)
            if not any(isinstance(each, _OnceAMinute) for each in logger.filters):
                logger.addFilter(_OnceAMinute())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on ``sockets``, which are taken over."""
        if sys.platform == "win32":  # its event loop accepts by other means
            await super().startup(sockets)
            return
        self._listening = [_BoundedSocket(each) for each in sockets or ()]
        await super().startup([*self._listening])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and end the connections."""
        await super().shutdown([*self._listening] or sockets)

    async def on_tick(self, counter: int) -> bool:
        """End late connections now and then."""
        if counter % _TICKS == 0:
            for each in self._listening:
                each.end_late()
        return await super().on_tick(counter)
