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
        raise ConfigError(
            f"a page listens at HOST:PORT or PORT, such as {LOOPBACK}:{PORT}, found {text!r}", address=text
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return True if ``host`` is an address of the loopback interface or ``localhost``: only this machine can connect."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket at ``host`` and ``port``; port 0 selects any free port.

    Raises:
        ConfigError: If the port is in use or not permitted, or the address is not of this machine.
    """
    try:
        return listening(host, port)
    except OSError as error:
        raise _unbound(host, port, error) from error


def url_of(bound: socket.socket) -> str:
    """Return the URL of a dashboard that listens on the socket ``bound``.

    If it listens at all addresses, the URL contains the host name of this machine.
    """
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_token(path: Path) -> str:
    """Return the operator's token: the first line of the file ``path``, without surrounding space.

    Raises:
        ConfigError: If the file cannot be read, or the token is too short or has invalid characters.
    """
    with naming(path), path.open("rb") as file:
        line = file.read(_MOST_TOKEN).partition(b"\n")[0].strip()
    return check_token(line.decode("ascii", "replace"), str(path))


def check_token(token: str, where: str) -> str:
    """Return ``token`` if it has at least 16 characters and can be sent in a header.

    ``where`` is its origin (a path or a variable), for the message.

    Raises:
        ConfigError: If ``token`` is too short, not printable ASCII, or contains a space.
    """
    if len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{where} holds no operator's token: one has at least {_LEAST_TOKEN} letters and digits, such as what "
            "`openssl rand -hex 24` prints"
        )
    return token


def serve(hub: Hub, handler: OrderHandler, bound: socket.socket, host: str) -> None:
    """Serve the dashboard on the listening socket ``bound`` until the process receives a signal.

    ``host`` is the name under which it is reached. On a loopback address, requests with other host names are refused.

    Raises:
        Exception: The error that ended the hub's loop.
    """
    hosts = frozenset({"localhost", "127.0.0.1", "::1", host}) if is_loopback(host) else None
    _PageServer(application(hub, handler, hosts=hosts), hub).run(sockets=[bound])
    if hub.error is not None:
        raise hub.error


class _PageServer(WebServer):
    """Web server that ends the streams of open pages at a signal, before it waits for open connections."""

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
    """Return the hub, which polls the folder ``run``, or the dashboard at the URL ``server`` if ``run`` is None.

    Args:
        run: Folder of a run, or None.
        server: URL of another dashboard.
        database: SQLAlchemy URL of the run's journal; empty for that in the folder.
        otlp: URL of an OpenTelemetry collector that receives traces; empty for none.

    Raises:
        ConfigError: If the folder is not that of a run, the dashboard does not answer, or a URL is invalid.
    """
    observer: EventObserver | None = None
    if otlp:
        from edgefl_server.dashboard.web.traces import TraceExporter

        observer = TraceExporter(otlp)
    return Hub(FolderSource(run, database, observer) if run is not None else RemoteSource(server, observer))


def order_handler(run: Path | None, server: str, token_file: Path | None) -> OrderHandler:
    """Return the handler of orders.

    Args:
        run: Folder of the run, into which orders are written; None to forward them to another dashboard.
        server: URL of that dashboard.
        token_file: File with the operator's token; None to use the environment variable :data:`TOKEN`, if it is set.

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
