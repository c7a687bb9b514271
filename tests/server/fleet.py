"""A tiny plan and scripted devices: real broker sessions that answer tasks with made-up weights, and do as told."""

from __future__ import annotations

import hashlib
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef, decompress, describe, split, verify_blob
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import DataSpec, Graph, Manifest
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address, client_id
from edgefl.wire.mqtt.envelope import Seal, peek, unsigned
from edgefl.wire.mqtt.events import Connected, IncomingMessage, Will
from edgefl.wire.mqtt.messages import (
    Ack,
    Hello,
    Message,
    Progress,
    ResourceUsage,
    Round,
    Status,
    Task,
    Update,
    UpdateChunk,
    encode,
)
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import NO_SHARD, Topics
from edgefl.wire.regions import Placement
from edgefl.wire.tensors import Arrays
from edgefl_server.coordinator.roster import TierRule
from edgefl_server.coordinator.states import Rules
from edgefl_server.events import Event
from edgefl_server.run_spec import Place, RunSpec, TierSpec
from edgefl_server.service import Service
from tests.support.listeners import CallingListener
from tests.wire.mqtt.events import cut

PATIENCE_S = 50.0
"""Below the waits after which a server helps itself: what it should have done before is not to pass for late."""
WEIGHTS: Arrays = {
    "stem.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "body.weight": np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30),
    "body.bias": np.zeros(20, np.float32),
    "head.weight": np.full((4, 5), 0.5, np.float32),
}
UNITS = ("stem", "body", "head")
HELD = {"strong": UNITS, "weak": ("head",)}


def bundle(tier: str) -> BundleArchive:
    """A manifest with one graph that nobody runs."""
    blob = b"graph of " + tier.encode()
    graph = Graph(name="g", format="onnx", blob=describe(blob, 1024), inputs=(), outputs=())
    manifest = Manifest(
        model="tiny",
        program="sgd",
        tier=tier,
        parameters=1,
        data=DataSpec(shape=(1,), dtype="float32", classes=2),
        batch=1,
        prefix=(),
        suffix=HELD[tier],
        start="g",
        phases=(),
        finish="g",
        evaluate="g",
        hyper={"lr": 0.1},
        graphs=(graph,),
        codec="dense",
        codec_version=1,
        draws="walk",
    )
    return BundleArchive(manifest, {graph.blob.sha256: blob})


def names_of(tier: str) -> list[str]:
    return [name for name in WEIGHTS if name.partition(".")[0] in HELD[tier]]


def placed(tier: str) -> Place:
    placement = Placement(dict.fromkeys(names_of(tier)))
    return lambda _weights, _number: placement


def plan_for(federation: str, limits: Limits, **rules: Any) -> RunSpec:
    """Two rounds for one strong device unless ``rules`` say otherwise."""
    tiers = (TierRule("strong", ("strong-*",)), TierRule("weak", ("weak-*",)))
    chosen = Rules(**{"run": "", "seed": 7, "rounds": 2, "tiers": tiers, "deadline_s": PATIENCE_S, **rules})
    return RunSpec(
        federation=federation,
        digest="d" * 64,
        rules=chosen,
        tiers={tier: TierSpec(bundle(tier), placed(tier)) for tier in HELD},
        units=UNITS,
        initial=WEIGHTS,
        hyper={"lr": 0.1},
        evaluate=lambda weights: {"accuracy": 0.5, "loss": float(weights["head.weight"].mean())},
        limits=limits,
    )


def with_manifest(tier: TierSpec, **changes: Any) -> TierSpec:
    """Return the tier with changes to its bundle's manifest."""
    manifest = msgspec.structs.replace(tier.bundle.manifest, **changes)
    return replace(tier, bundle=replace(tier.bundle, manifest=manifest))


def needing_carry(tiers: Mapping[str, TierSpec]) -> dict[str, TierSpec]:
    """The tiers with manifests that say so."""
    return {name: with_manifest(tier, carry_needed=True) for name, tier in tiers.items()}


def trained(device: str, task: Task) -> Arrays:
    """What a scripted device sends: values that depend on the device and the round only."""
    seed = int.from_bytes(hashlib.sha256(f"{device}/{task.round}".encode()).digest()[:8], "big")
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=WEIGHTS[name].shape).astype(np.float32) for name in names_of(task.tier)}


PROFILE = ResourceUsage(
    step_ms=1, forward_ms=1, load_ms=1, idle_bytes=1, peak_bytes=2, down_bytes=3, down_wire_bytes=0
)


def update_for(device: str, task: Task, version: str, arrays: Mapping[str, Any], /, **changes: Any) -> Update:
    same = {name: getattr(task, name) for name in ("run", "round", "nonce", "tier")}
    same |= {"device": device, "model_version": version, "samples": 10, "metrics": {"loss": 1.5}}
    same |= {"profile": PROFILE, "codec": "dense", "codec_version": 1, "tensors": tensors.dump(arrays)}
    return Update(**{**same, **changes})


