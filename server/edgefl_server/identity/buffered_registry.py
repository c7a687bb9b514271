"""Registry of devices that keeps failed writes in memory and repeats them later.

A device sends one hello per connection. If a full disk made the server refuse its key, the device would not return.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import msgspec

from edgefl.errors import ConfigError, StoreError
from edgefl.system.clock import Clock
from edgefl.wire.keys import FOREVER
from edgefl_server.identity.registry import DeviceKey, Registry, Source, State

_RETRY_S = 1.0

_KeyStates = tuple[tuple[bytes, State], ...]


@dataclass(frozen=True)
class _PendingKey:
    """Key that is not yet written to the registry.

    Attributes:
        key: The new key.
        until: Epoch seconds until which the device's previous key stays valid.
        token: Name of the enrolment token that permits the key, or empty.
        before: (key, state) of all keys of the device when this one was added, to detect changes by another process.
    """

    key: DeviceKey
    until: int
    token: str
    before: _KeyStates


class BufferedRegistry:
    """Registry of device keys that keeps failed writes in memory and repeats them later (:meth:`retry`).

    Args:
        registry: The registry.
        clock: Clock in seconds, for the pause before a retry.
    """

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._keys: dict[str, _PendingKey] = {}
        self._numbers: dict[tuple[str, bytes], tuple[int, int]] = {}
        self._failed_at = 0.0
        self._error: StoreError | None = None

    def keys(self, device: str) -> list[DeviceKey]:
        """Return all stored keys of a device and its unwritten one, the oldest first."""
        written, pending = self._registry.keys(device), self._keys.get(device)
        if pending is None:
            return written
        if (
            _states(written) != pending.before
        ):  # `edgefl enroll` changed the registry meanwhile, and takes precedence
            del self._keys[device]
            return written
        return [*(_retire(each, pending.until) for each in written), pending.key]

    def devices(self) -> int:
        """Return the number of device names with keys. Devices with an unwritten key may be counted twice."""
        return self._registry.devices() + len(self._keys)

    def token(self, name: str, now: float) -> tuple[str, bytes] | None:
        """Return (device, secret) of the enrolment token ``name``; None if it is unknown, used, or expired at ``now``."""
        is_used = any(pending.token == name for pending in self._keys.values())
        return None if is_used else self._registry.token(name, now)

    def add(
        self, device: str, key: bytes, *, source: Source, now: float, until: int = 0, token: str = ""
    ) -> None:
        """Add a key of a device and retire its earlier keys.

        If the registry cannot be written, the new key is kept in memory and written later.

        Args:
            device: Name of the device.
            key: Public key.
            source: Origin of the key.
            now: Epoch seconds.
            until: Epoch seconds until which the device's previous key stays valid.
            token: Name of the enrolment token that permits the key, which is used up; or empty.

        Raises:
            ConfigError: If the key was revoked.
        """
        new = DeviceKey(device=device, key=key, state="active", source=source, until=FOREVER, added_at=now)
        pending = _PendingKey(new, until, token, _states(self._registry.keys(device)))
        if not self._can_write():
            self._keys[device] = pending
            return
        try:
            self._put(pending)
        except StoreError as error:
            self._note_failure(error)
            self._keys[device] = pending

    def store_numbers(self, device: str, key: bytes, *, hello_at: int = 0, status_at: int = 0) -> None:
        """Store the number of the last hello or status that a key signed; 0 leaves the stored number.

        If the registry cannot be written, the numbers are kept in memory and written later.
        """
        if self._can_write():
            try:
                self._registry.store_numbers(device, key, hello_at=hello_at, status_at=status_at)
                return
            except StoreError as error:
                self._note_failure(error)
        hello, status = self._numbers.get((device, key), (0, 0))
        self._numbers[device, key] = max(hello, hello_at), max(status, status_at)

    def take_error(self) -> StoreError | None:
        """Return the error of the last failed write since the last call; None if there was none."""
        error, self._error = self._error, None
        return error

    def retry(self) -> None:
        """Repeat the failed writes, if there are any and a second has passed since the last failure.

        An error is kept for :meth:`take_error`.
        """
        if self._can_write() or 0 <= self._clock() - self._failed_at < _RETRY_S:
            return
        try:
            for device, pending in list(self._keys.items()):
                if _states(self._registry.keys(device)) == pending.before:
                    with suppress(ConfigError):
                        self._put(pending)
                del self._keys[device]
            for (device, key), (hello_at, status_at) in list(self._numbers.items()):
                self._registry.store_numbers(device, key, hello_at=hello_at, status_at=status_at)
                del self._numbers[device, key]
        except StoreError as error:
            self._note_failure(error)

    def _put(self, pending: _PendingKey) -> None:
        device, key, now = pending.key.device, pending.key.key, pending.key.added_at
        if pending.token:
            self._registry.redeem(pending.token, device, key, now=now)
        else:
            self._registry.add(device, key, source=pending.key.source, now=now, until=pending.until)

    def _can_write(self) -> bool:
        """Return False while earlier writes are pending, because the order of writes must stay."""
        return not (self._keys or self._numbers)

    def _note_failure(self, error: StoreError) -> None:
        self._error, self._failed_at = error, self._clock()


def _states(keys: list[DeviceKey]) -> _KeyStates:
    return tuple((each.key, each.state) for each in keys)


def _retire(known: DeviceKey, until: int) -> DeviceKey:
    """Return ``known`` as a key that another one has replaced: retired, and valid until ``until`` (epoch seconds)."""
    if known.state != "active":
        return known
    return msgspec.structs.replace(known, state="retired", until=until)
