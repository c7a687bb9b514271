"""More devices of a list than a server takes: who is let in is drawn, and the others are told when to come again."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgefl.wire.limits import Limits
from edgefl_server.events import RoundClosed, RoundOpened
from edgefl_server.identity.registry import Registry
from edgefl_server.service import ServerKeys
from edgefl_server.updates.rate_limit import AdmissionControl
from tests.conftest import Mosquitto
from tests.server.fleet import PATIENCE_S, MakeDevice, RunningServer, plan_for
from tests.wire.mqtt.speakers import speaker_in


def test_the_lowest_lots_get_the_places_and_the_others_come_later(
    mosquitto: Mosquitto, federation: str, limits: Limits, device: MakeDevice, tmp_path: Path
) -> None:
    limits = msgspec.structs.replace(limits, max_devices=2, come_later_s=30)
    names = [f"strong-{n}" for n in range(4)]
    lots = AdmissionControl(7, limits)
    ranked = sorted(names, key=lots.lot)
    speakers = {name: speaker_in(tmp_path / f"{name}.key") for name in names}
    registry = Registry(tmp_path / "list.sqlite", federation)
    for name, speaker in speakers.items():
        registry.add(name, speaker.keys.public, source="request", now=0.0)
    plan = plan_for(federation, limits, min_devices=3, rounds=2, ready_timeout_s=1.0)
    server = RunningServer.start(
        plan, mosquitto.address, tmp_path / "out", keys=ServerKeys(enrolled=tmp_path / "list.sqlite")
    )

    made = {name: device(name, seal=speakers[name].seal) for name in reversed(ranked)}
    for name in ranked[2:]:
        ack = made[name].acks.get(timeout=PATIENCE_S)
        assert (ack.round, ack.nonce, ack.status, ack.reason) == (0, "", "rejected", "come-later")
        assert isinstance(ack.later_s, float) and 30 <= ack.later_s < 60
    assert server.wait_for(RoundOpened).devices == tuple(sorted(ranked[:2]))
    assert server.wait_for(RoundClosed).reports == 2
    server.stop()
