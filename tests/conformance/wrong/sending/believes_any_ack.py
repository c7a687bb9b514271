"""Takes an answer to another update for one to its own."""

from __future__ import annotations

import msgspec

from edgefl.wire.mqtt.messages import Ack
from edgefl_device.link.outbox import Outbox


def plant() -> None:
    def any_word(self: Outbox, nonce: str, sha256: str, patience_s: float) -> Ack | None:
        ack = self._acks.get(timeout=patience_s)
        return ack and msgspec.structs.replace(ack, nonce=nonce, sha256=sha256)

    Outbox._wait_for = any_word  # type: ignore[method-assign]
