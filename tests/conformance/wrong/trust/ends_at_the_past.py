"""Ends where the server's message is older than its last one."""

from __future__ import annotations

import os

from edgefl.errors import IdentityError
from edgefl.wire.mqtt.envelope import Envelope
from edgefl.wire.mqtt.messages import Message
from edgefl_device.link.identity import ServerTrust

_in_order = ServerTrust._in_order


def plant() -> None:
    def or_end(self: ServerTrust, kind: type[Message], topic: str, envelope: Envelope) -> None:
        try:
            _in_order(self, kind, topic, envelope)
        except IdentityError as error:
            if error.reason == "replayed":
                os._exit(70)
            raise

    ServerTrust._in_order = or_end  # type: ignore[method-assign]
