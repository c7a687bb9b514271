"""Broker addresses, parsed without loading the MQTT client, and client ids.

mqtts://pi-1@broker.lan:8883?ca-file=ca.crt
wss://broker.example/mqtt?cert-file=pi-1.crt&key-file=pi-1.key
user:password@localhost:1883

Each role of each name in each federation has a client id that no other client can guess. If a second client connects with
the same id, a broker takes it for the first one and ends the first connection. Most brokers do not check the owner of an
id, so a client with credentials of its own could lock out any other whose id it can guess.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import ipaddress
import re
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import parse_qsl, quote, unquote, urlencode

from edgefl.errors import BrokerError

ClientIds = Literal["full", "short"]
"""Style of client ids.

short: 23 letters and digits that only the owner of the secret can compute; every broker accepts them (MQTT 3.1.1,
3.1.3.1). full: readable, at most 128 bytes; only for a broker that lets no user connect with the id of another.
"""

Role = Literal["device", "guest", "look", "server", "look-server", "probe-server", "profiler", "worker"]

MOST_FULL, MOST_SHORT = 128, 23
_DIGITS = string.digits + string.ascii_letters
_LONG_DIGEST = 43


def client_id(
    secret: bytes, role: Role, federation: str, name: str = "", *, style: ClientIds = "short"
) -> str:
    """Return the MQTT client id of a process.

    Args:
        secret: Secret of the process, 32 bytes or more: ``client_secret`` of its keys if the id must be the same at the
            next start, else random bytes. Ids of style ``full`` do not use it.
        role: Role of the process.
        federation: Name of the federation.
        name: Name of the device, worker or request.
        style: ``short`` for 23 of 62 digits (137 bits of an HMAC); ``full`` for ``edgefl:ROLE:FEDERATION:NAME``, or a
            digest of it if that is longer than 128 bytes. Names hold no colon and no equals sign, so no two full ids
            are equal.
    """
    whole = ":".join(("edgefl", role, federation, *([name] if name else ())))
    if style == "short":
        return _letters(hmac.digest(secret, whole.encode(), "sha256"), MOST_SHORT)
    if len(whole) <= MOST_FULL:
        return whole
    return f"edgefl:{role}={_letters(hashlib.sha256(whole.encode()).digest(), _LONG_DIGEST)}"


def _letters(digest: bytes, digits: int) -> str:
    """Return a text of ``digits`` letters and digits that is derived from ``digest``."""
    number = int.from_bytes(digest)
    found = ""
    for _ in range(digits):
        number, digit = divmod(number, len(_DIGITS))
        found += _DIGITS[digit]
    return found


Version = Literal["auto", "5", "3.1.1"]
"""Version of MQTT. ``auto``: 5 if the broker supports it, else 3.1.1."""

_LAST_PORT = 65535
_PORTS = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
_TEXTS = ("ca_file", "cert_file", "key_file", "alpn")
_CHOICES: dict[str, tuple[str, ...]] = {"mqtt": get_args(Version), "client_ids": get_args(ClientIds)}
_FLAGS = ("insecure_password",)
_PLACE = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<host>[^:\[\]]+))(?::(?P<port>[0-9]{0,5}))?")
_MOST_SECRET = 1 << 16


@dataclass(frozen=True)
class Address:
    """Address and credentials of a broker. TLS is used if ``tls`` or any certificate field or ``alpn`` is set.

    Attributes:
        host: Name or IP address.
        port: TCP port.
        username: User name, "" for none.
        password: Password, "" for none.
        ca_file: PEM file of the certificate authority that the broker is verified with. "": those of the system.
        cert_file: PEM file of a client certificate.
        key_file: PEM file of the client certificate's key.
        alpn: Protocol name for ALPN, if port 443 serves several protocols.
        tls: Use TLS with the system's certificate authorities.
        path: Path of a WebSocket that carries MQTT. "": plain MQTT.
        mqtt: Version of MQTT.
        client_ids: Style of client ids.
        insecure_password: Allow sending the password without TLS, which :meth:`check` rejects otherwise.
    """

    host: str
    port: int = 1883
    username: str = ""
    password: str = field(default="", repr=False)
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    alpn: str = ""
    tls: bool = False
    path: str = ""
    mqtt: Version = "auto"
    client_ids: ClientIds = "short"
    insecure_password: bool = False

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address that a text describes.

        Args:
            text: ``host``, ``host:port``, ``user:password@host:port``, or a URL: ``mqtt``, ``mqtts`` (TLS), ``ws`` or
                ``wss``. In a URL user and password are percent-encoded, and the query may contain other fields of an
                address.

        Raises:
            BrokerError: The text has another form.
        """
        scheme, is_url, rest = text.partition("://")
        if not is_url:
            return cls._parse_place(text, _PORTS["mqtt"])
        if scheme not in _PORTS:
            raise BrokerError(
                f"{scheme!r} is no way to reach a broker: write {', '.join(_PORTS)} before ://", scheme=scheme
            )
        rest, _, query = rest.partition("?")
        credentials, at, place = rest.rpartition("@")
        place, _, path = place.partition("/")
        placed = cls._parse_place(f"{credentials}{at}{place}", _PORTS[scheme])
        websocket = scheme in ("ws", "wss")
        if path and not websocket:
            raise BrokerError(
                f"a broker at {scheme}:// has no path, found /{path}: leave it out, or write ws://"
            )
        return dataclasses.replace(
            placed,
            username=unquote(placed.username),
            password=unquote(placed.password),
            tls=scheme in ("mqtts", "wss"),
            path=f"/{path or 'mqtt'}" if websocket else "",
            **_options(query),  # type: ignore[arg-type]
        )

    @classmethod
    def _parse_place(cls, text: str, default_port: int) -> Address:
        """Return the address ``user:password@host:port``, with ``default_port`` if it has none.

        Raises:
            BrokerError: The text has another form.
        """
        credentials, _, place = text.rpartition("@")
        username, _, password = credentials.partition(":")
        found = _PLACE.fullmatch(place)
        number = int(found["port"] or default_port) if found else 0
        if found is None or not 1 <= number <= _LAST_PORT or not _is_host(found["v6"]):
            raise BrokerError(
                f"broker address {place!r} should read host:port with a port up to {_LAST_PORT}, "
                "for example localhost:1883, [::1]:1883 or mqtts://broker.lan:8883",
                address=place,
            )
        return cls(found["v6"] or found["host"], number, username, password)

    @property
    def secure(self) -> bool:
        """True if the connection uses TLS."""
        return self.tls or bool(self.ca_file or self.cert_file or self.alpn)

    @property
    def is_loopback(self) -> bool:
        """True if the host is this machine."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def url(self) -> str:
        """URL of the address for :meth:`parse`. It contains the password, so do not display it."""
        secure = self.secure
        scheme = ("wss" if secure else "ws") if self.path else ("mqtts" if secure else "mqtt")
        user = quote(self.username, safe="")
        secret = f":{quote(self.password, safe='')}" if self.password else ""
        given = {name: getattr(self, name) for name in (*_TEXTS, *_CHOICES, *_FLAGS)}
        told = {
            name.replace("_", "-"): str(value)
            for name, value in given.items()
            if value != getattr(Address, name)
        }
        query = f"?{urlencode(told, safe='/:')}" if told else ""
        return f"{scheme}://{user}{secret}{'@' if user else ''}{self}{self.path}{query}"

    def check(self) -> None:
        """Check the credentials.

        Raises:
            BrokerError: The password would be sent without TLS to another machine, or half of a client certificate is
                missing.
        """
        if bool(self.cert_file) != bool(self.key_file):
            raise BrokerError(
                f"a client certificate is two files, and only {self.cert_file or self.key_file} is given: give both, "
                "`cert_file` and `key_file`"
            )
        if self.password and not (self.secure or self.is_loopback or self.insecure_password):
            raise BrokerError(
                f"the password of user {self.username!r} would travel to {self} in clear, for everybody on the way to read: "
                "use TLS (mqtts://, or `ca_file`), or say that it may (`insecure_password`)",
                address=str(self),
            )

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _is_host(address: str | None) -> bool:
    """Return True if ``address`` is None (the host was not in brackets) or an IPv6 address."""
    try:
        return address is None or ipaddress.ip_address(address).version == 6
    except ValueError:
        return False


def _options(query: str) -> dict[str, object]:
    """Return the fields in a URL's query by name. Raises BrokerError for an unknown option or value."""
    found: dict[str, object] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        name = key.replace("-", "_")
        if name in _TEXTS or value in _CHOICES.get(name, ()):
            found[name] = value
        elif name in _FLAGS and value.lower() in ("true", "false", "1", "0", ""):
            found[name] = value.lower() in ("true", "1", "")
        else:
            known = ", ".join(each.replace("_", "-") for each in (*_TEXTS, *_CHOICES, *_FLAGS))
            among = f"one of {', '.join(_CHOICES[name])}" if name in _CHOICES else f"an option: {known}"
            raise BrokerError(f"{key}={value} in the broker's address should be {among}", option=key)
    return found


def read_secret(path: str | Path) -> str:
    """Return the password in the first line of a file.

    Raises:
        BrokerError: The file cannot be read, or its first line is empty.
    """
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            secret = file.readline(_MOST_SECRET).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BrokerError(
            f"the password file {path} cannot be read ({error}): give a text file whose first line is the password",
            path=str(path),
            error=str(error),
        ) from error
    if not secret:
        raise BrokerError(
            f"the first line of the password file {path} is empty: write the password there", path=str(path)
        )
    return secret
