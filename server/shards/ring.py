"""Whose word an update is, as a worker can tell: by the keys that the server gave it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgefl.wire.errors import IdentityError
from edgefl.wire.mqtt.envelope import unwrap, verified
from edgefl.wire.mqtt.messages import UpdateChunk, decode
from server.identity.door import check_good, unknown_key, unsigned
from server.identity.registry import DeviceKey


class Stranger(IdentityError):
    """The server has not told of a device yet."""


class KeyRing:
    """The keys of the devices that the server told of. ``enrolled``: devices have to be on a list."""

    def __init__(self, *, enrolled: bool, clock: Callable[[], float]) -> None:
        self._enrolled = enrolled
        self._clock = clock
        self.keys: dict[str, tuple[DeviceKey, ...]] = {}

    def take(self, keys: Mapping[str, tuple[DeviceKey, ...] | None]) -> None:
        """What the server tells; None: of no device of the run."""
        for device, each in keys.items():
            if each is None:
                self.keys.pop(device, None)
            else:
                self.keys[device] = each

    def opened(self, device: str, topic: str, payload: bytes) -> UpdateChunk:
        """A chunk that ``device`` itself sent. IdentityError if it is not its word, Stranger if that cannot be known yet;
        ProtocolError if it is malformed."""
        keys = self.keys.get(device)
        if keys is None:
            raise Stranger(
                "unknown-device", f"device {device} has not said hello; connect again", device=device
            )
        envelope = unwrap(payload, UpdateChunk)
        if envelope is None:
            if self._enrolled or keys:
                raise unsigned(UpdateChunk, device, enrolled=self._enrolled)
            return decode(UpdateChunk, payload)
        known = next((each for each in keys if each.key == envelope.key), None)
        if known is None and (self._enrolled or keys):
            raise unknown_key(device, envelope, keys)
        if known is not None:
            check_good(device, known, self._clock())
        return verified(UpdateChunk, topic, envelope)
