"""What the page's process is told, and what it keeps in the folder of a run."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import msgspec

from edgefl.errors import ConfigError
from edgefl.system.files import make_folder
from edgefl.wire.mqtt.address import Address

FOLDER = "web"
PORT = 8091
DEFAULT = f"0.0.0.0:{PORT}"
"""Where a page listens: phones are other machines."""
_SECRET_BYTES = 16
_NOWHERE = "192.0.2.1"
"""An address that stands for any other in documents (RFC 5737): nothing is sent to it, only a route is asked for."""
_EVERYWHERE = ("0.0.0.0", "::")


class WebSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``folder``: of the page's own; its file ``federation.toml`` says what is trained. ``address``: what people scan.

    ``broker``: a WebSocket URL that browsers reach by themselves, or empty: this process connects them to ``relay``, which
    holds no password. ``login``: browsers are asked for user and password.
    """

    folder: str
    host: str
    port: int
    secret: str
    address: str
    broker: str = ""
    relay: str = ""
    login: bool = False
    server_key: str = ""
    cert_file: str = ""
    key_file: str = ""


def secret_of(folder: Path) -> str:
    """What lets browsers in: made once for a run's folder, so that those who joined go on after it is started again."""
    path = folder / "secret"
    make_folder(folder)
    known = path.read_text(encoding="ascii").strip() if path.is_file() else ""
    if known:
        return known
    # Nobody else ever reads it; one that was not written to its end is none, as an empty one would let everybody in.
    own = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(own, "w", encoding="ascii") as file:
        file.write(made := secrets.token_urlsafe(_SECRET_BYTES))
    return made


def address_of(host: str, port: int, secret: str, *, secure: bool) -> str:
    """What people scan. The secret stands behind a #: browsers keep that to themselves."""
    found = own_address() if host in _EVERYWHERE else host
    place = f"[{found}]" if ":" in found else found
    return f"{'https' if secure else 'http'}://{place}:{port}/#{secret}"


def own_address() -> str:
    """By which others on the local network reach this machine; its name where there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_NOWHERE, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def browsers_broker(text: str, *, secure: bool) -> str:
    """``text``, the broker's URL for browsers; ConfigError where it is no WebSocket, or one that the page may not open."""
    address = Address.parse(text)
    if not address.path:
        raise ConfigError(
            f"browsers speak MQTT over WebSocket only, and {text!r} is none: name the broker's WebSocket listener as "
            "`web_broker`, like wss://broker.lan:8884/mqtt (`edgefl broker --websocket-port` has one), or leave it out: the "
            "page then connects browsers to the server's own broker"
        )
    if secure and not address.secure:
        raise ConfigError(
            f"a page over https opens no WebSocket without TLS, and `web_broker` is {text}: write wss://, or leave it out"
        )
    if address.username or address.password:
        raise ConfigError("`web_broker` is shown to every browser: leave user and password out of it")
    scheme = "wss" if address.secure else "ws"
    return f"{scheme}://{address}{address.path}"
