"""The list of devices as the door uses it: what a full disk does not take holds in memory, and is written later.

A device says hello once for a connection, so one that is not let in for want of room on a disk would be away for good.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from edgefl.errors import ConfigError, StoreError
from edgefl.wire.keys import FOREVER
from edgefl_server.identity.registry import DeviceKey, Registry, Source, State

_RETRY_S = 1.0

_Standing = tuple[tuple[bytes, State], ...]


@dataclass(frozen=True)
class _Waiting:
    """A key that is not on the list yet. ``until``: when the one before it ends; ``before``: what the list said then."""

    key: DeviceKey
    until: int
    token: str
    before: _Standing


class Ledger:
    """``clock`` gives seconds; a list that could not be written is tried again after one of them."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._clock = clock
        self._keys: dict[str, _Waiting] = {}
        self._numbers: dict[tuple[str, bytes], tuple[int, int]] = {}
        self._failed_at = 0.0
        self._trouble: StoreError | None = None

    def keys(self, device: str) -> list[DeviceKey]:
        """All that a device ever had, the oldest first."""
        written, waiting = self._registry.keys(device), self._keys.get(device)
        if waiting is None:
            return written
        if _standing(written) != waiting.before:  # somebody else changed the list meanwhile, which counts
            del self._keys[device]
            return written
        return [*(_followed(each, waiting.until) for each in written), waiting.key]

    def devices(self) -> int:
        """How many names have keys, or a few more than that."""
        return self._registry.devices() + len(self._keys)

    def token(self, name: str, now: float) -> tuple[str, bytes] | None:
        """Device and secret of a token that can still be used."""
        used = any(waiting.token == name for waiting in self._keys.values())
        return None if used else self._registry.token(name, now)

    def add(
        self, device: str, key: bytes, *, source: Source, now: float, until: int = 0, token: str = ""
    ) -> None:
        """Make ``key`` the device's, by ``token`` if it has one. ConfigError for a key that was revoked."""
        new = DeviceKey(device=device, key=key, state="active", source=source, until=FOREVER, added_at=now)
        waiting = _Waiting(new, until, token, _standing(self._registry.keys(device)))
        if not self._wrote(lambda: self._put(waiting)):
            self._keys[device] = waiting

    def heard(self, device: str, key: bytes, *, hello_at: int = 0, status_at: int = 0) -> None:
        """The number of the last hello, or status, that a key of the device signed; 0 leaves what was."""
        if not self._wrote(lambda: self._registry.heard(device, key, hello_at=hello_at, status_at=status_at)):
            hello, status = self._numbers.get((device, key), (0, 0))
            self._numbers[device, key] = max(hello, hello_at), max(status, status_at)

    def trouble(self) -> StoreError | None:
        """Why something could not be written since this was last asked; None if all was."""
        trouble, self._trouble = self._trouble, None
        return trouble

    def retry(self) -> None:
        """Write what could not be written, if it is time."""
        if not (self._keys or self._numbers) or 0 <= self._clock() - self._failed_at < _RETRY_S:
            return
        try:
            self._write_keys()
            for (device, key), (hello_at, status_at) in list(self._numbers.items()):
                self._registry.heard(device, key, hello_at=hello_at, status_at=status_at)
                del self._numbers[device, key]
        except StoreError as error:
            self._failed(error)

    def _write_keys(self) -> None:
        for device, waiting in list(self._keys.items()):
            if _standing(self._registry.keys(device)) == waiting.before:
                with suppress(ConfigError):
                    self._put(waiting)
            del self._keys[device]

    def _put(self, waiting: _Waiting) -> None:
        device, key, now = waiting.key.device, waiting.key.key, waiting.key.added_at
        if waiting.token:
            self._registry.redeem(waiting.token, device, key, now=now)
        else:
            self._registry.add(device, key, source=waiting.key.source, now=now, until=waiting.until)

    def _wrote(self, write: Callable[[], None]) -> bool:
        if self._keys or self._numbers:  # in the order in which it came, once that is written
            return False
        try:
            write()
        except StoreError as error:
            self._failed(error)
            return False
        return True

    def _failed(self, error: StoreError) -> None:
        self._trouble, self._failed_at = error, self._clock()


def _standing(keys: list[DeviceKey]) -> _Standing:
    return tuple((each.key, each.state) for each in keys)


def _followed(known: DeviceKey, until: int) -> DeviceKey:
    """A key as it is once another one took its place."""
    if known.state != "active":
        return known
    return msgspec.structs.replace(known, state="retired", until=until)
