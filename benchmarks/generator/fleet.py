"""All generated devices together: their way in, and when they are done. ::

fleet = Fleet(Load(federation="demo", devices=1000), Address("localhost"))
summary = fleet.run()
"""

from __future__ import annotations

import random
import socket
import time
from collections import deque
from contextlib import suppress

from benchmarks.generator.common import Common, Say
from benchmarks.generator.connection import Loop, Target
from benchmarks.generator.device import Device
from benchmarks.generator.settings import Load, Summary, Tally
from edgefl.errors import BrokerError
from edgefl.lab.broker import check_room
from edgefl.wire.mqtt.address import Address

_LAST_ANSWERS_S, _LOOK_S = 5.0, 0.02


class Fleet:
    """Devices of one load. ``say`` gets lines for people. ``hold`` devices connect only after :meth:`release`.

    ConfigError for more connections than this process may have, BrokerError for an address that cannot be used.
    """

    def __init__(
        self,
        load: Load,
        broker: Address,
        *,
        loop: Loop | None = None,
        say: Say = lambda _: None,
        hold: int = 0,
    ) -> None:
        target = _target(broker)
        check_room(load.devices)
        self.load = load
        self.loop = loop or Loop()
        self.common = Common(load, target, self.loop, broker.client_ids, say, self._over)
        self._broker = broker
        self._devices = [Device(self.common, self, name) for name in load.names]
        self._held = self._devices[load.devices - hold :]
        self._next = deque(self._devices[: load.devices - hold])
        self._dialling: set[Device] = set()
        self._wanted = len(self._next)
        self._random = random.Random(load.seed)
        self._began = 0.0
        self._ends_at = 0.0
        self._ever_up = False

    @property
    def tally(self) -> Tally:
        return self.common.tally

    # -- life ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Have the devices connect, a few at a time; :meth:`run` does it too."""
        self._began = time.monotonic()
        self._dial()

    def run(self, seconds: float = 0.0) -> Summary:
        """Until the training is done, for so many seconds, or until somebody presses Ctrl-C. BrokerError if nobody can
        connect."""
        self.begin()
        if seconds:
            self.loop.later(seconds, self.loop.stop)
        try:
            with suppress(KeyboardInterrupt):
                self.loop.run()
            if self.common.error is not None:
                raise self.common.error
            summary = self.summary()
            for device in self._devices:
                device.leave()
        finally:
            self.close()
        return summary

    def _over(self) -> None:
        """The training is done, as one device read it: others may not have read the answers to their last updates yet."""
        if self.load.until_done and not self._ends_at:
            self._ends_at = time.monotonic() + _LAST_ANSWERS_S
            self._end()

    def _end(self) -> None:
        if self.tally.unanswered and time.monotonic() < self._ends_at:
            self.loop.later(_LOOK_S, self._end)
        else:
            self.loop.stop()

    def release(self) -> None:
        """Those that were held back may come."""
        self._next.extend(self._held)
        self._wanted += len(self._held)
        self._held = []
        self._dial()

    def watch(self, tell: Say) -> None:
        """Have ``tell`` hear every second where the load stands."""
        tally = self.tally
        tell(
            f"{tally.up:,} of {self.load.devices:,} connected, {tally.tasks:,} tasks, {len(tally.ack_s):,} answered, "
            f"{tally.unanswered:,} wait"
        )
        self.loop.later(1.0, lambda: self.watch(tell))

    def close(self) -> None:
        """End all connections without a word."""
        for device in self._devices:
            device.close()

    def summary(self) -> Summary:
        return self.tally.summary(self.load.devices, time.monotonic() - self._began)

    # -- the way in ------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        while self._next and len(self._dialling) < self.load.connecting:
            device = self._next.popleft()
            self._dialling.add(device)
            device.connect()

    def greeted(self, device: Device) -> None:
        """The broker has its hello."""
        self._ever_up = True
        self.tally.up += 1
        self._dialling.discard(device)
        if self.tally.up == self._wanted and not self._next:
            self.tally.connect_s = self.tally.connect_s or time.monotonic() - self._began
        self._dial()

    def lost(self, device: Device, reason: str, attempt: int) -> None:
        """A connection ended. The device tries again as the protocol says."""
        self.tally.drops += 1
        self._dialling.discard(device)
        if not self._ever_up:
            self.common.fail(
                BrokerError(
                    f"no device can connect to the broker at {self._broker}: {reason}; is it running, and are these its "
                    "address and its users?",
                    address=str(self._broker),
                )
            )
            return
        self.common.odd(f"a connection ended: {reason}")
        limits = self.load.limits
        pause = min(limits.reconnect_max_s, limits.reconnect_min_s * 2.0 ** min(attempt, 16))
        self.loop.later(pause * (0.5 + 0.5 * self._random.random()), device.connect)
        self._dial()


def _target(broker: Address) -> Target:
    """BrokerError for what cannot be found, and for ways that the generator does not speak."""
    if broker.secure or broker.path:
        raise BrokerError(
            f"the generator speaks MQTT over plain TCP only, and {broker} is reached by TLS or WebSocket: give the broker a "
            "plain listener for the measurement (`listener 1884 127.0.0.1`)",
            address=str(broker),
        )
    try:
        found = socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BrokerError(
            f"the broker's address {broker} cannot be found: {error}", address=str(broker)
        ) from error
    preferred = next((each for each in found if each[0] == socket.AF_INET), found[0])
    return Target(int(preferred[0]), preferred[4], broker.username, broker.password)
