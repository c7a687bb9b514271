"""How a broker is reached: read from text without loading what talks to it.

mqtts://pi-1@broker.lan:8883?ca-file=ca.crt
wss://broker.example/mqtt?cert-file=pi-1.crt&key-file=pi-1.key
user:password@localhost:1883
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import parse_qsl, quote, unquote, urlencode

from edgefl.wire.errors import BrokerError
from edgefl.wire.mqtt.client_ids import ClientIds

Version = Literal["auto", "5", "3.1.1"]
"""Of MQTT. auto: 5 where the broker has it, else 3.1.1."""

_LAST_PORT = 65535
_PORTS = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
_TEXTS = ("ca_file", "cert_file", "key_file", "alpn")
_CHOICES: dict[str, tuple[str, ...]] = {"mqtt": get_args(Version), "client_ids": get_args(ClientIds)}
_FLAGS = ("insecure_password",)
_PLACE = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<host>[^:\[\]]+))(?::(?P<port>[0-9]{0,5}))?")
_MOST_SECRET = 1 << 16


@dataclass(frozen=True)
class Address:
    """Where the broker listens and what it wants to see.

    TLS is on with ``tls`` (the system's authorities) or ``ca_file`` (one of your own, PEM), ``cert_file`` and ``key_file``
    (a client certificate, PEM) or ``alpn`` (the protocol's name, where port 443 serves several). With a ``path`` MQTT
    travels in a WebSocket. ``insecure_password``: the password may travel without TLS, which is refused otherwise.
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
        """``host``, ``host:port``, ``user:password@host:port``, or a URL: ``mqtt``, ``mqtts`` (TLS), ``ws`` or ``wss``, in
        which user and password are percent-encoded and the query may hold any option of an address by its name.

        BrokerError says how one reads.
        """
        scheme, is_url, rest = text.partition("://")
        if not is_url:
            return cls._placed(text, _PORTS["mqtt"])
        if scheme not in _PORTS:
            raise BrokerError(
                f"{scheme!r} is no way to reach a broker: write {', '.join(_PORTS)} before ://", scheme=scheme
            )
        rest, _, query = rest.partition("?")
        credentials, at, place = rest.rpartition("@")
        place, _, path = place.partition("/")
        placed = cls._placed(f"{credentials}{at}{place}", _PORTS[scheme])
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
    def _placed(cls, text: str, default_port: int) -> Address:
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
        """Whether the connection is TLS."""
        return self.tls or bool(self.ca_file or self.cert_file or self.alpn)

    @property
    def is_loopback(self) -> bool:
        """Whether what is sent there stays on this machine."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def url(self) -> str:
        """The whole address as :meth:`parse` reads it, password and all: for an environment, not for people."""
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
        """BrokerError for what must not be used: a password that would travel in clear, half a client certificate."""
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
    """Return False if ``address`` was in brackets and is no IPv6 address."""
    try:
        return address is None or ipaddress.ip_address(address).version == 6
    except ValueError:
        return False


def _options(query: str) -> dict[str, object]:
    """Options of a URL's query, by the field's name."""
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
    """The password in a file: its first line. BrokerError if there is none."""
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            secret = file.readline(_MOST_SECRET).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BrokerError(
            f"the password file {path} cannot be read ({error}): give a text file whose first line is the password",
            path=str(path),
        ) from error
    if not secret:
        raise BrokerError(f"the first line of the password file {path} is empty: write the password there")
    return secret
