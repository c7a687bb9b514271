"""Batched writes of device changes to the journal, so that a burst of hellos costs few writes."""

from __future__ import annotations

import time

from edgefl_server.coordinator.roster import Device
from edgefl_server.coordinator.states import State
from edgefl_server.storage.journal import Journal

_TOGETHER_S = 1.0
"""News of devices waits that long for more, while messages come one after the other."""


class DeviceWrites:
    """Devices without a tier take part in nothing, and have no rows: anybody may be one."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._new: dict[str, tuple[Device, bytes | None]] = {}
        self._since = 0.0

    def take(self, before: State, after: State, name: str, hello: bytes | None) -> None:
        """A device may be another than before; ``hello`` if it said so itself."""
        device = after.devices.get(name)
        if device is None or not device.tier or device is before.devices.get(name):
            return
        if not self._new:
            self._since = time.monotonic()
        known = self._new.get(name)
        self._new[name] = (device, hello if hello is not None else known[1] if known else None)

    def wait(self) -> float | None:
        """Seconds until something is to be written; None if nothing is."""
        return max(0.0, self._since + _TOGETHER_S - time.monotonic()) if self._new else None

    def write(self, *, quiet: bool) -> None:
        """Journal what is new, if it is ``quiet`` or has waited long enough. StoreError if it cannot be written; it is tried
        again later."""
        if self._new and (quiet or self.wait() == 0.0):
            self._since = time.monotonic()
            self._journal.save_devices(list(self._new.values()))
            self._new.clear()
