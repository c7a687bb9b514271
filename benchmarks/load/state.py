"""State that all generated devices share: broker, federation, announcements, manifests, and updates to send."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

from benchmarks.load import packets
from benchmarks.load.connection import BrokerTarget, Loop
from benchmarks.load.settings import LoadCounts, LoadSettings
from benchmarks.load.updates import UpdateTemplate, values_of
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
"""Receives blobs by their digests."""

_ANNOUNCEMENTS = 16
"""Remembered announcements: devices receive the same one at different times."""
_LAST_ANSWERS_S, _LOOK_S = 5.0, 0.02
_MOST_WARNINGS = 20
"""Different warnings that are printed: ten thousand devices would print as many lines."""


class FleetState:
    """State that all devices share.

    Args:
        load: settings of the load.
        target: address of the broker.
        loop: event loop of all connections.
        client_ids: style of the client ids.
        say: receives warnings and progress as text.
    """

    def __init__(
        self, load: LoadSettings, target: BrokerTarget, loop: Loop, client_ids: ClientIds, say: Say
    ) -> None:
        self.load = load
        self.target = target
        self.loop = loop
        self.counts = LoadCounts()
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
        self._ends_at = 0.0
        self._client_ids = client_ids
        self._secret = secrets.token_bytes()
        self._say = say

        self._announced: dict[bytes, Round] = {}
        self._opened: set[tuple[str, int]] = set()
        self._manifests: dict[str, Manifest] = {}
        self._values: dict[str, bytes] = {}
        self._templates: dict[str, UpdateTemplate] = {}
        self._waiting: dict[str, list[Ready]] = {}
        self._warnings: set[str] = set()

    def connect_packet(self, device: str, will: Will) -> bytes:
        """Return the CONNECT packet of a device."""
        return packets.connect(
            client_id(self._secret, "device", self.load.federation, device, style=self._client_ids),
            keepalive_s=self.load.limits.keepalive_s,
            will=will,
            username=self.target.username,
            password=self.target.password,
        )

    def fail(self, error: EdgeflError) -> None:
        """Stop the load with an error."""
        self.error = self.error or error
        self.loop.stop()

    def warn(self, text: str) -> None:
        """Print a warning, each once."""
        if text not in self._warnings and len(self._warnings) < _MOST_WARNINGS:
            self._warnings.add(text)
            self._say(text)

    def announcement(self, payload: bytes) -> Round:
        """Decode an announcement: one object for all devices that receive the same bytes."""
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
            self.counts.rounds += 1
            self._say(f"round {announced.round} is open")
        elif announced.state == "done" and any(run == announced.run for run, _ in self._opened):
            self._finish()
        return announced

    def _finish(self) -> None:
        """Stop the load soon: other devices may not have read the answers to their last updates yet."""
        if self.load.until_done and not self._ends_at:
            self._ends_at = time.monotonic() + _LAST_ANSWERS_S
            self._stop_when_answered()

    def _stop_when_answered(self) -> None:
        if self.counts.unanswered and time.monotonic() < self._ends_at:
            self.loop.later(_LOOK_S, self._stop_when_answered)
        else:
            self.loop.stop()

    @property
    def manifests(self) -> list[Manifest]:
        """Manifests of the tiers that had tasks."""
        return list(self._manifests.values())

    def bundle(
        self, task: Task, announced: Round, fetch: Callable[[Sequence[BlobRef], Got], None], ready: Ready
    ) -> None:
        """Call ``ready`` once the manifest of the task's tier is known; the first device that needs it fetches it."""
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

    def template(self, task: Task, announced: Round) -> UpdateTemplate:
        """Return the template of updates of a task's tier in a round."""
        made = self._templates.get(task.tier)
        if made is None or (made.run, made.round) != (task.run, task.round):
            sha256 = announced.offer(self.load.format).bundles[task.tier].sha256
            manifest, values = self._manifests[sha256], self._values[sha256]
            made = UpdateTemplate.of(manifest, values, announced, task, self.load.limits.chunk_bytes)
            self._templates[task.tier] = made
        return made

    def wanted(self, task: Task, announced: Round) -> list[BlobRef]:
        """Return the blobs that a device fetches for a task: graphs, and the weights of its tier's units."""
        manifest = self._manifests[announced.offer(self.load.format).bundles[task.tier].sha256]
        units = {*manifest.suffix, *(unit for chunk in manifest.prefix for unit in chunk.units)}
        own = announced.units.get(f"{task.tier}/submodel")
        weights = own or [ref for name, refs in announced.units.items() if name in units for ref in refs]
        return [*(graph.blob for graph in manifest.of_round), *weights]


def _not_offered(task: Task, announced: Round, format: str) -> ConfigError:
    offered = ", ".join(announced.formats_of(task.tier)) or "nothing"
    return ConfigError(
        f"tier {task.tier!r} offers bundles in {offered}, and these devices expect {format}; set `format` to an offered one",
        tier=task.tier,
        format=format,
    )
