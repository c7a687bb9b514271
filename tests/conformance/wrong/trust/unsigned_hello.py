"""Says hello without a signature."""

from __future__ import annotations

from edgefl.wire.mqtt.envelope import Speaker
from edgefl.wire.mqtt.messages import Hello, Message, encode

_seal = Speaker.seal


def plant() -> None:
    def seal(self: Speaker, topic: str, message: Message, at: int | None = None) -> bytes:
        return encode(message) if isinstance(message, Hello) else _seal(self, topic, message, at)

    Speaker.seal = seal  # type: ignore[method-assign]
