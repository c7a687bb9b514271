"""All generated devices together: their way in, what they know alike, and when they are done. ::

fleet = Fleet(Load(federation="demo", devices=1000), Address("localhost"))
summary = fleet.run()
"""

from __future__ import annotations

import random
import socket
import time
from collections import deque
from collections.abc import Callable

from edgefl.lab.generator import packets
from edgefl.lab.generator.connection import Target
from edgefl.lab.generator.descriptors import check_room
from edgefl.lab.generator.device import Device, greeting
from edgefl.lab.generator.loop import Loop
from edgefl.lab.generator.settings import Load
from edgefl.lab.generator.tally import Summary, Tally
from edgefl.lab.generator.updates import Template, values_of
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import Manifest, decode_manifest
from edgefl.wire.errors import BrokerError, ConfigError
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.events import Will
from edgefl.wire.mqtt.messages import Round, Task
from edgefl.wire.mqtt.topics import Topics

Say = Callable[[str], None]

_ANNOUNCEMENTS = 16
"""That are remembered: devices get the same one at different times."""


class Fleet:
    """``say`` is told what a person should know. ``connected`` is called each time that the broker has the hello of all
    devices that were to come; ``hold``: so many of them come only after :meth:`release`."""

    def __init__(
        self,
        load: Load,
        broker: Address,
        *,
        loop: Loop | None = None,
        say: Say = lambda _: None,
        connected: Callable[[], None] = lambda: None,
        hold: int = 0,
    ) -> None:
        self.load = load
        self.loop = loop or Loop()
        self.tally = Tally()
        self.topics = Topics(load.federation)
        self.blobs = f"{self.topics.root}/blobs/"
        self.hello = greeting(load.tier, load.memory_bytes, load.samples)
        self.target = _target(broker)
        self.client_ids = broker.client_ids
        check_room(load.devices)
        self._broker = broker
        self._say = say
        self._connected = connected
        self._devices = [Device(self, name) for name in load.names]
        self._held = self._devices[load.devices - hold :]
        self._next = deque(self._devices[: load.devices - hold])
        self._dialling: set[Device] = set()
        self._wanted = len(self._next)
        self._random = random.Random(load.seed)
        self._announced: dict[bytes, Round] = {}
        self._opened: set[tuple[str, int]] = set()
        self._manifests: dict[str, Manifest] = {}
        self._values: dict[str, bytes] = {}
        self._templates: dict[str, Template] = {}
        self._waiting: dict[str, list[tuple[Device, Task, Round]]] = {}
        self._odd: set[str] = set()
        self._began = 0.0
        self._error: BrokerError | ConfigError | None = None
        self._ever_up = False

    # -- life ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Have the devices connect, a few at a time; :meth:`run` does it too."""
        self._began = time.monotonic()
        self._dial()

    def run(self, seconds: float = 0.0) -> Summary:
        """Until the training is done, or for so many seconds. BrokerError if nobody can connect."""
        self.begin()
        if seconds:
            self.loop.later(seconds, self.loop.stop)
        try:
            self.loop.run()
            if self._error is not None:
                raise self._error
            for device in self._devices:
                device.leave()
        finally:
            self.close()
        return self.summary()

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

    def hello_packet(self, client_id: str, will: Will) -> bytes:
        """The CONNECT of a device."""
        return packets.connect(
            client_id,
            keepalive_s=self.load.limits.keepalive_s,
            will=will,
            username=self.target.username,
            password=self.target.password,
        )

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
            self._connected()
        self._dial()

    def lost(self, device: Device, reason: str, attempt: int) -> None:
        """A connection ended. The device tries again as the protocol says."""
        self.tally.drops += 1
        self._dialling.discard(device)
        if not self._ever_up:
            self.fail(
                BrokerError(
                    f"no device can connect to the broker at {self._broker}: {reason}; is it running, and are these its "
                    "address and its users?",
                    address=str(self._broker),
                )
            )
            return
        self.odd(f"a connection ended: {reason}")
        limits = self.load.limits
        pause = min(limits.reconnect_max_s, limits.reconnect_min_s * 2.0 ** min(attempt, 16))
        self.loop.later(pause * (0.5 + 0.5 * self._random.random()), device.connect)
        self._dial()

    def fail(self, error: BrokerError | ConfigError) -> None:
        """Nothing can go on."""
        self._error = self._error or error
        self.loop.stop()

    def odd(self, text: str) -> None:
        """Something that should not be; each once."""
        if text not in self._odd and len(self._odd) < 20:
            self._odd.add(text)
            self._say(text)

    # -- what all devices know alike -------------------------------------------------------------------------

    def announcement(self, payload: bytes) -> Round:
        """What an announcement says: one object for all devices that get the same bytes."""
        known = self._announced.get(payload)
        if known is not None:
            return known
        announced = peek(Round, payload)
        if len(self._announced) >= _ANNOUNCEMENTS:
            self._announced.clear()
        self._announced[payload] = announced
        name = announced.run, announced.round
        if announced.state == "open" and name not in self._opened:
            self._opened.add(name)
            self.tally.rounds += 1
            self._say(f"round {announced.round} is open")
        elif announced.state == "done" and self.load.until_done and self._saw(announced.run):
            self.loop.stop()
        return announced

    def _saw(self, run: str) -> bool:
        """Whether a round of it was open: an older run's end, which is retained, sends nobody away."""
        return any(run == opened for opened, _ in self._opened)

    def bundle(self, device: Device, task: Task, announced: Round) -> None:
        """Have ``device`` go on once the manifest of its tier is here: the first one that needs it fetches it."""
        ref = announced.offer(self.load.format).bundles.get(task.tier)
        if ref is None:
            self.fail(_not_offered(task, announced, self.load.format))
        elif ref.sha256 in self._manifests:
            device.take_up(task, announced)
        elif ref.sha256 in self._waiting:
            self._waiting[ref.sha256].append((device, task, announced))
        else:
            self._waiting[ref.sha256] = [(device, task, announced)]
            device.fetch([ref], self._have_manifest, keep=True)

    def _have_manifest(self, found: dict[str, bytes]) -> None:
        for sha256, data in found.items():
            manifest = decode_manifest(data)
            try:
                self._values[sha256] = values_of(manifest, seed=0)
            except ConfigError as error:
                self.fail(error)
                return
            self._manifests[sha256] = manifest
            for device, task, announced in self._waiting.pop(sha256):
                device.take_up(task, announced)

    def template(self, task: Task, announced: Round) -> Template:
        """The updates of a task's tier in a round."""
        made = self._templates.get(task.tier)
        if made is None or made.round != task.round:
            sha256 = announced.offer(self.load.format).bundles[task.tier].sha256
            manifest, values = self._manifests[sha256], self._values[sha256]
            made = Template.of(manifest, values, announced, task, self.load.limits.chunk_bytes)
            self._templates[task.tier] = made
        return made

    @property
    def manifests(self) -> list[Manifest]:
        """Those of the tiers that devices had tasks of."""
        return list(self._manifests.values())

    def wanted(self, task: Task, announced: Round) -> list[BlobRef]:
        """What a device fetches for the task: graphs, and the weights of its tier's units."""
        manifest = self._manifests[announced.offer(self.load.format).bundles[task.tier].sha256]
        units = {*manifest.suffix, *(unit for chunk in manifest.prefix for unit in chunk.units)}
        own = announced.units.get(f"{task.tier}/submodel")
        weights = own or [ref for name, refs in announced.units.items() if name in units for ref in refs]
        return [*(graph.blob for graph in manifest.of_round), *weights]


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


def _not_offered(task: Task, announced: Round, format: str) -> ConfigError:
    offered = ", ".join(announced.formats_of(task.tier)) or "nothing"
    return ConfigError(
        f"tier {task.tier!r} is offered in {offered}, not in {format}: say --format with one of these",
        tier=task.tier,
    )
