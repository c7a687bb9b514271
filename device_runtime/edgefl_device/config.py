"""What an agent is told when it is made, and what it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from edgefl.wire.enrolment import Token
from edgefl.wire.limits import Limits
from edgefl.wire.mirrors import Mirror
from edgefl.wire.mqtt.address import Address
from edgefl_device.policy import Policy as OwnerPolicy

Source = Callable[[], Any]
"""Gives ``(x, y)``, ``(x, y, others)`` or a mapping with x, y and the inputs beside x: arrays, one row for each sample."""

Policy = Literal["refuse", "skip"]
"""What becomes of a row that cannot be read, or does not fit the model."""


class AgentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something people want to know; ``details`` is ready for JSON."""

    event: str
    text: str
    details: dict[str, str | int | float] = {}


@dataclass(frozen=True)
class AgentConfig:
    """Who this device is and what it has."""

    federation: str
    device: str
    broker: Address
    data: Path | Source
    folder: Path
    bad_rows: Policy = "refuse"
    tier: str = ""
    memory_bytes: int = 0
    """Memory this device offers to training; 0: what it has. A task that needs more is declined."""
    server_keys: tuple[bytes, ...] = ()
    """Public keys of the server: this device acts on nothing that they did not sign. Without any, the first that it sees is
    trusted from then on."""
    mirrors: tuple[Mirror, ...] = ()
    """Of its own, such as a gateway's cache: asked before those that the server names."""
    token: Token | None = None
    """Brings this device's key onto the server's list of devices."""
    until_done: bool = False
    threads: int = 1
    """Those of the engine, for whoever asks what a bundle costs here."""
    tune: bool | None = False
    """Forms of graphs: True times them where they are first needed and keeps the fastest, None takes the one that suits the
    processor, False the graph's own: with the others the last bits of an update depend on the processor."""
    limits: Limits = Limits()
    policy: OwnerPolicy = field(default_factory=OwnerPolicy)
    """What the owner lets it do, and when."""
