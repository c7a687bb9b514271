"""Process of the dashboard: address, operator's token and web server."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from pathlib import Path
from types import FrameType

from starlette.applications import Starlette

from edgefl.errors import ConfigError
from edgefl.system.files import naming
from edgefl.system.listener import WebServer, listening
from edgefl_server.dashboard.state.source import EventObserver, FolderSource
from edgefl_server.dashboard.web.app import application
from edgefl_server.dashboard.web.hub import Hub
from edgefl_server.dashboard.web.orders import OrderHandler
from edgefl_server.dashboard.web.upstream import RemoteMailbox, RemoteSource
from edgefl_server.operations import Mailbox

LOOPBACK, PORT = "127.0.0.1", 8090
_MOST_TOKEN = 4096
_LEAST_TOKEN = 16


def parse_listen(text: str) -> tuple[str, int]:
    """Return (host, port) of ``HOST:PORT``, ``PORT`` or ``[::1]:PORT``. Port 0 selects any free port.

    Raises:
        ConfigError: If the text has another form.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"a page listens at HOST:PORT or PORT, such as {LOOPBACK}:{PORT}, found {text!r}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can connect to ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket at this address.

    Raises:
        ConfigError: If the port is in use, or the address is not of this machine.
    """
    try:
        return listening(host, port)
    except OSError as error:
        raise _unbound(host, port, error) from error


def url_of(bound: socket.socket) -> str:
    """Return the URL of a dashboard that listens on the socket."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_token(path: Path) -> str:
    """Return the operator's token from the first line of a file.

    Raises:
        ConfigError: If the file cannot be read, or the token is too short or has invalid characters.
    """
    with naming(path), path.open("rb") as file:
        line = file.read(_MOST_TOKEN).partition(b"\n")[0].strip()
    return check_token(line.decode("ascii", "replace"), str(path))


def check_token(token: str, where: str) -> str:
    """Return ``token`` if it is long enough and can be sent in a header. ``where`` is its origin, for the message.

    Raises:
        ConfigError: If it is not.
    """
    if len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{where} holds no operator's token: one has at least {_LEAST_TOKEN} letters and digits, such as what "
            "`openssl rand -hex 24` prints"
        )
    return token


def serve(hub: Hub, handler: OrderHandler, bound: socket.socket, host: str) -> None:
    """Serve the dashboard until the process receives a signal.

    Raises:
        Exception: The error that ended the hub's loop.
    """
    hosts = frozenset({"localhost", "127.0.0.1", "::1", host}) if is_loopback(host) else None
    _PageServer(application(hub, handler, hosts=hosts), hub).run(sockets=[bound])
    if hub.error is not None:
        raise hub.error


class _PageServer(WebServer):
    """Web server that lets streams end before it waits for them."""

    def __init__(self, app: Starlette, hub: Hub) -> None:
        super().__init__(app, timeout_graceful_shutdown=3, ws="none")
        self._hub = hub

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._hub.ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._hub.end()
        super().handle_exit(sig, frame)


def _unbound(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        why = "is in use by another process: name another port, or 0 for any that is free"
    elif error.errno == errno.EACCES:
        why = "may not be used by this user: take a port above 1023"
    else:
        why = f"cannot be used ({error.strerror or error}): name an address of this machine"
    return ConfigError(f"`listen` {host}:{port} {why}", host=host, port=port)


TOKEN = "EDGEFL_OPERATOR_TOKEN"


def hub_of(run: Path | None, server: str, *, database: str = "", otlp: str = "") -> Hub:
    """Return the hub for the folder ``run``, or, if that is None, for the dashboard at the URL ``server``.

    Args:
        run: Folder of a run, or None.
        server: URL of another dashboard.
        database: SQLAlchemy URL of the run's journal; empty for that in the folder.
        otlp: URL of an OpenTelemetry collector that receives traces; empty for none.

    Raises:
        ConfigError: If the folder is not that of a run, or the dashboard does not answer.
    """
    observer: EventObserver | None = None
    if otlp:
        from edgefl_server.dashboard.web.traces import TraceExporter

        observer = TraceExporter(otlp)
    return Hub(FolderSource(run, database, observer) if run is not None else RemoteSource(server, observer))


def order_handler(run: Path | None, server: str, token_file: Path | None) -> OrderHandler:
    """Return the handler of orders. It writes them into ``run``, or forwards them to the dashboard at ``server`` if that
    is None.

    The token is read from ``token_file``, or from the environment.

    Raises:
        ConfigError: If the token is invalid.
    """
    if run is None:
        return OrderHandler(RemoteMailbox(server))
    token = os.environ.get(TOKEN, "")
    if token_file is not None:
        token = read_token(token_file)
    elif token:
        token = check_token(token, TOKEN)
    return OrderHandler(Mailbox(run), token)
