"""What an agent is told when it is made, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address


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
    data: Path
    folder: Path
    tier: str = ""
    memory_bytes: int = 0
    """Memory this device offers to training; 0: what it has. A task that needs more is declined."""
    server_key: str = ""
    """Public key, in hexadecimal digits; with it, only bundles that it signed are loaded."""
    until_done: bool = False
    threads: int = 1
    """Those of the engine, for whoever asks what a bundle costs here."""
    limits: Limits = Limits()
