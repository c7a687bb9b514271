"""An enrolled fleet on a Mosquitto with TLS and an access list, and those who attack it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.wire import tensors
from edgefl.wire.bundle.archive import Signer
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.messages import Round, Task
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.events import RoundClosed
from edgefl_server.identity.registry import Registry
from edgefl_server.service import ServerKeys
from tests.secure import SecureBroker
from tests.server.fleet import (
    PATIENCE_S,
    WEIGHTS,
    RunningServer,
    ScriptedDevice,
    expected_mean,
    plan_for,
    silent,
)
from tests.wire.mqtt.events import wait_until
from tests.wire.mqtt.speakers import speaker_in

FEDERATION = "orchard"
TOPICS = Topics(FEDERATION)
DEVICES = ("strong-0", "strong-1")
EVERYTHING = "everything"
"""A user whom the broker lets do all: who has the broker can do no more."""


@contextmanager
def secured(folder: Path, *devices: str) -> Iterator[SecureBroker]:
    """A broker whose users are these devices, the server, an asker, and one who may do everything."""
    broker = SecureBroker(folder, devices=(*devices, EVERYTHING))
    command = broker._command()
    rules = broker.lab.folder / "mosquitto.acl"
    more = f"{rules.read_text()}\nuser {EVERYTHING}\ntopic readwrite #\n"
    broker._command = lambda: (rules.write_text(more), command)[1]  # type: ignore[method-assign]
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()


class Stage:
    """A server with a list of two devices, which answer when they are told to: so an attack has its time."""

    def __init__(
        self, broker: SecureBroker, folder: Path, limits: Limits, stack: ExitStack, **rules: Any
    ) -> None:
        self.broker = broker
        self.limits = limits
        self.folder = folder
        self.registry = Registry(folder / "list.sqlite", FEDERATION)
        stack.callback(self.registry.close)
        self.speakers = {name: speaker_in(folder / f"{name}.key") for name in DEVICES}
        for name, speaker in self.speakers.items():
            self.registry.add(name, speaker.keys.public, source="request", now=time.time())
        self.rounds = int(rules.setdefault("rounds", 1))
        plan = plan_for(FEDERATION, limits, min_devices=2, **rules)
        self.server = RunningServer.start(
            plan,
            broker.user("server"),
            folder / "out",
            keys=ServerKeys(Signer(folder / "server.key"), folder / "list.sqlite"),
        )
        stack.callback(self._end)
        self.devices = [
            ScriptedDevice(broker.user(name), FEDERATION, name, limits, silent, seal=self.speakers[name].seal)
            for name in DEVICES
        ]
        for device in self.devices:
            stack.callback(device.stop)

    def _end(self) -> None:
        if self.server.thread is not None and self.server.thread.is_alive():
            self.server.stop()

    def opened(self, number: int = 1) -> tuple[Round, list[Task]]:
        """The round's announcement, and the devices' tasks."""
        [opened, *_] = [device.wait_open(number) for device in self.devices]
        return opened, [self.task_of(device, number) for device in self.devices]

    def task_of(self, device: ScriptedDevice, number: int) -> Task:
        while (task := device.tasks.get(timeout=PATIENCE_S)).round != number:
            pass
        return task

    def goes_on(self, number: int = 1, opened: tuple[Round, list[Task]] | None = None) -> None:
        """The honest devices report, and the round has the weights that it would have had without anybody else."""
        announced, tasks = opened or self.opened(number)
        for device, task in zip(self.devices, tasks, strict=True):
            device.report(task, announced)
        closed = self.server.wait_for(RoundClosed, lambda event: event.round == number)
        assert (closed.outcome, closed.reports) == ("closed", 2)
        if number == self.rounds:
            self.server.join()
            self._same_weights()

    def _same_weights(self) -> None:
        expected = dict(WEIGHTS)
        for number in range(1, self.rounds + 1):
            expected = expected_mean(expected, [(name, "strong", number) for name in DEVICES])
        found = tensors.load((self.folder / "out" / "model.safetensors").read_bytes())
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)

    @property
    def turned_away(self) -> dict[str, int]:
        return dict(self.server.service.refused)


class Tap:
    """All that passes the broker, as whoever runs it sees it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.heard: list[IncomingMessage] = []
        session.subscribe(["edgefl/#"])

    def until(self, condition: Callable[[list[IncomingMessage]], bool], what: str) -> list[IncomingMessage]:
        def looked() -> bool:
            while not self.session.inbox.empty():
                event = self.session.inbox.get()
                if isinstance(event, IncomingMessage):
                    self.heard.append(event)
            return condition(self.heard)

        wait_until(looked, what)
        return self.heard

    def heard_on(self, leaf: str) -> list[IncomingMessage]:
        return [event for event in self.heard if f"/{leaf}" in event.topic and event.payload]

    def has(self, leaf: str, count: int = 1) -> None:
        """Wait until so many messages came on topics with ``leaf`` in them."""
        self.until(lambda _: len(self.heard_on(leaf)) >= count, f"{count} messages on {leaf}")


def changed(payload: bytes, place: int = -1) -> bytes:
    """The same with one bit turned."""
    spoiled = bytearray(payload)
    spoiled[place] ^= 1
    return bytes(spoiled)
