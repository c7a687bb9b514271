"""Sends its last update once more for each task that comes, though it was accepted."""

from __future__ import annotations

import hashlib

from edgefl.wire.blobs import split
from edgefl_device.link.outbox import Outbox
from edgefl_device.store.database import Outgoing

_settle, _again = Outbox._send_until_settled, Outbox.send_again
_last: dict[int, Outgoing] = {}


def plant() -> None:
    def settle(self: Outbox, outgoing: Outgoing) -> None:
        _settle(self, outgoing)
        _last[id(self)] = outgoing

    def again(self: Outbox) -> None:
        _again(self)
        outgoing = _last.get(id(self))
        if outgoing is not None:
            pieces = list(split(outgoing.data, self._limits.chunk_bytes - 512))
            self._send(outgoing, hashlib.sha256(outgoing.data).hexdigest(), pieces, range(len(pieces)))

    Outbox._send_until_settled = settle  # type: ignore[method-assign]
    Outbox.send_again = again  # type: ignore[method-assign]
