"""Configuration of an agent, and the log of its events."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from edgefl.wire.enrolment import Token
from edgefl.wire.limits import Limits
from edgefl.wire.mirrors import Mirror
from edgefl.wire.mqtt.address import Address
from edgefl.wire.text import printable
from edgefl_device.policy import OwnerPolicy

Source = Callable[[], Any]
"""Function that returns ``(x, y)``, ``(x, y, others)`` or a mapping with x, y and other inputs: arrays, one row a sample."""

Policy = Literal["refuse", "skip"]
"""Treatment of a row that cannot be read, or does not fit the model."""

_MOST_TEXT = 2000


class AgentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the device's log: its name, a sentence for people, and details that can be written as JSON."""

    event: str
    text: str
    details: dict[str, str | int | float] = {}


class DeviceLog:
    """Log of a device, which passes each event to the user's function. Thread-safe if that function is.

    Args:
        report: The user's function.
    """

    def __init__(self, report: Callable[[AgentEvent], None]) -> None:
        self._report = report

    def event(self, name: str, text: str, **details: str | int | float) -> None:
        """Pass an event to the user's function. Exceptions of that function, such as a closed standard output, are
        ignored.

        Args:
            name: Name of the event, such as ``online``.
            text: Sentence for people. Only its first 2000 characters are passed on; unprintable ones become blanks.
            **details: Values for programs, by name.
        """
        with suppress(Exception):
            clean = {key: printable(v) if isinstance(v, str) else v for key, v in details.items()}
            self._report(AgentEvent(event=name, text=printable(text, _MOST_TEXT), details=clean))


@dataclass(frozen=True)
class AgentConfig:
    """Name, data and limits of a device.

    Attributes:
        federation: Name of the federation.
        device: Name of the device in it.
        broker: Address of the broker.
        data: Path of the local samples, or a function that returns them.
        folder: Folder of the device's store and key.
        bad_rows: ``refuse`` raises an error for samples that cannot be used, ``skip`` leaves them out.
        tier: Tier that the device requests in its hello; "": the server chooses one.
        until_done: True ends :meth:`DeviceAgent.run` when the training is over.
    """

    federation: str
    device: str
    broker: Address
    data: Path | Source
    folder: Path
    bad_rows: Policy = "refuse"
    tier: str = ""
    memory_bytes: int = 0
    """Memory this device offers to training; 0: all it has. A task that needs more is declined."""
    server_keys: tuple[bytes, ...] = ()
    """Public keys of the server; messages signed by no other key count. Without any, the first key seen is trusted from then
    on."""
    mirrors: tuple[Mirror, ...] = ()
    """Mirrors of the owner, such as a gateway's cache, used before those that the server names."""
    token: Token | None = None
    """Token that adds this device's key to the server's list of devices."""
    until_done: bool = False
    threads: int = 1
    """Threads of the engine, for profiles of bundles."""
    tune: bool | None = False
    """Variants of graphs: True times them where they are first needed and keeps the fastest, None takes the one that suits
    the processor, False the graph's own form. With the others the last bits of an update depend on the processor."""
    limits: Limits = Limits()
    policy: OwnerPolicy = field(default_factory=OwnerPolicy)
    """The owner's rules."""
