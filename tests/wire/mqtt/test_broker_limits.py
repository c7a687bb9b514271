"""Brokers whose limits end connections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Version
from edgefl.wire.mqtt.session import Down, Refused, Session
from tests.conftest import Mosquitto


class _Limited(Mosquitto):
    """Mosquitto with one more line in its configuration."""

    line = ""

    def _command(self) -> list[str]:
        program, option, config = super()._command()
        with Path(config).open("a") as file:
            file.write(f"{self.line}\n")
        return [program, option, config]


@pytest.mark.parametrize(
    ("line", "version", "named"),
    [
        ("message_size_limit 2000", "auto", "takes no messages of 3000 bytes"),
        ("max_packet_size 2000", "auto", "2000 at most"),
        ("max_packet_size 2000", "3.1.1", "takes no messages of 3000 bytes"),
        ("max_qos 0", "auto", "takes no messages of QoS 1"),
        ("retain_available false", "auto", "takes no retained messages"),
        ("retain_available false", "3.1.1", "takes no retained messages"),
    ],
)
def test_a_limit_of_the_broker_is_named(
    tmp_path: Path, limits: Limits, line: str, version: Version, named: str
) -> None:
    broker = _Limited(tmp_path)
    broker.line = line
    broker.start()
    session = Session(replace(broker.address, mqtt=version), "edgefl:server:limits", limits=limits)
    try:
        session.publish("edgefl/v1/limits/blobs/a/0", bytes(3000), retain=True)
        session.start()
        while True:
            event = session.inbox.get(timeout=20.0)
            if isinstance(event, Down) and not event.limit:
                assert not event.rival
                session.publish("edgefl/v1/limits/blobs/a/0", bytes(3000), retain=True)
            elif isinstance(event, Down | Refused):
                break
    finally:
        session.stop(drain_s=0.0)
        broker.stop()

    assert named in event.limit