def progress(stage: str, **changes: Any) -> Progress:
    """Return what a device of the strong tier reports in round 1."""
    numbers: dict[str, Any] = dict.fromkeys(("step", "steps", "peak_bytes", "down_bytes", "up_bytes"), 0)
    return Progress(
        **{"round": 1, "tier": "strong", "stage": stage, "loss": 1.0, "step_ms": 1.0, **numbers, **changes}
    )


def chunks_of(data: bytes, nonce: str, size: int) -> list[UpdateChunk]:
    pieces = list(split(data, size))
    sha256 = hashlib.sha256(data).hexdigest()
    return [
        UpdateChunk(nonce=nonce, sha256=sha256, index=index, count=len(pieces), size=len(data), data=piece)
        for index, piece in enumerate(pieces)
    ]


def silent(_device: ScriptedDevice, _task: Task, _opened: Round) -> None:
    """Takes the task and does nothing by itself."""


class ScriptedDevice:
    """Says hello (retained) after each connection, and hands every task to ``answer``. What it says is bare, or as ``seal``
    makes it.

    ``acks``, ``tasks`` and ``rounds`` are queues of what it was sent.
    """

    def __init__(
        self,
        address: Address,
        federation: str,
        name: str,
        limits: Limits,
        answer: Callable[[ScriptedDevice, Task, Round], None] | None = None,
        *,
        seal: Seal = unsigned,
        **hello: Any,
    ) -> None:
        self.name = name
        self.seal = seal
        self.topics = Topics(federation)
        self.mine = self.topics.device(name)
        self.limits = limits
        self.acks: queue.Queue[Ack] = queue.Queue()
        self.tasks: queue.Queue[Task] = queue.Queue()
        self.rounds: queue.Queue[Round] = queue.Queue()
        self._hello = {"agent": "scripted", "memory_bytes": 1 << 30, "cores": 1, "samples": 10, "engines": {}}
        self._hello.update(hello)
        self._answer = answer or (lambda device, task, opened: device.report(task, opened))
        self._round: Round | None = None
        self._task: Task | None = None
        self._answered: set[str] = set()
        self._acked: set[str] = set()
        will = Will(self.mine.status, seal(self.mine.status, Status(online=False)))
        own = client_id(secrets.token_bytes(), "device", federation, name)
        self.session = Session(address, own, limits=limits, will=will)
        self.session.subscribe([self.topics.current_round, self.mine.tasks, self.mine.acks])
        self.session.start()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.session.inbox.put(IncomingMessage("stop", b""))
        self._thread.join(PATIENCE_S)
        self.session.stop(drain_s=0.2)

    def wait_open(self, round_number: int = 0) -> Round:
        """The next announcement of an open round (of that number, if one is given)."""
        while True:
            opened = self.rounds.get(timeout=PATIENCE_S)
            if opened.state == "open" and round_number in (0, opened.round):
                return opened

    def done(self) -> Round:
        """The announcement that all rounds are over."""
        while True:
            announced = self.rounds.get(timeout=PATIENCE_S)
            if announced.state == "done":
                return announced

    def vanish(self) -> None:
        """Cut the connection without goodbye, so that the broker speaks the will; stay away."""
        cut(self.session, for_good=True)

    def say(self, topic: str, message: Message, *, retain: bool = False) -> None:
        self.session.publish(topic, self.seal(topic, message), retain=retain)

    def greet(self) -> None:
        self.say(self.mine.status, Status(online=True), retain=True)
        self.say(self.mine.hello, Hello(**self._hello), retain=True)

    def report(self, task: Task, opened: Round, **changes: Any) -> None:
        """Send an honest update, or one with ``changes`` to its fields."""
        arrays = trained(self.name, task)
        self.send(encode(update_for(self.name, task, opened.model_version, arrays, **changes)), task)

    def send(self, data: bytes, task: Task, indices: list[int] | None = None) -> None:
        for chunk in chunks_of(data, task.nonce, self.limits.chunk_bytes):
            if indices is None or chunk.index in indices:
                shard = NO_SHARD if task.shard is msgspec.UNSET else task.shard
                self.say(self.mine.update(task.round, chunk.index, shard), chunk)

    def _serve(self) -> None:
        while True:
            event = self.session.inbox.get()
            if isinstance(event, Connected):
                self.greet()
            elif isinstance(event, IncomingMessage):
                if event.topic == "stop":
                    return
                self._receive(event)

    def _receive(self, event: IncomingMessage) -> None:
        if event.topic == self.topics.current_round and event.payload:
            self._round = peek(Round, event.payload)
            self.rounds.put(self._round)
        elif event.topic == self.mine.tasks:
            self._task = peek(Task, event.payload)
            self.tasks.put(self._task)
            if self._task.nonce not in self._acked:  # sent again: the server has not got our answer
                self._answered.discard(self._task.nonce)
        elif event.topic == self.mine.acks:
            ack = peek(Ack, event.payload)
            self._acked.add(ack.nonce)
            self.acks.put(ack)
        self._maybe_answer()

    def _maybe_answer(self) -> None:
        task, opened = self._task, self._round
        if task is None or opened is None or task.nonce in self._answered or task.run != opened.run:
            return
        if (own := opened.at(task.round)) is not None:
            self._answered.add(task.nonce)
            self._answer(self, task, own)


