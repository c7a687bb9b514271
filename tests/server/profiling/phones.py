"""Devices that only answer requests for profiles: on a real broker, each as its behaviour says."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from edgefl.wire.bundle import profiles
from edgefl.wire.mqtt.envelope import peek
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.messages import Hello, ProfileAnswer, ProfileRequest, Status, encode
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl_server.profiling.reports import DeviceReport, FleetReport
from tests.server.fleet import bundle
from tests.wire.bundle.example_profile import example_profile
from tests.wire.mqtt.events import PATIENCE_S, wait_up

WEAK, STRONG = bundle("weak"), bundle("strong")
Behaviour = Callable[["Phone", ProfileRequest], None]
MakePhone = Callable[..., "Phone"]
Profile = Callable[..., FleetReport]


class Phone:
    """A device that does nothing but answer requests for profiles, each as its behaviour says."""

    def __init__(
        self,
        session: Session,
        federation: str,
        name: str,
        behave: Behaviour,
        *,
        tier: str = "weak",
        memory_bytes: int = 1 << 30,
    ) -> None:
        self.name = name
        self.topics = Topics(federation)
        self.mine = self.topics.device(name)
        self.session = session
        self.requests: list[ProfileRequest] = []
        self._behave = behave
        self._ending = threading.Event()
        wait_up(session)
        session.subscribe([self.mine.profile_requests])
        hello = Hello(
            agent="edgefl/1",
            memory_bytes=memory_bytes,
            cores=4,
            samples=1,
            engines={"onnxruntime": "1"},
            tier=tier,
        )
        self.publish(self.mine.status, encode(Status(online=True)), retain=True)
        self.publish(self.mine.hello, encode(hello), retain=True)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        assert self.session.publish(topic, payload, retain=retain).wait(PATIENCE_S)

    def answer(self, answer: ProfileAnswer) -> None:
        self.session.publish(self.mine.profiles, encode(answer))

    def leave(self) -> None:
        self.session.publish(self.mine.status, encode(Status(online=False)), retain=True)

    def stop(self) -> None:
        self._ending.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                event = self.session.inbox.get(timeout=0.05)
            except queue.Empty:
                continue
            if isinstance(event, IncomingMessage) and event.topic == self.mine.profile_requests:
                self.requests.append(peek(ProfileRequest, event.payload))
                self._behave(self, self.requests[-1])


def measures(phone: Phone, request: ProfileRequest) -> None:
    phone.answer(ProfileAnswer(nonce=request.nonce, state="taken"))
    data = profiles.encode(example_profile(request.bundles["onnx"].sha256))
    phone.answer(ProfileAnswer(nonce=request.nonce, state="done", profile=data))


def ignores(_phone: Phone, _request: ProfileRequest) -> None:
    return


def takes(phone: Phone, request: ProfileRequest) -> None:
    phone.answer(ProfileAnswer(nonce=request.nonce, state="taken"))


def by_name(report: FleetReport) -> dict[str, DeviceReport]:
    return {row.device: row for row in report.devices}
