"""Web server with a bounded number of connections, for all pages of edgefl.

A connection is *pending* while none of its requests is being answered, or while its client does not read. Both states
end after ``REQUEST_S``. A WebSocket is pending except within :func:`kept`. The number of connections is smaller than
that of file descriptors. If it is reached, the server closes the connection that has been pending longest, so that
idle connections cannot block new requests.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
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
_CONNECTION = "client_socket"
"""Its key in the state of an ASGI scope."""
_LOG_S = 60.0
_NOT_ACCEPTED = "socket.accept() out of system resource"
"""How asyncio's message begins."""
_MOST_MESSAGES = 100


def most_connections() -> int:
    """Return the largest number of connections that the file descriptors of this process allow.

    It leaves room for a second connection to a backend for each.
    """
    if sys.platform == "win32":
        return 512
    import resource

    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(_LEAST_CONNECTIONS, min(_MOST_CONNECTIONS, (descriptors - _RESERVED) // 2))


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address; port 0 selects a free one.

    Raises:
        OSError: The address cannot be used.
    """
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
    """Return the problem with a certificate and its key, or "" if they can be used.

    Args:
        cert_file: Certificate; "" for none.
        key_file: Private key; "" for none.
        names: Names of the two settings, for the text.
    """
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
    """Connection of a client. Times are monotonic, in seconds.

    A connection is pending while none of its requests is being answered, or while the client does not read.

    Attributes:
        idle_since: Time since which no request is being answered; None while one is.
        unread_since: Time since which the client does not read; None if it has read everything.
        accepted_by: The listening socket.
        is_kept: True for a WebSocket in use.
    """

    idle_since: float | None = None
    unread_since: float | None = None
    is_kept = False
    accepted_by: _BoundedSocket | None = None

    @property
    def pending_since(self) -> float | None:
        """Monotonic time since which the connection has no request to answer, or its client does not read.

        None: neither.
        """
        if self.is_kept:
            return None
        return self.idle_since if self.unread_since is None else self.unread_since

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Send ``data`` and return the number of bytes that were sent. Record whether the client reads."""
        return self._sent(len(data), super().send, data, flags)

    if sys.platform != "win32":

        def sendmsg(self, buffers: Iterable[Any], *options: Any) -> int:
            """Send several buffers and return the number of bytes that were sent. Record whether the client reads."""
            pieces = list(buffers)
            return self._sent(sum(map(len, pieces)), super().sendmsg, pieces, *options)

    def _sent(self, nbytes: int, send: Callable[..., int], *arguments: Any) -> int:
        try:
            taken = send(*arguments)
        except BlockingIOError:
            self.unread_since = self.unread_since or time.monotonic()
            raise
        self.unread_since = time.monotonic() if taken < nbytes else None
        return taken

    def close(self) -> None:
        """Close the connection, and remove it from the open connections of the listening socket."""
        if self.accepted_by is not None:
            self.accepted_by.open.pop(self, None)
        super().close()

    def end(self) -> None:
        """Shut the connection down, so that the event loop closes it."""
        self.idle_since = self.unread_since = None
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


@contextmanager
def kept(scope: MutableMapping[str, Any]) -> Iterator[None]:
    """Open a context in which the WebSocket of the ASGI ``scope`` counts as in use, so that the server does not close
    it.
    """
    connection = scope.get("state", {}).get(_CONNECTION)
    if isinstance(connection, _ClientSocket):
        connection.is_kept = True
    try:
        yield
    finally:
        if isinstance(connection, _ClientSocket):
            connection.is_kept = False


class _BoundedSocket(socket.socket):
    """A listening socket that accepts a bounded number of connections."""

    _poll: Any

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(fileno=listening.detach())
        self.open: dict[_ClientSocket, None] = {}
        self._most = most_connections()
        if sys.platform != "win32":  # which does not serve with this class
            self._poll = select.poll()
            self._poll.register(self, select.POLLIN)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection for the event loop.

        Raises:
            BlockingIOError: No connection is waiting, or the loop must close some first.
            OSError: All connections are being answered. The loop tries again after a second.
        """
        if len(self.open) >= self._most:
            if len(self.open) >= self._most + _ENDING or not self._poll.poll(0):
                raise BlockingIOError
            if not self._make_room():
                raise OSError(
                    errno.EMFILE, f"each of {self._most} is being answered; it tries again each second"
                )
        accepted, address = super().accept()
        connection = _ClientSocket(fileno=accepted.detach())
        connection.idle_since, connection.accepted_by = time.monotonic(), self
        self.open[connection] = None
        return connection, address

    def end_late(self) -> None:
        """Close the connections that had no request to answer, or whose client did not read, for more than
        ``REQUEST_S``.
        """
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
    """HTTP protocol that records whether a request is being answered."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self.app_state = {**self.app_state, _CONNECTION: self._connection()}
        super().handle_websocket_upgrade(event)

    def _connection(self) -> _ClientSocket | None:
        connection = getattr(self.transport.get_extra_info("socket"), "_sock", None)
        return connection if isinstance(connection, _ClientSocket) else None

    def _note(self) -> None:
        connection = self._connection()
        if connection is None:
            return
        is_whole = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)
        if is_whole and self.cycle is not None and not self.cycle.response_complete:
            connection.idle_since = None
        elif connection.idle_since is None:
            connection.idle_since = time.monotonic()


class _OnceAMinute(logging.Filter):
    """Log filter that drops a message logged within the last minute, because clients must not fill the log.

    It shortens asyncio's report that no connection can be accepted to one line.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a message that was logged within the last minute. Shorten reports of refused connections."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ValueError) and "._start_serving(" in record.getMessage():
            return False  # a second after it could not accept, and the server has stopped meanwhile
        if isinstance(error, OSError) and str(record.msg).startswith(_NOT_ACCEPTED):
            record.msg, record.args, record.exc_info = (
                f"a web server accepts no connection now: {error}",
                (),
                None,
            )
        key, now = str(record.msg)[:200], record.created
        if abs(now - self._logged.get(key, -_LOG_S)) < _LOG_S:
            return False
        if len(self._logged) >= _MOST_MESSAGES:
            self._logged.clear()
        self._logged[key] = now
        return True


class WebServer(uvicorn.Server):
    """A uvicorn server with a bounded number of connections.

    If all are taken, it closes the one that has been without a request, or unread by its client, for the longest time.

    Args:
        app: The ASGI application.
        options: Options of ``uvicorn.Config``; those common to all pages have defaults.
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
        """Start to listen on ``sockets``, which the server closes in the end."""
        if sys.platform == "win32":  # its event loop accepts by other means
            await super().startup(sockets)
            return
        self._listening = [_BoundedSocket(each) for each in sockets or ()]
        await super().startup([*self._listening])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and close the connections."""
        await super().shutdown([*self._listening] or sockets)

    async def on_tick(self, counter: int) -> bool:
        """Close connections that have been idle or unread for too long. uvicorn calls it periodically.

        Return True if the server should exit.
        """
        if counter % _TICKS == 0:
            for each in self._listening:
                each.end_late()
        return await super().on_tick(counter)
