"""An agent in a thread and a server that follows a script, on a real broker."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgefl.wire import tensors
from edgefl.wire.keys import parse_keys
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.messages import (
    Ack,
    Decline,
    Hello,
    ProfileAnswer,
    Progress,
    Round,
    Status,
    Task,
    Update,
    UpdateChunk,
)
from edgefl.wire.mqtt.reasons import TEXTS
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl.wire.tensors import Arrays
from edgefl_device.agent import DeviceAgent
from edgefl_device.config import AgentConfig, AgentEvent, DeviceLog, Policy, Source
from edgefl_device.engine import open_engine
from edgefl_device.engine.base import Engine
from edgefl_device.policy import OwnerPolicy
from edgefl_device.profile.request import BundleProfiler
from tests.device_runtime import tiny
from tests.device_runtime.agent.link import publish_blob
from tests.device_runtime.tiny import World
from tests.wire.mqtt.events import PATIENCE_S, wait_for, wait_message, wait_up

DEVICE = "phone"


def write_data(folder: Path, rows: int = tiny.ROWS) -> Path:
    data = tiny.local(rows)
    path = folder / "data.npz"
    np.savez(path, x=data.x, y=data.y)
    return path


class RunningAgent:
    """An agent and the events it reports. ``stop`` ends it as a clean shutdown would."""

    def __init__(
        self,
        federation: str,
        broker: Address,
        folder: Path,
        limits: Limits,
        *,
        data: Path | Source | None = None,
        bad_rows: Policy = "refuse",
        until_done: bool = False,
        server_key: str = "",
        measure: BundleProfiler | None = None,
        engine: str | Engine = "onnx",
        tune: bool = False,
        policy: OwnerPolicy | None = None,
    ) -> None:
        config = AgentConfig(
            federation=federation,
            device=DEVICE,
            broker=broker,
            data=data or write_data(folder),
            bad_rows=bad_rows,
            folder=folder / "state",
            tier="weak",
            memory_bytes=1 << 30,
            until_done=until_done,
            server_keys=parse_keys(server_key),
            tune=tune,
            limits=limits,
            policy=policy or OwnerPolicy(),
        )
        self.events: queue.SimpleQueue[AgentEvent] = queue.SimpleQueue()
        self.error: BaseException | None = None
        opened = open_engine(engine) if isinstance(engine, str) else engine
        self.report: Callable[[AgentEvent], None] = self.events.put
        self.agent = DeviceAgent(config, opened, DeviceLog(self._report), measure)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _report(self, event: AgentEvent) -> None:
        self.report(event)

    def _run(self) -> None:
        try:
            self.agent.run()
        except BaseException as error:
            self.error = error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def event(self, *names: str) -> AgentEvent:
        """The next event of one of these names."""
        deadline = time.monotonic() + PATIENCE_S
        seen = []
        while (left := deadline - time.monotonic()) > 0:
            try:
                found = self.events.get(timeout=left)
            except queue.Empty:
                break
            if found.event in names:
                return found
            seen.append(f"{found.event}: {found.text}")
        raise AssertionError(f"no event {names}; there were {seen}")

    def ended(self) -> BaseException | None:
        """Wait for the end; what it raised."""
        self._thread.join(PATIENCE_S)
        assert not self.alive
        return self.error

    def stop(self) -> None:
        self.agent.stop()
        self.ended()


class ScriptedServer:
    """Publishes rounds and reads answers, one by one, as the test says."""

    def __init__(self, session: Session, federation: str) -> None:
        self.session = session
        self._greeted = False
        self.digests: dict[str, str] = {}
        self.topics = Topics(federation)
        self.mine = self.topics.device(DEVICE)
        session.subscribe(self.topics.server_filters)
        wait_up(session)
        session.publish(self.topics.device("mark").hello, b"mark")
        wait_message(session, self.topics.device("mark").hello)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        assert self.session.publish(topic, payload, retain=retain).wait(PATIENCE_S)

    def publish_blobs(self, world: World) -> None:
        for data in world.blobs.values():
            publish_blob(self.session, self.topics, data, tiny.CHUNK)

    def announce(self, announcement: Round) -> None:
        self.publish(self.topics.current_round, messages.encode(announcement), retain=True)

    def assign(self, task: Task) -> None:
        self.publish(self.mine.tasks, messages.encode(task))

    def open(self, world: World, *, number: int = 1, run: str = "run", base: int | None = None) -> None:
        """Publish a round and its task, once the device has said hello: then it is subscribed."""
        if not self._greeted:
            self.hello()
        self.publish_blobs(world)
        self.announce(world.announcement(number=number, run=run, base=base))
        self.assign(world.task(number=number, run=run))

    def ack(self, update: Update, status: str = "accepted", reason: str = "") -> None:
        ack = Ack(
            round=update.round,
            nonce=update.nonce,
            status=status,  # type: ignore[arg-type]
            reason=reason,
            sha256=self.digests[update.nonce],
        )
        self.publish(self.mine.acks, messages.encode(ack))

    def status(self, accept: Callable[[Status], bool] = lambda _: True) -> Status:
        event = wait_for(
            self.session,
            IncomingMessage,
            lambda event: event.topic == self.mine.status and accept(peek(Status, event.payload)),
        )
        return peek(Status, event.payload)

    def hello(self) -> Hello:
        self._greeted = True
        return peek(Hello, wait_message(self.session, self.mine.hello))

    def decline(self) -> Decline:
        """Return the next decline; its details stay on the device."""
        decline = peek(Decline, wait_message(self.session, self.mine.declines))
        assert decline.text == "" and decline.reason in TEXTS
        return decline

    def profile_answer(self) -> ProfileAnswer:
        """Return the next answer to a request for a profile; details of a decline stay on the device."""
        answer = peek(ProfileAnswer, wait_message(self.session, self.mine.profiles))
        assert answer.text == "" and answer.reason in {"", *TEXTS}
        return answer

    def progress(self, least: int = 0) -> Progress:
        """The next word on training, from step ``least`` on; not every step is told."""

        def training(event: IncomingMessage) -> bool:
            if event.topic != self.mine.progress:
                return False
            progress = peek(Progress, event.payload)
            return progress.stage == "train" and progress.step >= least

        return peek(Progress, wait_for(self.session, IncomingMessage, training).payload)

    def failed(self) -> Progress:
        """Return the next report of a failed attempt, which has a code alone."""

        def failure(event: IncomingMessage) -> bool:
            if event.topic != self.mine.progress:
                return False
            return peek(Progress, event.payload).stage.startswith(messages.FAILED)

        failed = peek(Progress, wait_for(self.session, IncomingMessage, failure).payload)
        assert failed.stage.removeprefix(messages.FAILED) in TEXTS
        return failed

    def update(self, number: int = 1) -> Update:
        """The next whole update of round ``number``."""
        pieces: dict[int, bytes] = {}
        while True:
            event = wait_for(
                self.session,
                IncomingMessage,
                lambda event: event.topic.startswith(self.mine.update(number, 0)[:-1]),
            )
            chunk = peek(UpdateChunk, event.payload)
            pieces[chunk.index] = chunk.data
            self.digests[chunk.nonce] = chunk.sha256
            if len(pieces) == chunk.count:
                return messages.decode(Update, b"".join(pieces[index] for index in sorted(pieces)))


def weights_of(update: Update) -> Arrays:
    return tensors.load(update.tensors)
