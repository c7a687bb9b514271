"""What a round reports to have moved is what the broker's side counts, to the byte, in both directions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.regions import Placement
from edgefl.wire.update.form import DENSE, SIGNS, CodeEncoding, Form, Section
from edgefl_server.coordinator.roster import TierRule
from edgefl_server.coordinator.states import Rules
from edgefl_server.events import DeviceSeen, RoundClosed
from edgefl_server.run_spec import DownlinkSpec, RunSpec, TierSpec
from tests.conftest import Mosquitto, SessionFactory
from tests.device_runtime import tiny, tiny_pte
from tests.device_runtime.agent.scripted import DEVICE, RunningAgent
from tests.e2e.tap import Direction, Publish, Tap
from tests.pairs import slow
from tests.server.fleet import RunningServer

pytestmark = pytest.mark.e2e
ROUNDS = 3
PATIENCE_S = 300.0
ONE_BIT = Form("bits", sections=(Section(("head.w",), CodeEncoding(1, SIGNS), {"head.w": 0}),), change=True)
CASES = {
    "int8 down, float32 up, onnx": ("int8", DENSE, "onnx"),
    "float32 down, one bit up, onnx": ("float32", ONE_BIT, "onnx"),
    "float32 down, float32 up, executorch": ("float32", DENSE, "executorch"),
}
"""How weights travel down, how updates travel up, and the engine that trains in between: what each case has is in another,
and no two of them are always together."""


@dataclass
class Watched:
    """A run of one real device and the real server, all of it through the tap."""

    tap: Tap
    broker: Mosquitto
    closed: list[RoundClosed]
    reported: list[DeviceSeen]


def plan(federation: str, limits: Limits, downlink: DownlinkSpec, form: Form, engine: str) -> RunSpec:
    bundle = tiny.make_bundle(codec=form.codec) if engine == "onnx" else tiny_pte.make_bundle()
    placement, weights = Placement({"head.w": None}), tiny.weights()
    return RunSpec(
        federation=federation,
        digest="d" * 64,
        rules=Rules(
            run="", seed=7, rounds=ROUNDS, tiers=(TierRule("weak", (DEVICE,)),), deadline_s=PATIENCE_S
        ),
        tiers={"weak": TierSpec(bundle, lambda _weights, _number: placement, form)},
        units=tuple(weights),
        initial={name: array for unit in weights.values() for name, array in unit.items()},
        hyper={"lr": 0.1},
        trained=frozenset({"stem.w", "mid.w", "head.w"}),
        downlink=downlink,
        limits=limits,
    )


@pytest.fixture(params=[slow(row) if "int8" not in row else row for row in CASES.values()], ids=list(CASES))
def watched(
    request: pytest.FixtureRequest, tmp_path: Path, federation: str, limits: Limits
) -> Iterator[Watched]:
    broker = Mosquitto(tmp_path, "sys_interval 1")
    broker.start()
    limits = msgspec.structs.replace(limits, chunk_bytes=600)
    tap = Tap(broker.address)
    down, form, engine = request.param
    downlink = DownlinkSpec(down, 10, "none" if down == "float32" else "zstd")
    made = plan(federation, limits, downlink, form, engine)
    server = RunningServer.start(made, tap.address, tmp_path / "out")
    agent = RunningAgent(federation, tap.address, tmp_path, limits, until_done=True, engine=engine)
    server.join()
    assert agent.ended() is None
    reports = [event for event in server.seen_of(DeviceSeen) if event.stage == "reported"]
    yield Watched(tap, broker, server.seen_of(RoundClosed), reports)
    tap.close()
    broker.stop()


def totals(packets: list[Publish]) -> tuple[int, int]:
    return sum(packet.payload for packet in packets), sum(packet.wire for packet in packets)


def by_report(packets: list[Publish]) -> list[list[Publish]]:
    """The messages of updates that each report takes in: up to the one that made the round's update whole.

    A device may send an update twice; a copy that comes after its round belongs to the next report.
    """
    reports: list[list[Publish]] = []
    waiting: list[Publish] = []
    for number in range(1, ROUNDS + 1):
        missing = {packet.topic for packet in packets if f"/updates/{number}/" in packet.topic}
        while missing:
            waiting.append(packets.pop(0))
            missing.discard(waiting[-1].topic)
        reports.append(waiting)
        waiting = []
    return reports


def check_counted(watched: Watched, connect: SessionFactory) -> None:
    """What the broker says it has taken and given, all topics together: it keeps no account of each."""
    received, _ = totals(watched.tap.packets("in"))
    sent, _ = totals(watched.tap.packets("out"))
    reader = connect(watched.broker.address)  # not through the tap
    reader.subscribe(["$SYS/broker/publish/bytes/received", "$SYS/broker/publish/bytes/sent"])
    deadline, to_reader, agreed = time.monotonic() + PATIENCE_S, 0, set()
    while agreed != {"received", "sent"}:
        event = reader.inbox.get(timeout=max(0.1, deadline - time.monotonic()))
        if isinstance(event, IncomingMessage):
            kind = event.topic.rpartition("/")[2]
            told, own = int(event.payload), to_reader if kind == "sent" else 0
            if told == (received if kind == "received" else sent) + own:
                agreed.add(kind)
            to_reader += len(event.payload)


def _updates(tap: Tap, way: Direction) -> list[Publish]:
    """The devices' messages of updates: without the one with which the server tests the broker."""
    return [packet for packet in tap.packets(way, "/updates/") if "/edgefl-probe/" not in packet.topic]


def test_reported_bytes_are_those_the_broker_counts(watched: Watched, connect: SessionFactory) -> None:
    check_counted(watched, connect)
    tap = watched.tap
    assert [event.round for event in watched.closed] == [1, 2, 3]
    reports = by_report(_updates(tap, "out"))
    assert len(reports[0]) > 1, "an update should take several messages here"
    assert [(event.up_bytes, event.up_wire_bytes) for event in watched.closed] == [totals(r) for r in reports]
    sent = _updates(tap, "in")
    assert sum(event.up_wire_bytes for event in watched.closed) <= totals(sent)[1]
    assert {packet.topic: packet.wire for packet in sent} == {p.topic: p.wire for r in reports for p in r}
    down = [(event.down_bytes, event.down_wire_bytes) for event in watched.closed]
    fetched = totals(tap.packets("out", "/blobs/"))
    assert (sum(one for one, _ in down), sum(both for _, both in down)) == fetched
    assert down[0] > down[1] > (0, 0), "the bundle is fetched once"
    assert [(r.up_bytes, r.down_bytes) for r in watched.reported] == [
        (event.up_bytes, event.down_bytes) for event in watched.closed
    ]
