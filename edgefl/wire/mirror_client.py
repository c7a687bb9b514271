"""HTTP client for blobs from a mirror, bounded in time and bytes. Responses are not trusted.

::

    with Watchdog(cancelled) as watchdog, MirrorConnection(mirror, watchdog, patience_s=10) as connection:
        for piece in connection.pieces(sha256, size, first=0, last=size, step=131072):
            ...                                             # MirrorError if the next one is missing
"""

from __future__ import annotations

import http.client
import math
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from edgefl.errors import MirrorError
from edgefl.wire.mirrors import Mirror, is_near

_LOOK_S = 0.1
_MOST_ADDRESSES = 4
"""Most addresses of one name that are tried, all within the timeout of one piece."""
_OK, _PART = 200, 206
_GONE = (404, 410)
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_BROKEN = (OSError, http.client.HTTPException, ValueError, EOFError)
"""Errors of hostile bytes and broken links: from sockets, TLS, HTTP, and text that is no number."""


class BlobMissing(MirrorError):
    """Error: the mirror answered that it does not have the blob."""


class Watchdog(threading.Thread):
    """Thread that shuts down a slow connection in any state: while it connects, in the TLS handshake, or between two
    bytes.

    Use it as a context manager, which starts and stops the thread.

    Args:
        cancelled: Event that shuts the connection down within 0.1 s. None: only the deadline does.

    Attributes:
        timed_out: True if the last shutdown was due to the deadline.
    """

    def __init__(self, cancelled: threading.Event | None = None) -> None:
        super().__init__(name="mirror-alarm", daemon=True)
        self._cancelled = threading.Event() if cancelled is None else cancelled
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._deadline = math.inf
        self.timed_out = False

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self.join()

    def guard(self, connection: socket.socket | None) -> None:
        """Set the socket that is shut down at the deadline; it replaces the previous socket. None: shut down no socket."""
        with self._lock:
            self._socket = connection

    def reset(self, seconds: float) -> None:
        """Clear ``timed_out`` and set the deadline of a new request to ``seconds`` from now."""
        self.timed_out = False
        self.extend(seconds)

    def extend(self, seconds: float) -> None:
        """Set the deadline to ``seconds`` from now.

        ``timed_out`` is kept, because response headers that the shutdown cut off look complete.
        """
        self._deadline = time.monotonic() + seconds

    def suspend(self) -> None:
        """Remove the deadline, while the caller and not the mirror takes the time."""
        self._deadline = math.inf

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0.01."""
        return max(0.01, self._deadline - time.monotonic())

    def run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            with self._lock:
                late = time.monotonic() > self._deadline
                if self._socket is not None and (late or self._cancelled.is_set()):
                    self.timed_out = late
                    # Not SSLSocket's own method, which forgets its state under a reader.
                    with suppress(OSError):
                        socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class MirrorConnection:
    """HTTP connection to one mirror, kept open for the next blob. Serves one request at a time.

    Args:
        mirror: Address of the mirror.
        alarm: Running watchdog of this thread.
        patience_s: Timeout in seconds of a request until its first byte, and of each piece.
        near: Reject plain HTTP to a machine outside of private networks.
        ca_file: PEM file with an additional certificate authority.
    """

    def __init__(
        self, mirror: Mirror, alarm: Watchdog, *, patience_s: float, near: bool = True, ca_file: str = ""
    ) -> None:
        self._mirror = mirror
        self._alarm = alarm
        self._patience_s = patience_s
        self._near = near
        self._ca_file = ca_file
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self) -> MirrorConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The next request opens a new one."""
        self._alarm.guard(None)
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError):
                connection.close()

    def pieces(self, sha256: str, size: int, *, first: int, last: int, step: int) -> Iterator[bytes]:
        """Yield bytes ``first`` to ``last`` of a blob in pieces of ``step`` bytes. Does not verify them.

        Args:
            sha256: Digest of the blob.
            size: Bytes of the whole blob.
            first: Index of the first byte.
            last: Index after the last byte.
            step: Bytes of one piece.

        Raises:
            BlobMissing: The mirror does not have the blob.
            MirrorError: The connection broke or was too slow, or the response contradicts the request.
        """
        self._alarm.reset(self._patience_s)
        with self._closing_if_broken():
            response = self._request(sha256, None if (first, last) == (0, size) else (first, last))
            skip = self._check_response(response, size, first, last)
            for start in range(0, skip, step):
                self._read(response, min(step, skip - start))
            for start in range(first, last, step):
                yield self._read(response, min(step, last - start))
            if response.length != 0:  # more than it is about, or who knows how much
                self.close()
            else:
                response.close()

    def whole(self, sha256: str, step: int) -> tuple[int, Iterator[bytes]]:
        """Request a whole blob of unknown size.

        Args:
            sha256: Digest of the blob.
            step: Bytes of one piece.

        Returns:
            Size of the blob according to the mirror, and an iterator over its unverified bytes.

        Raises:
            BlobMissing: The mirror does not have the blob.
            MirrorError: The connection broke or was too slow, or the response does not state its size. The iterator
                raises it too.
        """
        self._alarm.reset(self._patience_s)
        with self._closing_if_broken():
            response = self._request(sha256, None)
            self._check_status(response, (_OK,))
            size = response.length
            if size is None:
                raise MirrorError("it does not say how many bytes it sends")
        return size, self._rest(response, size, step)

    def _rest(self, response: http.client.HTTPResponse, size: int, step: int) -> Iterator[bytes]:
        with self._closing_if_broken():
            for start in range(0, size, step):
                yield self._read(response, min(step, size - start))
            response.close()

    @contextmanager
    def _closing_if_broken(self) -> Iterator[None]:
        """Close the connection if the ``with`` block raises. Convert errors of the connection to MirrorError."""
        try:
            yield
        except _BROKEN as error:
            self.close()
            raise MirrorError(self._why(error)) from error
        except BaseException:
            self.close()
            raise

    def _why(self, error: BaseException) -> str:
        if self._alarm.timed_out or isinstance(error, TimeoutError):
            return f"it gave nothing of use in {self._patience_s:g} s"
        return f"{type(error).__name__}: {error}"[:200]

    # -- asking ----------------------------------------------------------------------------------------------

    def _request(self, sha256: str, part: tuple[int, int] | None) -> http.client.HTTPResponse:
        """Send a request for a blob and return the response. Reconnects if the mirror has closed the open connection.

        Args:
            sha256: Digest of the blob.
            part: First byte and the end of the requested range. None: the whole blob.
        """
        if self._connection is not None:
            with suppress(*_BROKEN):
                return self._ask(self._connection, sha256, part)
            self.close()
        self._connection = self._connect()
        return self._ask(self._connection, sha256, part)

    def _ask(
        self, connection: http.client.HTTPConnection, sha256: str, part: tuple[int, int] | None
    ) -> http.client.HTTPResponse:
        connection.putrequest("GET", self._mirror.target(sha256), skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", self._mirror.netloc)
        connection.putheader("Accept-Encoding", "identity")
        if part is not None:
            connection.putheader("Range", f"bytes={part[0]}-{part[1] - 1}")
        connection.endheaders()
        return connection.getresponse()

    def _connect(self) -> http.client.HTTPConnection:
        """Return a new connection, with TLS if the mirror's address is https.

        Raises:
            MirrorError: The address is plain HTTP, the machine is public, and ``near`` is set.
            OSError: The connection or the TLS handshake failed.
        """
        mirror = self._mirror
        plain = self._dial()
        if not mirror.secure and self._near and not is_near(plain.getpeername()[0]):
            plain.close()
            raise MirrorError(
                f"{mirror.host} is no machine of a private network, and http is not secret: name an https mirror, or name "
                "this one to the device as its own (`mirror`)"
            )
        connection = http.client.HTTPConnection(mirror.host, mirror.port)
        connection.auto_open = 0  # what is closed is opened here, under the same rules
        connection.sock = self._start_tls(plain) if mirror.secure else plain
        return connection

    def _dial(self) -> socket.socket:
        """Return a TCP socket connected to one of the mirror's addresses, guarded by the watchdog.

        Raises:
            OSError: No address could be connected.
        """
        found = socket.getaddrinfo(self._mirror.host, self._mirror.port, type=socket.SOCK_STREAM)
        error: OSError = OSError("the name has no address")
        for family, kind, protocol, _, address in found[:_MOST_ADDRESSES]:
            made = socket.socket(family, kind, protocol)
            try:
                made.settimeout(self._alarm.left_s)
                self._alarm.guard(made)
                made.connect(address)
                made.settimeout(self._patience_s)
                return made
            except OSError as failed:
                error = failed
                self._alarm.guard(None)
                made.close()
        raise error

    def _start_tls(self, plain: socket.socket) -> ssl.SSLSocket:
        """Return the socket after a TLS handshake, guarded by the watchdog. Close it if the handshake fails."""
        try:
            context = ssl.create_default_context()
            if self._ca_file:
                context.load_verify_locations(self._ca_file)
            self._alarm.guard(None)
            secured = context.wrap_socket(
                plain, server_hostname=self._mirror.host, do_handshake_on_connect=False
            )
        except _BROKEN:
            plain.close()
            raise
        try:
            self._alarm.guard(secured)
            secured.do_handshake()
        except _BROKEN:
            self._alarm.guard(None)
            secured.close()
            raise
        return secured

    # -- what comes back -------------------------------------------------------------------------------------

    def _check_status(self, response: http.client.HTTPResponse, wanted: tuple[int, ...]) -> None:
        """Raise BlobMissing or MirrorError unless the status is one of ``wanted``."""
        status = response.status
        if status in wanted:
            return
        self.close()
        if status in _GONE:
            raise BlobMissing(f"it lacks the blob (HTTP {status})")
        if 300 <= status < 400:
            raise MirrorError(
                f"it sends elsewhere (HTTP {status}), which is not followed: name the last address"
            )
        raise MirrorError(f"it answers HTTP {status}")

    def _check_response(self, response: http.client.HTTPResponse, size: int, first: int, last: int) -> int:
        """Check status, range and length of a response.

        Returns:
            Number of bytes to skip before the requested ones: 0, or ``first`` if the mirror sends the whole blob.

        Raises:
            MirrorError: The response contradicts the request.
        """
        self._check_status(response, (_OK, _PART))
        if response.status == _OK:
            promised, skip = size, first
        else:
            told = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if told is None or (int(told[1]), int(told[2])) != (first, last - 1):
                self.close()
                raise MirrorError("it sends other bytes than the requested ones")
            promised, skip = last - first, 0
        if response.length is not None and response.length != promised:
            self.close()
            raise MirrorError(f"it sends {response.length} bytes, and the blob has {promised} there")
        return skip

    def _read(self, response: http.client.HTTPResponse, nbytes: int) -> bytes:
        """Read exactly ``nbytes`` under the watchdog. Raises EOFError if the response ends earlier."""
        self._alarm.extend(self._patience_s)
        data = response.read(nbytes)
        if len(data) < nbytes:
            raise EOFError("it ended early")
        self._alarm.suspend()
        return data
