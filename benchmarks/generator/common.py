"""What all generated devices know alike: the broker, the federation, announcements, manifests, and updates to send."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from benchmarks.generator import packets
from benchmarks.generator.connection import Loop, Target
from benchmarks.generator.settings import Load, Tally
from benchmarks.generator.updates import Template, values_of
from edgefl.errors import ConfigError, EdgeflError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import Manifest, decode_manifest
from edgefl.wire.mqtt.address import ClientIds, client_id
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.events import Will
from edgefl.wire.mqtt.messages import Hello, Round, Task
from edgefl.wire.mqtt.topics import Topics

Say = Callable[[str], None]
Ready = Callable[[], None]
Got = Callable[[dict[str, bytes]], None]
"""Takes blobs by their digests."""

_ANNOUNCEMENTS = 16
"""That are remembered: devices get the same one at different times."""
_MOST_ODD = 20
"""Kinds of trouble that are told: with ten thousand devices there would be as many lines."""


class Common:
    """One for all devices. ``failed`` is told what ends the load; ``over``: that the training is done."""

    def __init__(
        self, load: Load, target: Target, loop: Loop, client_ids: ClientIds, say: Say, over: Ready
    ) -> None:
        self.load = load
        self.target = target
        self.loop = loop
        self.tally = Tally()
        self.topics = Topics(load.federation)
        self.blobs = f"{self.topics.root}/blobs/"
        self.hello = Hello(
            agent="python -m benchmarks load",
            memory_bytes=load.memory_bytes,
            cores=1,
            samples=load.samples,
            engines={},
            tier=load.tier,
        )
        self.error: EdgeflError | None = None
        self._client_ids = client_ids
        self._secret = secrets.token_bytes()
        self._say = say
        self._over = over
        self._announced: dict[bytes, Round] = {}
        self._opened: set[tuple[str, int]] = set()
        self._manifests: dict[str, Manifest] = {}
        self._values: dict[str, bytes] = {}
        self._templates: dict[str, Template] = {}
        self._waiting: dict[str, list[Ready]] = {}
        self._odd: set[str] = set()

    def connect_packet(self, device: str, will: Will) -> bytes:
        """The CONNECT of a device."""
        return packets.connect(
            client_id(self._secret, "device", self.load.federation, device, style=self._client_ids),
            keepalive_s=self.load.limits.keepalive_s,
            will=will,
            username=self.target.username,
            password=self.target.password,
        )

    def fail(self, error: EdgeflError) -> None:
        """Nothing can go on."""
        self.error = self.error or error
        self.loop.stop()

    def odd(self, text: str) -> None:
        """Something that should not be; each once."""
        if text not in self._odd and len(self._odd) < _MOST_ODD:
            self._odd.add(text)
            self._say(text)

    # -- rounds ----------------------------------------------------------------------------------------------

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
        elif announced.state == "done" and any(run == announced.run for run, _ in self._opened):
            self._over()
        return announced

    # -- bundles and updates ---------------------------------------------------------------------------------

    @property
    def manifests(self) -> list[Manifest]:
        """Those of the tiers that devices had tasks of."""
        return list(self._manifests.values())

    def bundle(
        self, task: Task, announced: Round, fetch: Callable[[Sequence[BlobRef], Got], None], ready: Ready
    ) -> None:
        """Call ``ready`` once the manifest of the task's tier is here: the first device that needs it is to ``fetch`` it."""
        ref = announced.offer(self.load.format).bundles.get(task.tier)
        if ref is None:
            self.fail(_not_offered(task, announced, self.load.format))
        elif ref.sha256 in self._manifests:
            ready()
        elif ref.sha256 in self._waiting:
            self._waiting[ref.sha256].append(ready)
        else:
            self._waiting[ref.sha256] = [ready]
            fetch([ref], self._have_manifest)

    def _have_manifest(self, found: dict[str, bytes]) -> None:
        for sha256, data in found.items():
            try:
                manifest = decode_manifest(data)
                self._values[sha256] = values_of(manifest, seed=0)
            except EdgeflError as error:
                self.fail(error)
                return
            self._manifests[sha256] = manifest
            for ready in self._waiting.pop(sha256):
                ready()

    def template(self, task: Task, announced: Round) -> Template:
        """The updates of a task's tier in a round."""
        made = self._templates.get(task.tier)
        if made is None or (made.run, made.round) != (task.run, task.round):
            sha256 = announced.offer(self.load.format).bundles[task.tier].sha256
            manifest, values = self._manifests[sha256], self._values[sha256]
            made = Template.of(manifest, values, announced, task, self.load.limits.chunk_bytes)
            self._templates[task.tier] = made
        return made

    def wanted(self, task: Task, announced: Round) -> list[BlobRef]:
        """What a device fetches for the task: graphs, and the weights of its tier's units."""
        manifest = self._manifests[announced.offer(self.load.format).bundles[task.tier].sha256]
        units = {*manifest.suffix, *(unit for chunk in manifest.prefix for unit in chunk.units)}
        own = announced.units.get(f"{task.tier}/submodel")
        weights = own or [ref for name, refs in announced.units.items() if name in units for ref in refs]
        return [*(graph.blob for graph in manifest.of_round), *weights]


def _not_offered(task: Task, announced: Round, format: str) -> ConfigError:
    offered = ", ".join(announced.formats_of(task.tier)) or "nothing"
    return ConfigError(
        f"the bundles of tier {task.tier!r} are in {offered}, and these devices take {format}: set `format` to what is "
        "offered",
        tier=task.tier,
        format=format,
    )
