"""Source that follows another dashboard over HTTP: first its whole state, then each new line of the feed."""

from __future__ import annotations

import http.client
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from edgefl.errors import ConfigError, EdgeflError
from edgefl_server.dashboard.state import fold
from edgefl_server.dashboard.state.fleet import Fleet
from edgefl_server.dashboard.state.source import EventObserver
from edgefl_server.dashboard.web.hub import Follower, Hub
from edgefl_server.operations import AnyOrder
from edgefl_server.storage.feed import decode_event

_PAUSE_S = 0.5
_ANSWER_S = 10.0
_SILENT_S = 45.0
"""Timeout of a read; the other page sends a heartbeat more often."""
_AGAIN_S = 2.0
_HEARTBEAT_S = 15.0
_MOST_LINE = 512 << 20
_END = "end"

_decode = msgspec.json.Decoder(Fleet).decode
_encode = msgspec.json.Encoder().encode


async def feed(hub: Hub) -> AsyncGenerator[bytes]:
    """Yield server-sent events for a dashboard that follows this one, until the process is about to end.

    The first is ``fleet`` with the whole state, then ``lines`` with new lines of the feed. The stream also ends if the
    follower cannot keep up or the run was replaced; it then connects again.
    """
    follower = Follower()
    with hub.following(follower):
        while not (hub.ready or hub.ending):
            await hub.pause(_PAUSE_S)
        edition = hub.fleet.edition
        follower.lines.clear()
        yield b"event: fleet\ndata: " + _encode(_without_parts(hub.fleet)) + b"\n\n"
        quiet = 0.0
        # A follower that cannot keep up, or whose run changed, starts again.
        while not (follower.is_overrun or hub.ending) and hub.fleet.edition == edition:
            await hub.pause(_PAUSE_S)
            quiet += _PAUSE_S
            if follower.lines:
                new, follower.lines = follower.lines, []
                yield b"event: lines\n" + b"".join(b"data: " + line + b"\n" for line in new) + b"\n"
                quiet = 0.0
            elif quiet >= _HEARTBEAT_S:
                yield b": still here\n\n"
                quiet = 0.0


class RemoteSource:
    """Source that follows the dashboard at ``url`` over HTTP. ``observer`` receives each new event.

    Raises:
        ConfigError: If the URL is invalid, or no dashboard answers.
    """

    def __init__(self, url: str, observer: EventObserver | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"`server` is the address of another page, such as http://gateway:8090, found {url!r}",
                server=url,
            )
        if parts.username or parts.password:
            raise ConfigError(
                "`server` holds a password, which logs would show: put it into a proxy of your own"
            )
        self.url = url.rstrip("/")
        self._observer = observer
        self._news: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._ended = threading.Event()
        self._check()

    def _check(self) -> None:
        try:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=_ANSWER_S) as answer:
                if answer.read(16).strip() == b"ok":
                    return
            why = "what answers there is no page of edgefl"
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = str(getattr(error, "reason", error)) or type(error).__name__
        raise ConfigError(
            f"the page at {self.url} does not answer ({why}): start it there with `edgefl dashboard RUN --listen "
            "HOST:PORT`, and look at the address and at what lies between",
            url=self.url,
        )

    def begin(self) -> Fleet:
        """Wait for the state of the other dashboard and return it. Later events follow in :meth:`poll`.

        :meth:`close` ends the wait; the state is then empty.

        Raises:
            ConfigError: If the other dashboard sends a state that this release cannot read.
        """
        threading.Thread(target=self._follow, name="upstream", daemon=True).start()
        kind, content = self._news.get()
        while kind not in ("fleet", _END):
            kind, content = self._news.get()
        return Fleet() if kind == _END else self._decode_fleet(content)

    def poll(self, fleet: Fleet, lines: list[bytes]) -> bool:
        changed = False
        while True:
            try:
                kind, content = self._news.get_nowait()
            except queue.Empty:
                return changed
            changed = True
            if kind == "problem":
                fleet.problem = content
            elif kind == "fleet":
                replace_all(fleet, self._decode_fleet(content))
            elif kind != _END and (new := decode_event(content)) is not None:
                lines.append(content)
                fold.apply(fleet, new.at, new.event)
                if self._observer is not None:
                    self._observer.take(new.at, new.event)

    def close(self) -> None:
        self._ended.set()
        self._news.put((_END, b""))  # wakes begin() if the other page sends nothing

    def _decode_fleet(self, data: bytes) -> Fleet:
        try:
            return _decode_fleet(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the page at {self.url} sends a fleet in another format than this one reads ({error}): have both of "
                "the same release of edgefl",
                url=self.url,
            ) from error

    def _follow(self) -> None:
        while not self._ended.is_set():
            try:
                self._read()
                why = "it ended the connection"
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = str(getattr(error, "reason", error)) or type(error).__name__
            self._news.put(
                ("problem", f"the page at {self.url} is away ({why}): what is shown is what it told last")
            )
            self._ended.wait(_AGAIN_S)

    def _read(self) -> None:
        kind = ""
        with urllib.request.urlopen(f"{self.url}/feed", timeout=_SILENT_S) as answer:
            while (line := answer.readline(_MOST_LINE)) and not self._ended.is_set():
                if line.startswith(b"event: "):
                    kind = line[7:].strip().decode("ascii", "replace")
                elif line.startswith(b"data: "):
                    self._news.put((kind, line[6:].rstrip(b"\n")))


class RemoteMailbox:
    """Mailbox that sends orders to the dashboard at ``url``, which checks the operator's token."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def send(self, order: AnyOrder, token: str) -> None:
        """Send an order with the operator's ``token`` over HTTP.

        Raises:
            EdgeflError: If the other dashboard refuses the order.
            OSError: If the other dashboard cannot be reached.
        """
        request = urllib.request.Request(
            f"{self._url}/api/orders",
            data=_encode(order),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
        )
        try:
            urllib.request.urlopen(request, timeout=_ANSWER_S).close()
        except urllib.error.HTTPError as error:
            raise EdgeflError(f"the page at {self._url} refused it: {_text_of(error.read(4096))}") from error


def replace_all(fleet: Fleet, other: Fleet) -> None:
    """Replace the contents of ``fleet`` by those of ``other``, mark everything as changed, and begin a new edition."""
    tick, edition = fleet.tick, fleet.edition + 1
    for name in fleet.__struct_fields__:
        setattr(fleet, name, getattr(other, name))
    fleet.tick, fleet.edition = tick, edition
    for device in fleet.devices.values():
        device.changed = tick
    for row in fleet.rounds.values():
        row.changed = tick


def _without_parts(fleet: Fleet) -> Fleet:
    """Return a copy of the fleet with an empty ``DeviceRecord.parts`` for each device, to send it.

    The rounds hold the same states, so :func:`_decode_fleet` can restore them.
    """
    devices = {name: msgspec.structs.replace(device, parts={}) for name, device in fleet.devices.items()}
    return msgspec.structs.replace(fleet, devices=devices)


def _decode_fleet(data: bytes) -> Fleet:
    """Decode a fleet, and restore each device's states in rounds (``parts``) from the rounds.

    Raises:
        msgspec.MsgspecError: If ``data`` is no encoded fleet.
    """
    fleet = _decode(data)
    for number in sorted(fleet.rounds):
        for name, part in fleet.rounds[number].parts.items():
            if (device := fleet.devices.get(name)) is not None:
                device.parts[number] = part
    return fleet


def _text_of(data: bytes) -> str:
    try:
        return str(msgspec.json.decode(data, type=dict[str, str]).get("text", ""))[:200]
    except msgspec.MsgspecError:
        return "it says nothing more"
