"""An update is sent a window of chunks at a time, whatever a link takes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.link.identity import SignedSession
from edgefl_device.link.outbox import Outbox
from edgefl_device.store.database import Outgoing, Store
from tests.support.device_logs import RecordedLog
from tests.wire.mqtt.events import wait_until

DATA = bytes(range(256)) * 8


class SlowDelivery:
    """Done once it is told so."""

    def __init__(self) -> None:
        self.finished = False

    def wait(self, _timeout_s: float) -> bool:
        return self.finished


class SlowSession:
    """A link that takes messages and delivers none until asked to."""

    connected = True

    def __init__(self) -> None:
        self.deliveries: list[SlowDelivery] = []

    def publish(self, _topic: str, _payload: bytes, **_: object) -> SlowDelivery:
        self.deliveries.append(SlowDelivery())
        return self.deliveries[-1]


def test_no_more_chunks_than_the_window_are_ahead_of_the_broker(tmp_path: Path, limits: Limits) -> None:
    store = Store(tmp_path, limit_bytes=1000, history_rounds=5)
    store.finish_job(Outgoing("run", 3, "n1", DATA), None, "")
    session = SlowSession()
    limits = msgspec.structs.replace(limits, upload_window=2)
    signed = SignedSession(session)  # type: ignore[arg-type]
    outbox = Outbox(signed, Topics("demo").device("phone"), store, limits, RecordedLog())
    outbox.start()

    for sent in (2, 3, 4):
        wait_until(lambda sent=sent: len(session.deliveries) == sent, f"{sent} chunks on their way")  # type: ignore[misc]
        session.deliveries[sent - 2].finished = True

    outbox.stop()
    store.close()
