"""Presence of a device in its federation: its hello, its subscription to rounds, and a rate limiter for reports."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Hashable

import msgspec
from msgspec import UNSET

from edgefl.wire.enrolment import prove
from edgefl.wire.mqtt.messages import COME_LATER, UNKNOWN_CONDITIONS, Ack, Hello, Round
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.config import AgentConfig
from edgefl_device.engine.base import Engine
from edgefl_device.host import agent_version
from edgefl_device.link.identity import SignedSession
from edgefl_device.policy import ConditionsMonitor, ConditionsSensor, OwnerRules

SOONEST_S, LATEST_S = 1.0, 6 * 3600.0
"""Bounds of the time after which a server without room may have a device come again."""
_ROUNDS_WITHOUT_TASK = 2
"""Rounds without a task after which a device unsubscribes: by then it knows the end of its last one."""
_MOST_NOTICES = 256


class HelloSender:
    """Sender of the device's hello, the message that registers it with the server.

    It is sent on each connection, on changed conditions, and later again if the server was full. For one thread.

    Args:
        config: The device's configuration; ``memory_bytes`` is what it offers.
        rules: The owner's rules, on which the reported conditions depend.
        engine: Engine that runs the graphs.
        session: Session that publishes the hello.
        key: The device's public key.
        samples: Number of local samples.
    """

    def __init__(
        self,
        config: AgentConfig,
        rules: OwnerRules,
        engine: Engine,
        session: SignedSession,
        *,
        key: bytes,
        samples: int,
    ) -> None:
        sensor = ConditionsSensor(rules)
        self._conditions = ConditionsMonitor(sensor, config.limits.conditions_s, session.session)
        self._reports_conditions = config.policy.tell
        self._session = session
        self._topic = Topics(config.federation).device(config.device).hello
        self._again_at: float | None = None
        token = config.token
        self._hello = Hello(
            agent=agent_version(),
            memory_bytes=config.memory_bytes,
            cores=os.cpu_count() or 1,
            samples=samples,
            engines={engine.name: engine.version},
            tier=config.tier,
            token=token.name if token else "",
            proof=prove(token.secret, self._topic, key) if token else b"",
        )

    def begin(self) -> None:
        """Read the conditions for the first time. Call it before the device connects."""
        if self._reports_conditions:
            self._conditions.begin()

    def send(self, *, again: bool = False) -> None:
        """Publish the hello. ``again`` is True if only the conditions changed since the last one."""
        known = self._conditions.take()
        self._again_at = None
        conditions = known if known != UNKNOWN_CONDITIONS else UNSET
        hello = msgspec.structs.replace(self._hello, conditions=conditions, again=again or UNSET)
        self._session.publish(self._topic, hello, retain=True)

    def handle_answer(self, ack: Ack) -> None:
        """Handle the server's answer. If the server is full, schedule the next hello at the time that it names."""
        if ack.reason == COME_LATER and isinstance(ack.later_s, float):
            self._again_at = time.monotonic() + max(SOONEST_S, min(ack.later_s, LATEST_S))

    def step(self, *, connected: bool) -> None:
        """Send the hello if it is due and the broker is connected. Call it periodically."""
        changed = self._reports_conditions and self._conditions.step()
        if not connected:
            return
        if self._again_at is not None:
            if time.monotonic() >= self._again_at:
                self.send()
        elif changed:
            self.send(again=True)


class RoundSubscription:
    """Subscription to announcements, paused after several rounds without a task until a task arrives.

    The broker sends each announcement to all subscribers. If a server selects a hundred of ten thousand devices, the
    others would cost the broker more than the round does.
    """

    def __init__(self, session: Session, topic: str) -> None:
        self._session = session
        self._topic = topic
        self._rounds: set[tuple[str, int]] = set()
        self.is_paused = False

    def resume(self) -> None:
        """Subscribe after the start, on a new connection or for a task. The broker then sends the retained announcement."""
        self._rounds.clear()
        if self.is_paused:
            self.is_paused = False
            self._session.subscribe([self._topic])

    def is_due_to_pause(self, announced: Round) -> bool:
        """Count an announced round without a task; return True after several of them."""
        if announced.state == "open":
            self._rounds.add((announced.run, announced.round))
        return announced.state != "done" and len(self._rounds) > _ROUNDS_WITHOUT_TASK

    def pause(self) -> None:
        """Unsubscribe until :meth:`resume`."""
        self.is_paused = True
        self._session.unsubscribe([self._topic])


class NoticeLimiter:
    """Rate limiter of reports: each notice once in ``period_s`` seconds, because an attacker may cause it a million
    times.

    ``suppressed`` counts the notices that were not reported. For one thread.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._due_at: OrderedDict[Hashable, float] = OrderedDict()
        self.suppressed = 0

    def is_due(self, notice: Hashable) -> bool:
        """Return True if ``notice`` may be reported now; it is then suppressed for ``period_s`` seconds."""
        now = time.monotonic()
        if now < self._due_at.get(notice, now):
            self.suppressed += 1
            return False
        self._due_at[notice] = now + self._period_s
        self._due_at.move_to_end(notice)
        if len(self._due_at) > _MOST_NOTICES:
            self._due_at.popitem(last=False)
        return True