MakeDevice = Callable[..., ScriptedDevice]
"""Fixture that starts a scripted device."""
MakePlan = Callable[..., RunSpec]
"""Fixture that makes a plan."""


@dataclass
class RunningServer:
    """A service in a thread of its own; its events by type, and whatever ended it."""

    service: Service
    events: queue.Queue[Event] = field(default_factory=queue.Queue)
    seen: list[Event] = field(default_factory=list)
    error: BaseException | None = None
    thread: threading.Thread | None = None

    @classmethod
    def start(
        cls,
        plan: RunSpec,
        address: Address,
        out: Path,
        hear: Callable[[Event], None] = lambda _: None,
        **options: Any,
    ) -> RunningServer:
        events: queue.Queue[Event] = queue.Queue()

        def emit(event: Event) -> None:
            events.put(event)
            hear(event)

        running = cls(Service(plan, address, out, listener=CallingListener(emit), **options), events)
        running.thread = threading.Thread(target=running._run, daemon=True)
        running.thread.start()
        return running

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as error:
            self.error = error

    def wait_for(self, kind: type, condition: Callable[[Any], bool] = lambda _: True) -> Any:
        """The next event of ``kind`` for which ``condition`` holds."""
        while True:
            if self.events.empty():  # else there is more to hear of a server that has ended
                assert self.error is None, self.error
            event = self.events.get(timeout=PATIENCE_S)
            self.seen.append(event)
            if isinstance(event, kind) and condition(event):
                return event

    def seen_of(self, kind: type) -> list[Any]:
        """Every event of ``kind`` so far."""
        while not self.events.empty():
            self.seen.append(self.events.get())
        return [event for event in self.seen if isinstance(event, kind)]

    def join(self) -> None:
        assert self.thread is not None
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the server should have ended"
        assert self.error is None, self.error

    def stop(self) -> None:
        self.service.stop()
        self.join()


Serve = Callable[..., RunningServer]
"""Fixture that starts a server."""


def fetch(session: Session, federation: str, ref: BlobRef) -> bytes:
    """A blob's bytes, as a device gets them: by subscribing to its chunks."""
    topics = Topics(federation)
    pieces: dict[int, bytes] = {}
    session.subscribe([topics.blob_chunk(ref.sha256, index) for index in range(ref.count)], standing=True)
    while len(pieces) < ref.count:
        event = session.inbox.get(timeout=PATIENCE_S)
        if isinstance(event, IncomingMessage):
            _, index = topics.parse_blob(event.topic)
            assert ref.accepts(index, event.payload)
            pieces[index] = event.payload
    travelled = verify_blob(ref, b"".join(pieces[index] for index in range(ref.count)))
    return decompress(ref, travelled, 1 << 30)


def retained(session: Session, federation: str) -> set[str]:
    """Topics of the federation on which the broker keeps a message: all that come before an echo of our own."""
    topics, echo = Topics(federation), f"echo/{federation}"
    found: set[str] = set()
    session.subscribe([f"{topics.root}/#"], standing=True)
    session.subscribe([echo], standing=True)
    session.publish(echo, b"all", retain=True)
    while True:
        event = session.inbox.get(timeout=PATIENCE_S)
        if isinstance(event, IncomingMessage):
            if event.topic == echo:
                session.publish(echo, b"", retain=True)
                return found
            found.add(event.topic)


def expected_mean(old: Arrays, tasks: list[tuple[str, str, int]]) -> Arrays:
    """The model after a round in which (device, tier, round) reported honestly."""
    new = dict(old)
    for name, before in old.items():
        values = [
            trained(device, Task(run="", round=number, tier=tier, seed=0, nonce=""))[name].astype(np.float64)
            for device, tier, number in tasks
            if name in names_of(tier)
        ]
        new[name] = (sum(values) / len(values)).astype(np.float32) if values else before
    return new


def assert_mean(out: Path, tasks: list[tuple[str, str, int]]) -> None:
    """Assert that a run's model is the mean of the updates of these (device, tier, round), from the first weights."""
    model = tensors.load((out / "model.safetensors").read_bytes())
    for name, value in expected_mean(WEIGHTS, tasks).items():
        np.testing.assert_allclose(model[name], value, atol=1e-6)
