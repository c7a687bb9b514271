"""Says hello without a signature."""

from __future__ import annotations

from edgefl.wire.mqtt.envelope import MessageSigner
from edgefl.wire.mqtt.messages import Hello, Message, encode

_seal = MessageSigner.seal


def plant() -> None:
    def seal(self: MessageSigner, topic: str, message: Message, at: int | None = None) -> bytes:
        return encode(message) if isinstance(message, Hello) else _seal(self, topic, message, at)

    MessageSigner.seal = seal  # type: ignore[method-assign]
