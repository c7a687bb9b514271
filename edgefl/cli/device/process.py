"""Process of a device agent."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import msgspec

from edgefl.system.clock import clock
from edgefl.system.lazy_modules import on_first_use
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.text import printable

if TYPE_CHECKING:
    from edgefl_device.config import AgentEvent


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the process of `edgefl device`: the arguments of :class:`edgefl.Agent`.

    ``as_json``: True to print events as JSON lines.
    """

    federation: str
    device: str
    broker: Address
    data: str
    bad_rows: str = "refuse"
    folder: str
    tier: str = ""
    memory: int = 0
    server_key: str = ""
    token: str = ""
    until_done: bool = False
    limits: Limits = Limits()
    engine: str = "onnx"
    threads: int = 0
    tune: bool | None = None
    sandbox: str = "auto"
    policy: str | None = None
    mirrors: tuple[str, ...] = ()
    surroundings_command: str = ""
    as_json: bool = False


def load() -> None:
    """Import the modules of a device before its settings are known. They are excluded from garbage collection."""
    # paho reads proxies by it, and only where a package for them is installed; it brings all that speaks HTTP and e-mail,
    # 2.4 MB of an idle device.
    on_first_use("urllib.request")
    import edgefl.api.device  # noqa: F401

    gc.freeze()  # modules stay: a search for garbage need not walk through them, a round after the other


def run(settings: DeviceSettings, _loaded: None = None) -> None:
    """Run the agent until it is done, or SIGTERM or SIGINT arrives.

    Raises:
        ConfigError: A setting cannot be used.
        EdgeflError: The device cannot continue: its data cannot be read, or its store is another release's.
    """
    from edgefl.api.device import Agent, DeviceLimits, Trust

    os.umask(0o077)  # the store, and all that lies in it
    arguments = msgspec.structs.asdict(settings)
    report = _as_json if arguments.pop("as_json") else _as_text
    limits = DeviceLimits(sizes=arguments.pop("limits"), **_fields_of(DeviceLimits, arguments))
    trust = Trust(**_fields_of(Trust, arguments))
    agent = Agent(**arguments, trust=trust, limits=limits, report=report)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    agent.run()


def _fields_of(kind: type[Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the entries of ``arguments`` that are fields of the dataclass ``kind``. Return them by name."""
    return {each.name: arguments.pop(each.name) for each in fields(kind) if each.name in arguments}


settings_type = DeviceSettings


def _as_text(event: AgentEvent) -> None:
    line = f"{clock(time.time())}  {event.event:<9} {event.text}"
    _say(printable(line, len(line)))


def _as_json(event: AgentEvent) -> None:
    _say(msgspec.json.encode(event).decode())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
