"""What a device says of itself when it connects, when its conditions change, and when a server without room told it to come
later."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec
from msgspec import UNSET

from edgefl.wire.enrolment import proof
from edgefl.wire.mqtt.messages import COME_LATER, UNKNOWN_CONDITIONS, Ack, Hello
from edgefl_device.conditions import Watch
from edgefl_device.config import AgentConfig
from edgefl_device.host import agent_version

SOONEST_S, LATEST_S = 1.0, 6 * 3600.0
"""However soon or late a server wants it to come again."""


class Greeting:
    """Says hello by ``say``. ``key`` is the device's public one, ``topic`` where hellos go; for one thread."""

    def __init__(
        self,
        config: AgentConfig,
        conditions: Watch,
        say: Callable[[Hello], object],
        *,
        memory_bytes: int,
        samples: int,
        engine: tuple[str, str],
        key: bytes,
        topic: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._conditions = conditions
        self._tells = config.policy.tell
        self._say = say
        self._clock = clock
        self._again_at: float | None = None
        token = config.token
        self._hello = Hello(
            agent=agent_version(),
            memory_bytes=memory_bytes,
            cores=os.cpu_count() or 1,
            samples=samples,
            engines=dict([engine]),
            tier=config.tier,
            token=token.name if token else "",
            proof=proof(token.secret, topic, key) if token else b"",
        )

    def begin(self) -> None:
        """To be called before the device connects."""
        if self._tells:
            self._conditions.begin()

    def say(self, *, again: bool = False) -> None:
        """``again``: only the conditions are others than before."""
        told, hello = self._conditions.tell(), self._hello
        self._again_at = None
        conditions = told if told != UNKNOWN_CONDITIONS else UNSET
        self._say(msgspec.structs.replace(hello, conditions=conditions, again=again or UNSET))

    def answered(self, ack: Ack) -> None:
        """The server's word on the hello: it may have no room now, and say when to come again."""
        if ack.reason == COME_LATER and isinstance(ack.later_s, float):
            self._again_at = self._clock() + max(SOONEST_S, min(ack.later_s, LATEST_S))

    def step(self, *, connected: bool) -> None:
        """To be called now and then."""
        changed = self._tells and self._conditions.step()
        if not connected:
            return
        if self._again_at is not None:
            if self._clock() >= self._again_at:
                self.say()
        elif changed:
            self.say(again=True)
