"""A mirror as a process: where it listens, with which certificate, until it is told to end."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from edgefl.mirror.app import application
from edgefl.mirror.cache import Cache, Upstream
from edgefl.mirror.folder import BlobFolder
from edgefl.wire.errors import MirrorError

_MOST_CONNECTIONS = 2000
_BACKLOG = 1024
_END_S = 5


@dataclass(frozen=True)
class Place:
    """Where a mirror listens; port 0: any that is free. With a certificate (PEM) it speaks HTTPS only."""

    host: str = "127.0.0.1"
    port: int = 8480
    cert_file: str = ""
    key_file: str = ""


class MirrorServer:
    """Serves ``folder``; with ``upstream`` that is a cache. ``run`` returns after :meth:`stop`, or a signal.

    It listens once it is made. MirrorError for a folder, port or certificate that cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        place: Place = Place(),
        *,
        upstream: Upstream | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        _check_certificate(place)
        self._cache = None if upstream is None else Cache(folder, upstream, tell)
        served = self._cache or BlobFolder(folder)
        try:
            self._socket = _listening(place)
        except MirrorError:
            self._release()
            raise
        host, self.port = self._socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if place.cert_file else 'http'}://{shown}:{self.port}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                application(served.open),
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                limit_concurrency=_MOST_CONNECTIONS,
                timeout_graceful_shutdown=_END_S,
                ssl_certfile=place.cert_file or None,
                ssl_keyfile=place.key_file or None,
            )
        )

    def run(self) -> None:
        """Serve."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self._release()

    def stop(self) -> None:
        """End :meth:`run` soon, from another thread."""
        self._server.should_exit = True

    def _release(self) -> None:
        if self._cache is not None:
            self._cache.close()


def _check_certificate(place: Place) -> None:
    if bool(place.cert_file) != bool(place.key_file):
        raise MirrorError(
            "a certificate and its key go together: name both (`cert_file`, `key_file`), or none"
        )
    if not place.cert_file:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            place.cert_file, place.key_file, password=lambda: ""
        )
    except (OSError, ValueError) as error:
        raise MirrorError(
            f"the certificate {place.cert_file} with the key {place.key_file} cannot be used ({error}): name PEM files that "
            "belong together and can be read, the key without a password"
        ) from error


def _listening(place: Place) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(_BACKLOG)
        except OSError:
            made.close()
            raise
    except (OSError, OverflowError) as error:
        raise MirrorError(
            f"the mirror cannot listen on {place.host}:{place.port} ({getattr(error, 'strerror', '') or error}): stop what "
            "uses that port, or name another one (`port`, `host`)",
            host=place.host,
            port=place.port,
        ) from error
    return made
