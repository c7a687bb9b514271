"""Settings, files, address and QR code of the page for browsers."""

from __future__ import annotations

import io
import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgefl.errors import ConfigError
from edgefl.system.distribution import install
from edgefl.system.files import make_folder
from edgefl.wire.mqtt.address import Address

if TYPE_CHECKING:
    import segno


FOLDER = "web"
PORT = 8091
DEFAULT = f"0.0.0.0:{PORT}"
"""Default listening address: phones are other machines."""
_SECRET_BYTES = 16
_NOWHERE = "192.0.2.1"
"""An address reserved for documents (RFC 5737): a route to it is looked up, and nothing is sent."""
_EVERYWHERE = ("0.0.0.0", "::")


class WebSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the page's process.

    Attributes:
        folder: the page's own folder; its ``federation.toml`` describes the training.
        host: listening address.
        port: listening port.
        secret: secret that the address in the QR code contains.
        address: the page's address in the QR code.
        broker: WebSocket URL that browsers reach by themselves; empty to relay them.
        relay: URL of the broker behind the relay, without a password.
        login: browsers ask for user and password.
        server_key: public key of the server.
        cert_file: certificate (PEM).
        key_file: its private key (PEM).
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
    """Return the secret that admits browsers. It is created once in ``folder``, so that a restart keeps joined browsers."""
    path = folder / "secret"
    make_folder(folder)
    known = path.read_text(encoding="ascii").strip() if path.is_file() else ""
    if known:
        return known
    # Only the owner may read it. A half-written secret is replaced, because an empty one would admit everyone.
    own = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(own, "w", encoding="ascii") as file:
        file.write(made := secrets.token_urlsafe(_SECRET_BYTES))
    return made


def address_of(host: str, port: int, secret: str, *, secure: bool) -> str:
    """Return the page's URL for the QR code. The secret is in the fragment, which browsers do not send.

    Args:
        host: listening address. For one that means all interfaces, the URL has this machine's own address.
        port: listening port.
        secret: secret that admits browsers.
        secure: True for https.
    """
    found = own_address() if host in _EVERYWHERE else host
    place = f"[{found}]" if ":" in found else found
    return f"{'https' if secure else 'http'}://{place}:{port}/#{secret}"


def own_address() -> str:
    """Return this machine's IP address in the local network, or its host name if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_NOWHERE, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def browsers_broker(text: str, *, secure: bool) -> str:
    """Return the broker's URL for browsers in its canonical form.

    Args:
        text: URL of a WebSocket listener.
        secure: True if the page is served over https.

    Raises:
        ConfigError: if it is no WebSocket, holds a password, or the page may not open it.
    """
    address = Address.parse(text)
    if not address.path:
        raise ConfigError(
            f"browsers speak MQTT over WebSocket only, and {text!r} is none: name the broker's WebSocket listener as "
            "`web_broker`, like wss://broker.lan:8884/mqtt (`edgefl broker --websocket-port` has one), or leave it out: the "
            "page then connects browsers to the server's own broker"
        )
    if secure and not address.secure:
        raise ConfigError(
            f"a page over https opens no WebSocket without TLS, and `web_broker` is {text}: write wss://, or leave it out",
            web_broker=text,
        )
    if address.username or address.password:
        raise ConfigError("`web_broker` is shown to every browser: leave user and password out of it")
    scheme = "wss" if address.secure else "ws"
    return f"{scheme}://{address}{address.path}"


VARIABLE = "EDGEFL_WEB_PAGE"
"""Environment variable with the folder of another build of the page."""
STATIC = Path(__file__).parent / "static"
PACKED = ".gz"
"""Suffix of files that are stored and sent with gzip."""
_NEEDED = ("index.html", "worker.js", "ort/ort-wasm-simd-threaded.wasm" + PACKED)


def built_page() -> Path:
    """Return the folder of the page's files, which ``make agents-web`` builds and a wheel contains.

    Raises:
        ConfigError: if the page was not built.
    """
    folder = Path(os.environ.get(VARIABLE, "") or STATIC)
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"the page for browsers is not built ({missing[0]} is missing in {folder}): run `make agents-web` in a checkout "
            "(it needs Node 20 and npm), or install a wheel of a release",
            missing=tuple(missing),
        )
    return folder


def in_terminal(url: str) -> str:
    """Return the QR code of ``url`` as text, two modules per character, with a light border for any background."""
    out = io.StringIO()
    _code(url).terminal(out, compact=True, border=2)
    return out.getvalue()


def as_svg(url: str) -> bytes:
    """Return the QR code of ``url`` as SVG, dark on light for cameras."""
    out = io.BytesIO()
    _code(url).save(out, kind="svg", scale=4, border=2, dark="#000", light="#fff", xmldecl=False)
    return out.getvalue()


def _code(url: str) -> segno.QRCode:
    try:
        import segno
    except ModuleNotFoundError as error:
        raise ConfigError(f"QR codes are drawn by segno, which is not installed: {install('web')}") from error
    return segno.make(url, error="m", micro=False)
