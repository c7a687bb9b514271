"""Knows after a restart the key that it was given, and not the one that this introduced."""

from __future__ import annotations

import msgspec

from edgefl_device.store.database import Store

_fact = Store.fact


def plant() -> None:
    def fact(self: Store, name: str) -> bytes | None:
        kept = _fact(self, name)
        if kept is None or name != "server-keys":
            return kept
        return msgspec.msgpack.encode({**msgspec.msgpack.decode(kept), "statements": []})

    Store.fact = fact  # type: ignore[method-assign]
